"""Speculation: asks a Proposer for drafts for the requests that decode, and counts those that are accepted.

    propose   before a step is planned: which drafts it computes (draft_policy.py says how many)
    note      after it: how many were accepted, and what the step cost

Drafts belong to one step. They are in its plan and nowhere else, so nothing has to be undone after a failed step, a
preemption or the death of an engine: a request's tokens grow only by what was sampled.
"""

import logging
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.engine.draft_policy import DraftPolicy
from penstock.engine.request import Request
from penstock.interface.step import CacheGroup, DraftQuery, Proposer, ScheduledRequest

MAX_PAUSE = 15  # maximum number of steps without asking while no draft pays, because asking takes time too
MAX_MODEL_PAUSE = 63  # the same with a draft model, whose worth depends less on the text
CHEAP = 0.002  # share of a step up to which asking is cheap enough to go on
LOGGER = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True)
class Proposal:
    """The question for drafts before a step.

    Attributes:
        began: when it was answered.
        spent: seconds that it took.
        is_measured: whether drafts were considered.
    """

    began: float
    spent: float
    is_measured: bool


class Speculation:
    """One engine's drafts.

    Attributes:
        policy: decides how many drafts pay.
        num_drafts, num_draft_tokens, num_accepted_tokens: requests that got drafts in a step, their drafts, and
            accepted drafts, since the start.
        accepted_per_position: how often the first, second, ... draft was accepted.
        proposal: the last proposal.
    """

    def __init__(
        self,
        proposer: Proposer,
        num_speculative_tokens: int,
        *,
        policy: DraftPolicy | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.policy = policy or DraftPolicy(scores_unverified=proposer.is_free)
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        self.accepted_per_position = [0] * num_speculative_tokens
        self._proposer: Proposer | None = proposer
        self._most = num_speculative_tokens
        self._clock = clock
        self.proposal = Proposal(0.0, 0.0, is_measured=False)
        self._ended = 0.0  # when the last measured step was noted
        self._asked: set[str] = set()  # requests that had drafts, if drafts are not free
        self._guesses: dict[str, tuple[int, list[int]]] = {}  # drafts not computed: position of the first, and ids
        self._pause = self._steps_to_pause = 0  # steps without asking, after no draft paid

    def fit(self, groups: Iterable[CacheGroup]) -> None:
        """Limit the drafts to what the cache groups tolerate."""
        self._most = min([self._most, *(ring_slack(group) for group in groups if group.ring)])

    def propose(self, running: Sequence[Request]) -> dict[str, list[int]]:
        """Propose the next step's drafts by request id. There are none while prompts are computed: none would pay."""
        self.proposal = Proposal(self.proposal.began, self.proposal.spent, is_measured=False)
        if self._proposer is None or not running:
            return {}
        if self._steps_to_pause:
            self._steps_to_pause -= 1
            return {}
        if not self.policy.may_think or any(request.num_missing_tokens > 1 for request in running):
            return {}
        began = self._clock()
        try:
            drafts = self._drafts({request.request_id: request for request in running})
        except Exception:
            LOGGER.exception("the proposer of drafts failed and is off from now on; no request is affected")
            self.shutdown()
            return {}
        ended = self._clock()
        self.proposal = Proposal(ended, ended - began, is_measured=True)
        is_fine = self.policy.pays or self.proposal.spent <= CHEAP * self.policy.base
        longest = MAX_PAUSE if self._proposer.is_free else MAX_MODEL_PAUSE
        self._pause = 0 if is_fine else min(2 * self._pause + 1, longest)
        self._steps_to_pause = self._pause
        return drafts

    def _drafts(self, running: dict[str, Request]) -> dict[str, list[int]]:
        limits = {
            name: limit
            for name, request in running.items()
            if not request.params.has_sampler_state  # which follows from all earlier draws, drafts included
            and not request.params.use_beam_search  # its tokens are chosen after the step
            and (limit := min(self._most, request.max_output_tokens - request.num_output_tokens - 1)) > 0
        }
        proposer = self._proposer
        if proposer is None or not limits:
            return {}
        if proposer.is_free:
            self._settle_guesses(running)
            found = _ask(proposer, running, limits)
            counts = self.policy.choose({name: len(ids) for name, ids in found.items()}, len(running))
            self._guesses |= {name: (running[name].num_tokens, found[name]) for name in found if name not in counts}
            return {name: found[name][:count] for name, count in counts.items()}
        limits = self._admitted(limits)
        counts = self.policy.choose(limits, len(running)) if limits else {}
        if not counts:
            return {}
        began = self._clock()
        found = _ask(proposer, running, counts)
        enters = not counts.keys() <= self._asked
        self._asked |= counts.keys()
        self.policy.note_proposal(max(counts.values()), self._clock() - began, enters=enters)
        return found

    def _admitted(self, limits: dict[str, int]) -> dict[str, int]:
        """Select the requests that may have drafts: those that had some, and others if the budget allows entries."""
        if self.policy.may_enter:
            return limits
        return {name: limit for name, limit in limits.items() if name in self._asked}

    def _settle_guesses(self, running: dict[str, Request]) -> None:
        """Score the guesses that were not verified against the tokens generated since. It costs almost nothing."""
        for name in running.keys() & self._guesses.keys():  # the others wait, or are in flight
            start, ids = self._guesses.pop(name)
            if known := running[name].token_ids[start : start + len(ids)]:
                self.policy.note_drafts(name, len(known), _num_right(ids, known))

    def note(self, proposal: Proposal, scheduled: list[ScheduledRequest], accepted: dict[str, int]) -> None:
        """Learn from a step that succeeded. accepted: number of accepted drafts of each request that had drafts.

        With several steps in flight, each is taken to have begun when the one before it ended.
        """
        if not proposal.is_measured:
            self.policy.note_pause()
            return
        ended = self._clock()
        for item in scheduled:
            if item.draft_token_ids and item.request_id in accepted:
                self._count(item.request_id, len(item.draft_token_ids), accepted[item.request_id])
        if all(item.num_samples == item.num_new_tokens for item in scheduled):
            num_tokens = sum(item.num_new_tokens for item in scheduled)
            began = max(proposal.began, self._ended)
            self.policy.note_step(len(scheduled), num_tokens, ended - began, sum(accepted.values()))
        self._ended = self._clock()
        self.policy.note_overhead(proposal.spent + self._ended - ended)

    def _count(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            self.accepted_per_position[position] += 1
        self.policy.note_drafts(request_id, num_drafts, num_accepted)

    def counters(self) -> dict[str, Any]:
        return {
            "num_drafts_total": self.num_drafts,
            "num_draft_tokens_total": self.num_draft_tokens,
            "num_accepted_tokens_total": self.num_accepted_tokens,
            "num_accepted_tokens_per_pos_total": list(self.accepted_per_position),
        }

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._guesses.pop(request_id, None)
        self._asked.discard(request_id)
        self.policy.forget(request_id)
        if self._proposer is not None:
            self._proposer.forget(request_id)

    def shutdown(self) -> None:
        """Free the proposer. No drafts are made from then on."""
        if self._proposer is not None:
            self._proposer.shutdown()
        self._proposer = None


def ring_slack(group: CacheGroup) -> int:
    """Compute how many drafts a ring tolerates.

    A draft at position p overwrites the slot of position p - block_size. If no draft is accepted, the next token is at
    c + 1, where c is the last computed position, and still attends to c + 2 - sliding_window. So p may be at most that
    position + block_size - 1.
    """
    return max(0, group.block_size - (group.sliding_window or group.block_size) + 1)


def _num_right(drafts: list[int], token_ids: list[int]) -> int:
    pairs = enumerate(zip(drafts, token_ids, strict=False))
    return next((place for place, (draft, token) in pairs if draft != token), min(len(drafts), len(token_ids)))


def _ask(proposer: Proposer, running: dict[str, Request], counts: dict[str, int]) -> dict[str, list[int]]:
    """Ask a proposer for drafts, and drop the empty ones."""
    queries = [DraftQuery(name, running[name].token_ids, count) for name, count in counts.items()]
    return {
        query.request_id: ids[: query.count]
        for query, ids in zip(queries, proposer.propose(queries), strict=True)
        if ids
    }


MAX_CANDIDATES = 64  # most matches of the shortest length to look at, which bounds the time for frequent tokens
NONE = -1


class _Index:
    """Index of n-grams of the shortest length: the latest place where each ended and, for each place, the one before.

    It takes a dictionary entry per distinct n-gram and 4 bytes per token; a token is added in constant time.
    """

    def __init__(self, size: int) -> None:
        self.previous = array("i")  # by position: where the n-gram that ends there ended before
        self._size = size
        self._latest: dict[tuple[int, ...], int] = {}

    def extend(self, token_ids: list[int]) -> None:
        """Add the tokens that are new."""
        size, latest = self._size, self._latest
        for end in range(len(self.previous), len(token_ids)):
            key = tuple(token_ids[max(0, end - size + 1) : end + 1])  # shorter at the start, where it matches nothing
            self.previous.append(latest.get(key, NONE))
            latest[key] = end


class NgramProposer:
    """Prompt lookup: guesses that the last tokens are followed by what followed them earlier in the request's own text.

        token_ids  ... a b c d e f ............... x a b c        matches of the end: "c", "b c", "a b c"
                             ^ guessed: d e f

    The longest match of min_ngram to max_ngram tokens decides, because a longer context predicts better. Among matches
    of one length the latest decides, because a text repeats what it has just said rather than its beginning. The search
    goes from the end to the start, and stops at the first match of full length. A guess that reaches the end of the
    text goes on with its own tokens, so a text that repeats in a cycle is guessed for as long as wanted.
    """

    is_free = True

    def __init__(self, max_ngram: int, min_ngram: int) -> None:
        self._longest, self._shortest = max_ngram, min_ngram
        self._indices: dict[str, _Index] = {}

    def propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        return [self._propose(query) for query in queries]

    def _propose(self, query: DraftQuery) -> list[int]:
        tokens = query.token_ids
        index = self._indices.get(query.request_id)
        if index is None:
            index = self._indices[query.request_id] = _Index(self._shortest)
        index.extend(tokens)
        end = self._best_match(tokens, index.previous)
        if end == NONE:
            return []
        guess = tokens[end + 1 : end + 1 + query.count]
        while len(guess) < query.count:
            guess += guess[: query.count - len(guess)]
        return guess

    def _best_match(self, tokens: list[int], previous: "array[int]") -> int:
        """Find where the longest match of the text's end ends, the latest among equals; NONE if nothing matches."""
        last = len(tokens) - 1
        found, length = NONE, self._shortest - 1
        place = previous[last]
        for _ in range(MAX_CANDIDATES):
            if place == NONE or length == self._longest:
                break
            size = self._shortest
            while size < self._longest and size <= place and tokens[place - size] == tokens[last - size]:
                size += 1
            if size > length:
                found, length = place, size
            place = previous[place]
        return found

    def forget(self, request_id: str) -> None:
        self._indices.pop(request_id, None)

    def shutdown(self) -> None:
        self._indices.clear()
