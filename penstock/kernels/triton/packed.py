"""TritonLinear: a weight on the device, and how it is read, quantised and packed there.

Float and int8 weights keep the checkpoint's [N, K], so that a tied embedding is the same memory. The words of int4
weights are described in int4.py. Values are quantised as reference/quantized_weights.py says, on the device, a few rows
at a time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from penstock.kernels.ops import Packing, RowSource
from penstock.kernels.reference.quantized_weights import leaf_groups, quantize_int4, quantize_int8
from penstock.kernels.tensors import as_torch
from penstock.kernels.triton.sizes import QUAD, leaf_table, shapes

SLICE_BYTES = 2**26  # of float32 rows that are quantised at once


@dataclass(eq=False)
class TritonLinear:
    """A packed weight.

    Attributes:
        values: [N, K] in the model's type or int8; [N, words] int16 for int4.
        scales: [N] float32 for int8; [groups, N] bfloat16 for int4, with every leaf's groups filled up to whole words.
        bias: [N] float32, already rounded to the model's type.
        leaves: 1, 2, 4 or 8; empty ones follow if the packing has another number.
        length: elements of the longest leaf.
        starts: [leaves + 1] int32, where leaves begin; None: all have the same length.
    """

    shape: tuple[int, int]
    packing: Packing
    values: torch.Tensor
    scales: torch.Tensor | None
    bias: torch.Tensor | None
    leaves: int
    length: int
    starts: torch.Tensor | None

    def __post_init__(self) -> None:
        self.num_bytes = sum(tensor.nbytes for tensor in self.state().values())

    def state(self) -> dict[str, torch.Tensor]:
        found = {"values": self.values, "scales": self.scales, "bias": self.bias}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    @property
    def group_size(self) -> int:
        """Elements of K that share a scale; 0 unless the weight is int4."""
        return (self.packing.scheme.group_size or 0) if self.packing.scheme is not None else 0

    @property
    def has_fused_gate(self) -> bool:
        """Whether one program computes a gate and what it multiplies; otherwise the product is gated afterwards."""
        return self.leaves == 1 and not self.group_size

    @property
    def leaf_quads(self) -> int:
        """Words of int4 values along K in each leaf, each of group_size words."""
        return -(-self.length // (QUAD * self.group_size))


def tensors_of(
    shape: tuple[int, ...], packing: Packing, dtype: torch.dtype, *, bias: bool
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """List the shapes and types of the tensors of a packed weight, as `sizes.shapes` does."""
    found = shapes(shape, packing, str(dtype).removeprefix("torch."), bias=bias)
    return {name: (size, getattr(torch, kind)) for name, (size, kind) in found.items()}


def assemble(
    shape: tuple[int, ...], packing: Packing, dtype: torch.dtype, device: Any, state: Mapping[str, torch.Tensor]
) -> TritonLinear:
    """Make a weight of its tensors.

    Raises:
        ValueError: they do not fit the shape and the packing.
    """
    expected = tensors_of(shape, packing, dtype, bias="bias" in state)
    if {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()} != expected:
        raise ValueError(f"state: {sorted(state)} do not fit a weight {list(shape)} packed as {packing}")
    leaves, length, starts = leaf_table(shape[1], packing)
    table = None if starts is None else torch.tensor(starts, dtype=torch.int32, device=device)
    tensors = state["values"], state.get("scales"), state.get("bias")
    return TritonLinear((shape[0], shape[1]), packing, *tensors, leaves, length, table)


def pack(
    source: RowSource,
    bias: torch.Tensor | None,
    packing: Packing,
    dtype: torch.dtype,
    device: Any,
    magnitudes: torch.Tensor | None = None,
    staging: "Staging | None" = None,
) -> TritonLinear:
    """Read, round, quantise and pack a weight, some rows at a time. The device may still compute it afterwards.

    staging: how rows are copied, shared by weights so that the next one is read meanwhile.
    magnitudes: [N, 1] float32 for int8, the largest absolute values of rows of which these are parts.
    """
    expected = tensors_of(source.shape, packing, dtype, bias=bias is not None)
    state = {name: torch.empty(size, dtype=kind, device=device) for name, (size, kind) in expected.items()}
    n, k = source.shape
    some, staging = max(1, SLICE_BYTES // (4 * k)), staging or Staging(device)
    for start in range(0, n, some):
        stop = min(n, start + some)
        rows = staging.copy(as_torch(source.read(start, stop))).to(dtype)
        if packing.scheme is None:
            state["values"][start:stop] = rows
        elif packing.scheme.group_size is None:
            whole = None if magnitudes is None else magnitudes[start:stop]
            state["values"][start:stop], state["scales"][start:stop] = quantize_int8(rows.float(), whole)
        else:
            words, scales = _words(rows.float(), packing, packing.scheme.group_size)
            state["values"][start:stop], state["scales"][:, start:stop] = words, scales
    if bias is not None:
        state["bias"].copy_(as_torch(bias).to(dtype))
    return assemble(source.shape, packing, dtype, device, state)


class Staging:
    """Copies pieces to a device, to a GPU through two pinned buffers in turn: while the device copies and packs one
    piece, the host reads the next one. A piece waits until the copy before the last has left its buffer."""

    def __init__(self, device: Any) -> None:
        self._device = torch.device(device)
        self._slots: list[tuple[torch.Tensor, torch.cuda.Event]] = []

    def copy(self, rows: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the device. Its memory may be used again at once."""
        if self._device.type != "cuda" or rows.device.type != "cpu":
            return rows.to(self._device)
        buffer, copied = self._slots.pop(0) if len(self._slots) == 2 else (torch.empty(0), torch.cuda.Event())
        copied.synchronize()  # returns at once if nothing was recorded
        if buffer.nbytes < rows.nbytes:
            buffer = torch.empty(rows.nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        staged = buffer[: rows.nbytes].view(rows.dtype).view(rows.shape)
        staged.copy_(rows)
        found = staged.to(self._device, non_blocking=True)
        copied.record(torch.cuda.current_stream(self._device))
        self._slots.append((buffer, copied))
        return found


def _words(rows: torch.Tensor, packing: Packing, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows [n, K] float32: their words [n, words] int16, and scales [groups, n]."""
    n, k = rows.shape
    leaves, length, _ = leaf_table(k, packing)
    ends = packing.leaf_ends or (k,)
    per_leaf = QUAD * -(-length // (QUAD * size))
    values, scales = quantize_int4(rows, size, ends)
    wide = values.new_zeros(n, leaves * per_leaf, size)
    spread = scales.new_zeros(n, leaves * per_leaf)
    starts = (0, *ends)
    for index, (start, end) in enumerate(leaf_groups(k, size, ends)):
        leaf = next(leaf for leaf in range(len(ends)) if starts[leaf] <= start < starts[leaf + 1])
        group = leaf * per_leaf + (start - starts[leaf]) // size
        wide[:, group, : end - start] = values[:, start:end]
        spread[:, group] = scales[:, index]
    nibbles = (wide.to(torch.int32) & 15).view(n, -1, QUAD, size)
    words = sum(nibbles[:, :, index] << (4 * index) for index in range(QUAD))
    assert isinstance(words, torch.Tensor)
    return words.to(torch.int16).reshape(n, -1), spread.T
