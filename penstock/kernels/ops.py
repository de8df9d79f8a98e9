"""The arithmetic of an engine: one method per operation, with shapes, types and rounding points.

A backend (reference or cpu) implements `Ops`. Layers receive a backend as an argument and call nothing else. Only the
backend knows how a packed weight or a cache block is laid out. Attention's arguments are in kernels/metadata.py. The
backends' methods have no docstrings of their own: this file is their specification.

Letters: T tokens of a step, B sequences, H query heads, Hkv key/value heads, D head dim, V vocabulary; M, N, K rows,
columns and depth of a product.

Rounding points. `dtype` is the model's type (bfloat16 or float32). If it is float32, nothing is rounded.
  - The residual stream is float32. So are scores, softmax sums, router and vocabulary logits.
  - The operands of a product are `dtype`: norms read float32 and write `dtype`; rotary reads the float32 product and
    writes q, k, v in `dtype`; the gated activation reads float32 and writes `dtype`; attention writes `dtype`.
  - Every product accumulates in float32 and returns float32; its bias is added before anything is rounded.
So each value is rounded exactly once, when it becomes an operand of the next product.

Row independence (batch invariance). In the `cpu` backend a row of any result is a function of that row's
own inputs only. The `reference` backend is plain torch: it guarantees a tolerance, not identical bits.

`out=`, if given, is a buffer of exactly the result's shape and type, which is filled and returned; without it the
result is a new tensor. No other argument is written to, unless the method's docstring says so. Layers pass `out=`:
LayerFactory gives each layer its slot in an arena (kernels/tensors.py), so model files handle no buffers.

Quantised weights. `scheme` (kernels/scheme.py) says how a weight is stored and what it is multiplied with.
reference/quantized_weights.py specifies the stored values, and native/products/products.h the arithmetic.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from penstock.kernels.coding import Coding
from penstock.kernels.metadata import (
    AttentionMetadata,
    AttentionParams,
    CacheSpec,
    Heads,
    KVCache,
    RotaryParams,
    RouterParams,
)
from penstock.kernels.sampling import SamplingTensors, TokenScores
from penstock.kernels.scheme import Scheme
from penstock.kernels.tensors import Array, Dtype, Tensor

NUMERICS_VERSION = 4  # incremented whenever a new constant or order of sums changes a bit of any answer
REDUCTION_LEAVES = 8  # number of fixed pieces of K in products that tensor parallelism splits along K


class RowSource(Protocol):
    """A weight [N, K] that is read in pieces, so that it never exists as a whole beside its packed form."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, start: int, stop: int) -> Tensor:
        """Read rows start .. stop-1, [stop - start, K] of any float type, contiguous."""


@dataclass(frozen=True, slots=True)
class TensorRows:
    """A whole tensor as a RowSource."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def read(self, start: int, stop: int) -> Tensor:
        return self.tensor[start:stop]


@dataclass(frozen=True, slots=True)
class Packing:
    """The form in which a weight [N, K] is packed.

    Attributes:
        leaf_ends: the ends of the leaves, the last of which is K. Each leaf of K is reduced by itself, and the leaves'
            sums are added as a fixed binary tree, so that tensor parallelism over K gives the same bits. Empty: K is
            one leaf.
        scheme: how the weight is quantised; None keeps the model's type.
        gated: the weight is for `gated_linear` only.
        coding: how a coded weight is stored (kernels/coding.py); its source is a CodedRows of this coding. Leaves end
            where its blocks end.
        slices: int8 rows that represent a row of activations for a coded weight whose levels are integers.
    """

    leaf_ends: tuple[int, ...] = ()
    scheme: Scheme | None = None
    gated: bool = False
    coding: Coding | None = None
    slices: int = 2

    @property
    def activation_slices(self) -> int:
        """The int8 rows that represent a row of activations; 0: it keeps the model's type."""
        if self.coding is not None:
            return self.slices if self.coding.is_integer else 0
        return self.scheme.slices if self.scheme is not None else 0


PLAIN = Packing()


@dataclass(frozen=True, slots=True, eq=False)
class LoraTable:
    """The LoRA adapters of a product x [M, K] -> y [M, N], in S slots of at most R ranks each, for P pieces of N.

    Attributes:
        a: [S, P, R, K] dtype.
        b: [S, N / 16 rounded up, R, 16] dtype: 16 columns of all ranks, then the next ones.
        factors, offsets: [S, N] float32.
        ranks: [S] int32, how many rows of a and b count; 0: the adapter does not change this product.
        scaled: [S] int32, whether factors and offsets count.
        piece_ends: where the columns of each piece end; the last is N.
        leaf_ends: as in Packing, with (K,) for one leaf.
    """

    a: Tensor
    b: Tensor
    factors: Tensor
    offsets: Tensor
    ranks: Tensor
    scaled: Tensor
    piece_ends: tuple[int, ...]
    leaf_ends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class XieluCurve:
    """The parameters of xIELU (Huang and Schlag, "Deriving Activation Functions Using Integration", 2024).

    x > 0: convex x^2 + linear x. Other x: concave (e^min(x, bound) - 1 - x) + linear x.
    """

    convex: float
    concave: float
    linear: float
    bound: float


class PackedLinear(Protocol):
    """A weight [N, K] and its bias in the backend's own layout. Opaque outside the backend."""

    shape: tuple[int, int]
    num_bytes: int

    def state(self) -> dict[str, Tensor]:
        """Expose the packed memory as tensors, to be written to a file. `Ops.restore_linear` takes them back.

        Raises:
            NotSupportedError: the backend has no packed form.
        """


class Ops(Protocol):
    """The operations of a backend. All tensors are contiguous, of one kind (kernels/tensors.py) and on one device."""

    name: str
    dtype: Dtype
    device: Any  # "cpu", or a torch.device
    fixed_rows: int  # rows of a result that are always at the same address; no program has more
    is_planned: bool  # whether all memory that it takes is known before it is allocated (assembly/memory.py)
    leaves: int  # pieces of K in products that ranks may share; 1 where a model has one device, which saves time

    def free_bytes(self) -> int:
        """Count the bytes that can still be allocated where tensors are."""

    def is_lost(self) -> bool:
        """Tell, after an exception, whether the device computes nothing any more in this process."""

    def tensor(self, array: Array) -> Tensor:
        """Convert an array on the host to a tensor of this backend; on the CPU, both share memory."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """Allocate uninitialised memory for results. dtype: the name of the type, for example "float32"."""

    def pack_linear(
        self, weight: Tensor | RowSource, bias: Tensor | None = None, packing: Packing = PLAIN
    ) -> PackedLinear:
        """Pack a weight [N, K] (and bias [N]) of any float type, which is first rounded to `dtype`."""

    def packed_bytes(self, shape: tuple[int, ...], packing: Packing = PLAIN, *, bias: bool = False) -> int:
        """Count the bytes that pack_linear keeps for a weight of this shape, padding and scales included."""

    def restore_linear(
        self, shape: tuple[int, ...], state: Mapping[str, Tensor], packing: Packing = PLAIN
    ) -> PackedLinear:
        """Rebuild the weight that pack_linear made, from its shape and its state. The tensors of `state` are kept.

        Raises:
            NotSupportedError: the backend has no packed form.
            ValueError: the state does not fit the shape and the packing.
        """

    def linear(self, x: Tensor, weight: PackedLinear, *, out: Tensor | None = None) -> Tensor:
        """Multiply x [M, K] dtype by a weight and add its bias: x @ weight.T + bias, [M, N] float32.

        It also computes q, k and v as one product, the LM head, and gate and up of a gated weight without activation.

        `out` may be some columns of a wider buffer (each row contiguous): the pieces of an LM head share a buffer.
        """

    def activated_linear(
        self, x: Tensor, weight: PackedLinear, activation: str, *, out: Tensor | None = None
    ) -> Tensor:
        """Compute activation(x @ weight.T + bias) of x [M, K] dtype: [M, N] dtype. `activation` as in gated_linear."""

    def gated_linear(self, x: Tensor, weight: PackedLinear, activation: str, *, out: Tensor | None = None) -> Tensor:
        """Compute activation(gate) * up of x [M, K] dtype: [M, N] dtype. The weight [2N, K] is gate rows, then up rows.

        `activation`: "silu", "gelu" (exact), "gelu_tanh", "relu", "relu2" (its square), "tanh", or "clamped_silu":
        min(x, 7) sigmoid(1.702 min(x, 7)), which multiplies up, clamped to -7 .. 7, plus 1. Equal to linear followed by
        the element-wise product.
        """

    def embedding(self, ids: Tensor, weight: Tensor, *, scale: float = 1.0, out: Tensor | None = None) -> Tensor:
        """Look up scale * weight[ids], [T, hidden] float32, for ids [T] int64 in weight [V, hidden] dtype."""

    def packed_embedding(
        self, ids: Tensor, weight: PackedLinear, *, scale: float = 1.0, out: Tensor | None = None
    ) -> Tensor:
        """Look up rows of a packed weight, neither quantised nor gated, with the same bits as `embedding`."""

    def experts(
        self,
        x: Tensor,
        gate_up: Sequence[PackedLinear],
        down: Sequence[PackedLinear],
        chosen: tuple[Tensor, Tensor],
        activation: str,
        *,
        weigh_inputs: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """Apply each row's own experts: the sum of weight * down(activation(gate) * up), in ascending expert id.

        x [M, hidden] dtype; gate_up, down: one gated and one plain weight per expert; chosen: ids [M, k] int64,
        distinct in each row, and weights [M, k] float32, as `route` returns them -> [M, hidden] float32.

        weigh_inputs: an expert reads weight * x, rounded to dtype, and its result is added as it is.
        """

    def route(
        self, logits: Tensor, params: RouterParams, *, out: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Choose experts from router logits [M, experts] float32: ids [M, k] int64, weights [M, k] float32.

        The best expert is the first, and of equal ones that with the lowest id.

        Raises:
            ValueError: rows cannot choose so among that many experts.
        """

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, *, dtype: Dtype | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Compute x / sqrt(mean(x^2) + eps) * weight of x [T, hidden] float32, weight [hidden] float32, in `dtype`.

        dtype: None is the model's type, for operands of products; float32 is for the residual stream and its branches.
        """

    def add_rms_norm(
        self, x: Tensor, h: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Add a branch h float32 to the residual stream x [T, hidden] float32, and norm the sum.

        Adds into x **in place** and returns (x, norm in dtype).
        """

    def layer_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        *,
        dtype: Dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Compute the layer norm of x [T, hidden] float32; weight and bias are [hidden] float32, dtype as in rms_norm.

        It is (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias: the mean is computed first, then the
        deviations from it.
        """

    def add_layer_norm(
        self, x: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Add h into x **in place** as add_rms_norm does, and return (x, its layer norm in dtype)."""

    def add(self, x: Tensor, h: Tensor) -> Tensor:
        """Add h into x **in place**, both [T, hidden] float32, and return x. For a second branch beside the first."""

    def add_gated(self, x: Tensor, h: Tensor, gates: Tensor) -> Tensor:
        """Add sigmoid(gates) * h into x **in place**, both [T, hidden] float32, gates [T, 1] float32, and return x."""

    def round(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Round x [T, hidden] float32 to dtype, for products that read the residual stream without a norm."""

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """Multiply x [M, N] float32 by a factor **in place** and return x."""

    def xielu(self, x: Tensor, curve: XieluCurve, *, out: Tensor | None = None) -> Tensor:
        """Compute the activation xIELU of x [M, N] float32 in dtype, as XieluCurve says."""

    def norm_heads(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Replace the first heads in each row of x float32 by their layer norms **in place**, and return x.

        x [T, columns], weight [heads, D] float32: each head is normed by itself, and has a weight of its own.
        """

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """Compute cap * tanh(x / cap) of x [M, N] float32 **in place** and return x."""

    def rotary_qkv(
        self, qkv: Tensor, positions: Tensor, params: RotaryParams, *, out: tuple[Tensor, Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split the product of q, k and v, RMS-norm those with norm weights, scale q, and rotate q and k.

        qkv [T, params.columns] float32, positions [T] int64 -> q [T, H, D], k [T, Hkv, D], v [T, Hkv, D] in dtype.
        """

    def rotary_q(self, qkv: Tensor, positions: Tensor, params: RotaryParams, *, out: Tensor | None = None) -> Tensor:
        """Make only q, as rotary_qkv does. A position after the last one of the tables counts as the last one."""

    def new_kv_cache(self, spec: CacheSpec) -> KVCache:
        """Allocate an empty cache for one layer.

        Raises:
            NotSupportedError: the backend does not support this cache; `param` names the field.
            ValueError: the scales are not [Hkv, D].
        """

    def store_kv(self, cache: KVCache, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Store k, v [N, Hkv, D] dtype at slots [N] int64; a negative slot stores nothing."""

    def load_kv(self, cache: KVCache, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Read slots [N] int64, none negative -> k, v [N, Hkv, D] float32. For hand-written attention and tests."""

    def copy_block(self, cache: KVCache, source: int, target: int) -> None:
        """Copy the keys and values of a whole block, scales per token included, to another block.

        Raises:
            ValueError: the cache does not have one of the blocks.
        """

    def read_block(self, cache: KVCache, block_id: int) -> bytes:
        """Copy a block to the host as the cache stores it, scales per token included.

        Raises:
            ValueError: the cache does not have this block.
        """

    def write_block(self, cache: KVCache, block_id: int, content: bytes | memoryview) -> None:
        """Overwrite a block with what read_block returned for any block of an equal cache.

        Raises:
            ValueError: the cache does not have this block, or a block has another size.
        """

    def plan(self, meta: AttentionMetadata, heads: Heads, cache: KVCache) -> AttentionMetadata:
        """Move metadata from the host to the device, with a plan for all layers with these heads and this cache type.

        Reserves the memory that the plan needs, so that `attend` allocates nothing. A backend that needs no plan makes
        none.

        Raises:
            ValueError: a new token would see a cached position that has no block, or whose block the cache lacks.
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
        """Let each sequence's new tokens attend to its cached and its new tokens, and store the new tokens.

        q [T, H, D], k_new and v_new [T, Hkv, D] in dtype -> [T, H * D] dtype. Attention is causal and limited to
        meta.sliding_window, or bidirectional. A row that sees nothing is zeros. q may also be [2, T, H, D]: q[1] are
        then the queries for the keys of the first meta.num_sink_tokens tokens, q[0] those for all others. lse: a buffer
        [T, H] float32 for the logarithm of each row's sum of e^score, sink logits included; -inf for a row that sees
        nothing.

        New keys and values are rounded to the cache's type before they are attended to, so it makes no difference
        whether a token is read from the cache or from the step. Queries and probabilities are rounded to the cache's
        type as well; for an int8 cache they are written as slices. Metadata without a plan is planned first.

        Raises:
            ValueError: as in `plan`.
        """

    def log_softmax(self, logits: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Compute the log-probabilities [M, V] float32 of logits [M, V] float32."""

    def choose(self, logits: Tensor, params: SamplingTensors) -> tuple[Tensor, Tensor]:
        """Choose one id per row of logits [M, V] float32, and test whether the rows are healthy.

        kernels/sampling.py describes the steps and their order.

        Returns:
            ids: [M] int64; sampling.NO_TOKEN where no id may be chosen; any number for a row that is not healthy.
            healthy: [M] bool, whether each row of logits has no NaN, no +inf, and a value above -inf.
        """

    def token_scores(self, logits: Tensor, ids: Tensor, num_top: int) -> TokenScores:
        """Score the ids [M] int64 and the num_top likeliest ids in rows of logits [M, V] float32.

        In a row that is not healthy, as in `choose`, every log-probability is NaN. An id may be NO_TOKEN; then its
        log-probability and its rank are any numbers.
        """

    def fetch(self, tensors: Sequence[Tensor]) -> Callable[[], list[Array]]:
        """Begin to copy tensors to the host.

        Returns:
            A function that waits for the copies and returns them. They may share the tensors' memory.
        """


class AdaptingOps(Ops, Protocol):
    """A backend that can add LoRA adapters to its products."""

    def group_rows(self, slots: Array) -> Array:
        """Bring the slots of a step's rows [M] int32 (-1: none) into the form, int32 [M, ...], in which the operations
        below read them. Those of a recorded pass read them where they were when it was recorded."""

    def activate(self, x: Tensor, activation: str, *, gated: bool = False, out: Tensor | None = None) -> Tensor:
        """Compute activation(x) of x [M, N] float32 in dtype; gated: of its first half, times the second: [M, N / 2].

        After `linear`, the bits are those of activated_linear and of gated_linear.
        """

    def lora_shrink(self, x: Tensor, table: LoraTable, slots: Tensor, *, out: Tensor) -> Tensor:
        """Multiply each row of x [M, K] dtype by the A of its adapter: out[m, p, j] = x[m] . a[slots[m], p, j].

        out [M, P, R] float32; slots: as group_rows returns them. Only the ranks that count are written, and nothing
        for the slot -1. The leaves are summed as those of products are.
        """

    def lora_expand(self, hidden: Tensor, table: LoraTable, slots: Tensor, y: Tensor) -> Tensor:
        """Change y [M, N] float32 **in place**, and return it: y[m] * factors[s] + offsets[s] + hidden[m, p] @ B[s].

        s = slots[m], and p is the piece of the column; without `scaled`, factors are 1 and offsets 0. hidden: as
        lora_shrink returns it. A row with the slot -1, or whose slot has rank 0 and is not scaled, keeps its bits.
        """


@runtime_checkable
class SplittingOps(Ops, Protocol):
    """A backend that can compute a rank's part of a product that is split over ranks along K."""

    def pack_part(
        self, weight: RowSource, magnitudes: Array | None, packing: Packing
    ) -> tuple[PackedLinear, Array | None]:
        """Pack a part [N, K / ranks] of a weight, cut between leaves. Return the part and its scales [N].

        `linear` then gives the part's share of the sum, and `add_parts` takes the scales. magnitudes: [N] float32, the
        largest absolute value of each row of the whole weight, which an int8 weight needs. Scales are None for other
        weights.
        """

    def add_parts(self, parts: Sequence[Tensor], scales: Array | None, bias: Array | None, *, out: Tensor) -> Tensor:
        """Add 2, 4 or 8 shares of a sum, of all ranks in order: each [M, N] float32, on the device or on the host, or
        all of them in one tensor.

        They are added as the upper levels of the leaves' tree, ((0+1)+(2+3))+((4+5)+(6+7)); then the sum is multiplied
        by scales [N], and bias [N] is added.
        """

    def run_host(self, work: Callable[[], None]) -> None:
        """Run a Python function between two operations of a forward pass, on memory that does not move.

        A program (RecordingOps) runs the function again at the same point.
        """


class Program(Protocol):
    """A recorded forward pass, run again without the model's Python."""

    def run(self, attention: Sequence[AttentionMetadata]) -> Tensor:
        """Run with this step's metadata for each cache group.

        Reads and writes the tensors of the recorded pass, with their current contents, and returns the tensor that the
        recorded pass returned.

        Raises:
            ValueError: a token id or a position is outside of its table.
        """

    def decode(
        self,
        attention: Sequence[AttentionMetadata],
        input_ids: Tensor,
        positions: Tensor,
        tokens: Array,
        vocab_size: int,
    ) -> bool:
        """Run a recorded pass over one token of each of B sequences S times, always with the likeliest next tokens.

        Args:
            attention: as in `run`; its plans must hold for all S steps.
            input_ids, positions: those of the recorded pass, [B].
            tokens: [B, S+1] int64, each row's token in each step, and the one after the last step. The first column is
                given. Negative entries of the others are replaced with the likeliest token.
            vocab_size: only the logits of these tokens count.

        Positions and the slots of the metadata are advanced in place by S. Its lengths, and the positions of its plans,
        are written anew from `positions`.

        Returns:
            False if the backend cannot do this with the pass; then nothing was computed.

        Raises:
            ValueError: as in `run`.
        """


@runtime_checkable
class RecordingOps(Ops, Protocol):
    """A backend that can record a forward pass as a program."""

    @property
    def num_compiled(self) -> int:
        """The number of kernels that this process has compiled so far."""

    def program_rows(self, tokens: int) -> int:
        """Choose the tokens of the program that computes a step of `tokens` tokens: as many or more; 0: none does.

        A step of fewer tokens is padded with sequences of one token, which see nothing but themselves and are not
        stored. What is chosen is a program of its own: program_rows of it is the same number.
        """

    def record(
        self,
        forward: Callable[[Sequence[AttentionMetadata]], Tensor],
        attention: Sequence[AttentionMetadata],
        *,
        torch_too: bool = False,
    ) -> tuple[Tensor, Program | None]:
        """Run a forward pass with this metadata, and return its result and its program.

        The program may call `forward` again, with the metadata of another step.

        The program is None if the pass did anything besides calling operations of this backend. torch_too: it may also
        call torch's functions, which are the same in every pass over as many tokens, and on memory that stays.
        """
