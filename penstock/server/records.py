"""The journal's records about a call, as typed msgpack. Only `Begun` is needed to answer a call. The other records save
work, and any of them may be lost, because the same request gives the same tokens.
"""

from typing import Any

import msgspec

from penstock.client.prompts import PromptRequest
from penstock.interface.sampling_params import SamplingParams
from penstock.server.api_errors import ApiError


class Begun(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A call that has been accepted: everything that its answer depends on.

    Attributes:
        id: of the answer.
        kind: the API, a key of `ServerContext.sources`.
        owner: hash of the key that the call carried; only that key may fetch the answer.
        created: time of acceptance, in seconds since 1970.
        body: the checked body as JSON.
        fingerprint: of the engine that computes it; an engine with another one would give other tokens.
        grace_s: how long the call goes on without a reader; None: forever.
        keep_s: how long the answer may be fetched after the call has ended.
        key: name of its API key, under which it is scheduled.
        priority: its priority, where the scheduling policy uses one.
        timeout_s: how long it may take, counted from `created`.
    """

    id: str
    kind: str
    owner: str
    created: int
    body: bytes
    model: str
    fingerprint: str
    params: SamplingParams
    prompts: list[PromptRequest]
    grace_s: float | None
    keep_s: float
    key: str = ""
    priority: int = 0
    timeout_s: float | None = None

    @property
    def num_bytes(self) -> int:
        """Return roughly how much memory the call takes."""
        return 1024 + len(self.body) + 8 * sum(len(prompt.token_ids) for prompt in self.prompts)


class Tokens(msgspec.Struct, tag=True, frozen=True):
    """Tokens of a choice, beginning at its output position `start`."""

    id: str
    prompt: int
    choice: int
    start: int
    token_ids: list[int]


class Failure(msgspec.Struct, frozen=True):
    """An error as the client sees it."""

    status: int
    message: str
    param: str | None
    code: str | None
    headers: dict[str, str] | None = None

    def as_error(self) -> ApiError:
        return ApiError(self.status, self.message, param=self.param, code=self.code, headers=self.headers)


class Ended(msgspec.Struct, tag=True, frozen=True):
    """The end of a call.

    Attributes:
        at: time of the end, in seconds since 1970.
        frames: the whole stream, packed.
        result: the whole answer as JSON, where the API has one.
    """

    id: str
    at: float
    frames: bytes
    result: bytes | None
    failure: Failure | None


class Deleted(msgspec.Struct, tag=True, frozen=True):
    """The call has been deleted: nobody may fetch it any more."""

    id: str


Record = Begun | Tokens | Ended | Deleted
encode: Any = msgspec.msgpack.Encoder().encode
decode: Any = msgspec.msgpack.Decoder(Record).decode


def failure_of(error: ApiError) -> Failure:
    return Failure(error.status, error.message, error.param, error.code, dict(error.headers or {}))
