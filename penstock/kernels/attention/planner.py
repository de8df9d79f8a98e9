"""Plans one step after another. A step of decoding mostly sees the tiles that the last one saw: then only positions are
new, and the rest of the last plan is right again."""

from dataclasses import dataclass, replace

import numpy as np

from penstock.kernels.attention.layout import TILE
from penstock.kernels.attention.plan import AttentionPlan, Int32, plan_attention
from penstock.kernels.attention.shape import AttentionShape
from penstock.kernels.attention.sharing import look_alike


@dataclass(slots=True, eq=False)
class Planner:
    """Makes plans for the layers of one cache group; arguments as those of plan_attention."""

    shape: AttentionShape
    block_size: int
    sliding_window: int | None
    num_sink_tokens: int
    num_cores: int
    _seen: tuple[int, bytes] | None = None  # what the last plan depends on
    _last: AttentionPlan | None = None

    def plan(self, query_start_loc: Int32, seq_lens: Int32, block_table: Int32) -> AttentionPlan:
        """What plan_attention makes of this step."""
        seen = self._what_is_seen(query_start_loc, seq_lens, block_table)
        if self._last is not None and seen is not None and seen == self._seen:
            return replace(self._last, positions=seq_lens - 1)
        self._seen = seen
        self._last = plan_attention(
            query_start_loc,
            seq_lens,
            block_table,
            self.shape,
            block_size=self.block_size,
            sliding_window=self.sliding_window,
            num_sink_tokens=self.num_sink_tokens,
            num_cores=self.num_cores,
        )
        return self._last

    def _what_is_seen(self, query_start_loc: Int32, seq_lens: Int32, block_table: Int32) -> tuple[int, bytes] | None:
        """All that a plan of decoding depends on; None for other steps, and where a prefix may be shared."""
        num_seqs = len(seq_lens)
        if query_start_loc[-1] != num_seqs or not np.array_equal(query_start_loc, np.arange(num_seqs + 1)):
            return None
        if num_seqs == 0 or look_alike(block_table):
            return None
        tiles = ((seq_lens - 1) // TILE).tobytes()
        if self.sliding_window is not None:
            hidden = seq_lens - self.sliding_window
            tiles += (hidden // TILE).tobytes() + (hidden > 0).tobytes()
        return min(block_table.shape[1], 2), tiles
