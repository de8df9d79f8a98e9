"""The layers that own parameters: products, norms, token embedding, and the language-model head.

A layer declares the names and shapes of its parameters as in the parameter table. It need not keep the values: a
product passes them to the backend, which packs them. Every layer writes its result to the buffer `out` (Arena in
kernels/tensors.py). A product may be computed in pieces, each with some of its columns: because parts of its weight are
coded differently, or because the user wants the LM head in pieces.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np

from penstock.errors import NotSupportedError
from penstock.kernels.coding import CodedRows, PartRows
from penstock.kernels.ops import PLAIN, AdaptingOps, Ops, PackedLinear, Packing, RowSource, TensorRows, XieluCurve
from penstock.kernels.tensors import FLOAT32, Array, Slot, Tensor, array_type, as_array, rounded
from penstock.layers.lora import LoraLinear, LoraSpec
from penstock.layers.module import Module, named_modules

EXACT_PARTS = 3  # bfloat16 holds 8 of the 24 bits of a float32


class WeightLayer(Module):
    """Base of all layers with parameters.

    Attributes:
        shapes: shape of each declared parameter, by name.
    """

    def __init__(self, ops: Ops) -> None:
        super().__init__()  # of SwappedLinear, which is a torch.nn.Module, too
        self.ops = ops
        self.shapes: dict[str, tuple[int, ...]] = {}

    def load(self, values: Mapping[str, Tensor | RowSource]) -> None:
        """Load the values of all declared parameters, by name. They may have any float type. Call it once, before any
        forward."""
        raise NotImplementedError

    @property
    def num_bytes(self) -> int:
        """The bytes that `load` will keep. They are known before loading."""
        return sum(FLOAT32.itemsize * math.prod(shape) for shape in self.shapes.values())

    def state(self) -> dict[str, Tensor]:
        """Collect what `load` made from the values: all tensors that `forward` needs, by name."""
        return {name: getattr(self, name) for name in self.shapes}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take what `state` of the same layer returned, instead of calling `load`. These tensors are kept.

        Raises:
            ValueError: the state belongs to another layer.
            NotSupportedError: the backend has no packed form of weights.
        """
        if self.shapes != {name: tuple(value.shape) for name, value in state.items()}:
            raise ValueError(f"its parameters are {self.shapes}")
        for name, value in state.items():
            setattr(self, name, self.ops.tensor(as_array(value)))

    def forget(self) -> None:
        """Free what `load` made."""
        for name in self.shapes:
            delattr(self, name)


def whole(value: Tensor | RowSource) -> Array:
    """Read a parameter's value as one array."""
    return as_array(value.read(0, value.shape[0]) if hasattr(value, "read") else value)


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """A product's weight on this device.

    Attributes:
        shape: [N, K].
        bias: whether the product has a bias [N].
        packing: how the weight is packed, if it is in one piece.
        pieces: the number of rows and the packing of each piece, if there are several; their source has them as its
            attribute `pieces`.
        rest: a buffer [M, N] float32 for products with what rounding takes from the weight, which then counts as exact
            (up to float32); None: the weight is rounded to the model's type.
        lora: the LoRA adapters of the product; None: it has none.
    """

    shape: tuple[int, ...]
    bias: bool = False
    packing: Packing = PLAIN
    pieces: tuple[tuple[int, Packing], ...] = ()
    rest: Slot | None = None
    lora: LoraSpec | None = None

    @property
    def is_coded(self) -> bool:
        """Whether a part of the weight keeps the codes of its checkpoint."""
        return any(packing.coding is not None for packing in (self.packing, *(item for _, item in self.pieces)))


class Linear(WeightLayer):
    """x [M, K] dtype -> x @ weight.T + bias [M, N] float32. The weight is packed by the backend when it is loaded.

    An exact weight is the sum of EXACT_PARTS weights of the model's type, each of which holds what the ones before it
    leave. Parts that are zero, as of a weight that has the model's type in the checkpoint, are not multiplied.

    Attributes:
        pieces: the first and past-the-last column of each piece, and its packing.
        packed: the packed weights of the pieces.
    """

    packed: tuple[PackedLinear, ...]

    def __init__(self, ops: Ops, spec: LinearSpec, out: Slot) -> None:
        super().__init__(ops)
        self.spec, self.out = spec, out
        self.shapes = {"weight": spec.shape} | ({"bias": spec.shape[:1]} if spec.bias else {})
        ends = list(itertools.accumulate(rows for rows, _ in spec.pieces))
        self.pieces = [(end - rows, end, item) for end, (rows, item) in zip(ends, spec.pieces, strict=True)]
        self.pieces = self.pieces or [(0, spec.shape[0], spec.packing)]
        if spec.rest is not None and array_type(ops.dtype) != FLOAT32:
            self.pieces *= EXACT_PARTS
        self._rests: tuple[PackedLinear, ...] = ()
        self.lora = None if spec.lora is None else LoraLinear(ops, spec.lora, spec.shape)

    def load(self, values: Mapping[str, Tensor | RowSource]) -> None:
        bias = self._bias(whole(values["bias"]) if self.spec.bias else None)
        sources = self._sources(values["weight"])
        self.packed = tuple(
            self.ops.pack_linear(rows, None if bias is None else bias[begin:end], packing)
            for rows, (begin, end, packing) in zip(sources, self.pieces, strict=True)
        )
        if self.spec.rest is not None:
            self._rests = tuple(part for part, rows in zip(self.packed, sources, strict=True) if whole(rows).any())[1:]

    def _bias(self, bias: Array | None) -> Array | None:
        """Return the bias of all columns."""
        return bias

    def _sources(self, weight: Any) -> Sequence[Any]:
        """Return the rows of each piece."""
        if self.spec.rest is None or len(self.pieces) == 1:
            return weight.pieces if self.spec.pieces else (weight,)
        left, parts = rounded(whole(weight), FLOAT32), []
        for _ in self.pieces:
            parts.append(rounded(rounded(left, self.ops.dtype), FLOAT32))
            left = left - parts[-1]
        return [TensorRows(part) for part in parts]

    @property
    def num_bytes(self) -> int:
        return sum(
            self.ops.packed_bytes((end - begin, self.spec.shape[1]), packing, bias=self.has_bias)
            for begin, end, packing in self.pieces
        )

    @property
    def has_bias(self) -> bool:
        """Whether a bias is packed with the weight."""
        return self.spec.bias

    def state(self) -> dict[str, Tensor]:
        if len(self.packed) == 1:
            return self.packed[0].state()
        states = enumerate(item.state() for item in self.packed)
        return {f"{index}_{name}": tensor for index, state in states for name, tensor in state.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        depth, states = self.spec.shape[1], [state]
        if len(self.pieces) > 1:
            names = [f"{index}_" for index in range(len(self.pieces))]
            states = [{key.removeprefix(name): state[key] for key in state if key.startswith(name)} for name in names]
            if sum(map(len, states)) != len(state):
                raise ValueError(f"it has {len(self.pieces)} pieces")
        self.packed = tuple(
            self.ops.restore_linear((end - begin, depth), own, packing)
            for own, (begin, end, packing) in zip(states, self.pieces, strict=True)
        )
        if self.spec.rest is not None:
            stored = zip(self.packed, states, strict=True)
            self._rests = tuple(part for part, own in stored if any(as_array(item).any() for item in own.values()))[1:]

    def forget(self) -> None:
        del self.packed
        self._rests = ()

    def forward(self, x: Tensor) -> Tensor:
        out = self.multiply(x, self.out(x.shape[0]))
        return out if self.lora is None else self.lora.add(x, out)

    def multiply(self, x: Tensor, out: Tensor) -> Tensor:
        """Compute the product without adapters. out: a buffer for it."""
        if self.spec.rest is not None:
            out = self._compute(x, self.packed[0], out)
            for part in self._rests:
                out = self.ops.add(out, self._compute(x, part, self.spec.rest(x.shape[0])))
            return out
        if len(self.packed) == 1:
            return self._compute(x, self.packed[0], out)
        for weight, (begin, end, _) in zip(self.packed, self.pieces, strict=True):
            self._compute(x, weight, out[:, begin:end])
        return out

    def _compute(self, x: Tensor, weight: PackedLinear, out: Tensor) -> Tensor:
        return self.ops.linear(x, weight, out=out)


class ActivatedLinear(Linear):
    """x [M, K] dtype -> activation(x @ weight.T + bias) [M, N] dtype. With adapters, the activation is a call of its
    own, with the same bits."""

    is_gated = False

    def __init__(self, ops: Ops, spec: LinearSpec, out: Slot, activation: str) -> None:
        super().__init__(ops, spec, out)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        out = self.out(x.shape[0])
        if self.lora is None or self.lora.spec.sums is None:
            return self.multiply(x, out)
        sums = self.lora.add(x, self.multiply(x, self.lora.spec.sums(x.shape[0])))
        return cast(AdaptingOps, self.ops).activate(sums, self.activation, gated=self.is_gated, out=out)

    def _compute(self, x: Tensor, weight: PackedLinear, out: Tensor) -> Tensor:
        if self.lora is not None:
            return self.ops.linear(x, weight, out=out)
        return self.ops.activated_linear(x, weight, self.activation, out=out)


class GatedLinear(ActivatedLinear):
    """x [M, K] dtype -> activation(x @ gate.T) * (x @ up.T) [M, N] dtype; the weight holds gate's rows, then up's."""

    is_gated = True

    def _compute(self, x: Tensor, weight: PackedLinear, out: Tensor) -> Tensor:
        if self.lora is not None:
            return self.ops.linear(x, weight, out=out)
        return self.ops.gated_linear(x, weight, self.activation, out=out)


def adapted_products(model: Any) -> dict[str, LoraLinear]:
    """Find the products of a model that LoRA adapters may change, by the names of their weights."""
    named = ((name, getattr(module, "lora", None)) for name, module in named_modules(model))
    return {f"{name}.weight": lora for name, lora in named if isinstance(lora, LoraLinear)}


class Vector(WeightLayer):
    """A vector that an operation reads."""

    weight: Tensor

    def __init__(self, ops: Ops, shape: tuple[int, ...], *, is_exact: bool = False) -> None:
        super().__init__(ops)
        self.shapes, self.is_exact = {"weight": shape}, is_exact

    def load(self, values: Mapping[str, Tensor | RowSource]) -> None:
        """Round the values to the model's type, as Transformers does, unless they are exact. Keep them in float32."""
        for name, value in values.items():
            stored = rounded(whole(value), FLOAT32 if self.is_exact else self.ops.dtype)
            setattr(self, name, self.ops.tensor(self._value(name, stored)))

    def number(self) -> float:
        """Read the only value, without an operation of torch's, which would keep a pass from being recorded."""
        return float(as_array(self.weight)[0])

    def _value(self, name: str, stored: Array) -> Array:
        return rounded(stored, FLOAT32)


class Norm(Vector):
    """Base of the norms. They compute the norm alone, or together with the addition before it."""

    def __init__(
        self, ops: Ops, shape: tuple[int, ...], eps: float, out: Slot, *, unit_offset: bool = False, factor: float = 1.0
    ) -> None:
        """unit_offset: the stored weight is the difference from 1. factor: of the weight, in float32."""
        super().__init__(ops, shape)
        self.eps, self.out = eps, out
        self.unit_offset, self.factor = unit_offset, factor

    def _value(self, name: str, stored: Array) -> Array:
        value = super()._value(name, stored)
        if self.factor != 1.0:
            return value * FLOAT32.type(self.factor)
        return value + FLOAT32.type(1.0) if self.unit_offset and name == "weight" else value


class RMSNorm(Norm):
    """x / sqrt(mean(x^2) + eps) * weight: [T, hidden] float32 -> dtype, or float32 for a branch (`out` decides)."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.out(x.shape[0])
        return self.ops.rms_norm(x, self.weight, self.eps, dtype=self.out.dtype, out=out)

    def add(self, x: Tensor, h: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add the branch h to the residual stream x **in place** (None: no branch yet), and return x and its norm."""
        if h is None:
            return x, self(x)
        return self.ops.add_rms_norm(x, h, self.weight, self.eps, out=self.out(x.shape[0]))


class LayerNorm(Norm):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias: [T, hidden] float32 -> dtype, or float32 (`out` decides)."""

    bias: Tensor | None

    def __init__(
        self, ops: Ops, shape: tuple[int, ...], eps: float, out: Slot, *, bias: bool, unit_offset: bool = False
    ) -> None:
        super().__init__(ops, shape, eps, out, unit_offset=unit_offset)
        if bias:
            self.shapes["bias"] = shape
        else:
            self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        out = self.out(x.shape[0])
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps, dtype=self.out.dtype, out=out)

    def add(self, x: Tensor, h: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add h to x in place, and return x and its norm, as RMSNorm.add does."""
        if h is None:
            return x, self(x)
        return self.ops.add_layer_norm(x, h, self.weight, self.bias, self.eps, out=self.out(x.shape[0]))


class HeadNorms(Vector):
    """The layer norm of each head of q and of k, without a bias. The weight is [heads of q and k, D]."""

    def __init__(self, ops: Ops, shape: tuple[int, ...], eps: float) -> None:
        super().__init__(ops, shape)
        self.eps = eps

    def forward(self, qkv: Tensor) -> Tensor:
        """Norm q and k in qkv [T, (H + 2 Hkv) D] float32, **in place**, and return qkv."""
        return self.ops.norm_heads(qkv, self.weight, self.eps)


class Xielu(WeightLayer):
    """The activation xIELU [T, N] float32 -> dtype, with two trained numbers.

    Both go through a softplus, so that they act as positive ones. BETA and EPS are constants of Transformers' class.
    """

    BETA, EPS = 0.5, -1e-6

    alpha_p: Tensor
    alpha_n: Tensor
    _curve: XieluCurve | None = None

    def __init__(self, ops: Ops, out: Slot) -> None:
        super().__init__(ops)
        self.out = out
        self.shapes = dict.fromkeys(("alpha_p", "alpha_n"), (1,))

    def load(self, values: Mapping[str, Tensor | RowSource]) -> None:
        for name, value in values.items():
            setattr(self, name, self.ops.tensor(rounded(rounded(whole(value), self.ops.dtype), FLOAT32)))

    def forward(self, x: Tensor) -> Tensor:
        if self._curve is None:
            self._curve = self._make_curve()
        return self.ops.xielu(x, self._curve, out=self.out(x.shape[0]))

    def _make_curve(self) -> XieluCurve:
        positive, negative = (_softplus(float(as_array(value)[0])) for value in (self.alpha_p, self.alpha_n))
        return XieluCurve(positive, self.BETA + negative, self.BETA, self.EPS)


def _softplus(x: float) -> float:
    """Compute log(1 + e^x) without overflow."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


class Embedding(WeightLayer):
    """ids [T] int64 -> scale * weight[ids], [T, hidden] float32. It serves for learned positions, too.

    It reads rows from its own table, which is packed if it keeps the codes of a checkpoint, or from the packed weight
    of a tied LM head.
    """

    weight: Tensor
    _packed: PackedLinear | None = None
    _is_shared = False

    def __init__(
        self, ops: Ops, shape: tuple[int, ...], out: Slot, scale: float = 1.0, packing: Packing | None = None
    ) -> None:
        """packing: how a coded table is packed; None: it is a tensor of the model's type."""
        super().__init__(ops)
        self.scale, self.out = scale, out
        self.shapes = {"weight": shape}
        self.packing = packing

    def load(self, values: Mapping[str, Tensor | RowSource]) -> None:
        if self.packing is not None:
            self._packed = self.ops.pack_linear(values["weight"], None, self.packing)
        else:
            self.weight = self.ops.tensor(rounded(whole(values["weight"]), self.ops.dtype))

    def share(self, head: PackedLinear) -> None:
        """Read rows from the packed weight of the LM head, which has the same values, instead of loading a table."""
        self._packed, self._is_shared = head, True

    @property
    def num_bytes(self) -> int:
        """The bytes of its own table."""
        if self.packing is not None:
            return self.ops.packed_bytes(self.shapes["weight"], self.packing)
        return int(self.ops.dtype.itemsize) * math.prod(self.shapes["weight"])

    def table(self) -> Tensor:
        """Return all rows: [N, hidden] dtype, or float32 if they are read from a packed weight."""
        if self._packed is None:
            return self.weight
        ids = self.ops.tensor(np.arange(self.shapes["weight"][0]))
        return self.ops.packed_embedding(ids, self._packed)

    def state(self) -> dict[str, Tensor]:
        if self._is_shared:
            return {}
        return super().state() if self._packed is None else self._packed.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        if self.packing is None:
            super().restore(state)
        else:
            self._packed = self.ops.restore_linear(self.shapes["weight"], state, self.packing)

    def forget(self) -> None:
        if self._packed is None:
            super().forget()
        self._packed, self._is_shared = None, False

    def forward(self, ids: Tensor) -> Tensor:
        if self._packed is not None:
            return self.ops.packed_embedding(ids, self._packed, scale=self.scale, out=self.out(ids.shape[0]))
        return self.ops.embedding(ids, self.weight, scale=self.scale, out=self.out(ids.shape[0]))


NEVER = float("-inf")
WHOLE_IN_FILES = "packed weights hold the LM head whole, neither in pieces nor padded"


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """The arrangement of a head's columns. It changes no logit.

    Attributes:
        pieces: the number of products, computed one after the other, each with its share of the columns.
        pad_to: columns are padded to a multiple of this; the logits of the padding are -inf. Falcon's 65024 columns
            stay as they are with 512 and become 65536, as in Falcon-40B's decode backend, with 1024.
    """

    pieces: int = 1
    pad_to: int = 1

    @property
    def is_plain(self) -> bool:
        return self.pieces == self.pad_to == 1

    def width(self, vocab_size: int) -> int:
        """Round the number of columns up to the padding."""
        return -(-vocab_size // self.pad_to) * self.pad_to

    def cuts(self, vocab_size: int) -> list[tuple[int, int]]:
        """Divide the columns into pieces: the first and past-the-last of each; widths differ by at most one column."""
        width, pieces = self.width(vocab_size), self.pieces
        return [(index * width // pieces, (index + 1) * width // pieces) for index in range(pieces)]


PLAIN_HEAD = HeadLayout()


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """The rows begin .. end-1 of a source. Rows beyond the source's end are zeros."""

    source: PartRows
    begin: int
    end: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.end - self.begin, *self.source.shape[1:])

    def read(self, start: int, stop: int) -> Array:
        first, last = (min(self.begin + row, self.source.shape[0]) for row in (start, stop))
        rows = as_array(self.source.read(first, last))
        missing = (stop - start) - (last - first)
        return np.concatenate([rows, np.zeros((missing, *rows.shape[1:]), rows.dtype)]) if missing else rows


def cut_rows(weight: Any, bounds: Sequence[tuple[int, int]]) -> Sequence[RowSource]:
    """Cut a weight into sources of the rows between bounds. Rows beyond its end are zeros."""
    source = weight if hasattr(weight, "read") else TensorRows(weight)
    if isinstance(source, CodedRows):  # all parts of a row are zeros: so are its values
        return [source.map_rows(partial(PaddedRows, begin=begin, end=end)) for begin, end in bounds]
    return [PaddedRows(source, begin, end) for begin, end in bounds]


class LMHead(Linear):
    """hidden [M, hidden] dtype -> logits [M, V'] float32, where V' is V, or more with padding.

    If `holds_rows`, the embedding that the head is tied to reads its rows from the head (weights/loader.py).
    """

    def __init__(
        self,
        ops: Ops,
        spec: LinearSpec,
        out: Slot,
        *,
        scale: float = 1.0,
        softcap: float | None = None,
        layout: HeadLayout = PLAIN_HEAD,
    ) -> None:
        """out: a buffer with V' columns. scale: a factor of the logits, above 0. softcap: a soft limit of their
        absolute values, after scaling."""
        super().__init__(ops, spec, out)
        self.scale = scale
        self.softcap = softcap
        self.layout = layout
        self.vocab_size = spec.shape[0]
        self.width = layout.width(self.vocab_size)
        self.pieces = [(begin, end, spec.packing) for begin, end in layout.cuts(self.vocab_size)]

    def _sources(self, weight: Any) -> Sequence[Any]:
        return (weight,) if self.layout.is_plain else cut_rows(weight, [item[:2] for item in self.pieces])

    @property
    def has_bias(self) -> bool:
        return self.spec.bias or self.width > self.vocab_size

    def _bias(self, bias: Array | None) -> Array | None:
        """Pad bias [V] to [V'] with -inf. Together with zero weights, that gives logits of -inf."""
        padding = self.width - self.vocab_size
        if not padding:
            return bias
        if bias is None:
            bias = np.full(self.vocab_size, -0.0, FLOAT32)  # adding -0 changes no number; adding 0 would change -0
        return np.concatenate([bias, np.full(padding, NEVER, bias.dtype)])

    @property
    def holds_rows(self) -> bool:
        """Return whether the packed weight holds the rows of the parameter unchanged."""
        return self.layout.is_plain and self.spec.packing.scheme is None

    def state(self) -> dict[str, Tensor]:
        self._require_plain()
        return super().state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self._require_plain()
        super().restore(state)

    def _require_plain(self) -> None:
        if not self.layout.is_plain:
            raise NotSupportedError(WHOLE_IN_FILES, param="lm_head_pieces")

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        if self.scale != 1.0:
            self.ops.scale(logits, self.scale)
        if self.softcap is not None:
            self._cap(logits, self.softcap)
        return logits

    def _cap(self, logits: Tensor, cap: float) -> None:
        """Cap all logits but the padding, whose -inf would become -cap. With padding, cap row by row, because the
        operation takes contiguous tensors only."""
        if self.width == self.vocab_size:
            self.ops.softcap(logits, cap)
            return
        for row in range(logits.shape[0]):
            self.ops.softcap(logits[row : row + 1, : self.vocab_size], cap)
