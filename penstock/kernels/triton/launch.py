"""Launching a kernel: on a device, in Triton's interpreter, or through the compiler alone.

Every kernel is launched by `launch`, with its sizes as arguments and its configuration as constants. Where it runs:
  - On the device that is torch's current one, compiled when it is first launched.
  - In the interpreter, on arrays of the CPU, if Triton's interpreter was on when the kernels were imported
    (TRITON_INTERPRET=1). The tests compare kernels with the reference there.
  - Within `compiling(architecture)`, not at all: it is compiled for that architecture, which needs neither a driver nor
    a GPU, and the result is kept for inspection. Tensors are then on torch's device "meta".

Between the kernels of one operation, values are in its scratch memory (`Scratch`). The next operation on the stream
begins when that one has ended, so it may use the same memory. Programs (programs.py) hold addresses of it: when it has
to grow, the old memory stays.

Multiply-adds are never contracted: a fused one is written out (tl.fma). So the compiler cannot choose other roundings.
"""

import contextlib
import json
import math
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

INTERPRETED = knobs.runtime.interpret
INTERPRETER = 0  # its number as an architecture
WARP = 32  # threads
ALIGNMENT = 256  # bytes, of scratch memory
INTERPRETER_PROCESSORS = 2  # so that a persistent kernel owns several tiles there, too


@dataclass
class Compiler:
    """Stands in for Triton's driver, so that it compiles for an architecture that is not there.

    Attributes:
        kernels: what was compiled, by Triton's handles; `asm` of each has its code in every language on the way.
    """

    architecture: int
    kernels: list[Any] = field(default_factory=list)

    def get_current_device(self) -> int:
        return self.architecture  # Triton keeps what it compiles for each device apart

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, WARP)


_compilers: list[Compiler] = []


@dataclass
class Compilations:
    """Counts the kernels that were compiled in this process; those in Triton's cache on the disk were not."""

    count: int = 0

    def __call__(self, *, cache_hit: bool, **what: Any) -> None:
        self.count += not cache_hit


compilations = Compilations()
knobs.compilation.listener = compilations


@contextlib.contextmanager
def compiling(architecture: int) -> Iterator[Compiler]:
    """Compile kernels for an architecture (90 is sm_90) instead of launching them."""
    compiler, before = Compiler(architecture), driver._active  # driver.active would look for a GPU
    driver.set_active(compiler)
    _compilers.append(compiler)
    try:
        yield compiler
    finally:
        _compilers.pop()
        driver._active = before


def architecture() -> int:
    """Return the compute capability that kernels run on, for example 90; 0 in the interpreter."""
    if _compilers:
        return _compilers[-1].architecture
    if INTERPRETED:
        return INTERPRETER
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def processors() -> int:
    """Return the number of multiprocessors, which is the number of programs of a persistent kernel."""
    if _compilers or INTERPRETED:
        return INTERPRETER_PROCESSORS
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int, stages: int = 1, **constants: Any) -> None:
    """Launch a kernel with a grid of programs. warps, stages: how it is compiled, which never changes a bit.

    A kernel that is damaged in Triton's cache on the disk is compiled again.
    """
    if INTERPRETED:
        kernel[grid](*arguments, **constants)
        return
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False, **constants}
    try:
        _launch(kernel, grid, arguments, options)
    except (json.JSONDecodeError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "kernel image" not in str(error):  # what CUDA says of a damaged binary
            raise
        print(f"penstock: {kernel.__name__} is damaged in {knobs.cache.dir}; it is compiled again", file=sys.stderr)
        for folder in {file.parent for file in Path(knobs.cache.dir).glob(f"*/*{kernel.__name__}.*")}:
            shutil.rmtree(folder, ignore_errors=True)
        kernel.device_caches.clear()
        _launch(kernel, grid, arguments, options)


def _launch(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    if _compilers:
        _compilers[-1].kernels.append(kernel.warmup(*arguments, grid=grid, **options))
    else:
        kernel[grid](*arguments, **options)


class Scratch(Protocol):
    """Memory between the kernels of one operation."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> Tensor:
        """Take memory that nothing else in this operation has."""


class _Anew:
    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)


ANEW: Scratch = _Anew()  # allocates


class FixedScratch:
    """One piece of memory of a device.

    Attributes:
        peak: the most bytes that an operation has taken so far.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.peak = device, 0
        self._used = 0
        self._pieces = [torch.empty(0, dtype=torch.uint8, device=device)]  # the last one is used

    def reserve(self, num_bytes: int) -> None:
        """Make room for so many bytes."""
        if num_bytes > len(self._pieces[-1]):
            self._pieces.append(torch.empty(num_bytes, dtype=torch.uint8, device=self.device))

    def begin(self) -> "FixedScratch":
        """Begin an operation, which may overwrite everything."""
        self._used = 0
        return self

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        start = self._used
        self._used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        self.peak = max(self.peak, self._used)
        self.reserve(self._used if self._used <= len(self._pieces[-1]) else 2 * self._used)
        return self._pieces[-1][start : start + num_bytes].view(dtype).view(shape)
