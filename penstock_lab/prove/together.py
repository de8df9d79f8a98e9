"""The proof that all features at once, on one engine, change nothing.

Thousands of requests with different options come at random moments, share rows, blocks and drafts, are preempted, and
are sometimes aborted. Each answer must equal that of the same request sent alone, in one piece, to an engine that does
nothing else. Request I of seed S is the same in every run, and has a few of all the options (FEATURES).
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar

from penstock import (
    EngineConfig,
    EngineError,
    InvalidRequestError,
    RequestOutput,
    SamplingParams,
    register_logits_processor,
)
from penstock.assembly import BuiltEngine, build_engine
from penstock.client.step_client import InProcessClient
from penstock.client.text import choose_tokenizer
from penstock.config import BLOCK_SIZE_UNIT, BLOCK_SIZE_UNITS, SCHEDULING_POLICIES
from penstock.errors import check_int
from penstock.interface.plugins import PROCESSORS
from penstock.runner.sampler import ALL_MASKED
from penstock_lab.prove import axes
from penstock_lab.prove.every_draft import EveryDraft
from penstock_lab.prove.proof import Trials
from penstock_lab.prove.same_bits import room_bytes

PROCESSOR = "prove_ramp"  # a processor of the proof, registered where it is used
MAX_TOKENS = 40
SALTS = (None, None, None, "a", "b")
SHARED_RATE = 0.5  # share of prompts that begin like others
REPEAT_RATE = 0.3  # share of prompts that repeat themselves, so that lookups find drafts
SEARCH_RATE = 0.1
MAX_PRIORITY = 3
Fields = dict[str, Any]
LENGTHS = (8, 2048)  # shortest and longest prompt in tokens, as far as the model's context reaches
NUM_SHARED = 6  # number of texts with which prompts begin
ROWS, ROOM = 24, 2  # requests at once, and how many of the longest ones find room in the cache
MAX_OPEN = 40  # requests that run or wait
ARRIVAL_RATES = (0.05, 0.3, 1.0)  # per step; each sitting has one of them
REQUESTS_PER_ROUND = 100  # requests, after which the engine finishes all of them, and every block must be free


def ramp(logits: Any, args: Any) -> Any:
    """Make every second token less likely, as an example of a user's own logits processor."""
    logits[:, 1::2] -= args or 1.0
    return logits


def _ids(random: Random, vocab_size: int, most: int) -> list[int]:
    return random.choices(range(vocab_size), k=random.randint(1, most))


FEATURES: dict[str, tuple[float, Callable[[Random, int], Fields]]] = {  # name -> (how often, its fields)
    "greedy": (0.4, lambda random, size: {"temperature": 0.0}),
    "temperature": (0.3, lambda random, size: {"temperature": random.choice([0.3, 0.8, 1.4])}),
    "top_p": (0.2, lambda random, size: {"top_p": random.choice([0.5, 0.9])}),
    "top_k": (0.15, lambda random, size: {"top_k": random.choice([1, 5, 100])}),
    "min_p": (0.1, lambda random, size: {"min_p": 0.05}),
    "penalties": (0.2, lambda random, size: {
        "presence_penalty": random.choice([0.0, 0.7]), "frequency_penalty": random.choice([-0.4, 0.5]),
        "repetition_penalty": random.choice([1.0, 1.2]),
    }),
    "n": (0.15, lambda random, size: {"n": random.randint(2, 4)}),
    "logprobs": (0.3, lambda random, size: {"logprobs": random.choice([0, 1, 5, 20])}),
    "prompt_logprobs": (0.08, lambda random, size: {"prompt_logprobs": random.choice([0, 2])}),
    "stop": (0.2, lambda random, size: {
        "stop": random.sample(["e", " the", "\n", "ing", ". ", "you"], 2),
        "include_stop_str_in_output": random.random() < 0.5,
    }),
    "stop_token_ids": (0.1, lambda random, size: {"stop_token_ids": random.sample(range(size), min(size, 40))}),
    "ignore_eos": (0.3, lambda random, size: {"ignore_eos": True}),
    "min_tokens": (0.15, lambda random, size: {"min_tokens": random.randint(1, 20)}),
    "min_length": (0.05, lambda random, size: {"min_length": random.randint(1, 40), "min_new_tokens": 2}),
    "logit_bias": (0.1, lambda random, size: {"logit_bias": {i: random.uniform(-9, 9) for i in _ids(random, size, 9)}}),
    "bad_words": (0.1, lambda random, size: {"bad_words": random.sample(["the", "a", "is", ".", "and"], 2)}),
    "bad_words_ids": (0.05, lambda random, size: {"bad_words_ids": [_ids(random, size, 3) for _ in range(3)]}),
    "suppress_tokens": (0.05, lambda random, size: {"suppress_tokens": _ids(random, size, 20)}),
    "sequence_bias": (0.05, lambda random, size: {"sequence_bias": [[_ids(random, size, 2), 4.0] for _ in range(4)]}),
    "no_repeat_ngram_size": (0.08, lambda random, size: {"no_repeat_ngram_size": random.randint(1, 4)}),
    "forced_eos_token_id": (0.04, lambda random, size: {"forced_eos_token_id": random.randrange(size)}),
    "exponential_decay": (0.04, lambda random, size: {"exponential_decay_length_penalty": [3, 1.2]}),
    "truncations": (0.08, lambda random, size: {"typical_p": 0.9, "eta_cutoff": 0.001, "top_h": 0.9}),
    "dry": (0.12, lambda random, size: {"dry_multiplier": 0.8, "dry_allowed_length": random.randint(1, 3)}),
    "xtc": (0.08, lambda random, size: {"xtc_probability": 0.5, "xtc_threshold": 0.05}),
    "mirostat": (0.08, lambda random, size: {"mirostat": random.randint(1, 2), "mirostat_tau": 4.0}),
    "processor": (0.05, lambda random, size: {"logits_processors": {PROCESSOR: random.choice([None, 2.5])}}),
    "no text": (0.05, lambda random, size: {"detokenize": False}),
    "special tokens": (0.05, lambda random, size: {"skip_special_tokens": False}),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Asked:
    """A random request.

    Attributes:
        features: the names of its FEATURES.
        leaves_after: number of tokens of its first choice after which it is aborted; None: never.
    """

    prompt: Fields
    params: SamplingParams
    priority: int
    features: tuple[str, ...]
    leaves_after: int | None


@dataclass(frozen=True, slots=True)
class Maker:
    """Makes random requests for a model.

    Attributes:
        lengths: shortest and longest prompt; the logarithm of the length is evenly distributed.
        shared: texts with which some of the prompts begin.
    """

    vocab_size: int
    lengths: tuple[int, int]
    shared: list[list[int]]
    abort_rate: float = 0.1

    def make(self, random: Random) -> Asked:
        """Draw a valid request. Features that exclude each other are drawn again."""
        prompt = {"prompt_token_ids": self._prompt(random), "cache_salt": random.choice(SALTS)}
        leaves_after = random.randint(1, MAX_TOKENS // 2) if random.random() < self.abort_rate else None
        while True:
            names, fields = self._fields(random)
            try:
                params = SamplingParams(max_tokens=random.randint(1, MAX_TOKENS), seed=random.getrandbits(60), **fields)
            except InvalidRequestError:
                continue
            return Asked(prompt, params, random.randint(-MAX_PRIORITY, MAX_PRIORITY), names, leaves_after)

    def _fields(self, random: Random) -> tuple[tuple[str, ...], Fields]:
        if random.random() < SEARCH_RATE:
            fields: Fields = {"use_beam_search": True, "n": random.randint(1, 4), "logprobs": random.choice([None, 2])}
            fields |= {"length_penalty": random.choice([0.0, 1.0, 2.0]), "early_stopping": random.random() < 0.3}
            return ("beam search",), fields
        names = tuple(name for name, (rate, _) in FEATURES.items() if random.random() < rate)
        fields = {}
        for name in names:
            fields |= FEATURES[name][1](random, self.vocab_size)
        return names or ("none",), fields

    def _prompt(self, random: Random) -> list[int]:
        least, most = self.lengths
        length = min(most, round(least * (most / least) ** random.random()))
        ids: list[int] = []
        if random.random() < SHARED_RATE:
            ids = random.choice(self.shared)[: random.randint(1, length)]
        phrase = random.choices(
            range(self.vocab_size), k=random.randint(2, 12) if random.random() < REPEAT_RATE else length
        )
        while len(ids) < length:
            ids = ids + phrase
        return ids[:length]


@dataclass(slots=True)
class _Crowd:
    """The engine that serves all requests, the engine that answers alone, and the requests that are open.

    Attributes:
        open: request id -> its number, what it asks, and its last output.
    """

    trials: Trials
    maker: Maker
    served: BuiltEngine
    client: InProcessClient
    alone: InProcessClient
    number: int = 0
    open: dict[str, tuple[int, Asked, RequestOutput | None]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)


class Together:
    """Sends thousands of requests with random features to one engine."""

    name: ClassVar[str] = "together"
    promise: ClassVar[str] = (
        "All features at random on one engine: every answer is as if asked alone, and no block is lost"
    )
    unit: ClassVar[str] = "requests"
    goal: ClassVar[int] = 5_000
    weight: ClassVar[float] = 1.0

    def run(self, trials: Trials) -> None:
        register_logits_processor(PROCESSOR)(ramp)
        crowd = _open(trials)
        try:
            while trials.go_on():
                _run_round(crowd)
        finally:
            PROCESSORS.pop(PROCESSOR, None)
            crowd.client.shutdown()
            crowd.alone.shutdown()
        stats, info = crowd.served.engine.stats(), crowd.served.info
        trials.figure("policy", info.scheduling_policy)
        trials.figure("longest_prompt", crowd.maker.lengths[1])
        trials.figure("aborted", crowd.counts["aborted"])
        trials.figure("preemptions", stats.num_preemptions_total)
        trials.figure("cached_tokens", stats.num_cached_tokens_total)
        trials.figure("drafts", stats.num_draft_tokens_total)
        trials.figure("accepted_drafts", stats.num_accepted_tokens_total)
        trials.detail("requests with", dict(sorted(crowd.counts.items())))


def _open(trials: Trials) -> _Crowd:
    """Build both engines. The one for the crowd has little room, so that requests preempt each other."""
    random, subject = Random(f"engine {trials.seed}"), trials.subject
    kernels = axes.kernels_of(subject.options)
    unit = BLOCK_SIZE_UNITS.get(kernels, BLOCK_SIZE_UNIT)
    options: dict[str, Any] = {"kernels": kernels, **subject.options, "model": subject.model}
    alone = build_engine(EngineConfig.from_options(**{**options, **axes.UNDISTURBED, "max_num_seqs": 4}))
    longest = alone.info.max_model_len - MAX_TOKENS
    check_int("max_model_len", longest, LENGTHS[0] + 1, 2**31)
    layout = {
        "max_num_seqs": ROWS,
        "max_num_batched_tokens": random.choice([64, 256, 700]),
        "block_size": random.choice([unit, 2 * unit]),
        "scheduling_policy": random.choice(SCHEDULING_POLICIES),
        "max_stall_ms": random.choice([None, 20]),
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 5},
    }
    sized = options | {name: value for name, value in layout.items() if name not in options and value is not None}
    served = build_engine(EngineConfig.from_options(**sized, kv_cache_memory_bytes=room_bytes(sized, alone, ROOM)))
    if served.engine.speculation is not None:
        served.engine.speculation.policy = EveryDraft()
    tokenizer = choose_tokenizer(None, subject.model)
    size = alone.info.vocab_size
    shared = [random.choices(range(size), k=longest) for _ in range(NUM_SHARED)]
    maker = Maker(size, (LENGTHS[0], min(LENGTHS[1], longest)), shared)
    client, other = (InProcessClient(built.engine, built.info, tokenizer) for built in (served, alone))
    return _Crowd(trials, maker, served, client, other)


def _run_round(crowd: _Crowd) -> None:
    """Let requests come at random until there were enough, and the engine finish all of them."""
    random, trials = Random(f"arrivals {crowd.trials.seed} {crowd.number}"), crowd.trials
    left, rate = min(REQUESTS_PER_ROUND, trials.goal - trials.outcome.tried), random.choice(ARRIVAL_RATES)
    while left or crowd.client.has_unfinished_requests():
        if left and len(crowd.open) < MAX_OPEN and random.random() < rate:
            left -= 1
            _arrive(crowd)
        for output in crowd.client.step():
            _receive(crowd, output)
        if left < REQUESTS_PER_ROUND - MAX_OPEN and not trials.go_on():
            left = 0
    crowd.served.engine.check_integrity()
    cache = crowd.served.engine.kv_cache
    if cache.num_free < cache.num_blocks:
        raise EngineError(f"{cache.num_blocks - cache.num_free} blocks are in use, and no request is open")


def _arrive(crowd: _Crowd) -> None:
    number = crowd.number
    crowd.number += 1
    asked = crowd.maker.make(Random(f"request {crowd.trials.seed} {number}"))
    priority = asked.priority if crowd.served.info.scheduling_policy == "priority" else 0
    try:
        name = crowd.client.add_request(None, asked.prompt, asked.params, priority)
    except InvalidRequestError as error:  # it is refused alone as well, or needs more cache than there is
        crowd.counts[f"refused: {error.code or error.param}"] += 1
        return
    crowd.open[name] = number, asked, None
    crowd.counts.update(asked.features)


def _receive(crowd: _Crowd, output: RequestOutput) -> None:
    number, asked, _ = crowd.open[output.request_id]
    crowd.open[output.request_id] = number, asked, output
    leaves = asked.leaves_after is not None and len(output.outputs[0].token_ids) >= asked.leaves_after
    if leaves and not output.finished:
        crowd.client.abort(output.request_id)
        crowd.counts["aborted"] += 1
    if not (leaves or output.finished):
        return
    del crowd.open[output.request_id]
    expected = _ask_alone(crowd.alone, asked)
    wrong = _difference(output, expected)
    if expected.error is not None:
        crowd.counts["failed, alone too"] += 1
        if ALL_MASKED not in expected.error:  # only that can be the request's own fault
            wrong = f"failed alone: {expected.error}"
    if wrong is not None:
        crowd.trials.wrong(
            f"{wrong} (request {number} of --seed {crowd.trials.seed}: {asked.features}, {asked.params})"
        )
    crowd.trials.tried()


def _ask_alone(client: InProcessClient, asked: Asked) -> RequestOutput:
    last: RequestOutput | None = None
    client.add_request("alone", asked.prompt, asked.params)
    while client.has_unfinished_requests():
        for output in client.step():
            last = output
    if last is None:
        raise EngineError("a request that was asked alone got no answer")
    return last


def _difference(found: RequestOutput, wanted: RequestOutput) -> str | None:
    """Compare two answers. If a request was aborted, what it received must be the beginning."""
    pairs: dict[str, tuple[Any, Any]] = {"error": (found.error, wanted.error), "log-probabilities of the prompt": (
        found.prompt_logprobs, wanted.prompt_logprobs if found.prompt_logprobs is not None or found.finished else None
    )}  # fmt: skip
    for one, other in zip(found.outputs, wanted.outputs, strict=True):
        end = None if one.finished or found.finished else len(one.token_ids)
        pairs[f"tokens of choice {one.index}"] = one.token_ids, other.token_ids[:end]
        pairs[f"log-probabilities of choice {one.index}"] = one.logprobs, other.logprobs and other.logprobs[:end]
        pairs[f"text of choice {one.index}"] = one.text, other.text if end is None else other.text[: len(one.text)]
        if end is None:
            ends = [(item.finish_reason, item.stop_reason) for item in (one, other)]
            pairs[f"end of choice {one.index}"] = ends[0], ends[1]
    return next((f"{what}: {one} in place of {other}" for what, (one, other) in pairs.items() if one != other), None)
