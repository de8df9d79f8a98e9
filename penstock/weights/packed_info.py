"""What a directory of packed weights holds, and which options fit it. No torch.

Packed weights are written by `penstock convert` (weights/convert.py) into one file (weights/packed_file.py) that a
model directory holds in place of a checkpoint.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.config import NumericsConfig
from penstock.errors import InvalidRequestError, ModelLoadError
from penstock.kernels.cpu.library import best_level, why_missing
from penstock.quant.scheme import Scheme
from penstock.weights.safetensors import PACKED, read_metadata

FORMAT = "penstock-packed"
FORMAT_VERSION = "1"  # goes up with every change of native/abi.h's layout
DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class PackedInfo:
    """What a packed directory says of itself.

    Attributes:
        dtype: of what was not quantised, and of the activations.
        quantization, group_size: as the engine's options spell them.
    """

    dtype: str
    quantization: str | None
    group_size: int | None

    @property
    def scheme(self) -> Scheme | None:
        return Scheme.parse(self.quantization, self.group_size)

    def __str__(self) -> str:
        if self.quantization is None:
            return f"{self.dtype}, not quantised"
        return f"{self.dtype}, {self.quantization}" + (f" in groups of {self.group_size}" if self.group_size else "")

    def metadata(self) -> dict[str, str]:
        values = {"dtype": self.dtype, "quantization": self.quantization, "group_size": self.group_size}
        known = {name: str(value) for name, value in values.items() if value is not None}
        return {"format": FORMAT, "version": FORMAT_VERSION} | known


def find_packed(directory: Path) -> Path | None:
    """The file of packed weights, if a directory holds one."""
    file = directory / PACKED
    return file if file.is_file() else None


def read_info(file: Path) -> PackedInfo:
    """What a file of packed weights holds.

    Raises:
        ModelLoadError: it is damaged, or was written by another version.
    """
    metadata = read_metadata(file)
    if metadata.get("format") != FORMAT:
        raise ModelLoadError(f"{file}: holds no packed weights")
    if metadata.get("version") != FORMAT_VERSION:
        raise ModelLoadError(
            f"{file}: its format is version {metadata.get('version')!s:.20}, and this is version {FORMAT_VERSION}; "
            f"convert the checkpoint once more"
        )
    size = metadata.get("group_size")
    try:
        info = PackedInfo(metadata["dtype"], metadata.get("quantization"), None if size is None else int(size))
        Scheme.parse(info.quantization, info.group_size)
    except (KeyError, ValueError, TypeError, OverflowError):
        raise ModelLoadError(f"{file}: its metadata are damaged") from None
    if info.dtype not in DTYPES:
        raise ModelLoadError(f"{file}: its metadata are damaged")
    return info


def fit(numerics: NumericsConfig, directory: Path) -> tuple[NumericsConfig, dict[str, str]]:
    """Options that were left open become what a packed directory holds, and why; others pass as they are.

    Raises:
        InvalidRequestError: an option asks for something else than the directory holds, or nothing here can read it.
    """
    file = find_packed(directory) if numerics.load_format == "auto" else None
    if file is None:
        return numerics, {}
    if best_level() is None:
        raise InvalidRequestError(
            f"kernels: the directory's packed weights need the native kernels; {why_missing()}", param="kernels"
        )
    info = read_info(file)
    scheme = _asked_scheme(numerics, info)
    kernels = "cpu" if numerics.kernels == "auto" else numerics.kernels
    dtype = info.dtype if numerics.dtype == "auto" else numerics.dtype
    check_fit(info, kernels, dtype, scheme)
    chosen: dict[str, Any] = {
        "dtype": dtype,
        "quantization": scheme and scheme.name,
        "quantization_group_size": scheme and scheme.group_size,
    }
    reasons = {
        name: f"{value}: the directory holds packed weights ({info})"
        for name, value in chosen.items()
        if value is not None and getattr(numerics, name) in (None, "auto")
    }
    return replace(numerics, **chosen), reasons


def check_fit(info: PackedInfo, kernels: str, dtype: str, scheme: Scheme | None) -> None:
    """Whether packed weights can be computed with like this.

    The scheme may be another one if it stores weights alike: int8 weights serve int8, int8-x2 and int8-x3.

    Raises:
        InvalidRequestError: they cannot; it names the option.
    """
    if kernels != "cpu":
        raise InvalidRequestError(
            f"kernels: {kernels!r} cannot read packed weights; use cpu, or the checkpoint they were made of",
            param="kernels",
        )
    if dtype != info.dtype:
        raise _unfit("dtype", dtype, info)
    held = info.scheme
    if (scheme and scheme.weight_bits) != (held and held.weight_bits):
        raise _unfit("quantization", scheme and scheme.name, info)
    if (scheme and scheme.group_size) != (held and held.group_size):
        raise _unfit("quantization_group_size", scheme and scheme.group_size, info)


def _asked_scheme(numerics: NumericsConfig, info: PackedInfo) -> Scheme | None:
    """What the options and, where they are open, the directory say together."""
    name, group_size = numerics.quantization or info.quantization, numerics.quantization_group_size
    if (name or "").startswith("int4"):
        return Scheme.parse(name, group_size or info.group_size)
    if group_size is not None:
        raise _unfit("quantization_group_size", group_size, info)
    return Scheme.parse(name)


def _unfit(name: str, value: object, info: PackedInfo) -> InvalidRequestError:
    text = f"{name}: {value!r} does not fit the directory's packed weights ({info}); convert the checkpoint for it"
    return InvalidRequestError(text, param=name)
