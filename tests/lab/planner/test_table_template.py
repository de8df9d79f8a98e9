"""`penstock table`: what a table would say of a model, from its config.json or the headers of its checkpoint."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import ModelLoadError
from penstock.models.registry import ARCHITECTURES, find_model
from penstock.spec.param_table import ParamTable
from penstock.weights.safetensors import INDEX, SINGLE
from penstock_lab.planner.table_template import guess_axis, row_fields, table_text
from tests.hf_models import TINY, make_llama
from tests.test_cli import called
from tests.weights.files import FILES

GOLDEN = Path(__file__).parent / "golden"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    **TINY,
}
# A model nobody knows: fused experts, a bias, numbers in the wrong order.
STRANGER = {
    "architectures": ["StrangeForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
}
TENSORS = {
    "decoder.embed.weight": ("BF16", [100, 64]),
    **{f"decoder.blocks.{layer}.attn.wq.weight": ("BF16", [64, 64]) for layer in (10, 2, 0)},
    **{f"decoder.blocks.{layer}.attn.wk.weight": ("BF16", [32, 64]) for layer in (10, 2, 0)},
    **{f"decoder.blocks.{layer}.attn.wk.bias": ("F32", [32]) for layer in (10, 2, 0)},
    **{f"decoder.blocks.{layer}.attn.wo.weight": ("BF16", [64, 64]) for layer in (10, 2, 0)},
    **{f"decoder.blocks.0.experts.{expert}.fc2.weight": ("BF16", [64, 96]) for expert in (0, 1)},
    "decoder.blocks.2.experts.0.fc2.weight": ("BF16", [64, 90]),
    "decoder.blocks.0.norm.weight": ("F32", [64]),
    "decoder.blocks.0.scale": ("F16", []),
    "decoder.mask": ("U8", [7]),
}


def write_headers(directory: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    """A checkpoint whose tensors are holes in the file: nobody can have read what a test did not write."""
    sizes, end, header = {"BF16": 2, "F16": 2, "F32": 4, "U8": 1}, 0, {}
    for name, (dtype, shape) in tensors.items():
        count = 1
        for size in shape:
            count *= size
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + count * sizes[dtype]]}
        end += count * sizes[dtype]
    text = json.dumps(header).encode()
    with (directory / SINGLE).open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + end)


def golden(name: str, text: str) -> None:
    """The text is what the file says; write the file anew to see what changes."""
    assert text == (GOLDEN / name).read_text(encoding="utf-8")


@pytest.mark.covers("J10")
@pytest.mark.parametrize("sharding", [False, True])
def test_a_known_architecture_needs_its_config_only(sharding: bool, tmp_path: Path) -> None:
    """Guards against a line that is lost or says another shape than the model has."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for place in (tmp_path, tmp_path / "config.json"):
        golden(f"llama{'-sharding' * sharding}.txt", table_text(place, sharding=sharding))


@pytest.mark.covers("J10")
@pytest.mark.parametrize("sharding", [False, True])
def test_a_template_is_made_of_headers(sharding: bool, tmp_path: Path) -> None:
    """Guards against layers out of order, experts taken for layers, a size under the wrong word, and a guess that
    passes for knowledge."""
    write_headers(tmp_path, TENSORS)
    (tmp_path / "config.json").write_text(json.dumps(STRANGER))
    golden(f"stranger{'-sharding' * sharding}.txt", table_text(tmp_path, sharding=sharding))


def test_a_template_has_to_be_filled_in(tmp_path: Path) -> None:
    """Guards against a template that loads as it is: the axis is asked for. Filled in it is a table."""
    write_headers(tmp_path, {name: item for name, item in TENSORS.items() if name != "decoder.blocks.0.scale"})
    text = table_text(tmp_path)
    assert "[100, 64]" in text  # no config.json, no words
    with pytest.raises(ModelLoadError, match=r"shard = '\?' is not allowed; it must be one of None, -1, 0"):
        ParamTable.from_text(text, "mine.yaml")
    rows = ParamTable.from_text(text.replace("shard: '?'", "shard: -1"), "mine.yaml").rows
    assert len(rows) == 8


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_every_table_is_written_as_it_is_read(architecture: str) -> None:
    """Guards against a field that the printed table leaves out or spells so that it means something else."""
    table = find_model(architecture).read_table()
    text = "\n".join(f"{row.pattern}: {{{', '.join(row_fields(row))}}}" for row in table.rows)
    again = ParamTable.from_text(text, "printed.yaml")
    assert again.rows == table.rows


@pytest.mark.parametrize(("name", "coding"), [("Q8_0", "Q8_0"), ("gptq", "GPTQ int4")])
def test_codes_have_the_name_of_their_format(name: str, coding: str, tmp_path: Path) -> None:
    """Guards against a GGUF file that is read as JSON, and codes that are said to be floats."""
    place, _ = next(file for file in FILES if file.name == name).make(tmp_path)
    assert f"model.layers.*.mlp.down_proj.weight:  # {coding} [" in table_text(place)


def test_an_index_without_its_files_is_no_checkpoint(tmp_path: Path) -> None:
    """Guards against a hub name of a known architecture that is refused, because its weights were not fetched."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    golden("llama.txt", table_text(tmp_path))


def test_what_cannot_be_told_is_an_error(tmp_path: Path) -> None:
    """Guards against an empty template."""
    (tmp_path / "config.json").write_text(json.dumps(STRANGER))
    with pytest.raises(ModelLoadError, match=r"StrangeForCausalLM is not known, and there is no checkpoint"):
        table_text(tmp_path)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(ModelLoadError, match="JSON"):
        table_text(tmp_path)


@pytest.mark.parametrize(
    ("name", "axes", "guess"),
    [
        ("h.*.attn.c_proj.weight", 2, 1),
        ("h.*.mlp.dense_4h_to_h.bias", 1, -1),
        ("layers.*.q_proj.bias", 1, 0),
        ("layers.*.q_norm.weight", 1, -1),
        ("model.embed_tokens.weight", 2, 0),
        ("a.scale", 0, -1),
    ],
)
def test_guesses(name: str, axes: int, guess: int) -> None:
    """Guards against a hint that is wrong for the usual names."""
    assert guess_axis(name, axes) == guess


@pytest.mark.covers("J10")
def test_the_command_reads_no_weights_and_needs_no_torch(tmp_path: Path) -> None:
    """Guards against a command that loads gigabytes to print a list."""
    _, made = make_llama(tmp_path)
    program = (
        "import sys; sys.modules['torch'] = None; from penstock.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    for words in ([str(made)], [str(made / "config.json"), "--sharding"], ["demo"]):
        command = [sys.executable, "-c", program, "table", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "model.layers.*.self_attn.qkv_proj.weight" in done.stdout
    done = called("table", str(tmp_path / "nothing"))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
