"""The proof that a request's tokens and log-probabilities have the same bits, however they are computed.

A round takes one form of a model (axes.FORMS) and sends its requests alone, in one piece, on one thread. Then it builds
engines at random points of the other axes, and sends crowds of the same requests. Every answer is one comparison. A
round is determined by its number, so a failed round can be repeated by itself.
"""

import tempfile
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, ClassVar, TypeVar

from penstock import EngineConfig, InvalidRequestError, ModelLoadError
from penstock.assembly import BuiltEngine, build_engine
from penstock.assembly.memory import plan_kv_cache
from penstock.config import BLOCK_SIZE_UNIT, BLOCK_SIZE_UNITS, TRITON
from penstock_lab.prove import axes, tiny_models
from penstock_lab.prove.askers import OFFLINE, OPEN, SERVING
from penstock_lab.prove.completions import Completion, Key, Member, Query, ask_alone
from penstock_lab.prove.proof import Trials

ENGINES, CROWDS = 3, 5  # engines of a round, and crowds in each of them
LENGTHS = (1, 5, 16, 17, 24, 33, 48, 64, 72, 80, 97, 110, 120)  # lengths of prompts, in tokens
SHARED = (40, 70)  # numbers of leading tokens of the longest prompt with which two more prompts begin
MAX_TOKENS = 12
MAX_DELAY = 12  # maximum number of steps between the first arrival and the last
UNLIMITED_BYTES = 2**50
MAX_LEFT_OUT = 20  # the proof is skipped if this many rounds at its start cannot be made
T = TypeVar("T")


@dataclass(slots=True)
class Round:
    """One form of a model, its queries, and their answers when they are computed alone.

    Attributes:
        number: determines all random choices.
        point: the form's value on each axis.
        options: of EngineConfig, the same for all engines of the round.
        expected: by query and choice.
        offloaded: directory of blocks that its engines share.
    """

    number: int
    point: dict[str, str]
    options: dict[str, Any]
    undisturbed: BuiltEngine
    queries: list[Query]
    expected: dict[Key, Completion] = field(default_factory=dict)
    offloaded: str = ""

    def expect(self, crowd: Iterable[Member]) -> None:
        """Compute the answers that the members of a crowd get alone, if they are not known yet."""
        wanted = {(member.query, choice) for member in crowd for choice in range(member.n)} - self.expected.keys()
        self.expected |= ask_alone(self.undisturbed.engine, self.queries, sorted(wanted))


class SameBits:
    """Samples the product of all axes."""

    name: ClassVar[str] = "same-bits"
    promise: ClassVar[str] = "The same request gets the same bits, however it is computed"
    unit: ClassVar[str] = "comparisons"
    goal: ClassVar[int] = 10_000
    weight: ClassVar[float] = 2.0

    def run(self, trials: Trials) -> None:
        counts: Counter[tuple[str, str]] = Counter()
        kernels = axes.kernels_of(trials.subject.options)
        left_out: dict[str, str] = dict(axes.NOT_ON_GPU) if kernels == TRITON else {}
        num_axes = len(left_out)
        if left_out:
            trials.figure("left_out", "; ".join(f"{name} ({why})" for name, why in left_out.items()))
        with tempfile.TemporaryDirectory() as directory:
            models = {"yours": trials.subject.model}
            if trials.subject.model == "demo":
                models = {"demo": "demo"} | tiny_models.write(Path(directory))
            number = trials.seed
            while trials.go_on():
                try:
                    this = start_round(number, models, trials.subject.options)
                except (InvalidRequestError, ModelLoadError) as error:  # the machine or the model does not support it
                    left_out[f"round {number}"] = str(error)
                    if len(left_out) - num_axes == MAX_LEFT_OUT and not counts:
                        trials.skip(str(error))
                        return
                else:
                    this.offloaded = str(Path(directory) / f"blocks {number}")
                    self._round(trials, this, counts)
                number += 1
        _report(trials, counts, {"model": list(models), **axes.layouts_of(kernels)}, left_out)

    def _round(self, trials: Trials, this: Round, counts: Counter[tuple[str, str]]) -> None:
        random = Random(f"engines {this.number}")
        for _ in range(ENGINES):
            if not trials.go_on():
                break
            point, layout = axes.choose(random, axes.layouts_of(this.options["kernels"]))
            via = _weighted(random, axes.ENTRY_WEIGHTS)
            with ExitStack() as stack:
                asker = OPEN[via](stack, engine_options(this, layout), this.queries, this.expected)
                for index in range(CROWDS):
                    if not trials.go_on():
                        break
                    crowd, about = make_crowd(random, this, via, is_first=index == 0)
                    disturbed = about["disturbance"] in axes.ENGINE_DISTURBANCES
                    found = asker.ask(crowd, random, disturbed=disturbed, pinned=about["pinned"] != axes.PINNED[0])
                    _compare(trials, this, crowd, this.point | point | {"via": via} | about, found, counts)
        this.undisturbed.engine.shutdown()


def start_round(number: int, models: dict[str, str], given: dict[str, Any]) -> Round:
    """Take a random form of the next model, and build the engine that answers undisturbed.

    given: options that the user has set, which override those of axes.FORMS.

    Raises:
        InvalidRequestError, ModelLoadError: this model has no such form, or there is no room for it.
    """
    random = Random(f"round {number}")
    model = list(models)[number % len(models)]
    point, options = axes.choose(random, axes.FORMS)
    kernels = axes.kernels_of(given)
    longer = axes.LONGER_ON_GPU if kernels == TRITON else 1
    own = {"model": models[model], "kernels": kernels, "max_model_len": longer * axes.MAX_MODEL_LEN}
    options = options | given | own
    if models[model] != models.get("demo", models.get("yours")):
        options["load_format"] = "dummy"
    undisturbed = build_engine(EngineConfig.from_options(**options | axes.UNDISTURBED))
    queries = make_queries(random, undisturbed.info.vocab_size, longer)
    return Round(number, {"model": model, **point}, options, undisturbed, queries)


def make_queries(random: Random, vocab_size: int, longer: int = 1) -> list[Query]:
    """Draw queries of every kind, with prompts of every length, some of which begin alike.

    longer: the prompts have so many times the usual lengths.
    """
    prompts = [random.choices(range(3, vocab_size), k=longer * length) for length in LENGTHS]
    prompts += [prompts[-1][: longer * shared] + random.choices(range(3, vocab_size), k=16) for shared in SHARED]
    kinds = [*axes.KINDS] * len(prompts)
    random.shuffle(prompts)
    common = {"max_tokens": MAX_TOKENS, "logprobs": 3}
    seeds = [random.getrandbits(62) for _ in prompts]
    return [
        Query(prompt, {**common, **axes.KINDS[kind], "seed": seed}, kind)
        for prompt, kind, seed in zip(prompts, kinds, seeds, strict=False)
    ]


def engine_options(this: Round, layout: dict[str, Any]) -> dict[str, Any]:
    """Complete the options of an engine at a point of the layouts, with the cache's size in bytes."""
    options = this.options | {"max_num_seqs": max(axes.CROWDS)} | layout
    room = options.pop(axes.ROOM)
    drafts = options.get("speculative_config")
    if drafts is not None and drafts.get("model") == axes.SELF_DRAFT:
        options["speculative_config"] = {**drafts, "model": options["model"]}
    if not options.get("enable_prefix_caching", True) or not this.offloaded:
        options = {name: value for name, value in options.items() if not name.startswith("kv_offload")}
    elif "kv_offload_dir" in options:
        options["kv_offload_dir"] = this.offloaded
    return options | {"kv_cache_memory_bytes": room_bytes(options, this.undisturbed, room)}


def room_bytes(options: dict[str, Any], built: BuiltEngine, room: int) -> int:
    """Compute the cache size of an engine with these options that has room for `room` of the longest requests.

    built: an engine of the same model.
    """
    numerics = built.config.numerics  # a directory of packed weights determines some of these
    chosen = {name: getattr(numerics, name) for name in ("dtype", "quantization", "quantization_group_size")}
    sized = EngineConfig.from_options(**options | chosen | {"max_num_seqs": room})
    return plan_kv_cache(sized.resolve(built.model_config), built.model_config, UNLIMITED_BYTES).num_bytes


def make_crowd(random: Random, this: Round, via: str, *, is_first: bool) -> tuple[list[Member], dict[str, str]]:
    """Draw a crowd and its value on each of its axes. An engine process is killed only in the first crowd."""
    size, arrival = random.choice(axes.CROWDS), random.choice(axes.ARRIVALS)
    disturbance = random.choice(axes.DISTURBANCES if via == OFFLINE else axes.DISTURBANCES[:1])
    if via != OFFLINE and is_first:
        disturbance = axes.KILLED
    possible = [index for index, query in enumerate(this.queries) if via != SERVING or "prompt" not in query.kind]
    crowd = [
        Member(
            query := random.choice(possible),
            _width(random, this.queries[query]),
            random.randint(0, MAX_DELAY) * (arrival != axes.ARRIVALS[0]),
            salt=random.choice((None, *axes.SALTS[1:])),
        )
        for _ in range(size)
    ]
    this.expect(crowd)
    if disturbance == axes.RESUMED:
        crowd = [replace(member, cut=_cut(random, this, member)) for member in crowd]
    pinned = random.choice(axes.PINNED if via == OFFLINE else axes.PINNED[:1])
    return crowd, {"crowd": str(size), "arrival": arrival, "disturbance": disturbance, "pinned": pinned}


def _width(random: Random, query: Query) -> int:
    if query.is_pooled:
        return 1
    return axes.BEAMS if query.is_search else _weighted(random, axes.CHOICES)


def _weighted(random: Random, weights: dict[T, int]) -> T:
    return random.choices(list(weights), list(weights.values()))[0]


def _cut(random: Random, this: Round, member: Member) -> int:
    """Draw how many tokens a member brings along: at most all but one of its shortest choice."""
    query = this.queries[member.query]
    if query.is_search or query.is_pooled:  # these start from the beginning
        return 0
    shortest = min(len(this.expected[member.query, choice].ids) for choice in range(member.n))
    return random.randrange(shortest)


def _compare(
    trials: Trials,
    this: Round,
    crowd: list[Member],
    where: dict[str, str],
    found: dict[Key, Completion],
    counts: Counter[tuple[str, str]],
) -> None:
    for index, member in enumerate(crowd):
        query = this.queries[member.query]
        position = "first" if index == 0 else "last" if index == len(crowd) - 1 else "between"
        for choice in range(member.n):
            answer = found.get((index, choice), Completion())
            point = where | {"position": position, "n": str(member.n), "request": query.kind}
            point["salt"] = member.salt or axes.SALTS[0]
            unit = BLOCK_SIZE_UNITS.get(this.options["kernels"], BLOCK_SIZE_UNIT)
            point |= {
                "prefix": _prefix(answer.num_cached, len(query.prompt), unit),
                "preempted": _yes(answer.preempted),
            }
            counts.update(point.items())
            wrong = answer.difference(this.expected[member.query, choice], member.cut)
            if wrong is not None:
                again = f"repeat it with --only same-bits --seed {this.number}"
                trials.wrong(f"{wrong} (choice {choice} of {member} at {point}; {again})")
            trials.tried()


def _prefix(num_cached: int, length: int, unit: int) -> str:
    return "cold" if num_cached == 0 else "partial" if num_cached < (length - 1) // unit * unit else "warm"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _report(
    trials: Trials, counts: Counter[tuple[str, str]], engines: dict[str, Any], left_out: dict[str, str]
) -> None:
    known = {**engines, **axes.FORMS, **axes.CROWD_AXES}
    missed = [f"{name}: {value}" for name, values in known.items() for value in values if not counts[name, value]]
    total = sum(map(len, known.values()))
    trials.figure("values_tried", f"{total - len(missed)} of {total} on {len(known)} axes")
    trials.detail("comparisons", {f"{name}: {value}": count for (name, value), count in sorted(counts.items())})
    trials.detail("values not tried", missed)
    trials.detail("left out", left_out)
