"""The parameter table: one truth for names, shapes and axes. (families/test_tables.py holds every family's against its
model and Transformers.)"""

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import ModelLoadError
from penstock.models.config_json import load_model_config
from penstock.spec.param_table import ParamTable, leaf_bounds
from tests.hf_models import make_llama, make_qwen3

LINE = "model.layers.*.a.weight: {shape: [hidden, hidden]}\n"


def test_planner_reads_the_table_without_torch(tmp_path: Path) -> None:
    """Guards against an import of torch on the planner's way to the sizes of a model."""
    _, directory = make_qwen3(tmp_path)
    program = f"""
import sys
sys.modules["torch"] = None
from penstock.models.config_json import load_model_config
from penstock.models.registry import find_model
from penstock.weights.safetensors import Checkpoint, fingerprint
from penstock_lab.planner.planned import num_elements
config = load_model_config({str(directory)!r})
table = find_model(config.architecture).read_table()
print(num_elements(table.parameters(config).values()))
from pathlib import Path
Checkpoint(Path({str(directory)!r}))
fingerprint(Path({str(directory)!r}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("a.weight: {shape: [hidden], shrad: 0}", "shrad"),
        ("a.weight: {shape: [hidden], shard: 1}", "shard"),
        ("a.weight: {shape: [hidden], shard: true}", "shard"),
        ("a.weight: {shape: [huge]}", "shape"),
        ("a.weight: {}", "shape"),
        ("a.weight:", "shape"),
        ("a.weight: {shape: [[q, kv], [q, kv]], from: [b, c]}", "shape"),
        ("a.weight: {shape: [[q, kv, kv], hidden], from: [b, c]}", "from"),
        ("a.weight: {shape: [hidden], from: b}", "from"),
        ("a.weight: {shape: [hidden], from: {names: [b], sorted: true}}", "from"),
        ("a.weight: {shape: [hidden], from: {names: [b], order: rows}}", "from"),
        ("a.weight: {shape: [hidden], from: {names: [b], order: [rows]}}", "from"),  # cannot be a key
        ("a.weight: {shape: [hidden, hidden], from: {names: [b], order: kv_group}}", "from"),
        ("a.weight: {shape: [[q, kv, kv], hidden], from: {names: [b], order: rotary_pairs}}", "from"),
        ("a.weight: {shape: [hidden, q], from: {names: [b], order: rotary_pairs}}", "from"),
        ("a.weight: {shape: [hidden, [q, kv, kv]], from: {names: [b], order: kv_group}}", "from"),
        ("a.weight: {shape: [hidden], from: {names: [b], transposed: true}}", "transposed for a matrix"),
        ("a.weight: {shape: [hidden], or: [{names: [b], stacked: true}]}", "stacked for a parameter of an expert"),
        ("a.weight: {shape: [q, head], from: {names: [b], numbered: true}}", "numbered for a matrix with joined rows"),
        ("a.weight: {shape: [hidden], quant: int3}", "quant"),
        ("a.weight: {shape: [hidden], unit: head}", "unit"),
        ("a.weight: {shape: [hidden], leaves: 3}", "leaves"),
        ("a.weight: {shape: [hidden], when: sunny}", "when"),
        ("a.weight: {shape: [hidden], tied_to: 3}", "tied_to"),
        ("a.weight: {shape: [hidden]}\na.weight: {shape: [vocab]}", "duplicate key 'a.weight'"),
        ("ignore: a", "ignore"),
        ("- a", "map"),
        ("a: [", "YAML"),
    ],
)
def test_mistakes_in_a_table_are_named(text: str, named: str) -> None:
    """Guards against a misspelt field that is accepted and ignored."""
    with pytest.raises(ModelLoadError, match=named):
        ParamTable.from_text(text, "mine.yaml")


def test_a_table_may_be_like_another(tmp_path: Path) -> None:
    """Guards against fields that an entry of the same name loses, and against one that replaces more than it has."""
    (tmp_path / "base.yaml").write_text(
        "a.weight: {shape: [hidden], shard: 0}\nb.weight: {shape: [vocab]}\nprefix: 'a.'"
    )
    (tmp_path / "own.yaml").write_text("like: base.yaml\na.weight: {from: [c]}\nd.weight: {shape: [hidden]}")
    whole = "a.weight: {shape: [hidden], shard: 0, from: [c]}\nb.weight: {shape: [vocab]}\nd.weight: {shape: [hidden]}"
    expected = ParamTable.from_text(whole + "\nprefix: 'a.'", "own.yaml")
    assert ParamTable.from_file(tmp_path / "own.yaml") == expected
    (tmp_path / "own.yaml").write_text("like: nothing.yaml")
    with pytest.raises(ModelLoadError, match=r"nothing\.yaml"):
        ParamTable.from_file(tmp_path / "own.yaml")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (LINE + "model.layers.*.b.weight: {shape: [hidden], from: [a]}", "two parameters"),
        (LINE + "head.weight: {shape: [hidden], tied_to: nothing}", "nothing"),
    ],
)
def test_contradictions_in_a_table_are_named(text: str, named: str, tmp_path: Path) -> None:
    """Guards against two parameters that would both take one tensor, and against a tie to nowhere."""
    _, directory = make_llama(tmp_path, tie_word_embeddings=True)
    with pytest.raises(ModelLoadError, match=named):
        ParamTable.from_text(text, "mine.yaml").parameters(load_model_config(directory))


@pytest.mark.parametrize(
    ("k", "unit"), [(5632, 1), (8, 1), (5, 1), (1, 1), (14336, 1), (4864, 1), (2048, 256), (896, 448), (4096, 32)]
)
def test_leaves_end_where_ranks_end(k: int, unit: int) -> None:
    """Guards against two ranks that would each need half a leaf, and so against bits that depend on their number.
    Leaves cover the axis without gap or overlap, also where K does not divide by 8."""
    bounds = leaf_bounds(k, 8, unit)
    assert [index for low, high in bounds for index in range(low, high)] == list(range(k))
    assert all(low % unit == high % unit == 0 for low, high in bounds)
    assert max(high - low for low, high in bounds) - min(high - low for low, high in bounds) <= unit
    for ranks in (1, 2, 4, 8):
        of_ranks = leaf_bounds(k, ranks, unit)
        per_rank = 8 // ranks
        for rank, (low, high) in enumerate(of_ranks):
            own = bounds[rank * per_rank : (rank + 1) * per_rank]
            assert (low, high) == (own[0][0], own[-1][1])


def test_leaf_bounds_in_numbers() -> None:
    """Guards against another rounding, which would change bits of every model whose K does not divide evenly."""
    assert leaf_bounds(10, 4) == [(0, 2), (2, 5), (5, 7), (7, 10)]
    assert leaf_bounds(12, 8, 4) == [(0, 0), (0, 0), (0, 4), (4, 4), (4, 4), (4, 8), (8, 8), (8, 12)]
    assert leaf_bounds(7, 1) == [(0, 7)]
    with pytest.raises(ValueError, match="units of 4"):
        leaf_bounds(10, 8, 4)


def test_shard_minus_one_is_replicated() -> None:
    """Guards against two spellings of one meaning."""
    rows = ParamTable.from_text("a.weight: {shape: [hidden], shard: -1}\nb.weight: {shape: [hidden]}", "mine.yaml").rows
    assert [row.shard for row in rows] == [None, None]


def test_a_name_that_means_something_else_is_not_also_the_parameter_whole() -> None:
    """Guards against a transposed square matrix that would be read either way."""
    text = "h.*.a.weight: {shape: [hidden, hidden], from: {names: [h.*.a.weight], transposed: true}}"
    assert [held.transposed for held in ParamTable.from_text(text, "mine.yaml").rows[0].held] == [True]
    plain = ParamTable.from_text("h.*.a.weight: {shape: [hidden, hidden], from: [b]}", "mine.yaml").rows[0]
    assert [held.names for held in plain.held] == [("h.*.b.weight",), ("h.*.a.weight",)]


def test_what_is_ignored_may_lack_the_prefix() -> None:
    """Guards against an old checkpoint refused for a mask that it stores without the prefix."""
    table = ParamTable.from_text("prefix: top.\nignore: [top.h.*.mask]", "mine.yaml")
    assert table.ignores("top.h.11.mask")
    assert table.ignores("h.11.mask")
    assert not table.ignores("p.h.11.mask")
