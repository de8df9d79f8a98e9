"""Measure what speculation gains: the same requests without and with drafts, alternately on one engine.

dataset       random   random ids, input_len per prompt
              repeat   the demo model is asked to repeat a text
              demo     other questions and stories of the demo model's corpus
acceptance    drafts are the tokens of the run without drafts, each correct with this probability and otherwise wrong,
              so that a model with random weights shows what drafts of any quality gain
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from random import Random
from statistics import median
from typing import Any

from penstock import EngineConfig, EngineError, SamplingParams
from penstock.assembly import build_engine
from penstock.engine.engine import Engine
from penstock.engine.speculation import Speculation
from penstock.errors import check_choice, check_float, check_int, fail, invalid
from penstock.interface.messages import EngineRequest, ModelInfo
from penstock.interface.step import DraftQuery
from penstock.weights.hub import MODEL_DIR
from penstock_lab.bench.machine import Progress

DATASETS = ("random", "repeat", "demo")
MAKERS: dict[str, Sequence[str]] = {  # functions of penstock_lab.training.chats
    "repeat": ("repeat_task",),
    "demo": ("requested_story", "read_story", "list_task", "json_task"),
}


@dataclass(frozen=True, slots=True)
class Contest:
    """num_prompts simultaneous requests for output_len tokens each, `rounds` times without drafts and with them.

    acceptance: share of correct drafts; None: the engine's own proposer makes the drafts.
    """

    num_prompts: int
    input_len: int
    output_len: int
    rounds: int = 5
    dataset: str = "random"
    acceptance: float | None = None

    def __post_init__(self) -> None:
        for name in ("num_prompts", "input_len", "output_len", "rounds"):
            check_int(name, getattr(self, name), 1, 10**6)
        check_choice("dataset", self.dataset, DATASETS)
        if self.dataset in MAKERS and find_spec("penstock_lab.training") is None:
            raise fail("dataset", self.dataset, "random: wheels have no training texts; use a checkout for the others")
        if self.acceptance is not None:
            check_float("acceptance", self.acceptance, 0.0, 1.0)

    def prompts(self, index: int, vocab_size: int) -> list[list[int]]:
        random = Random(index)
        if self.dataset == "random":
            return [random.choices(range(vocab_size), k=self.input_len) for _ in range(self.num_prompts)]
        from tokenizers import Tokenizer

        from penstock_lab.training import chats

        tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
        makers = [getattr(chats, name) for name in MAKERS[self.dataset]]
        texts = (chats.render_prompt(makers[i % len(makers)](random)[:1]) for i in range(self.num_prompts))
        return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


class KnownDrafts:
    """A proposer that knows the next tokens, and proposes each of them correctly with the probability `share`."""

    is_free = True

    def __init__(self, share: float, vocab_size: int) -> None:
        self.answers: dict[str, tuple[int, list[int]]] = {}  # by request id: length of the prompt, and the outputs
        self._share, self._vocab_size, self._random = share, vocab_size, Random(0)

    def propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        return [self._propose(query) for query in queries]

    def _propose(self, query: DraftQuery) -> list[int]:
        length, outputs = self.answers[query.request_id]
        start = len(query.token_ids) - length
        return [self._maybe(token_id) for token_id in outputs[start : start + query.count]]

    def _maybe(self, token_id: int) -> int:
        return token_id if self._random.random() < self._share else (token_id + 1) % self._vocab_size

    def forget(self, request_id: str) -> None:
        """Keep the answer, because the next run has the same requests."""

    def shutdown(self) -> None:
        self.answers.clear()


@dataclass(slots=True)
class _Run:
    """One run: outputs by request, and the time, tokens and number of its steps that only decoded."""

    outputs: dict[str, list[int]]
    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0


def measure_speculation(
    options: dict[str, Any], contest: Contest, *, announce: Callable[[ModelInfo], None], progress: Progress
) -> dict[str, Any]:
    """Build an engine from EngineConfig options, which include a speculative_config, and return the figures.

    Raises:
        InvalidRequestError: an option is invalid, or the contest does not fit the model.
        EngineError: a request failed, or drafts changed a token.
    """
    if contest.dataset != "random" and options.get("model", "demo") != "demo":
        raise fail("dataset", contest.dataset, "random: the other datasets are for the demo model")
    built = build_engine(EngineConfig.from_options(**{"enable_prefix_caching": False, **options}))
    announce(built.info)
    engine = built.engine
    known = None if contest.acceptance is None else _propose_known(engine, contest.acceptance)
    pairs: list[tuple[_Run, _Run]] = []
    with progress("runs", 2 * contest.rounds + 2) as advance:
        for index in range(contest.rounds + 1):  # the first round warms up
            prompts = contest.prompts(index, built.info.vocab_size)
            with _without_drafts(engine):
                plain = _run(engine, prompts, contest)
            advance(1)
            if known is not None:
                known.answers = {name: (len(prompts[int(name)]), ids) for name, ids in plain.outputs.items()}
            drafted = _run(engine, prompts, contest)
            advance(1)
            if drafted.outputs != plain.outputs:
                raise EngineError("drafts have changed a token; this is a bug in Penstock")
            pairs.append((plain, drafted))
    stats = engine.stats()
    engine.shutdown()
    return {
        "model": built.info.model,
        "system_fingerprint": built.info.system_fingerprint,
        "threads": built.config.numerics.threads,
        **{name: getattr(contest, name) for name in ("num_prompts", "input_len", "output_len", "dataset")},
        "speculative_config": built.config.speculation.speculative_config,
        "acceptance": contest.acceptance,
        **_figures(pairs[1:]),
        "draft_tokens": stats.num_draft_tokens_total,
        "accepted_tokens": stats.num_accepted_tokens_total,
        "accepted_tokens_per_pos": stats.num_accepted_tokens_per_pos_total,
    }


def _propose_known(engine: Engine, acceptance: float) -> KnownDrafts | None:
    """Replace the engine's proposer by one that knows the next tokens."""
    if engine.speculation is None:
        return None
    known, most = KnownDrafts(acceptance, engine.vocab_size), len(engine.speculation.accepted_per_position)
    engine.speculation.shutdown()
    engine.speculate(Speculation(known, most))
    return known


@contextmanager
def _without_drafts(engine: Engine) -> Iterator[None]:
    kept, engine.speculation = engine.speculation, None
    try:
        yield
    finally:
        engine.speculation = kept


def _run(engine: Engine, prompts: list[list[int]], contest: Contest) -> _Run:
    params = SamplingParams(temperature=0.0, max_tokens=contest.output_len, ignore_eos=contest.dataset == "random")
    for index, prompt in enumerate(prompts):
        engine.add_request(EngineRequest(str(index), prompt, params))
    run = _Run({str(index): [] for index in range(len(prompts))})
    while engine.has_work:
        is_decode = bool(engine.scheduler.running) and not engine.scheduler.waiting
        is_decode = is_decode and all(request.num_missing_tokens == 1 for request in engine.scheduler.running)
        began = time.perf_counter()
        outputs = engine.step()
        seconds = time.perf_counter() - began
        for output in outputs:
            if output.error is not None:
                raise EngineError(f"a request failed, so nothing was measured: {output.error}")
            run.outputs[output.request_id] += output.new_token_ids
        if is_decode:
            run.seconds += seconds
            run.steps += 1
            run.tokens += sum(len(output.new_token_ids) for output in outputs)
    return run


def _figures(pairs: list[tuple[_Run, _Run]]) -> dict[str, Any]:
    """Compute medians over rounds, and the ratio of the two runs of each round, which are neighbours in time."""
    if not all(run.seconds for pair in pairs for run in pair):
        raise invalid("output_len", "it leaves nothing to decode; increase it")
    ratios = sorted(plain.seconds / drafted.seconds for plain, drafted in pairs)
    names = ("plain", "drafted")
    speeds = {
        f"{name}_tokens_per_s": median(pair[place].tokens / pair[place].seconds for pair in pairs)
        for place, name in enumerate(names)
    }
    steps = {f"{name}_steps": sum(pair[place].steps for pair in pairs) for place, name in enumerate(names)}
    return {**speeds, **steps, "speedup": median(ratios), "speedup_low": ratios[0], "speedup_high": ratios[-1]}
