"""What the machine can do: reading memory, and multiplying from registers. Measured beside whatever it is held against.

A shared machine drifts from minute to minute, so a limit is probed again and again between measurements, and the best
that was ever seen is the denominator.
"""

import torch

from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.cpu.packed import empty

READ_BYTES = 512 * 2**20  # beyond any cache that one user of a machine gets to himself
MULTIPLY_SECONDS = 0.01  # that one probe of a multiply rate should take
KINDS = ("f32", "bf16", "int8")  # as native/abi.h counts them


class MachineLimits:
    """Best rates seen so far, with all threads of a backend.

    Attributes:
        read_gb_s: memory read in 10^9 bytes a second.
        multiply_gop_s: 10^9 operations a second for each of KINDS; a multiply-add counts as two.
    """

    def __init__(self, ops: CpuOps) -> None:
        self._ops = ops
        self._memory = empty((READ_BYTES,), torch.uint8).fill_(1)  # in the same big pages as weights
        self._iterations = dict.fromkeys(KINDS, 1000)
        self.read_gb_s = 0.0
        self.multiply_gop_s = dict.fromkeys(KINDS, 0.0)
        for kind in KINDS:
            self._calibrate(kind)
        self.probe(*KINDS)

    def probe(self, *kinds: str) -> None:
        """Measure reading once, and multiplying in these kinds."""
        self.read_gb_s = max(self.read_gb_s, READ_BYTES / self._ops.limit_read(self._memory) / 1e9)
        for kind in kinds:
            operations, seconds = self._ops.limit_multiply(KINDS.index(kind), self._iterations[kind])
            self.multiply_gop_s[kind] = max(self.multiply_gop_s[kind], operations / seconds / 1e9)

    def figures(self) -> dict[str, float]:
        """The limits by the names that the JSON of the benchmarks has."""
        return {
            "read_gb_s": self.read_gb_s,
            "f32_gflop_s": self.multiply_gop_s["f32"],
            "bf16_gflop_s": self.multiply_gop_s["bf16"],
            "int8_gop_s": self.multiply_gop_s["int8"],
        }

    def _calibrate(self, kind: str) -> None:
        """As many iterations as take MULTIPLY_SECONDS."""
        seconds = 0.0
        while seconds < MULTIPLY_SECONDS:
            self._iterations[kind] *= 2
            seconds = self._ops.limit_multiply(KINDS.index(kind), self._iterations[kind])[1]
