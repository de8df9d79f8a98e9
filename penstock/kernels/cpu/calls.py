"""Calls of native functions: the context that all operations of an engine share, and programs of recorded calls.

Native functions cannot check the type, shape or layout of the memory at an address, so `address` does.

A program is the calls of a forward pass, recorded once and then run as one native call without the model's Python: a
line of Python between two kernels starts cold, because weights have streamed through the caches (measured on a 1.1B
model, 1.2 ms of Python become 4 ms). Only the attention metadata changes from step to step: each cache group has one
PenstockAttentionStep, which is rewritten before every run. A program is correct only if the forward pass did nothing
besides native calls, which holds for the bundled families. For a model with torch's tensors, torch_watch.py tells the
Recorder what else the pass did: it is recorded, too, if nothing but values changes from pass to pass, which the caller
has to know; else any such operation makes the pass unrecordable. Torch's functions, and those that exchange arrays
between the ranks of a model (`run_host`), run between native calls: the program then has several parts, in order.
"""

import ctypes
import os
import struct
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from penstock.errors import EngineError, check_choice, invalid
from penstock.kernels.cpu.host import free_memory_bytes, show_cpus
from penstock.kernels.cpu.library import (
    ABI,
    LEVELS,
    MAX_ARGUMENTS,
    RECORDABLE,
    PenstockAttention,
    PenstockAttentionStep,
    PenstockCall,
    PenstockSampling,
    check_status,
    chosen_level,
    load_library,
    why_missing,
)
from penstock.kernels.metadata import AttentionMetadata, AttentionParams
from penstock.kernels.ops import REDUCTION_LEAVES
from penstock.kernels.sampling import SamplingTensors, hide
from penstock.kernels.tensors import (
    BFLOAT16,
    FIXED_ROWS,
    FLOAT32,
    INT32,
    INT64,
    Array,
    ArrayType,
    Dtype,
    Tensor,
    address_of,
    array_type,
    as_array,
    as_torch,
    dtype_of,
    empty,
    is_torch,
    tree_sum,
)

if TYPE_CHECKING:
    from penstock.kernels.cpu.torch_watch import TorchPool


HostCall = Callable[[], None]
Arguments = tuple[int | float | None, ...]  # of a native function, without the context


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
    runner: "NativeCalls"
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


@dataclass(frozen=True, slots=True)
class _TorchCalls:
    """Functions of torch's that run one after the other."""

    calls: list[Callable[[], object]]

    def __call__(self) -> None:
        for call in self.calls:
            call()


class Recorder:
    """Records native calls.

    Attributes:
        foreign: an operation that a program cannot contain, or None.
    """

    def __init__(self, attention: Sequence[AttentionMetadata], runner: "NativeCalls") -> None:
        """attention: the planned metadata of this pass. runner: runs the calls, and owns the native context."""
        self.foreign: str | None = None
        self._attention = attention
        self._runner = runner
        self._steps = (PenstockAttentionStep * len(attention))()
        for index, meta in enumerate(attention):
            fill_step(self._steps[index], meta)
        self._parts: list[list[tuple[str, Arguments]] | HostCall] = []
        self._kept: list[Any] = []

    def refuse(self, name: str) -> None:
        """Note an operation that a program cannot contain."""
        self.foreign = name

    def call(self, name: str, arguments: Arguments, used: tuple[object, ...]) -> None:
        """Record the call of a native function. used: owners of the memory that it reads and writes."""
        calls = self._parts[-1] if self._parts else None
        if not isinstance(calls, list):
            self._parts.append(calls := [])
        calls.append((name, arguments))
        pool = self._runner.pool
        self._kept += used if pool is None else (item for item in used if not pool.has(item))
        if name not in RECORDABLE:
            self.foreign = name

    def host(self, work: HostCall) -> None:
        """Record a Python function that runs between native calls."""
        self._parts.append(work)

    def torch(self, call: Callable[[], object]) -> None:
        """Record the call of a function of torch's; several in a row are one part."""
        calls = self._parts[-1] if self._parts else None
        if not isinstance(calls, _TorchCalls):
            self._parts.append(calls := _TorchCalls([]))
        calls.calls.append(call)

    def step(self, meta: AttentionMetadata) -> PenstockAttentionStep | None:
        """Find the step of this metadata's cache group; None if the metadata is not part of this pass."""
        for index, item in enumerate(self._attention):
            if item is meta:
                step: PenstockAttentionStep = self._steps[index]
                return step
        self.foreign = "attention metadata of unknown origin"
        return None

    def program(self, result: Tensor) -> NativeProgram | None:
        """Build the program; None if it would be incomplete."""
        if self.foreign:
            return None
        parts = [
            (PenstockCall * len(part))(*(_recorded_call(*call) for call in part)) if isinstance(part, list) else part
            for part in self._parts
        ]
        return NativeProgram(parts, self._runner, self._steps, list(self._attention), self._kept, result)


def _recorded_call(name: str, arguments: Arguments) -> PenstockCall:
    types = ABI.functions[name][1][1:]  # without the context
    words = (_word(value, kind) for value, kind in zip(arguments, types, strict=True))
    return PenstockCall(RECORDABLE.index(name), (ctypes.c_int64 * MAX_ARGUMENTS)(*words))


def _word(value: int | float | None, kind: type) -> int:
    """Encode a float as the bits of a double, an integer or address unchanged, None as 0."""
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
    step.num_sink_tokens, step.chunked, step.bidirectional = meta.num_sink_tokens, meta.chunked, meta.bidirectional
    step.positions = plan.positions.ctypes.data
    step.items, step.combines = len(plan.items), len(plan.combines)
    step.item = plan.items.ctypes.data
    step.item_starts = plan.starts.ctypes.data
    step.combine = plan.combines.ctypes.data
    step.references = plan.references.ctypes.data
    step.staged = plan.staged.ctypes.data
    step.partial_rows = plan.partial_rows
    return step


BIAS_COPIES = 15  # of the first and of the last bias of a head (attention/attention.h)


class NativeParams:
    """AttentionParams as a structure for native functions. It keeps the tensors that it points to alive."""

    def __init__(self, params: AttentionParams, num_heads: int) -> None:
        """Check and copy the parameters.

        Raises:
            ValueError: slopes or sink logits are not [H] float32; distances have not [H, 2R + 1] biases; softcap is
                not above 0.
        """
        if params.softcap is not None and not params.softcap > 0:
            raise ValueError(f"softcap: {params.softcap} is not above 0")
        self.params = params
        self.struct = PenstockAttention(
            scale=params.scale, softcap=params.softcap or 0.0, bias_before_scale=params.bias_before_scale
        )
        if params.alibi_slopes is not None:
            self.struct.slopes = address(params.alibi_slopes, (num_heads,), FLOAT32, "alibi_slopes")
        if params.sink_logits is not None:
            self.struct.sink_logits = address(params.sink_logits, (num_heads,), FLOAT32, "sink_logits")
        if params.distance_bias is not None:
            bias = as_array(params.distance_bias)
            if bias.dtype != FLOAT32 or bias.ndim != 2 or len(bias) != num_heads or bias.shape[1] % 2 == 0:
                raise ValueError(f"distance_bias: {bias.dtype} {bias.shape} is not [{num_heads}, 2R + 1] float32")
            self._bias = np.pad(bias, [(0, 0), (BIAS_COPIES, BIAS_COPIES)], mode="edge")
            self.struct.distance_bias, self.struct.bias_reach = address_of(self._bias), bias.shape[1] // 2
        self.address = ctypes.addressof(self.struct)


SUMMED_ROWS = 16  # of a sum over ranks, which are added at once, so that they stay in the processor's caches
Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

TYPES = {FLOAT32: ABI.constants["TYPE_F32"], BFLOAT16: ABI.constants["TYPE_BF16"]}
ACTIVATIONS = {
    name: ABI.constants[f"ACT_{name.upper()}"]
    for name in ("silu", "gelu", "gelu_tanh", "clamped_silu", "relu2", "relu", "tanh")
}


class CallObserver(Protocol):
    """An observer of the native calls of operations, called right before each runs."""

    def call(self, name: str, arguments: Arguments) -> None:
        """Note the call of a function of native/abi.h. arguments: those after the context."""

    def replay(self, calls: "ctypes.Array[PenstockCall]") -> None:
        """Note a run of the calls of a recorded program."""


class NativeCalls:
    """Threads and kernels of one instruction level; one call runs at a time.

    Attributes:
        observer: notes every call, for measurements; None costs nothing.
        dtype: type of weights and of the inputs of products; results are torch's tensors if this is a torch.dtype.
        element: the same type as a np.dtype.
        level: name of the instruction level, which determines the bits of results.
        threads: number of computing threads, the caller's included.
        library, context: the native library and its context, for measurements (penstock_lab/bench/native.py).
    """

    name = "cpu"
    device = "cpu"
    fixed_rows = FIXED_ROWS
    leaves = REDUCTION_LEAVES

    def __init__(self, dtype: Dtype, *, threads: int = 1, level: str | None = None) -> None:
        """Start the threads. level: None means `chosen_level()`.

        Raises:
            InvalidRequestError: the native library is missing, or this machine does not have the level.
            EngineError: the threads cannot be started.
        """
        library, level = load_library(), level or chosen_level()
        if library is None or level is None:
            raise invalid("kernels", f"'cpu' is not installed: {why_missing()}")
        check_choice("level", level, LEVELS[: library.penstock_best_level() + 1])
        context = library.penstock_context_new(LEVELS.index(level), threads)
        if not context:
            raise EngineError(f"the native kernels cannot start at level {level} with {threads} threads")
        weakref.finalize(self, library.penstock_context_free, context).atexit = False
        self.dtype = dtype
        self.is_planned = not is_torch(dtype)  # torch allocates its own memory
        self.element = array_type(dtype)
        self.level = level
        self.threads = threads
        self._type = TYPES[self.element]
        self.context: int = context
        self.library = library
        self._native: dict[str, Callable[..., int]] = {name: getattr(library, name) for name in ABI.functions}
        self._recorder: Recorder | None = None
        self.observer: CallObserver | None = None
        self.pool: TorchPool | None = None  # memory of what torch computes in programs

    def pin(self, cores: Sequence[Sequence[int]]) -> None:
        """Pin each helper thread to its CPUs, and let the calling thread use the CPUs of all threads.

        The calling thread is not pinned to one core, because threads and processes that it starts later inherit its
        CPUs. Helpers that have a core each leave the first core free for the calling thread.

        Args:
            cores: the CPUs of each thread, the caller's first.

        Raises:
            EngineError: the system refuses.
        """
        try:
            os.sched_setaffinity(0, {cpu for core in cores for cpu in core})
        except OSError as error:
            raise EngineError(f"cpu_affinity: this process may not use these CPUs: {error}") from error
        for thread, cpus in enumerate(cores[1:], start=1):
            array = (ctypes.c_int32 * len(cpus))(*cpus)
            if self.library.penstock_context_pin(self.context, thread, ctypes.addressof(array), len(cpus)):
                raise EngineError(f"cpu_affinity: thread {thread} may not be pinned to the CPUs {show_cpus(cpus)}")

    def free_bytes(self) -> int:
        return free_memory_bytes()

    def is_lost(self) -> bool:
        return False

    def tensor(self, array: Array) -> Tensor:
        return as_torch(array) if is_torch(self.dtype) else array

    def group_rows(self, slots: Array) -> Array:
        return slots

    def empty(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        return self._new(shape, array_type(dtype))

    def _new(self, shape: tuple[int, ...], dtype: ArrayType) -> Tensor:
        if not is_torch(self.dtype):
            return empty(shape, dtype)
        import torch

        return torch.empty(shape, dtype=dtype_of(str(dtype), self.dtype))

    def _output(self, out: Tensor | None, shape: tuple[int, ...], dtype: ArrayType) -> Tensor:
        return self._new(shape, dtype) if out is None else out

    def _call(self, name: str, used: tuple[object, ...], *arguments: int | float | None) -> None:
        """Call a native function; `used` owns the memory that its arguments point to.

        Raises:
            ValueError, MemoryError: see `library.check_status`.
        """
        if self._recorder is not None:
            self._recorder.call(name, arguments, used)
        if self.observer is not None:
            self.observer.call(name, arguments)
        if status := self._native[name](self.context, *arguments):
            check_status(status)

    def add_parts(self, parts: Sequence[Tensor], scales: Array | None, bias: Array | None, *, out: Tensor) -> Tensor:
        found, total = [as_array(part) for part in parts], as_array(out)
        for start in range(0, len(total), SUMMED_ROWS):
            rows = slice(start, start + SUMMED_ROWS)
            tree_sum([part[rows] for part in found], total[rows])
            if scales is not None:
                total[rows] *= scales
            if bias is not None:
                total[rows] += bias
        return out

    def run_host(self, work: Callable[[], None]) -> None:
        recorder, self._recorder = self._recorder, None
        try:
            work()
        finally:
            self._recorder = recorder
        if recorder is not None:
            recorder.host(work)

    @property
    def num_compiled(self) -> int:
        return 0  # the native library was built when the package was installed

    def program_rows(self, tokens: int) -> int:
        return tokens if tokens <= FIXED_ROWS else 0

    def record(
        self,
        forward: Callable[[Sequence[AttentionMetadata]], Tensor],
        attention: Sequence[AttentionMetadata],
        *,
        torch_too: bool = False,
    ) -> tuple[Tensor, NativeProgram | None]:
        recorder = Recorder(attention, self)
        self._recorder = recorder
        try:
            with self._watching(recorder, torch_too):
                result = forward(attention)
        finally:
            self._recorder = None
        return result, recorder.program(result)

    def replay(self, calls: "ctypes.Array[PenstockCall]") -> int:
        """Run recorded calls once, and return a Status of native/abi.h."""
        if self.observer is not None:
            self.observer.replay(calls)
        return self._native["penstock_replay"](self.context, ctypes.addressof(calls), len(calls))

    def decode(self, calls: "ctypes.Array[PenstockCall]", steps: int, *arguments: int) -> int:
        """Run recorded calls in several decode steps. arguments: of penstock_decode, between `count` and `steps`."""
        if self.observer is not None:
            for _ in range(steps):
                self.observer.replay(calls)
        at = ctypes.addressof(calls)
        return self._native["penstock_decode"](self.context, at, len(calls), *arguments, steps)

    def _watching(self, recorder: Recorder, torch_too: bool) -> AbstractContextManager[object]:
        """Watch what torch does besides the native calls. The bundled families use arrays and do nothing else."""
        if not is_torch(self.dtype):
            return nullcontext()
        from penstock.kernels.cpu.torch_watch import TorchPool, TorchWatch

        self.pool = self.pool or TorchPool()
        record = recorder.torch if torch_too else None
        return TorchWatch(self.pool, record, recorder.refuse, lambda: self._recorder is None)


def remembered(known: dict[Key, Value], key: Key, limit: int, make: Callable[[], Value]) -> Value:
    """Look up the value of a key. If it is not known, make and keep it, dropping all others if there are `limit`."""
    value = known.get(key)
    if value is None:
        if len(known) >= limit:
            known.clear()
        value = known[key] = make()
    return value


def address(tensor: Tensor, shape: tuple[int, ...], dtype: ArrayType, name: str) -> int:
    """Check that a tensor of either kind is contiguous, with exactly this shape and type, and give its address.

    Raises:
        ValueError: the tensor has another shape or type, is not contiguous, or is not in CPU memory.
    """
    check_tensor(tensor, shape, dtype, name)
    return address_of(tensor)


def check_tensor(tensor: Tensor, shape: tuple[int, ...], dtype: ArrayType, name: str) -> None:
    """Raise ValueError unless `address` accepts the tensor."""
    if isinstance(tensor, np.ndarray):
        flat = tensor.flags.c_contiguous
        if flat and tensor.dtype is dtype and tensor.shape == shape:
            return
    else:
        flat = tensor.is_contiguous() and tensor.is_cpu
        if flat and tensor.shape == shape and array_type(tensor.dtype) is dtype:
            return
    found = f"{list(tensor.shape)} {tensor.dtype}{'' if flat else ', not contiguous in CPU memory'}"
    raise ValueError(f"{name}: {found}, but {list(shape)} {dtype} is needed".replace("torch.", ""))


def rows_address(tensor: Tensor, shape: tuple[int, int], dtype: ArrayType, name: str) -> tuple[int, int]:
    """Find the address of a tensor, which may be some columns of a wider one, and its row stride in elements.

    Raises:
        ValueError: the tensor has another shape or type, or its rows are not contiguous.
    """
    if tensor.shape == shape and array_type(tensor.dtype) is dtype:
        stride, step = _strides(tensor)
        if step == 1 and stride > shape[1] and shape[0] > 1:
            return address_of(tensor), stride
    return address(tensor, shape, dtype, name), shape[1]


def _strides(tensor: Tensor) -> tuple[int, int]:
    """Find the strides of rows and of columns, in elements; zeros for memory of another device."""
    if isinstance(tensor, np.ndarray):
        return tensor.strides[0] // tensor.itemsize, tensor.strides[1] // tensor.itemsize
    return (tensor.stride(0), tensor.stride(1)) if tensor.is_cpu else (0, 0)


def optional_address(tensor: Tensor | None, shape: tuple[int, ...], dtype: ArrayType, name: str) -> int | None:
    return None if tensor is None else address(tensor, shape, dtype, name)


def head_norm_address(weight: Tensor | None, heads: int, head_dim: int, name: str) -> tuple[int | None, int]:
    """Find the address and size of a weight: [D] norms each head by itself, [heads * D] all heads together."""
    if weight is None:
        return None, head_dim
    size = len(weight) if weight.shape == (heads * head_dim,) else head_dim
    return address(weight, (size,), FLOAT32, name), size


def rows_of(tensor: Tensor, name: str) -> tuple[int, int]:
    """Split the shape of a tensor [rows, columns].

    Raises:
        ValueError: the tensor does not have two axes.
    """
    shape = tensor.shape
    if len(shape) != 2:
        raise ValueError(f"{name}: {list(shape)}, but [rows, columns] is needed")
    return shape[0], shape[1]


def type_code(dtype: ArrayType) -> int:
    """Look up the DataType of abi.h.

    Raises:
        ValueError: native functions do not support the type.
    """
    code = TYPES.get(dtype)
    if code is None:
        raise ValueError(f"dtype: {dtype}; supported are {', '.join(map(str, TYPES))}")
    return code


def activation_code(activation: str) -> int:
    """Look up the Activation of abi.h.

    Raises:
        ValueError: the activation is unknown.
    """
    code = ACTIVATIONS.get(activation)
    if code is None:
        raise ValueError(f"activation {activation!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
    return code


def fill_sampling(native: PenstockSampling, params: SamplingTensors, rows: int, vocab_size: int) -> None:
    """Fill every field for logits [rows, vocab_size]. The tensors must outlive the call that reads the structure.

    Raises:
        ValueError: a tensor has another shape or type, or a pair is outside the logits.
    """
    native.temperature = address(params.temperature, (rows,), FLOAT32, "temperature")
    native.top_k = optional_address(params.top_k, (rows,), INT64, "top_k")
    native.top_p = optional_address(params.top_p, (rows,), FLOAT32, "top_p")
    native.min_p = optional_address(params.min_p, (rows,), FLOAT32, "min_p")
    native.noise_key = optional_address(params.noise_key, (rows, 3), INT64, "noise_key")
    bias_pairs, bias_values = params.bias or (None, None)
    repetition, repetition_pairs = params.repetition or (None, None)
    frequency, presence, count_pairs, count_values = params.counts or (None, None, None, None)
    native.masked, native.num_masked = _pairs(params.masked, rows, vocab_size, "masked")
    native.bias_pairs, native.num_bias = _pairs(bias_pairs, rows, vocab_size, "bias")
    native.bias_values = optional_address(bias_values, (native.num_bias,), FLOAT32, "bias")
    native.repetition = optional_address(repetition, (rows,), FLOAT32, "repetition")
    native.repetition_pairs, native.num_repetition = _pairs(repetition_pairs, rows, vocab_size, "repetition")
    native.frequency = optional_address(frequency, (rows,), FLOAT32, "frequency")
    native.presence = optional_address(presence, (rows,), FLOAT32, "presence")
    native.count_pairs, native.num_counts = _pairs(count_pairs, rows, vocab_size, "counts")
    native.count_values = optional_address(count_values, (native.num_counts,), FLOAT32, "counts")


def hide_forms(logits: Tensor, params: SamplingTensors) -> None:
    """Set the logits [M, V] of ids that no form allows to -inf.

    Raises:
        ValueError: the bitmaps have another shape or type.
    """
    if params.allowed is None:
        return
    values, rows, bits = map(as_array, (logits, *params.allowed))
    address(bits, (len(rows), -(-values.shape[1] // 32)), INT32, "allowed")
    for row, own in zip(rows, bits, strict=True):
        hide(values[row], own)


def _pairs(pairs: Tensor | None, rows: int, vocab_size: int, name: str) -> tuple[int | None, int]:
    """Find the address and number of the pairs [P, 2], after checking that all of them are inside the logits."""
    if pairs is None or not len(pairs):
        return None, 0
    count = len(pairs)
    at = address(pairs, (count, 2), INT64, name)
    found = as_array(pairs)
    (row, token), (last_row, last_token) = found.min(axis=0).tolist(), found.max(axis=0).tolist()
    if row < 0 or token < 0 or last_row >= rows or last_token >= vocab_size:
        raise ValueError(f"{name}: a pair is outside the logits [{rows}, {vocab_size}]")
    return at, count
