"""Plans of attention: which pieces of work a step has, and who begins where. Made before a step runs, without torch.

A piece (item) is some query rows of some kv heads over some spans of one sequence's cache. The arithmetic of a row is
fixed by tiles and spans at absolute positions (layout.py), so a plan decides only who computes what: a different
number of cores gives another plan and the same bits.

Planned as Huawei's IncreFlashAttention operator does it: first by sequence and head, spans as well where that leaves
cores idle (its flash decoding; its rule is B * N2 < 0.4 * cores, ours looks at the load of each item, because one long
sequence among many short ones idles cores just as well), then contiguous ranges of items so that the greatest load of
a core is least. A core drains its range and steals from others.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

# Columns of AttentionPlan.items and .combines; native/abi.h has the same.
SEQUENCE, HEAD_BEGIN, HEAD_END, ROW_BEGIN, ROW_END, SPAN_BEGIN, SPAN_END, PARTIAL = range(8)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What the layers of a cache group have in common.

    Attributes:
        kv_cache_dtype: "float32", "bfloat16" or "int8".
        slices: int8 only: rows that stand for a query row, and for a row of probabilities; else 0.
        token_scales: int8 only: scales belong to tokens, not to channels.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_cache_dtype: str
    slices: int = 0
    token_scales: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """One step for the layers of one cache group.

    A row of the packed step is token * group + g: query head (kv head) * group + g of that token. An item's rows may
    belong to several neighbouring sequences, where those share the blocks of its spans (a shared prefix): then every
    position of those spans is cached for all of them.

    Attributes:
        items: [I, 8] int32: sequence whose block table is read; kv heads begin, end; rows begin, end; spans begin, end;
            the first partial row that the item writes, or -1 where its results are final. Of a partial item, row r of
            head h and span s is partial row
            partial + ((s - span begin) * heads + h - head begin) * rows + r - row begin.
        starts: [cores + 1] int64: the first item of each core, then the number of items.
        combines: [C, 6] int32: kv heads begin, end; rows begin, end; references begin, end.
        references: [R] int32: the items that a combine folds, spans ascending; each covers its heads and rows.
        positions: [T] int32: each token's position.
        staged: [B+1] int32: granules (of each kv head) of new tokens, a running sum over the sequences: those from
            that of the first new token to that of the last one.
        loads: [I] int64: what each item costs, in rows times tiles times heads and what reading adds.
        partial_rows: of all items together.
        workspace_bytes: that the cores share while the step runs; the reference needs none.
        scratch_bytes: of each core.
        key: names the plan (key.py).
    """

    items: Int32
    starts: Int64
    combines: Int32
    references: Int32
    positions: Int32
    staged: Int32
    loads: Int64
    partial_rows: int
    workspace_bytes: int
    scratch_bytes: int
    key: int


def plan_attention(
    query_start_loc: Int32,
    seq_lens: Int32,
    block_table: Int32,
    shape: AttentionShape,
    *,
    block_size: int,
    sliding_window: int | None = None,
    num_sink_tokens: int = 0,
    num_cores: int = 1,
) -> AttentionPlan:
    """The plan of a step; arguments as in kernels.ops.AttentionMetadata, on the host."""
    raise NotImplementedError
