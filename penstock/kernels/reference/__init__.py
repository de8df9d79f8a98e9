"""The reference backend: every operation of kernels/ops.py in plain torch, written to be read and not to be fast."""

from penstock.kernels.reference.ops import ReferenceOps

__all__ = ["ReferenceOps"]
