"""Requests of a proof, and their answers, which are compared to the bit."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from penstock import EngineError, SamplingParams, StructuredOutputsParams
from penstock.engine.engine import Engine
from penstock.interface.messages import EngineOutput, EngineRequest, Hypothesis
from penstock.interface.step import SamplerState, TokenLogprobs

Entry = dict[int, float]  # token id -> log-probability
Key = tuple[int, int]  # the index of a query or of a crowd's member, and a choice


@dataclass(frozen=True, slots=True)
class Query:
    """A prompt and fields of SamplingParams, which `kind` names."""

    prompt: list[int]
    fields: dict[str, Any]
    kind: str = ""

    def params(self, n: int = 1) -> SamplingParams:
        fields = dict(self.fields)
        if "structured_outputs" in fields:  # in the form of an HTTP body
            fields["structured_outputs"] = StructuredOutputsParams.of(fields["structured_outputs"])
        return SamplingParams(n=n, **fields)

    @property
    def is_pooled(self) -> bool:
        return "pooling" in self.fields

    @property
    def is_search(self) -> bool:
        return bool(self.fields.get("use_beam_search"))


@dataclass(frozen=True, slots=True)
class Member:
    """One request of a crowd.

    Attributes:
        query: its index among the queries.
        n: choices, or beams.
        delay: of its arrival, in steps of an engine in this process.
        cut: number of outputs that it brings along, as if another engine had computed them.
        salt: of its cached prefixes.
    """

    query: int
    n: int
    delay: int = 0
    cut: int = 0
    salt: str | None = None


@dataclass(slots=True)
class Completion:
    """The ids that one choice received, and every log-probability that was asked for.

    Attributes:
        ended: its finish_reason.
        error: why it failed.
        num_cached: prompt tokens found in the cache; not compared, because it may differ.
        preempted: whether it was preempted; not compared either.
        sampler_states: the sampler's after each token, from an engine in this process.
        pooled: the vector of a request that generates nothing.
    """

    ids: list[int] = field(default_factory=list)
    logprobs: list[Entry] = field(default_factory=list)
    prompt_logprobs: list[Entry] = field(default_factory=list)
    ended: str | None = None
    error: str | None = None
    num_cached: int = 0
    preempted: bool = False
    sampler_states: list[SamplerState | None] = field(default_factory=list)
    pooled: bytes | None = None

    def add(self, output: EngineOutput) -> None:
        self.ids += output.new_token_ids
        self.sampler_states += [output.sampler_state] * len(output.new_token_ids)
        self.logprobs += map(_entry, output.logprobs or ())
        self.prompt_logprobs += map(_entry, output.prompt_logprobs or ())
        self.ended = None if output.finish_reason is None else str(output.finish_reason)
        self.error = output.error
        self.num_cached = output.num_cached_tokens
        self.pooled = output.pooled

    def add_beam(self, output: EngineOutput, found: Hypothesis) -> None:
        """Store one beam of a search."""
        self.ids, self.ended, self.num_cached = found.token_ids, str(found.finish_reason), output.num_cached_tokens
        self.logprobs = list(map(_entry, found.logprobs or ()))

    def difference(self, expected: "Completion", start: int = 0) -> str | None:
        """Find the first difference from the expected answer after its first `start` tokens; None if equal."""
        for what, found, wanted in (
            ("error", self.error, expected.error),
            ("token", self.ids, expected.ids[start:]),
            ("log-probabilities", self.logprobs, expected.logprobs[start:]),
            ("log-probabilities of the prompt", self.prompt_logprobs, expected.prompt_logprobs),
            (
                "the sampler's state",
                self.sampler_states,
                expected.sampler_states[start:] if self.sampler_states else [],
            ),
            ("vector", self.pooled, expected.pooled),
            ("finish_reason", self.ended, expected.ended),
        ):
            if found != wanted:
                return f"{what}{_first(found, wanted)}"
        return None


def _first(found: Any, wanted: Any) -> str:
    if isinstance(found, list) and len(found) == len(wanted):
        place = next(index for index, pair in enumerate(zip(found, wanted, strict=True)) if pair[0] != pair[1])
        return f" {place}: {found[place]} in place of {wanted[place]}"
    return f": {found} in place of {wanted}"


def _entry(at: TokenLogprobs) -> Entry:
    return dict(zip(at.token_ids, at.logprobs, strict=True))


def ask_alone(engine: Engine, queries: list[Query], wanted: Iterable[Key]) -> dict[Key, Completion]:
    """Compute the answers of choices, each when nothing else runs. Raise EngineError if a request fails."""
    found: dict[Key, Completion] = {}
    keys = list(wanted)
    widths = {query: sum(key[0] == query for key in keys) for query, _ in keys if queries[query].is_search}
    for query, choice in keys:
        if choice and query in widths:  # found together with the first choice
            continue
        answers = [found.setdefault((query, choice + place), Completion()) for place in range(widths.get(query, 1))]
        params = queries[query].params(len(answers))
        engine.add_request(EngineRequest("alone", queries[query].prompt, params, choice))
        while engine.has_work:
            for output in engine.step():
                add_output(answers, output)
        if answers[0].error is not None:
            raise EngineError(f"a request failed alone: {answers[0].error}")
    return found


def add_output(answers: list[Completion], output: EngineOutput) -> None:
    """Append an output of an engine to the answer of a choice, or to the answers of a search."""
    if output.hypotheses is None:
        answers[0].add(output)
        return
    for answer, hypothesis in zip(answers, output.hypotheses, strict=True):
        answer.add_beam(output, hypothesis)
