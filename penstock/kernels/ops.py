"""The arithmetic of an engine: one method per operation, with shapes, types and rounding points.

A backend (reference, cpu, triton) implements `Ops`; layers get one as an argument and call nothing else. Nobody but
the backend knows how a packed weight or a cache block is laid out.

Letters: T tokens of a step, B sequences, H query heads, Hkv key/value heads, D head dim, V vocabulary; M, N, K rows,
columns and depth of a product.

Rounding points. `dtype` is the model's type (bfloat16 or float32); in float32 there are none.
  - The residual stream is float32. So are scores, softmax sums, router and vocabulary logits.
  - Whatever a product reads is `dtype`: norms read float32 and write `dtype`; rotary reads the float32 product and
    writes q, k, v in `dtype`; the gated activation reads float32 and writes `dtype`; attention writes `dtype`.
  - Every product accumulates in float32 and delivers float32, its bias added before anything is rounded.
So each value is rounded exactly once, when it becomes the operand of the next product.

Row independence (batch invariance). In the `cpu` and `triton` backends a row of any result is a function of that row's
own inputs only. The `reference` backend is plain torch, promises a tolerance and not bits, and says so.

`out=`, where given, is a buffer of exactly the result's shape and type that is filled and returned; without it the
result is new. No other argument is written to, unless its docstring line says so.

Who passes `out=`: the layers. LayerFactory hands each its slot in an arena (kernels/arena.py); model files make layers
by name and call them without buffers.

Quantised weights. `scheme` (quant/scheme.py) says how a weight is stored and what it is multiplied with; quant/int8.py
and quant/int4.py are the specification of the stored values, native/products.h that of the arithmetic.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from penstock.errors import InvalidRequestError
from penstock.kernels.attention.plan import AttentionPlan
from penstock.kernels.sampling import SamplingTensors
from penstock.quant.scheme import Scheme

NUMERICS_VERSION = 2  # goes up whenever a constant or an order changes a bit of any answer
REDUCTION_LEAVES = 8  # fixed pieces of K in products that tensor parallelism splits along K


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the sequences of a step stand, for the layers of one cache group.

    Sequence b has the new tokens query_start_loc[b] .. query_start_loc[b+1]-1 of the packed step, at positions
    seq_lens[b] - (number of its new tokens) .. seq_lens[b]-1.

    Attributes:
        query_start_loc: [B+1] int32, where each sequence's new tokens begin; the last entry is T.
        seq_lens: [B] int32, cached plus new tokens.
        block_table: [B, max_blocks] int32, block ids by position // block_size; -1 where nothing is allocated.
        slot_mapping: [T] int64, block id * block_size + offset: where each new token's key and value are stored;
            a negative one: nowhere, because no later token will see it.
        block_size: tokens a block holds.
        sliding_window: a token sees itself and the sliding_window - 1 before it, so 1 or more; None sees all.
        num_sink_tokens: the first tokens of a sequence, which stay visible (and allocated) behind a window.
        plan: who computes what, where somebody has planned already (kernels/attention/plan.py).

    A ring is a block table that repeats one block: its rows are used again, and slot_mapping stores only tokens that
    no later one of the step overwrites.

    Raises:
        InvalidRequestError: sliding_window is below 1.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    block_size: int
    sliding_window: int | None
    num_sink_tokens: int = 0
    plan: AttentionPlan | None = None

    def __post_init__(self) -> None:
        if self.sliding_window is not None and self.sliding_window < 1:
            text = f"sliding_window: {self.sliding_window} is not allowed; it must be 1 or more, or None"
            raise InvalidRequestError(text, param="sliding_window")

    def to(self, device: torch.device) -> "AttentionMetadata":
        """The same with its tensors on a device; the plan stays on the host."""
        tensors = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
        return replace(self, **{name: getattr(self, name).to(device) for name in tensors})


@dataclass(frozen=True, slots=True, eq=False)
class AttentionParams:
    """How scores are made in one layer.

    In this order: s = q . k; s += bias if bias_before_scale; s *= scale; s = softcap * tanh(s / softcap); s += bias
    otherwise. Then hidden positions become -inf.

    Attributes:
        scale: usually 1 / sqrt(D).
        softcap: a soft limit to the size of scores (Gemma 2); None: none.
        alibi_slopes: [H] float32; the bias is slope * (key position - query position). None: no bias.
        bias_before_scale: add the bias before scaling (Falcon, and `pse` of IncreFlashAttention), not after (BLOOM).
        sink_logits: [H] float32, learned logits that take part in every softmax and bring no value. None: none.
    """

    scale: float
    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    bias_before_scale: bool = False
    sink_logits: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class KVScales:
    """Scales and offsets of an int8 cache of one layer that belong to channels, [Hkv, D] float32 each."""

    key_scales: Tensor
    key_offsets: Tensor
    value_scales: Tensor
    value_offsets: Tensor


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads, kv heads and elements of a head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class RowSource(Protocol):
    """A weight [N, K] that is read piece by piece, so that nobody holds all of it beside its packed form."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, start: int, stop: int) -> Tensor:
        """Rows start .. stop-1, [stop - start, K] of any float type, contiguous."""


@dataclass(frozen=True, slots=True)
class TensorRows:
    """A whole tensor as a RowSource."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def read(self, start: int, stop: int) -> Tensor:
        return self.tensor[start:stop]


class PackedLinear(Protocol):
    """A weight [N, K], with its bias, as the backend likes it. Opaque outside the backend."""

    shape: tuple[int, int]
    num_bytes: int

    def state(self) -> dict[str, Tensor]:
        """The packed memory as tensors, to be written to a file. `Ops.restore_linear` takes them back.

        Raises:
            NotSupportedError: the backend has no packed form.
        """


class KVCache(Protocol):
    """One layer's paged keys and values, as the backend lays them out. Opaque outside the backend."""

    num_bytes: int


class Ops(Protocol):
    """What a backend provides. All tensors are contiguous and on the backend's device."""

    name: str
    dtype: torch.dtype
    device: torch.device

    def pack_linear(
        self,
        weight: Tensor | RowSource,
        bias: Tensor | None = None,
        *,
        leaf_ends: Sequence[int] = (),
        scheme: Scheme | None = None,
        gated: bool = False,
    ) -> PackedLinear:
        """Take a weight [N, K] (and bias [N]) of any float type, rounded to `dtype` first.

        leaf_ends: K is reduced in pieces that end there (the last at K), each by itself, and the pieces are added as a
            fixed binary tree, so that tensor parallelism over K gives the same bits; none: K is one piece.
        scheme: how to quantise; None keeps `dtype`.
        gated: the weight is for `gated_linear`, and only for it.
        """

    def restore_linear(
        self,
        shape: tuple[int, int],
        state: Mapping[str, Tensor],
        *,
        leaf_ends: Sequence[int] = (),
        scheme: Scheme | None = None,
        gated: bool = False,
    ) -> PackedLinear:
        """What pack_linear made of a weight of that shape with these arguments, from its state. Keeps the tensors.

        Raises:
            NotSupportedError: the backend has no packed form.
            ValueError: the state is not what these arguments make.
        """

    def linear(self, x: Tensor, weight: PackedLinear, *, out: Tensor | None = None) -> Tensor:
        """x [M, K] dtype -> x @ weight.T + bias [M, N] float32. Also q/k/v as one product, and the LM head.

        `out` may be some of the columns of a wider buffer (each row contiguous): a head in pieces fills one together.
        """

    def activated_linear(
        self, x: Tensor, weight: PackedLinear, activation: str, *, out: Tensor | None = None
    ) -> Tensor:
        """x [M, K] dtype -> activation(x @ weight.T + bias), [M, N] dtype. `activation` as in gated_linear."""

    def gated_linear(self, x: Tensor, weight: PackedLinear, activation: str, *, out: Tensor | None = None) -> Tensor:
        """x [M, K] dtype, weight [2N, K] (gate rows, then up rows) -> activation(gate) * up, [M, N] dtype.

        `activation`: "silu", "gelu" (exact) or "gelu_tanh". Equal to linear followed by the element-wise product.
        """

    def embedding(self, ids: Tensor, weight: Tensor, *, scale: float = 1.0, out: Tensor | None = None) -> Tensor:
        """ids [T] int64, weight [V, hidden] dtype -> scale * weight[ids], [T, hidden] float32."""

    def experts(
        self,
        x: Tensor,
        gate_up: Sequence[PackedLinear],
        down: Sequence[PackedLinear],
        ids: Tensor,
        weights: Tensor,
        activation: str,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Each row through its experts only: sum of weight * down(activation(gate) * up), in ascending expert id.

        x [M, hidden] dtype; gate_up, down: one gated and one plain weight an expert; ids [M, k] int64, distinct in a
        row; weights [M, k] float32 -> [M, hidden] float32.
        """

    def route(
        self, logits: Tensor, top_k: int, *, renormalize: bool, out: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Router: logits [M, experts] float32 -> ids [M, k] int64, weights [M, k] float32, most likely first.

        Softmax over all experts, the k most likely (lowest id on a tie); renormalize divides them by their sum.
        """

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, *, dtype: torch.dtype | None = None, out: Tensor | None = None
    ) -> Tensor:
        """x [T, hidden] float32, weight [hidden] float32 -> x / sqrt(mean(x^2) + eps) * weight, in `dtype`.

        dtype: None is the model's, for what a product reads; float32 for a branch that is normed before it is added.
        """

    def add_rms_norm(
        self, x: Tensor, h: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The residual stream x [T, hidden] float32 plus a branch h float32, and the norm of the sum.

        Adds into x **in place** and returns (x, norm in dtype).
        """

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, out: Tensor | None = None
    ) -> Tensor:
        """x [T, hidden] float32, weight and bias [hidden] float32 -> the norm in dtype.

        (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias: the mean first, then the deviations from it.
        """

    def add_layer_norm(
        self, x: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As add_rms_norm: adds h into x **in place** and returns (x, its layer norm in dtype)."""

    def add(self, x: Tensor, h: Tensor) -> Tensor:
        """x += h **in place**, [T, hidden] float32 both; returns x. For a second branch beside the first."""

    def round(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """x [T, hidden] float32 -> in dtype: for products that read the residual stream without a norm."""

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap) of x [M, N] float32 **in place**; returns x."""

    def rotary_qkv(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor | None,
        heads: tuple[int, int, int],
        *,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
        out: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split the product of q, k and v, RMS-norm q and k where weights are given, rotate q and k.

        qkv [T, (H + 2 Hkv) D] float32; positions [T] int64; cos_sin [max positions, rotary dim] float32 (cosines,
        then sines, of the halves that are rotated against each other), computed in float64, None rotates nothing;
        heads (H, Hkv, D); q_norm, k_norm float32 -> q [T, H, D], k [T, Hkv, D], v [T, Hkv, D] in dtype.
        A norm's weight of [D] is for each head by itself; one of all heads' elements ([H D] for q, [Hkv D] for k) norms
        them together, which is the same where there is one head.
        """

    def new_kv_cache(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        *,
        slices: int = 0,
        scales: KVScales | None = None,
    ) -> KVCache:
        """An empty cache for one layer: float32, bfloat16 or int8.

        int8 only: `slices`, 2 (closer than a bfloat16 query) or 3 (close to float32), is how many int8 rows stand for a
        query row and for a row of probabilities; `scales` belong to channels, without them to tokens (quant/kv.py).

        Raises:
            NotSupportedError: the backend cannot hold this; `param` names what.
        """

    def store_kv(self, cache: KVCache, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Keep k, v [N, Hkv, D] dtype at slots [N] int64 (as slot_mapping; negative ones are not kept)."""

    def load_kv(self, cache: KVCache, slots: Tensor) -> tuple[Tensor, Tensor]:
        """What is at slots [N] int64, none negative: k, v [N, Hkv, D] float32. For hand-written attention and tests."""

    def plan(self, meta: AttentionMetadata, heads: Heads, cache: KVCache) -> AttentionMetadata:
        """Metadata on the host -> on the device, with a plan for all layers that have such heads and such a cache.

        Reserves the memory that the plan needs, so that `attend` allocates nothing. A backend that needs no plan makes
        none.
        """

    def attend(
        self,
        q: Tensor,
        k_new: Tensor,
        v_new: Tensor,
        cache: KVCache,
        meta: AttentionMetadata,
        params: AttentionParams,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Each sequence's new tokens attend to its cached and to its new tokens; the new ones are stored.

        q [T, H, D], k_new and v_new [T, Hkv, D] in dtype -> [T, H * D] dtype; where `lse` [T, H] float32 is given, the
        logarithm of each row's sum of e^score is written there (sink logits included). Causal, within
        meta.sliding_window. A row that sees nothing is zeros, its lse -inf.
        New keys and values are rounded to the cache's type before they are attended to, so it makes no difference
        whether a token is read from the cache or from the step. The cache is written; nothing waits for it.
        Queries and probabilities are rounded to the cache's type as well; for an int8 cache they are written as slices.
        Plans where meta has no plan.
        """

    def finite_rows(self, logits: Tensor) -> Tensor:
        """logits [M, V] float32 -> [M] bool: no NaN, no +inf, and something above -inf to choose."""

    def log_softmax(self, logits: Tensor, *, out: Tensor | None = None) -> Tensor:
        """logits [M, V] float32 -> log-probabilities [M, V] float32."""

    def sample(self, logits: Tensor, params: SamplingTensors) -> Tensor:
        """logits [M, V] float32 -> one id a row, [M] int64; sampling.NO_TOKEN where no id may be chosen.

        kernels/sampling.py has the steps and their order.
        """


class RecordedForward(Protocol):
    """A forward pass that can be done again."""

    def run(self, attention: Sequence[AttentionMetadata]) -> Tensor:
        """Do it again, with this step's metadata for each cache group: reads and writes the same tensors as the first
        time, whatever they hold by now, and returns the same one.

        Raises:
            ValueError: a token id or a position is outside of its table.
        """


@runtime_checkable
class RecordingOps(Ops, Protocol):
    """A backend that can do a forward pass again without running its Python."""

    def record(
        self, forward: Callable[[], Tensor], attention: Sequence[AttentionMetadata]
    ) -> tuple[Tensor, RecordedForward | None]:
        """Run a forward pass that gets this metadata, and write down what it did. None where it did something else
        than call operations of this backend."""
