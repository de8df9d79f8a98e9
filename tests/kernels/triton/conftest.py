"""Kernels run in Triton's interpreter in these tests, with the products of the hardware (hardware.py)."""

import os
from importlib.util import find_spec

if find_spec("triton") is not None:  # without it, each file says that it is left out
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, whose own functions are kernels, too
    from tests.kernels.triton import hardware

    hardware.install()
