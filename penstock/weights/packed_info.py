"""What a directory of packed weights holds, and which options fit it. No torch.

Packed weights are written by `penstock convert` (weights/convert.py) into one file (weights/packed_file.py) that a
model directory holds in place of a checkpoint.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.config import NumericsConfig
from penstock.errors import InvalidRequestError, ModelLoadError
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
    except (KeyError, ValueError, TypeError):
        raise ModelLoadError(f"{file}: its metadata are damaged") from None
    if info.dtype not in DTYPES:
        raise ModelLoadError(f"{file}: its metadata are damaged")
    return info


def fit(numerics: NumericsConfig, directory: Path) -> tuple[NumericsConfig, dict[str, str]]:
    """Options that were left open become what a packed directory holds, and why; others pass as they are.

    The scheme may be another one if it stores weights alike: int8 weights serve int8, int8-x2 and int8-x3.

    Raises:
        InvalidRequestError: an option asks for something else than the directory holds.
    """
    file = find_packed(directory) if numerics.load_format == "auto" else None
    if file is None:
        return numerics, {}
    info = read_info(file)
    if numerics.kernels not in ("auto", "cpu"):
        raise unfit("kernels", numerics.kernels, info)
    if numerics.dtype not in ("auto", info.dtype):
        raise unfit("dtype", numerics.dtype, info)
    asked = numerics.quantization or info.quantization
    group_size = numerics.quantization_group_size
    scheme = Scheme.parse(asked, group_size or (info.group_size if (asked or "").startswith("int4") else None))
    if not stored_alike(scheme, info.scheme):
        same_bits = scheme is not None and info.scheme is not None and scheme.weight_bits == info.scheme.weight_bits
        name = "quantization_group_size" if same_bits else "quantization"
        raise unfit(name, group_size if same_bits else asked, info)
    chosen: dict[str, Any] = {
        "dtype": info.dtype,
        "quantization": asked,
        "quantization_group_size": scheme and scheme.group_size,
    }
    reasons = {
        name: f"{value}: the directory holds packed weights ({info})"
        for name, value in chosen.items()
        if value is not None and getattr(numerics, name) in (None, "auto")
    }
    return replace(numerics, **chosen), reasons


def stored_alike(one: Scheme | None, other: Scheme | None) -> bool:
    if one is None or other is None:
        return one is other
    return (one.weight_bits, one.group_size) == (other.weight_bits, other.group_size)


def unfit(name: str, value: object, info: PackedInfo) -> InvalidRequestError:
    if name == "kernels":
        text = f"kernels: {value!r} cannot read packed weights; use cpu, or the checkpoint they were made of"
    else:
        text = f"{name}: {value!r} does not fit the directory's packed weights ({info}); convert the checkpoint for it"
    return InvalidRequestError(text, param=name)
