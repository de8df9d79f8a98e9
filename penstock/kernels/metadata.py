"""The arguments of attention: the state of a step's sequences, and how one layer makes queries, keys and scores.

Letters are as in kernels/ops.py: T tokens, B sequences, H query heads, Hkv key/value heads, D head dim.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np

from penstock.errors import invalid
from penstock.kernels.attention.items import first_seen
from penstock.kernels.attention.plan import AttentionPlan
from penstock.kernels.tensors import Dtype, Tensor, as_array

Kind = TypeVar("Kind")


@dataclass(frozen=True, slots=True)
class Heads:
    """H, Hkv and D."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The positions, lengths and blocks of the sequences of a step, for the layers of one cache group.

    Sequence b has the new tokens query_start_loc[b] .. query_start_loc[b+1]-1 of the packed step, at positions
    seq_lens[b] - (number of its new tokens) .. seq_lens[b]-1.

    Attributes:
        query_start_loc: [B+1] int32, where each sequence's new tokens begin; the last entry is T.
        seq_lens: [B] int32, cached plus new tokens.
        block_table: [B, max_blocks] int32, block ids by position // block_size; -1 where nothing is allocated.
        slot_mapping: [T] int64, block id * block_size + offset: where each new token's key and value are stored.
            A negative slot stores nothing, because no later token will see it.
        block_size: tokens per block.
        sliding_window: a token sees itself and the sliding_window - 1 tokens before it; 1 or more; None: it sees all.
        chunked: the window does not slide: the text is cut into chunks of its length, and a token sees itself and the
            tokens before it in its own chunk.
        num_sink_tokens: how many first tokens of a sequence stay visible (and allocated) before a window.
        bidirectional: a token also sees the tokens after it: all, or sliding_window - 1 of them.
        plan: which core computes what (kernels/attention/plan.py); None: not planned yet.

    A ring is a block table that repeats one block. Its slots are used again, and slot_mapping stores only tokens that
    no later token of the step overwrites.

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
    chunked: bool = False
    bidirectional: bool = False

    def __post_init__(self) -> None:
        if self.sliding_window is not None and self.sliding_window < 1:
            raise invalid("sliding_window", f"{self.sliding_window} is not allowed; it must be 1 or more, or None")

    def to(self, convert: Callable[[Tensor], Tensor]) -> "AttentionMetadata":
        """Convert the tensors of the metadata; the plan stays on the host."""
        tensors = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
        return replace(self, **{name: convert(getattr(self, name)) for name in tensors})

    def check_blocks(self, num_blocks: int) -> None:
        """Check that every cached position that a new token sees is in a block of a cache with num_blocks blocks.

        Raises:
            ValueError: a position has no block (-1), or a block that the cache does not have.
        """
        table = as_array(self.block_table)
        wrong = table.astype(np.uint32) >= num_blocks  # a negative id becomes a large one
        if not np.count_nonzero(wrong):
            return
        starts, lengths = as_array(self.query_start_loc), as_array(self.seq_lens)
        new = starts[1:] - starts[:-1]
        cached = ((lengths - new) * (new > 0))[:, None]
        first = np.arange(0, table.shape[1] * self.block_size, self.block_size, dtype=np.int32)  # position by column
        wrong &= first < cached
        if self.sliding_window is not None:
            seen = first_seen(cached, self.sliding_window, chunked=self.chunked)
            wrong &= (first + self.block_size > seen) | (first < self.num_sink_tokens)
        if np.count_nonzero(wrong):
            row, column = np.argwhere(wrong)[0].tolist()
            raise ValueError(
                f"block_table: block {table[row, column]}, seen at position {first[column]} of sequence {row}, is "
                f"outside of its table: the cache has blocks 0 to {num_blocks - 1}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class AttentionParams:
    """The arithmetic of one layer's scores.

    The order is: s = q . k; if bias_before_scale, s += bias; s *= scale; s = softcap * tanh(s / softcap); if not
    bias_before_scale, s += bias; s += distance_bias. Then hidden positions become -inf.

    Attributes:
        scale: usually 1 / sqrt(D).
        softcap: a soft limit on the size of scores (Gemma 2); None: no limit.
        alibi_slopes: [H] float32; the bias is slope * (key position - query position). None: no bias.
        bias_before_scale: add the bias before scaling (Falcon, and `pse` of IncreFlashAttention), not after (BLOOM).
        sink_logits: [H] float32, learned logits that take part in every softmax and have no value. None: no sinks.
        distance_bias: [H, 2R + 1] float32, what is added for a key at a distance of -R .. R from the query (beyond,
            that of -R or R), after the scores are scaled. None: nothing. Not beside ALiBi; on the CPU only.
    """

    scale: float
    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    bias_before_scale: bool = False
    sink_logits: Tensor | None = None
    distance_bias: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RotaryParams:
    """The arithmetic from one layer's product to q, k and v: the heads, the norms, the scale of q, the rotation.

    Attributes:
        heads: how the columns of the product are split.
        cos_sin: [max positions, rotary dim] float32, computed in float64: the cosines, then the sines, of the angles by
            which the halves of a head are rotated against each other. None: no rotation.
        q_norm, k_norm: float32 weights of an RMS norm before the rotation; None: no norm. A weight [D] norms each head
            by itself; a weight [H D] for q, or [Hkv D] for k, norms all heads together. With one head, both are the
            same.
        v_norm: float32 weights [D] of an RMS norm of each head of v; None: no norm.
        eps: the eps of the norms.
        values_are_keys: the product has no columns for v, which is k before its norm.
        q_scale: [max positions] float32, a factor of q at each position; None: no factor.
    """

    heads: Heads
    cos_sin: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0
    q_scale: Tensor | None = None
    v_norm: Tensor | None = None
    values_are_keys: bool = False

    @property
    def columns(self) -> int:
        """Count the columns of the product."""
        heads = self.heads
        return (heads.num_heads + (1 if self.values_are_keys else 2) * heads.num_kv_heads) * heads.head_dim


@dataclass(frozen=True, slots=True, eq=False)
class RouterParams:
    """The arithmetic from the logits of a row to its experts and their weights.

    Experts are chosen by their scores plus the bias; their weights are the scores without the bias.

    Attributes:
        top_k: how many experts a row gets.
        scores: "softmax" over all experts; "sigmoid" of each logit; "chosen_sigmoid", which is
            the same weight, where experts are chosen by their logits, of which large ones have the same sigmoid; or
            "sparsemixer" (Liu et al., "GRIN", 2024), where experts are chosen by their logits, and a weight is the
            softmax of its logit m over the logits l that are not larger and not much smaller:
            m - l <= threshold * max(|l|, m). None of the experts chosen before is among these.
        bias: [experts] float32; None: no bias.
        groups, top_groups, group_top: neighbouring experts make `groups` groups of one size, and experts are chosen
            from the `top_groups` groups with the largest sums of their `group_top` largest scores, with the bias.
        renormalize: weights are divided by their sum, or by min_sum if that is larger.
        scale, expert_scale: factors of the weights, in the end: of all, and [experts] float32 of each expert's.
        threshold: for "sparsemixer".
    """

    top_k: int
    scores: str = "softmax"
    bias: Tensor | None = None
    groups: int = 1
    top_groups: int = 1
    group_top: int = 2
    renormalize: bool = False
    min_sum: float = 0.0
    scale: float = 1.0
    expert_scale: Tensor | None = None
    threshold: float = 0.0

    def check(self, experts: int) -> None:
        """Raise ValueError unless rows can choose so among a number of experts."""
        size = experts // self.groups
        if not 1 <= self.top_k <= min(self.top_groups, self.groups) * size:
            raise ValueError(f"top_k: {self.top_k} of {experts} experts, in {self.top_groups} of {self.groups} groups")
        if experts % self.groups or (self.groups > 1 and not 1 <= self.group_top <= size):
            raise ValueError(f"groups: {self.groups} of {experts} experts, compared by {self.group_top} of each")


@dataclass(frozen=True, slots=True, eq=False)
class KVScales:
    """Per-channel scales and offsets of one layer's int8 cache, [Hkv, D] float32 each."""

    key_scales: Tensor
    key_offsets: Tensor
    value_scales: Tensor
    value_offsets: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class CacheSpec:
    """The size and type of one layer's cache.

    Attributes:
        dtype: float32, bfloat16 or int8.
        slices: int8 only: how many int8 rows represent a query row, or a row of probabilities: 2 (closer than a
            bfloat16 query) or 3 (close to float32).
        scales: int8 only: scales per channel; None: per token (reference/quantized_kv.py).
    """

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: Dtype
    slices: int = 0
    scales: KVScales | None = None


class KVCache(Protocol):
    """One layer's paged keys and values, as the backend lays them out. Opaque outside the backend."""

    num_bytes: int


def check_block_ids(num_blocks: int, *block_ids: int) -> None:
    """Raise ValueError unless a cache of num_blocks has these blocks."""
    if not all(0 <= block_id < num_blocks for block_id in block_ids):
        raise ValueError(f"block ids: {block_ids}; the cache has blocks 0 to {num_blocks - 1}")


def own(value: object, kind: type[Kind]) -> Kind:
    """Check that a packed weight or a cache is of the type that a backend makes.

    Raises:
        TypeError: another backend made the value.
    """
    if not isinstance(value, kind):
        raise TypeError(f"made by another backend: {type(value).__name__}")
    return value
