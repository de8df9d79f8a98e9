"""Unpacking of GGUF blocks, compared with the package `gguf` of the format's authors."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from penstock.kernels.backends import load_ops
from penstock.kernels.coding import CodedRows
from penstock.kernels.ops import Packing, TensorRows
from penstock.kernels.tensors import FLOAT32
from penstock.spec.gguf import BLOCKS
from penstock.weights.gguf import FORMATS, coded_rows
from penstock.weights.rows import cut
from penstock.weights.safetensors import TensorEntry
from tests.kernels import packed
from tests.weights.gguf_files import dequantised, random_blocks

ROWS, K = 5, 512


@pytest.mark.parametrize("name", list(FORMATS))
def test_values_equal_the_reference(name: str, tmp_path: Path) -> None:
    """Guards against a nibble, a high bit or a step that is read from another place in the block."""
    blocks = random_blocks(name, ROWS, K)
    file = tmp_path / "blocks"
    file.write_bytes(b"skipped" + blocks.tobytes())
    rows = coded_rows("weight", TensorEntry(file, (ROWS, K), name, 7))
    expected = dequantised(blocks, name)
    # The reference multiplies scale and step first, so that a product may be rounded differently.
    np.testing.assert_allclose(rows.read(0, ROWS), expected, rtol=3e-6, atol=np.abs(expected).max() * 3e-7)
    np.testing.assert_array_equal(rows.read(2, 4), rows.read(0, ROWS)[2:4])


@pytest.mark.parametrize("name", list(FORMATS))
def test_parts_have_the_shapes_and_types_of_the_coding(name: str, tmp_path: Path) -> None:
    """Guards against a part that the kernels would read in another type."""
    file = tmp_path / "blocks"
    file.write_bytes(random_blocks(name, ROWS, K).tobytes())
    rows = coded_rows("weight", TensorEntry(file, (ROWS, K), name, 0))
    parts = {part: (array.shape, str(array.dtype)) for part, array in rows.read_parts(0, ROWS).items()}
    assert parts == rows.coding.parts((ROWS, K))
    assert rows.read_parts(0, ROWS)["codes"].max() < 2**rows.coding.bits


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K"])
def test_columns_of_whole_blocks(name: str, tmp_path: Path) -> None:
    """Guards against ranks that cut the bytes of blocks as if they were columns."""
    file = tmp_path / "blocks"
    file.write_bytes(random_blocks(name, ROWS, K).tobytes())
    rows = coded_rows("weight", TensorEntry(file, (ROWS, K), name, 0))
    part = cut(rows, 256, 512, axis=1)
    assert isinstance(part, CodedRows)
    np.testing.assert_array_equal(part.read(1, 4), rows.read(1, 4)[:, 256:512])


@pytest.mark.skipif(not packed.levels(), reason="needs the native library")
@pytest.mark.parametrize("ends", [(), (256, 512)])
@pytest.mark.parametrize("name", list(FORMATS))
def test_blocks_are_packed_as_their_parts(name: str, ends: tuple[int, ...], tmp_path: Path) -> None:
    """Guards against native code that reads a block otherwise than its specification, BlockForm.unpack."""
    file = tmp_path / "blocks"
    file.write_bytes(random_blocks(name, ROWS, K).tobytes())
    rows = coded_rows("weight", TensorEntry(file, (ROWS, K), name, 0))
    parts = {part: TensorRows(array) for part, array in rows.read_parts(0, ROWS).items()}
    packing = Packing(ends, slices=2 if rows.coding.is_integer else 0, coding=rows.coding)
    ops = load_ops("cpu", FLOAT32, threads=2)
    found, expected = (ops.pack_linear(item, None, packing).state() for item in (rows, CodedRows(rows.coding, parts)))
    assert found.keys() == expected.keys()
    for array in expected:
        np.testing.assert_array_equal(found[array], expected[array])


def test_sizes_of_blocks_are_those_of_the_format() -> None:
    assert {name: gguf.GGML_QUANT_SIZES[GGMLQuantizationType[name]] for name in BLOCKS} == BLOCKS
