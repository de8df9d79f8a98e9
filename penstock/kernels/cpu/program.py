"""Programs: the native calls of a forward pass, recorded once and then run without the model's Python.

A line of Python between two kernels starts cold, because weights have streamed through the caches: measured on a
1.1B model, 1.2 ms of Python become 4 ms. A program is one native call. Only the attention metadata changes from step to
step: each cache group has one PenstockAttentionStep, which is rewritten before every run.

A program is correct only if the forward pass did nothing besides native calls, which holds for the bundled families.
For a model with torch's tensors, torch_watch.py tells the Recorder what else the pass did; any such operation makes it
unrecordable. Where the ranks of a model exchange arrays, Python runs between native calls (`run_host`): the program
then has several parts, in order.
"""

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.kernels.cpu.library import (
    ABI,
    MAX_ARGUMENTS,
    RECORDABLE,
    PenstockAttentionStep,
    PenstockCall,
    check_status,
)
from penstock.kernels.metadata import AttentionMetadata
from penstock.kernels.tensors import Array, Tensor, address_of, as_array

HostCall = Callable[[], None]
Arguments = tuple[int | float | None, ...]  # of a native function, without the context


class CallRunner(Protocol):
    """Runs recorded calls, and returns a Status of native/abi.h."""

    def replay(self, calls: "ctypes.Array[PenstockCall]") -> int:
        """Run the calls once."""

    def decode(self, calls: "ctypes.Array[PenstockCall]", steps: int, *arguments: int) -> int:
        """Run the calls in several decode steps. arguments: those of penstock_decode between `count` and `steps`."""


@dataclass(frozen=True, slots=True, eq=False)
class NativeProgram:
    """A recorded forward pass, for a fixed number of tokens.

    Attributes:
        parts: runs of native calls, and the Python functions between them.
        runner: runs the calls.
        steps: the arguments of attention, by cache group.
        filled: the metadata from which each of `steps` was filled.
        kept: owners of the memory that the calls read and write.
        result: the tensor that the pass returned; every run overwrites it.
    """

    parts: "Sequence[ctypes.Array[PenstockCall] | HostCall]"
    runner: CallRunner
    steps: "ctypes.Array[PenstockAttentionStep]"
    filled: list[AttentionMetadata]
    kept: Sequence[Any]
    result: Tensor

    def run(self, attention: Sequence[AttentionMetadata]) -> Tensor:
        """Run the pass with the planned metadata of this step for each cache group.

        Raises:
            ValueError, MemoryError: see `library.check_status`.
        """
        self._fill(attention)
        for part in self.parts:
            if not isinstance(part, ctypes.Array):
                part()
            elif status := self.runner.replay(part):
                check_status(status)
        return self.result

    def decode(
        self,
        attention: Sequence[AttentionMetadata],
        input_ids: Tensor,
        positions: Tensor,
        tokens: Array,
        vocab_size: int,
    ) -> bool:
        if len(self.parts) != 1 or not isinstance(calls := self.parts[0], ctypes.Array):
            return False
        self._fill(attention)
        logits = as_array(self.result)
        status = self.runner.decode(
            calls,
            tokens.shape[1] - 1,
            ctypes.addressof(self.steps),
            len(self.steps),
            logits.ctypes.data,
            logits.shape[1],
            vocab_size,
            len(tokens),
            address_of(input_ids),
            address_of(positions),
            tokens.ctypes.data,
            tokens.strides[0] // tokens.itemsize,
        )
        if status:
            check_status(status)
        return True

    def _fill(self, attention: Sequence[AttentionMetadata]) -> None:
        """Fill the steps from this step's metadata."""
        for index, meta in enumerate(attention):
            if meta is not self.filled[index]:  # for the same metadata, only the contents of its tensors have changed
                fill_step(self.steps[index], meta)
                self.filled[index] = meta


class Recorder:
    """Records native calls.

    Attributes:
        foreign: an operation that a program cannot contain, or None.
    """

    def __init__(self, attention: Sequence[AttentionMetadata], runner: CallRunner) -> None:
        """attention: the planned metadata of this pass. runner: runs the calls, and owns the native context."""
        self.foreign: str | None = None
        self._attention = attention
        self._runner = runner
        self._steps = (PenstockAttentionStep * len(attention))()
        for index, meta in enumerate(attention):
            fill_step(self._steps[index], meta)
        self._parts: list[list[tuple[str, Arguments]] | HostCall] = []
        self._kept: list[Any] = []

    def keep(self, owner: object) -> None:
        """Keep memory that the calls may read or write."""
        self._kept.append(owner)

    def call(self, name: str, arguments: Arguments, used: tuple[object, ...]) -> None:
        """Record the call of a native function. used: owners of the memory that it reads and writes."""
        calls = self._parts[-1] if self._parts else None
        if not isinstance(calls, list):
            self._parts.append(calls := [])
        calls.append((name, arguments))
        self._kept += used
        if name not in RECORDABLE:
            self.foreign = name

    def host(self, work: HostCall) -> None:
        """Record a Python function that runs between native calls."""
        self._parts.append(work)

    def step(self, meta: AttentionMetadata) -> PenstockAttentionStep | None:
        """Return the step of this metadata's cache group, or None if the metadata is not part of this pass."""
        for index, item in enumerate(self._attention):
            if item is meta:
                step: PenstockAttentionStep = self._steps[index]
                return step
        self.foreign = "attention metadata of unknown origin"
        return None

    def program(self, result: Tensor) -> NativeProgram | None:
        """Return the program, or None if it would be incomplete."""
        if self.foreign:
            return None
        parts = [_recorded_calls(part) if isinstance(part, list) else part for part in self._parts]
        return NativeProgram(parts, self._runner, self._steps, list(self._attention), self._kept, result)


def _recorded_calls(calls: Sequence[tuple[str, Arguments]]) -> "ctypes.Array[PenstockCall]":
    return (PenstockCall * len(calls))(*(_recorded_call(name, values) for name, values in calls))


def _recorded_call(name: str, arguments: Arguments) -> PenstockCall:
    types = ABI.functions[name][1][1:]  # without the context
    words = (_word(value, kind) for value, kind in zip(arguments, types, strict=True))
    return PenstockCall(RECORDABLE.index(name), (ctypes.c_int64 * MAX_ARGUMENTS)(*words))


def _word(value: int | float | None, kind: type) -> int:
    """Return a float as the bits of a double, an integer or address unchanged, None as 0."""
    if kind is ctypes.c_float:
        word: int = struct.unpack("<q", struct.pack("<d", value))[0]
        return word
    return int(value or 0)


def fill_step(step: PenstockAttentionStep, meta: AttentionMetadata) -> PenstockAttentionStep:
    """Fill a step from planned metadata, and return it. It has addresses of meta's tensors, which must outlive it."""
    plan = meta.plan
    if plan is None:
        raise ValueError("plan: the metadata has no plan")
    step.sequences, step.tokens = len(meta.seq_lens), len(meta.slot_mapping)
    step.query_start_loc = address_of(meta.query_start_loc)
    step.seq_lens = address_of(meta.seq_lens)
    step.block_table = address_of(meta.block_table)
    step.max_blocks = meta.block_table.shape[1]
    step.slot_mapping = address_of(meta.slot_mapping)
    step.sliding_window = meta.sliding_window or 0
    step.num_sink_tokens = meta.num_sink_tokens
    step.positions = plan.positions.ctypes.data
    step.items, step.combines = len(plan.items), len(plan.combines)
    step.item = plan.items.ctypes.data
    step.item_starts = plan.starts.ctypes.data
    step.combine = plan.combines.ctypes.data
    step.references = plan.references.ctypes.data
    step.staged = plan.staged.ctypes.data
    step.partial_rows = plan.partial_rows
    return step
