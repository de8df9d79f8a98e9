"""Accounts: what each API key may use and uses now, and stocks of which no key may hold more than is left for others.

A request opens a lease on the account of its key. The lease counts as one request and holds the tokens that the call
may use at most, until its work has ended, whether a connection, a background call or both wait for it. So whatever
ends a call, and in whatever order, gives back everything exactly once. This module knows no HTTP.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

import msgspec

from penstock.errors import EngineOverloadedError, InvalidRequestError
from penstock.interface.sampling_params import SamplingParams

SOME = 1e-3  # fraction of a token or request that must be in a bucket before anything is let through
Limit = Annotated[int, msgspec.Meta(ge=1, le=2**40)] | None


class KeyRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limits and rights of a key: one table of the key file."""

    key: str
    max_concurrent_requests: Limit = None
    requests_per_minute: Limit = None
    tokens_per_minute: Limit = None
    max_choices: Limit = None
    max_tokens: Limit = None
    admin: bool = False
    priority: Annotated[int, msgspec.Meta(ge=-1000, le=1000)] | None = None


class KeyLimitError(EngineOverloadedError):
    """A limit of the key does not allow the request now."""

    code = "rate_limit_exceeded"


class Bucket:
    """A limit per minute: it starts full, and fills steadily up to one minute's worth."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level, self._at = float(per_minute), clock()

    def wait_s(self, amount: float = 0.0) -> float:
        """Compute the seconds until the bucket is above zero and holds `amount`; 0.0 if it does now."""
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / 60)
        self._at = now
        missing = max(amount, SOME) - self._level
        return missing * 60 / self.per_minute if missing > SOME * 1e-3 else 0.0

    def spend(self, amount: float) -> None:
        """Take an amount out; a negative one gives back what was not used."""
        self._level -= amount


class Account:
    """A key's name, its limits and their use. An account outlives a reload of the file if its name is still there.

    Attributes:
        num_open: requests whose work has not ended.
        on_use: called with "prompt" or "completion" and a number of tokens as soon as they are used, and with
            "refusal" and 1 for each refused request.
    """

    def __init__(self, name: str, rules: KeyRules, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.num_open = 0
        self.on_use: Callable[[str, int], None] = _ignore
        self._clock = clock
        self.apply(rules)

    def apply(self, rules: KeyRules) -> None:
        """Apply new rules. The use of a limit that does not change is kept."""
        before: KeyRules | None = getattr(self, "rules", None)
        self.rules = rules
        if before is None or before.requests_per_minute != rules.requests_per_minute:
            self._requests = _bucket(rules.requests_per_minute, self._clock)
        if before is None or before.tokens_per_minute != rules.tokens_per_minute:
            self.tokens = _bucket(rules.tokens_per_minute, self._clock)

    def open(self) -> "Lease":
        """Begin a request. Raise KeyLimitError if a limit does not allow it now."""
        rules = self.rules
        if rules.max_concurrent_requests is not None and self.num_open >= rules.max_concurrent_requests:
            raise self.exceeded(f"max_concurrent_requests = {rules.max_concurrent_requests}", 1.0)
        if self.tokens is not None and (wait_s := self.tokens.wait_s()):
            raise self.exceeded(f"tokens_per_minute = {rules.tokens_per_minute}", wait_s)
        if self._requests is not None:
            if wait_s := self._requests.wait_s(1):
                raise self.exceeded(f"requests_per_minute = {rules.requests_per_minute}", wait_s)
            self._requests.spend(1)
        return Lease(self)

    def readmit(self) -> "Lease":
        """Begin a request that was accepted before, whatever the limits."""
        return Lease(self)

    def limited(self, params: SamplingParams, num_prompts: int, num_prompt_tokens: int) -> SamplingParams:
        """Fit the parameters of a call to the key.

        Without `max_tokens`, an answer may have the key's, and no more than `tokens_per_minute` leaves.

        Raises:
            InvalidRequestError: the call asks for more choices or tokens than the key ever allows.
        """
        limits, num_choices = self.rules, num_prompts * params.n
        if limits.max_choices is not None and num_choices > limits.max_choices:
            message = f"n: {num_choices} choices in a call; the key {self.name} may ask for at most"
            raise _beyond("n", f"{message} {limits.max_choices}")
        most = limits.max_tokens
        if limits.tokens_per_minute is not None:
            left = (limits.tokens_per_minute - num_prompt_tokens) // num_choices
            if left < 1:
                message = f"prompt: {num_prompt_tokens} tokens; the key {self.name} has tokens_per_minute ="
                raise _beyond("prompt", f"{message} {limits.tokens_per_minute}")
            most = left if most is None else min(most, left)
        if most is None:
            return params
        if params.max_tokens is None:
            return replace(params, max_tokens=most)
        if params.max_tokens > most:
            message = f"max_tokens: {params.max_tokens} is too large; the key {self.name} may ask for {most}"
            raise _beyond("max_tokens", message)
        return params

    def allowed_priority(self, asked: int | None) -> int:
        """Choose the priority of a call: the one it asks for, or the key's if it asks for none or a more urgent one."""
        own = self.rules.priority
        if own is None and not self.name:  # without named keys, nobody is kept apart
            return asked or 0
        return (own or 0) if asked is None else max(asked, own or 0)

    def exceeded(self, limit: str, retry_after_s: float) -> KeyLimitError:
        """Count a refusal, and make its error."""
        self.on_use("refusal", 1)
        return KeyLimitError(f"the key {self.name} has reached {limit}", retry_after_s=retry_after_s)


def _ignore(kind: str, amount: int) -> None:
    pass


def _bucket(per_minute: int | None, clock: Callable[[], float]) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute, clock)


def _beyond(param: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param=param, code="key_limit_exceeded")


class Lease:
    """What one request holds of an account: a place among the open requests, and tokens; and the use of its model.

    Its connection holds it, and so does a call that outlives the connection (`share`); each of them releases it once.
    After the last release, the tokens that were reserved and not used are back in the account.
    """

    def __init__(self, account: Account) -> None:
        self.account = account
        account.num_open += 1
        self._num_holders = 1
        self._bucket = account.tokens  # a reload of the file may give the account another one
        self._reserved = 0
        self._used = 0
        self._at_end: list[Callable[[], None]] = []

    def until_end(self, end: Callable[[], None]) -> None:
        """Call `end` after the last release: what else the request holds is then given back."""
        self._at_end.append(end)

    def share(self) -> "Lease":
        """Return the lease for another holder."""
        self._num_holders += 1
        return self

    def reserve(self, num_tokens: int, *, is_accepted: bool = False) -> None:
        """Set aside the most tokens that the call can use, so that running calls never pass the key's limit.

        Raises:
            KeyLimitError: the account does not have them now, and the call has not been accepted before.
        """
        if self._bucket is None:
            return
        if not is_accepted and (wait_s := self._bucket.wait_s(num_tokens)):
            limit = f"tokens_per_minute = {self._bucket.per_minute}: its running calls and this one, with up to"
            raise self.account.exceeded(f"{limit} {num_tokens} tokens, may need more", wait_s)
        self._bucket.spend(num_tokens)
        self._reserved += num_tokens

    def use(self, kind: str, num_tokens: int) -> None:
        """Count tokens of the prompt or the answer when they are used. What was not reserved is spent now."""
        self._used += num_tokens
        if self._bucket is not None and self._used > self._reserved:
            self._bucket.spend(self._used - self._reserved)
            self._reserved = self._used
        self.account.on_use(kind, num_tokens)

    def release(self) -> None:
        self._num_holders -= 1
        if self._num_holders == 0:
            self.account.num_open -= 1
            if self._bucket is not None:
                self._bucket.spend(self._used - self._reserved)
            for end in self._at_end:
                end()


class Stock:
    """A limited amount that all keys share, of which no key may hold more than is left for the others.

    So one key can take a half of it, and two a third each; the next one always finds some. Known from the buffers of
    switches (Choudhury and Hahne 1998, "Dynamic queue length thresholds").
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.held: Counter[str] = Counter()

    def has(self, owner: str, amount: int) -> bool:
        """Check whether an owner may take this amount now."""
        return self.held[owner] + amount <= self.capacity - self.used - amount

    def take(self, owner: str, amount: int) -> None:
        """Count an amount that an owner takes or, if it is negative, gives back."""
        self.used += amount
        self.held[owner] += amount
        if self.held[owner] == 0:
            del self.held[owner]
