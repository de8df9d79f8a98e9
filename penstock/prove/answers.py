"""Requests of a proof, and their answers to the bit."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from penstock.engine.engine import Engine
from penstock.errors import EngineError
from penstock.interface.messages import EngineOutput, EngineRequest
from penstock.interface.sampling_params import SamplingParams
from penstock.interface.step import TokenLogprobs

Entry = dict[int, float]  # token id -> log-probability
Key = tuple[int, int]  # a query, or a member of a crowd; and a choice


@dataclass(frozen=True, slots=True)
class Query:
    """What is asked: the prompt, and fields of SamplingParams, which `kind` names."""

    prompt: list[int]
    fields: dict[str, Any]
    kind: str = ""

    def params(self, n: int = 1) -> SamplingParams:
        return SamplingParams(n=n, **self.fields)


@dataclass(frozen=True, slots=True)
class Member:
    """One request of a crowd.

    Attributes:
        query: its index among the queries.
        n: choices.
        delay: of its arrival, in steps of an engine in this process.
        cut: outputs that it brings along, as if another engine had computed them.
        salt: of its cached prefixes.
    """

    query: int
    n: int
    delay: int = 0
    cut: int = 0
    salt: str | None = None


@dataclass(slots=True)
class Answer:
    """What one choice answers: ids, and every log-probability that was asked for.

    Attributes:
        ended: its finish_reason.
        error: why it failed.
        num_cached: prompt tokens found in the cache; an answer may be found there or not, so it is not compared.
        preempted: not compared either.
        mirostat_mus: mirostat's state after each token that an engine in this process gave.
    """

    ids: list[int] = field(default_factory=list)
    logprobs: list[Entry] = field(default_factory=list)
    prompt_logprobs: list[Entry] = field(default_factory=list)
    ended: str | None = None
    error: str | None = None
    num_cached: int = 0
    preempted: bool = False
    mirostat_mus: list[float | None] = field(default_factory=list)

    def add(self, output: EngineOutput) -> None:
        """Append what an engine says."""
        self.ids += output.new_token_ids
        self.mirostat_mus += [output.mirostat_mu] * len(output.new_token_ids)
        self.logprobs += map(_entry, output.logprobs or ())
        self.prompt_logprobs += map(_entry, output.prompt_logprobs or ())
        self.ended = None if output.finish_reason is None else str(output.finish_reason)
        self.error = output.error
        self.num_cached = output.num_cached_tokens

    def difference(self, expected: "Answer", start: int = 0) -> str | None:
        """Return the first difference from what is expected, from its token `start` on; None if there is none."""
        for what, found, wanted in (
            ("error", self.error, expected.error),
            ("token", self.ids, expected.ids[start:]),
            ("log-probabilities", self.logprobs, expected.logprobs[start:]),
            ("log-probabilities of the prompt", self.prompt_logprobs, expected.prompt_logprobs),
            ("mirostat's state", self.mirostat_mus, expected.mirostat_mus[start:] if self.mirostat_mus else []),
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


def ask_alone(engine: Engine, queries: list[Query], wanted: Iterable[Key]) -> dict[Key, Answer]:
    """Return the answers of choices, each asked when nothing else runs. Raise EngineError if one fails."""
    found = {}
    for query, choice in wanted:
        engine.add_request(EngineRequest("alone", queries[query].prompt, queries[query].params(), choice))
        answer = found[query, choice] = Answer()
        while engine.has_work:
            for output in engine.step():
                answer.add(output)
        if answer.error is not None:
            raise EngineError(f"a request failed alone: {answer.error}")
    return found
