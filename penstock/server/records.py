"""What the journal's records say of a call, as typed msgpack. Only `Begun` is needed to answer a call: the others spare
work, and any of them may be lost, since the same request gives the same tokens.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.interface.sampling_params import SamplingParams
from penstock.server.api_errors import ApiError


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as the engine takes it.

    Attributes:
        text: only where the answer may repeat it.
        seed: settled here; None leaves it to the parameters.
        output_token_ids: what an earlier computation gave, one list per choice.
        cache_salt: with the name of the key where requests are salted by key.
    """

    token_ids: list[int]
    text: str | None = None
    seed: int | None = None
    output_token_ids: list[list[int]] | None = None
    cache_salt: str | None = None

    def as_given(self) -> dict[str, Any]:
        """Return it as an engine client takes it."""
        return {"prompt_token_ids": self.token_ids, "cache_salt": self.cache_salt}


class Begun(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A call that has been accepted: all that its answer depends on.

    Attributes:
        id: of the answer.
        kind: a key of server/resumption.py's table of APIs.
        owner: of the key that the call carried, a hash; only it may fetch the answer.
        created: when, in seconds since 1970.
        body: as JSON, checked.
        fingerprint: of the engine that computes it; another one would give other tokens.
        grace_s: without a reader for so long it is given up; None: never.
        keep_s: how long it may be fetched after its end.
        key: name of its API key, whose turns it takes.
        priority, timeout_s: what it says of its turn, and of the time that it may take, from `created` on.
    """

    id: str
    kind: str
    owner: str
    created: int
    body: bytes
    model: str
    fingerprint: str
    params: SamplingParams
    prompts: list[EncodedPrompt]
    grace_s: float | None
    keep_s: float
    key: str = ""
    priority: int = 0
    timeout_s: float | None = None

    @property
    def num_bytes(self) -> int:
        """Return roughly how much memory it takes."""
        return 1024 + len(self.body) + 8 * sum(len(prompt.token_ids) for prompt in self.prompts)


class Tokens(msgspec.Struct, tag=True, frozen=True):
    """Tokens of a choice, from its output number `start` on."""

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
        at: when, in seconds since 1970.
        frames: the whole stream, packed.
        result: the whole answer as JSON, where the API has one.
    """

    id: str
    at: float
    frames: bytes
    result: bytes | None
    failure: Failure | None


class Deleted(msgspec.Struct, tag=True, frozen=True):
    """Nobody may fetch the call any more."""

    id: str


Record = Begun | Tokens | Ended | Deleted
encode: Any = msgspec.msgpack.Encoder().encode
decode: Any = msgspec.msgpack.Decoder(Record).decode


def failure_of(error: ApiError) -> Failure:
    return Failure(error.status, error.message, error.param, error.code, dict(error.headers or {}))
