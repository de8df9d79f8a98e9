"""Kernels run in Triton's interpreter in these tests, with the products of the hardware (hardware.py), or on a GPU."""

import os
from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from tests.kernels.triton.compare import DEVICE

if DEVICE != "cpu":
    torch.set_default_device(DEVICE)
elif find_spec("triton") is not None:  # without it, each file says that it is left out
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, whose own functions are kernels, too
    from tests.kernels.triton import hardware

    hardware.install()


@pytest.fixture(autouse=True, scope="module")
def _engines_find_the_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Engines choose a device for every tensor themselves; nothing else does it for them."""
    if DEVICE == "cpu" or not request.module.__name__.endswith("test_engine"):
        yield
        return
    torch.set_default_device("cpu")
    yield
    torch.set_default_device(DEVICE)


@pytest.fixture(autouse=True)
def _as_on_a_device() -> Iterator[None]:
    """A kernel computes with masked elements, too, where numpy would warn of NaN and infinity."""
    with np.errstate(all="ignore"):
        yield
