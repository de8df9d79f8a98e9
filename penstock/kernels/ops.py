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

Who passes `out=`: the layers, and nobody yet. Once a backend gains from fixed buffers, LayerFactory hands each layer it
makes its place in an arena, and the layer passes that on. Model files make layers by name and call them without
buffers, so they do not change.

A tied head. Embedding keeps the rows as a tensor and LMHead packs them again: two copies, in every backend so far. A
backend that wants one adds `pack_embedding(weight) -> PackedEmbedding`, which `embedding` then takes for its weight,
and `pack_linear(..., shared=PackedEmbedding)`. LayerFactory, which knows from the parameter table what is tied, gives
the head its embedding; model files do not change. Look-ups read unquantised rows, whatever the head's product reads.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.kernels.sampling import SamplingTensors

NUMERICS_VERSION = 1  # goes up whenever a constant or an order changes a bit of any answer
REDUCTION_LEAVES = 8  # fixed pieces of K in products that tensor parallelism splits along K
ATTENTION_TILE = 64  # L: positions jL .. (j+1)L-1 make one attention tile
ATTENTION_SPAN = 32  # C: tiles folded in ascending order before spans are folded


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
        sliding_window: a token sees itself and the sliding_window - 1 before it; None sees all.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    block_size: int
    sliding_window: int | None


class PackedLinear(Protocol):
    """A weight [N, K], with its bias, as the backend likes it. Opaque outside the backend."""

    shape: tuple[int, int]
    num_bytes: int


class KVCache(Protocol):
    """One layer's paged keys and values, as the backend lays them out. Opaque outside the backend."""

    num_bytes: int


class Ops(Protocol):
    """What a backend provides. All tensors are contiguous and on the backend's device."""

    name: str
    dtype: torch.dtype
    device: torch.device

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None, *, leaves: int = 1) -> PackedLinear:
        """Take a weight [N, K] (and bias [N]) of any float type, rounded to `dtype` first.

        `leaves` pieces of K are reduced separately and added as a fixed binary tree, so that tensor parallelism
        over K gives the same bits.
        """

    def linear(self, x: Tensor, weight: PackedLinear, *, out: Tensor | None = None) -> Tensor:
        """x [M, K] dtype -> x @ weight.T + bias [M, N] float32. Also q/k/v as one product, and the LM head."""

    def gated_linear(self, x: Tensor, weight: PackedLinear, activation: str, *, out: Tensor | None = None) -> Tensor:
        """x [M, K] dtype, weight [2N, K] (gate rows, then up rows) -> activation(gate) * up, [M, N] dtype.

        `activation`: "silu", "gelu" (exact) or "gelu_tanh". Equal to linear followed by the element-wise product.
        """

    def embedding(self, ids: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
        """ids [T] int64, weight [V, hidden] dtype -> [T, hidden] float32."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
        """x [T, hidden] float32, weight [hidden] float32 -> x / sqrt(mean(x^2) + eps) * weight, dtype."""

    def add_rms_norm(
        self, x: Tensor, h: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The residual stream x [T, hidden] float32 plus a branch h float32, and the norm of the sum.

        Adds into x **in place** and returns (x, norm in dtype).
        """

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
        """Split the product of q, k and v, norm each head where weights are given, rotate q and k.

        qkv [T, (H + 2 Hkv) D] float32; positions [T] int64; cos_sin [max positions, rotary dim] float32 (cosines,
        then sines, of the halves that are rotated against each other), computed in float64, None rotates nothing;
        heads (H, Hkv, D); q_norm, k_norm [D] float32 -> q [T, H, D], k [T, Hkv, D], v [T, Hkv, D] in dtype.
        """

    def new_kv_cache(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> KVCache:
        """An empty cache for one layer."""

    def attend(
        self,
        q: Tensor,
        k_new: Tensor,
        v_new: Tensor,
        cache: KVCache,
        meta: AttentionMetadata,
        *,
        scale: float,
        out: Tensor | None = None,
    ) -> Tensor:
        """Each sequence's new tokens attend to its cached and to its new tokens; the new ones are stored.

        q [T, H, D], k_new and v_new [T, Hkv, D] in dtype -> [T, H * D] dtype. Causal, within meta.sliding_window.
        New keys and values are rounded to the cache's type before they are attended to, so it makes no difference
        whether a token is read from the cache or from the step. The cache is written; nothing waits for it.
        """

    def log_softmax(self, logits: Tensor, *, out: Tensor | None = None) -> Tensor:
        """logits [M, V] float32 -> log-probabilities [M, V] float32."""

    def sample(self, logits: Tensor, params: SamplingTensors) -> Tensor:
        """logits [M, V] float32 -> one id a row, [M] int64; sampling.NO_TOKEN where no id may be chosen.

        kernels/sampling.py has the steps and their order.
        """
