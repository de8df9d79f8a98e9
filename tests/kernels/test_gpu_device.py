"""Finding a GPU: what is missing is named before torch is imported, and what cannot work is not chosen by itself."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.config import EngineConfig
from penstock.errors import InvalidRequestError
from penstock.kernels.triton import device
from penstock.models.config_json import load_model_config
from penstock.weights.hub import resolve_model
from tests.support_matrix import ROOT


class Driver:
    """A libcuda with GPUs of these compute capabilities."""

    def __init__(self, *capabilities: int, status: int = 0) -> None:
        self.capabilities, self.status = capabilities, status

    def cuInit(self, flags: int) -> int:
        return self.status

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self.capabilities)
        return 0

    def cuDeviceGet(self, handle: Any, number: int) -> int:
        handle._obj.value = 40 + number
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, handle: Any) -> int:
        capability = self.capabilities[handle.value - 40]
        value._obj.value = {75: capability // 10, 76: capability % 10}[attribute]
        return 0


SetUp = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[SetUp]:
    """Set what a machine has: a driver, or None; the packages that are installed; whether torch has CUDA."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def set_up(driver: Driver | None, packages: tuple[str, ...] = device.PACKAGES, *, cuda: bool = True) -> None:
        def load(name: str) -> Driver:
            assert name == "libcuda.so.1"
            if driver is None:
                raise OSError(name)
            return driver

        device.architectures.cache_clear()
        monkeypatch.setattr(device, "ctypes", SimpleNamespace(CDLL=load, c_int=ctypes.c_int, byref=ctypes.byref))
        monkeypatch.setattr(device, "find_spec", lambda name: name if name in packages else None)
        monkeypatch.setattr(device, "_torch_has_cuda", lambda: cuda)

    yield set_up
    device.architectures.cache_clear()


def chosen(**options: Any) -> Any:
    """The numbers that an engine of the demo model gets."""
    why_no_gpu, num_engines, number = (options.pop(name, 0) for name in ("why_no_gpu", "num_engines", "number"))
    model = load_model_config(resolve_model("demo"))
    config = EngineConfig.from_options(**options)
    return config.resolve(model, num_engines or 1, number=number, why_no_gpu=why_no_gpu or "")


@pytest.mark.parametrize(
    ("set_up", "message"),
    [
        ((None,), "this machine has no NVIDIA driver"),
        ((Driver(90, status=100),), "the NVIDIA driver finds no GPU"),
        ((Driver(),), "there is no GPU 0: the NVIDIA driver shows 0"),
        ((Driver(75),), "compute capability 7.5; 8.0 or more is needed"),
        ((Driver(90), ("torch",)), "triton is not installed"),
        ((Driver(90), ("triton",)), "torch is not installed"),
    ],
)
def test_what_is_missing(set_up: tuple[Any, ...], message: str, machine: SetUp) -> None:
    """Guards against a crash where a line should be, and against `auto` choosing what cannot work."""
    machine(*set_up)
    assert (chosen().numerics.kernels == "triton", chosen().numerics.device) == (False, "cpu")
    for options in ({"kernels": "triton"}, {"device": "cuda"}):
        with pytest.raises(InvalidRequestError, match=message) as caught:
            chosen(**options)
        assert caught.value.param in options


def test_a_torch_without_cuda(machine: SetUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against taking a GPU for the torch of a CPU, which pip installs where it is asked to."""
    machine(Driver(90), cuda=False)
    assert chosen().numerics.device == "cpu"
    with pytest.raises(InvalidRequestError, match="a build without CUDA"):
        chosen(device="cuda:0")
    monkeypatch.undo()
    for text, expected in (("cuda: Optional[str] = None", False), ("cuda: Optional[str] = '13.0'", True)):
        (tmp_path / "version.py").write_text(f"__version__ = '2.11.0'\n{text}\nhip: Optional[str] = None\n")
        monkeypatch.setattr(device, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
        assert device._torch_has_cuda() == expected


def test_what_is_chosen(machine: SetUp) -> None:
    """Guards against two engines on one GPU, and against the CPU's blocks and limits on a GPU."""
    machine(Driver(80, 90))
    config = chosen()
    assert (config.numerics.kernels, config.numerics.device, config.numerics.threads) == ("triton", "cuda:0", 1)
    assert (config.cache.block_size, config.scheduler.max_num_seqs) == (128, 256)
    assert [chosen(num_engines=2, number=number).numerics.device for number in range(2)] == ["cuda:0", "cuda:1"]
    assert chosen(device="cuda:1").numerics.device == "cuda:1"
    assert chosen(kernels="cpu").numerics.device == "cpu"
    assert chosen(device="cpu").numerics.kernels != "triton"
    assert chosen(why_no_gpu="its heads are too wide").numerics.device == "cpu"
    assert (chosen(kernels="cpu").cache.block_size, chosen(kernels="cpu").scheduler.max_num_seqs) == (16, 32)
    for options, message in (
        ({"device": "cuda", "why_no_gpu": "its heads are too wide"}, "cannot be used: its heads are too wide"),
        ({"device": "cuda", "num_engines": 3, "number": 2}, "there is no GPU 2: the NVIDIA driver shows 2"),
        ({"device": "cuda:1", "num_engines": 2}, "each of 2 engines has GPUs of its own"),
        ({"kernels": "triton", "device": "cpu"}, "compute on the GPU"),
        ({"kernels": "triton", "block_size": 16}, "it must be a multiple of 128"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            chosen(**options)


def test_ranks_have_a_gpu_each(machine: SetUp) -> None:
    """Guards against two ranks on one GPU, ranks whose bits differ, and GPUs taken for ranks without being asked to."""
    machine(Driver(80, 90, 90, 90))
    two = {"tensor_parallel_size": 2}
    assert chosen(**two).numerics.device == "cpu"
    config = chosen(**two, device="cuda", num_engines=2, number=1)
    assert [device.of_rank(config.numerics.device, rank) for rank in range(2)] == ["cuda:2", "cuda:3"]
    assert device.name_of("cuda:2", 2) == "triton.sm90.leaves8"
    assert chosen(**two, device="cuda:1").numerics.device == "cuda:1"
    for options, message in (
        ({"device": "cuda"}, "capabilities 8.0 and 9.0, and only equal ones share a model"),
        ({"device": "cuda:3"}, "there is no GPU 4"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            chosen(**two, **options)


def test_the_command(tmp_path: Path) -> None:
    """Guards against seconds of imports, or a traceback, before the line that says what is missing."""
    hidden = "import sys\nsys.modules.update(torch=None, transformers=None, triton=None)\n"
    (tmp_path / "sitecustomize.py").write_text(hidden)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "TRITON_INTERPRET": ""}
    words = [sys.executable, "-m", "penstock", "serve", "demo", "--device", "cuda", "--port", "0"]
    found = subprocess.run(words, env=env, capture_output=True, text=True)
    assert found.returncode == 2
    lines = found.stderr.strip().splitlines()
    assert len(lines) == 1, found.stderr
    assert "device: 'cuda' cannot be used: " in lines[0]
