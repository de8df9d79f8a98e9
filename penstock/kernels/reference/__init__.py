"""The reference backend: every operation of kernels/ops.py in plain torch. The specification, not the fast way."""

from penstock.kernels.reference.ops import ReferenceOps

__all__ = ["ReferenceOps"]
