"""Scheme: how a quantised weight is stored, and by what it is multiplied. No torch.

    name        weights                                  activations
    int8        8 bits, one scale per output channel     one int8 row, one scale per token
    int8-x2     the same                                 two int8 slices: closer than bfloat16
    int8-x3     the same                                 three int8 slices: close to float32
    int4        4 bits, one bfloat16 scale per group     one int8 row
    int4-a16    the same                                 unquantised, in bfloat16

A group is a run of elements of K. Slices are the multi-step decomposition of Huawei's IncreFlashAttention operator: a
row is a sum of int8 rows, each of which holds the rounding error of the rows before it.
"""

from dataclasses import dataclass

DEFAULT_GROUP_SIZE = 128
GROUP_SIZES = (32, 64, 128)
SLICES = {"int8": 1, "int8-x2": 2, "int8-x3": 3, "int4": 1, "int4-a16": 0}


@dataclass(frozen=True, slots=True)
class Scheme:
    """One row of the table above.

    Attributes:
        weight_bits: 8 or 4.
        group_size: elements of K that share a scale; None: one scale per output channel.
        slices: int8 rows that represent one row of activations; 0 keeps them in bfloat16.
    """

    name: str
    weight_bits: int
    group_size: int | None
    slices: int

    @classmethod
    def parse(cls, quantization: str | None, group_size: int | None = None) -> "Scheme | None":
        """Parse an engine option; None without quantisation.

        Raises:
            ValueError: the scheme is unknown, or it does not allow groups of that size.
        """
        if quantization is not None and quantization not in SLICES:
            raise ValueError(f"quantisation {quantization!r} is not supported; supported are {', '.join(SLICES)}")
        if quantization is None or not quantization.startswith("int4"):
            if group_size is not None:
                raise ValueError("only int4 weights have groups")
            return None if quantization is None else cls(quantization, 8, None, SLICES[quantization])
        size = DEFAULT_GROUP_SIZE if group_size is None else group_size
        if size not in GROUP_SIZES:
            raise ValueError(f"group size {size} is not supported; supported are {', '.join(map(str, GROUP_SIZES))}")
        return cls(quantization, 4, size, SLICES[quantization])


def scheme_of(quant: bool | str, scheme: Scheme | None) -> Scheme | None:
    """Choose the scheme of one weight in a model that is quantised with `scheme`.

    quant: from the parameter table: whether the weight may be quantised, or "int8" if it must keep 8 bits. In that case
        its activations stay about as precise.
    """
    if scheme is None or not quant:
        return None
    if quant != "int8" or scheme.weight_bits >= 8:
        return scheme
    return Scheme.parse("int8" if scheme.slices else "int8-x2")
