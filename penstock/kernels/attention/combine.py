"""Which partial items fold into which result: one combine for each row block and kv head."""

import numpy as np
import numpy.typing as npt

from penstock.kernels.attention.blocks import Int64, RowBlocks, ragged
from penstock.kernels.attention.cut import Pieces

Int32 = npt.NDArray[np.int32]


def combines(
    blocks: RowBlocks,
    targets: Int64,
    chains: list[list[int]] | None,
    pieces: Pieces,
    numbers: Int64 | None,
    kv_heads: int,
) -> tuple[Int32, Int32]:
    """AttentionPlan.combines and .references.

    targets: [N] blocks whose results are combined.
    chains: of each block of the step, the blocks that see its tiles, spans ascending; None: each sees its own.
    numbers: the item that each piece became; None: they are numbered alike.
    """
    if len(targets) == 0:
        return np.empty((0, 6), dtype=np.int32), np.empty(0, dtype=np.int32)
    if chains is None:
        links, link_counts = targets, np.ones_like(targets)
    else:
        links = np.array([link for target in targets for link in chains[target]], dtype=np.int64)
        link_counts = np.array([len(chains[target]) for target in targets], dtype=np.int64)
    # A combine for each target and head, and in it each link of the target's chain.
    target, head = ragged(np.full_like(targets, kv_heads))
    combine, index = ragged(link_counts[target])
    link = links[(np.cumsum(link_counts) - link_counts)[target[combine]] + index]
    # Piece q of h of n heads has head i where q is the greatest with q n < (i + 1) h.
    piece = ((head[combine] + 1) * pieces.heads[link] - 1) // kv_heads
    counts = pieces.spans[link]
    of_link, span_piece = ragged(counts)
    references = (pieces.first[link] + piece * counts)[of_link] + span_piece
    if numbers is not None:
        references = numbers[references]

    table = np.empty((len(head), 6), dtype=np.int32)
    table[:, 0], table[:, 1] = head, head + 1
    table[:, 2], table[:, 3] = blocks.row_begin[targets[target]], blocks.row_end[targets[target]]
    table[:, 5] = np.cumsum(counts)[np.cumsum(link_counts[target]) - 1]
    table[0, 4] = 0
    table[1:, 4] = table[:-1, 5]
    return table, references.astype(np.int32)
