"""The language-model head: the product over the vocabulary, whole or in pieces, with or without padding."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from penstock.errors import NotSupportedError
from penstock.kernels.arena import Slot
from penstock.kernels.ops import Ops, PackedLinear, RowSource, TensorRows
from penstock.kernels.tensors import FLOAT32, Array, Tensor, as_array
from penstock.layers.weights import Linear, LinearSpec, whole

NEVER = float("-inf")
WHOLE_IN_FILES = "packed weights hold the LM head whole, neither in pieces nor padded"


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """How a head's columns are arranged. It changes no logit.

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
        """Return the number of columns including the padding."""
        return -(-vocab_size // self.pad_to) * self.pad_to

    def cuts(self, vocab_size: int) -> list[tuple[int, int]]:
        """Return the first and past-the-last column of each piece; widths differ by at most one column."""
        width, pieces = self.width(vocab_size), self.pieces
        return [(index * width // pieces, (index + 1) * width // pieces) for index in range(pieces)]


PLAIN_HEAD = HeadLayout()


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """The rows begin .. end-1 of a source, as a RowSource. Rows beyond the source's end are zeros."""

    source: RowSource
    begin: int
    end: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.end - self.begin, self.source.shape[1])

    def read(self, start: int, stop: int) -> Tensor:
        first, last = (min(self.begin + row, self.source.shape[0]) for row in (start, stop))
        rows = as_array(self.source.read(first, last))
        missing = (stop - start) - (last - first)
        return np.concatenate([rows, np.zeros((missing, rows.shape[1]), rows.dtype)]) if missing else rows


class HeadPieces:
    """The packed weights of a head's pieces, as one PackedLinear [V, K]."""

    def __init__(self, shape: tuple[int, int], pieces: Iterable[PackedLinear], *, plain: bool) -> None:
        self.shape = shape
        self.pieces = tuple(pieces)
        self.num_bytes = sum(piece.num_bytes for piece in self.pieces)
        self._plain = plain

    def state(self) -> dict[str, Tensor]:
        """Return the packed memory of a head that is in one piece and not padded.

        Raises:
            NotSupportedError: the head is in pieces or padded.
        """
        if not self._plain:
            raise NotSupportedError(WHOLE_IN_FILES, param="lm_head_pieces")
        return self.pieces[0].state()


class LMHead(Linear):
    """hidden [M, hidden] dtype -> logits [M, V'] float32, where V' is V, or more with padding.

    If `holds_rows`, the embedding that the head is tied to reads its rows from the head (weights/loader.py).
    """

    packed: HeadPieces

    def __init__(
        self,
        ops: Ops,
        spec: LinearSpec,
        out: Slot,
        *,
        softcap: float | None = None,
        layout: HeadLayout = PLAIN_HEAD,
    ) -> None:
        """out: a buffer with V' columns. softcap: a soft limit of the logits' absolute values."""
        super().__init__(ops, spec, out)
        self.softcap = softcap
        self.layout = layout
        self.vocab_size = spec.shape[0]
        self.width = layout.width(self.vocab_size)
        self.cuts = layout.cuts(self.vocab_size)

    def load(self, values: Mapping[str, Tensor | RowSource]) -> None:
        weight = values["weight"]
        source = weight if hasattr(weight, "read") else TensorRows(weight)
        bias = self._padded_bias(whole(values["bias"]) if self.spec.bias else None)
        self._hold(
            self.ops.pack_linear(
                PaddedRows(source, begin, end), None if bias is None else bias[begin:end], self.spec.packing
            )
            for begin, end in self.cuts
        )

    @property
    def num_bytes(self) -> int:
        depth, bias = self.spec.shape[1], self.spec.bias or self.width > self.vocab_size
        return sum(
            self.ops.packed_bytes((end - begin, depth), self.spec.packing, bias=bias) for begin, end in self.cuts
        )

    def _padded_bias(self, bias: Array | None) -> Array | None:
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

    def _hold(self, pieces: Iterable[PackedLinear]) -> None:
        n, k = self.spec.shape
        self.packed = HeadPieces((n, k), pieces, plain=self.layout.is_plain)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        if not self.layout.is_plain:
            raise NotSupportedError(WHOLE_IN_FILES, param="lm_head_pieces")
        self._hold([self.ops.restore_linear(self.spec.shape, state, self.spec.packing)])

    def forward(self, x: Tensor) -> Tensor:
        logits = self.out(x.shape[0])
        for piece, (begin, end) in zip(self.packed.pieces, self.cuts, strict=True):
            self.ops.linear(x, piece, out=logits[:, begin:end])
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
