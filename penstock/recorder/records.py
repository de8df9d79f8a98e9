"""The records of the flight recorder, as typed msgpack, compact: arrays without field names, columns for objects.

A step has two records, Planned before it is computed and Computed after it, so that the last record before the engine
dies names the step in which it died. A request has a number from its introduction to the executor until its removal.
"""

from array import array
from collections.abc import Callable
from typing import Any

import msgspec

from penstock.interface.sampling_params import SamplingParams
from penstock.interface.step import CacheGroup, SamplerState

FORMAT = 3  # incremented with every change to a record


class EngineDescription(msgspec.Struct, frozen=True):
    """Everything needed to build the engine again.

    Attributes:
        options: for EngineConfig.from_options, including those that were chosen automatically.
        groups: the cache groups.
    """

    system_fingerprint: str
    options: dict[str, Any]
    groups: list[CacheGroup]
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


class Introduced(msgspec.Struct, frozen=True, array_like=True):
    """A request as it is introduced to the executor (step.NewRequest).

    Attributes:
        token_ids: prompt and outputs so far, packed by pack_ids.
        num_computed_tokens: tokens whose keys and values are in the cache, if the request is listed at the beginning
            of a segment; else 0.
    """

    number: int
    request_id: str
    token_ids: bytes
    num_prompt_tokens: int
    params: SamplingParams
    choice: int
    block_tables: list[list[int]]
    num_computed_tokens: int = 0
    sampler_state: SamplerState | None = None


class Begun(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first record of a segment.

    Attributes:
        time: seconds since 1970, like all times here.
        epoch: of the engine.
        continued: whether the previous segment holds every record up to this one. If not, records are missing, or the
            engine is new.
        requests: all requests that the executor knows at this moment.
    """

    time: float
    epoch: int
    continued: bool
    engine: EngineDescription
    requests: list[Introduced]


class Arrived(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The engine accepted a request."""

    time: float
    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int  # more than 0 if the request is resumed


class Aborted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A client aborted a request."""

    time: float
    request_id: str


class Planned(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One step as planned (step.SchedulerOutput).

    Attributes:
        new: the plan's new_requests.
        removed: numbers of the removed requests.
        numbers, num_computed, num_new, num_samples: of the scheduled requests, in order.
        tables: index of a scheduled request -> new_block_ids and num_released_blocks, if these change.
        drafts: index of a scheduled request -> draft_token_ids, if it has any.
        copies: the plan's block_copies, as (group, source, target).
    """

    step_id: int
    time: float
    new: list[Introduced]
    removed: list[int]
    numbers: list[int]
    num_computed: list[int]
    num_new: list[int]
    num_samples: list[int]
    tables: dict[int, tuple[list[list[int]], list[int]]]
    drafts: dict[int, list[int]] = {}
    copies: list[tuple[int, int, int]] = []


class Computed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The results of the step planned last, in the plan's order.

    Attributes:
        checksums: of the logits from which the ids were sampled; None where nothing was sampled.
        scores: index -> checksum of the log-probabilities or of the pooled vector that the request asked for.
        errors: index -> why the request failed.
    """

    step_id: int
    duration_us: int
    token_ids: list[list[int]]
    checksums: list[int | None]
    scores: dict[int, int]
    errors: dict[int, str]


class StepFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The step planned last failed as a whole."""

    step_id: int
    error: str


class EngineFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An exception that ends the engine process."""

    time: float
    error: str


Record = Begun | Arrived | Aborted | Planned | Computed | StepFailed | EngineFailed

encode: Callable[[Record], bytes] = msgspec.msgpack.Encoder().encode
decode: Callable[[bytes], Record] = msgspec.msgpack.Decoder(Record).decode  # raises msgspec.DecodeError


def pack_ids(ids: list[int]) -> bytes:
    """Return token ids as 4 bytes each, which is two hundred times faster than a list of numbers."""
    return array("I", ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Return the token ids packed by pack_ids. Raise ValueError if the length is not a multiple of 4."""
    return array("I", data).tolist()
