"""A checkpoint in every form: each loads, and the way back gives the same bits under the same names."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from penstock.config import EngineConfig
from penstock.errors import InvalidRequestError, ModelLoadError
from penstock.models.config_json import load_model_config
from penstock.models.registry import find_model
from penstock.spec.param_table import ParamTable
from penstock.weights import rows
from penstock.weights.safetensors import INDEX, SINGLE, Checkpoint, TensorEntry, num_bytes
from penstock.weights.sources import CheckpointSource, read_table
from penstock_lab.convert import rewrite
from penstock_lab.convert.pack import convert_model
from penstock_lab.convert.rewrite import Destination, rewrite_model
from tests.hf_models import hf_logprobs, make_llama, make_qwen2, random_ids
from tests.kernels import packed
from tests.paged import PagedModel
from tests.test_cli import called, penstock
from tests.weights.tables import replace_tables

LIMIT = 10**9

QKV = [["q_proj", "k_proj", "v_proj"]]
# Llama's parameters, held as other families hold theirs.
HELD: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {},
    "interleaved": {"self_attn.qkv_proj": {"from": {"names": ["query_key_value"], "order": "kv_group"}, "or": QKV}},
    "transposed": {
        "self_attn.qkv_proj": {"from": {"names": ["c_attn"], "transposed": True}, "or": QKV},
        "self_attn.o_proj": {"from": {"names": ["out_t"], "transposed": True}},
        "mlp.gate_up_proj": {
            "from": {"names": ["gate_t", "up_t"], "transposed": True},
            "or": [["gate_proj", "up_proj"]],
        },
        "mlp.down_proj": {"from": {"names": ["c_proj"], "transposed": True}},
    },
    "paired": {"self_attn.qkv_proj": {"from": {"names": ["wq", "wk", "wv"], "order": "rotary_pairs"}, "or": QKV}},
}


def held_as(kind: str) -> str:
    """Llama's table with some lines that say another layout."""
    entries = yaml.safe_load(find_model("LlamaForCausalLM").table_file.read_text())
    for name, fields in HELD[kind].items():
        for leaf in ("weight", "bias"):
            entry = entries[f"model.layers.*.{name}.{leaf}"]
            entry |= {key: value for key, value in fields.items() if leaf == "weight" or "from" in entry}
            if leaf == "bias" and "from" in entry:
                entry["from"] = {key: value for key, value in entry["from"].items() if key != "transposed"}
    return yaml.safe_dump(entries, sort_keys=False)


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A function that gives every architecture another table from now on."""

    def use(text: str) -> ParamTable:
        file = tmp_path / "table.yaml"
        file.write_text(text)
        replace_tables(monkeypatch, file)
        return ParamTable.from_file(file)

    return use


def bits(entry: TensorEntry) -> bytes:
    return entry.file.read_bytes()[entry.offset : entry.offset + num_bytes(entry.shape, entry.dtype)]


def same_checkpoint(one: Path, other: Path, table: ParamTable | None = None) -> None:
    """The same names, types and bits, but for tensors of the first without values of the model, which are left out."""
    first, second = Checkpoint(one), Checkpoint(other)
    table = table or read_table(load_model_config(one))
    kept = {name: entry for name, entry in first.entries.items() if not table.ignores(name)}
    assert kept.keys() == second.entries.keys()
    for name, entry in kept.items():
        assert (entry.shape, entry.dtype) == (second.entries[name].shape, second.entries[name].dtype)
        assert bits(entry) == bits(second.entries[name])


@pytest.mark.covers("F21", "F33", "J19")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", list(HELD))
def test_the_way_back_gives_the_same_bits(
    kind: str, dtype: torch.dtype, tied: bool, tables: Any, tmp_path: Path
) -> None:
    """Guards against a split that is not the inverse of the join, a matrix turned once too often, or a type that
    changes on the way; and against a form that does not load."""
    hf_model, made = make_qwen2(tmp_path, dtype=dtype, tie_word_embeddings=tied)
    source = tmp_path / "source"
    tables(held_as(kind))
    original = {"plain": made}
    if kind != "plain":  # the source in the layout of that table
        rewrite_model(str(made), source, "transformers", LIMIT)
        original[kind] = source
    start = original[kind]
    chain = [start]
    for index, form in enumerate(["merged", "separate", "transformers"]):
        chain.append(tmp_path / f"{index}-{form}")
        rewrite_model(str(chain[-2]), chain[-1], form, LIMIT)
    same_checkpoint(start, chain[-1])
    _, merged, separate, _ = (set(Checkpoint(directory).entries) for directory in chain)
    assert "model.layers.0.self_attn.qkv_proj.weight" in merged
    assert len([name for name in merged if "attn.q" in name]) == 4
    assert {f"model.layers.1.self_attn.{x}_proj.bias" for x in "qkv"} - separate == set() or kind == "paired"
    assert ("lm_head.weight" in separate) is not tied
    ids = random_ids(12)
    expected = PagedModel(made).step({0: ids})[0]
    if dtype == torch.float32:
        torch.testing.assert_close(expected, hf_logprobs(hf_model, ids), atol=1e-4, rtol=0)
    for directory in chain:
        assert torch.equal(PagedModel(directory).step({0: ids})[0], expected)


def test_shards_have_an_index_and_a_limit(tmp_path: Path) -> None:
    """Guards against a file beyond the limit, a tensor that the index does not name, and tensors that do not begin at
    a multiple of their own size."""
    _, made = make_llama(tmp_path)
    tensors = load_file(made / SINGLE)
    mixed = {name: value.bfloat16() if "norm" in name else value for name, value in tensors.items()}
    save_file(mixed, made / SINGLE)
    done = rewrite_model(str(made), tmp_path / "sharded", "transformers", 40_000)
    index = json.loads((tmp_path / "sharded" / INDEX).read_text())
    checkpoint = Checkpoint(tmp_path / "sharded")
    assert len(checkpoint.files) > 3
    assert index["metadata"]["total_size"] == done.num_bytes == sum(value.nbytes for value in mixed.values())
    assert index["weight_map"] == {name: entry.file.name for name, entry in checkpoint.entries.items()}
    sizes = [sum(value.nbytes for value in load_file(file).values()) for file in checkpoint.files]
    assert max(sizes) <= 40_000
    assert min(a + b for a, b in itertools.pairwise(sizes)) > 20_000  # files are filled
    same_checkpoint(made, tmp_path / "sharded")
    assert all(not entry.offset % (4 if entry.dtype == "F32" else 2) for entry in checkpoint.entries.values())
    alone = rewrite_model(str(made), tmp_path / "alone", "separate", 1)
    assert len(Checkpoint(tmp_path / "alone").files) == len(tensors)
    assert alone.num_bytes == done.num_bytes
    ids = random_ids(9)
    found = PagedModel(tmp_path / "alone").step({0: ids})[0]
    torch.testing.assert_close(found, PagedModel(made).step({0: ids})[0], atol=0, rtol=0)


def test_transformers_reads_what_is_written(tmp_path: Path) -> None:
    """Guards against files that only we can read: header, index, metadata and names are Transformers'."""
    hf_model, made = make_llama(tmp_path, tie_word_embeddings=True)
    rewrite_model(str(made), tmp_path / "merged", "merged", LIMIT)
    rewrite_model(str(tmp_path / "merged"), tmp_path / "back", "transformers", 40_000)
    again = type(hf_model).from_pretrained(tmp_path / "back")
    for name, value in hf_model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)


def test_what_goes_along_and_what_stays(tmp_path: Path) -> None:
    """Guards against a directory without its tokenizer, a tied head that appears or goes, and tensors left out without
    a word."""
    _, made = make_llama(tmp_path, tie_word_embeddings=True)
    tensors = load_file(made / SINGLE)
    extra = {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    for head in ({}, {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}):
        save_file(tensors | head | extra, made / SINGLE)
        (made / "tokenizer.json").write_text("{}")
        target = tmp_path / f"target-{len(head)}"
        done = rewrite_model(str(made), target, "merged", LIMIT)
        assert done.ignored == tuple(extra)
        assert ("lm_head.weight" in Checkpoint(target).entries) is bool(head)
        assert (target / "tokenizer.json").read_text() == "{}"
        assert (target / "config.json").read_text() == (made / "config.json").read_text()


def test_pieces_of_different_types_are_not_joined(tmp_path: Path) -> None:
    """Guards against a merge that rounds a piece, or cannot be undone; as they are they may stay."""
    _, made = make_llama(tmp_path)
    tensors = load_file(made / SINGLE)
    name = "model.layers.0.self_attn.k_proj.weight"
    save_file(tensors | {name: tensors[name].half()}, made / SINGLE)
    with pytest.raises(ModelLoadError, match=r"layers\.0.*qkv_proj.weight has pieces of different types \(F16, F32\)"):
        rewrite_model(str(made), tmp_path / "merged", "merged", LIMIT)
    assert not (tmp_path / "merged").exists()
    rewrite_model(str(made), tmp_path / "same", "transformers", LIMIT)
    same_checkpoint(made, tmp_path / "same")


@pytest.mark.covers("J19")
def test_names_that_are_missing_or_unknown_are_reported(tmp_path: Path) -> None:
    """Guards against a conversion that loses a tensor, or carries one along that nobody reads."""
    _, made = make_llama(tmp_path)
    tensors = load_file(made / SINGLE)
    tensors["model.layers.0.self_attn.query.weight"] = tensors.pop("model.layers.0.self_attn.q_proj.weight")
    save_file(tensors, made / SINGLE)
    with pytest.raises(ModelLoadError, match=r"missing: .*q_proj.*query.weight meant.*unknown: .*query"):
        rewrite_model(str(made), tmp_path / "merged", "merged", LIMIT)
    assert not (tmp_path / "merged").exists()


@pytest.mark.skipif(not packed.levels(), reason="no native library")
def test_packed_weights_cannot_be_turned_back(tmp_path: Path) -> None:
    """Guards against a checkpoint of rounded weights under the name of the original."""
    _, made = make_llama(tmp_path)
    for options, reason in (({}, "rounded to float32"), ({"quantization": "int8"}, "quantised to int8")):
        target = tmp_path / f"packed-{len(options)}"
        convert_model(EngineConfig.from_options(model=str(made), **options), target)
        with pytest.raises(InvalidRequestError, match=reason):
            rewrite_model(str(target), tmp_path / "back", "transformers", LIMIT)


def test_the_command(tmp_path: Path) -> None:
    """Guards against a form that cannot be asked for, and options that would be accepted and ignored."""
    _, made = make_llama(tmp_path)
    done = penstock("convert", str(made), str(tmp_path / "merged"), "--to", "merged", "--max-shard-size", "40kB")
    assert done.returncode == 0, done.stderr
    assert "MiB of weights, written in" in done.stderr
    assert (tmp_path / "merged" / INDEX).exists()
    for words, said in (
        (["--to", "fused"], "--to: 'fused' is not allowed; it must be one of packed, transformers, merged, separate"),
        (["--to", "merged", "--quantization", "int8"], "--quantization: not allowed with --to merged, which keeps"),
        (["--max-shard-size", "5GB"], "--max-shard-size: not allowed with --to packed"),
        (["--to", "merged", "--max-shard-size", "0"], "--max-shard-size: 0 is not allowed"),
    ):
        done = called("convert", str(made), str(tmp_path / "other"), *words)
        assert done.returncode == 2
        assert said in done.stderr


def test_little_of_the_model_is_held_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a conversion that needs the memory of the whole model: rows are read when they are written, in
    pieces."""
    _, made = make_llama(tmp_path)
    monkeypatch.setattr("penstock_lab.convert.rewrite.PIECE_BYTES", 1000)
    monkeypatch.setattr(rows, "PIECE_BYTES", 1000)
    held: list[int] = []
    write = rewrite.write_checkpoint

    def noting(directory: Any, tensors: Any, *rest: Any) -> int:
        for tensor in tensors:
            rows = tensor.parts[0]()
            held.append(rows.read(0, 1).nbytes)
        return write(directory, tensors, *rest)

    monkeypatch.setattr(rewrite, "write_checkpoint", noting)
    rewrite_model(str(made), tmp_path / "merged", "merged", LIMIT)
    rewrite_model(str(tmp_path / "merged"), tmp_path / "back", "transformers", LIMIT)
    same_checkpoint(made, tmp_path / "back")
    assert max(held) <= 4 * 80


EXPERTS = """
layers.*.experts.*.gate_up_proj.weight:
  {shape: [[expert_intermediate, expert_intermediate], hidden], or: [[w1, w3]],
   from: {names: [layers.*.experts.gate_up], stacked: true}}
layers.*.experts.*.down_proj.weight:
  {shape: [hidden, expert_intermediate], from: {names: [layers.*.experts.down], stacked: true, transposed: true},
   or: [[w2]]}
layers.*.router.weight: {shape: [experts, hidden]}
"""


def test_experts_stacked_and_apart(tmp_path: Path) -> None:
    """Guards against one expert's weights under the number of another, and against all experts read for each."""
    _, made = make_llama(tmp_path)
    config = replace(load_model_config(made), num_experts=3, moe_intermediate_size=10)
    table = ParamTable.from_text(EXPERTS, "experts.yaml")
    parameters = table.parameters(config)
    gate_up, down = torch.randn(2, 3, 20, 48).bfloat16(), torch.randn(2, 3, 10, 48).bfloat16()
    tensors = {f"layers.{layer}.router.weight": torch.randn(3, 48) for layer in range(2)}
    for layer in range(2):
        tensors[f"layers.{layer}.experts.gate_up"] = gate_up[layer].clone()
        tensors[f"layers.{layer}.experts.down"] = down[layer].clone()
    directory = tmp_path / "stacked"
    directory.mkdir()
    save_file(tensors, directory / SINGLE)

    def written(source: Path, form: str) -> Path:
        checkpoint = CheckpointSource(Checkpoint(source), table, parameters)
        target = source.parent / f"{source.name}-{form}"
        with Destination(target) as destination:
            rewrite.write_checkpoint(destination, rewrite.outgoing(checkpoint, form), 2000, lambda done, total: None)
        return target

    separate = written(directory, "separate")
    merged = written(separate, "merged")
    same_checkpoint(directory, written(merged, "transformers"), table)
    same_checkpoint(directory, written(separate, "transformers"), table)
    apart = {name: value for file in Checkpoint(separate).files for name, value in load_file(file).items()}
    whole = {name: value for file in Checkpoint(merged).files for name, value in load_file(file).items()}
    for layer, expert in itertools.product(range(2), range(3)):
        own = f"layers.{layer}.experts.{expert}"
        assert torch.equal(apart[f"{own}.w1.weight"], gate_up[layer, expert, :10])
        assert torch.equal(apart[f"{own}.w3.weight"], gate_up[layer, expert, 10:])
        assert torch.equal(apart[f"{own}.w2.weight"], down[layer, expert].t())
        assert torch.equal(whole[f"{own}.gate_up_proj.weight"], gate_up[layer, expert])
    mixed = {name: value for name, value in (apart | tensors).items() if "layers.1" in name or "experts.down" in name}
    save_file(mixed, directory / SINGLE)
    said = r"missing: layers\.0\.experts\.gate_up.*unknown: layers\.1\.experts\.0\.w"
    with pytest.raises(ModelLoadError, match=said):
        CheckpointSource(Checkpoint(directory), table, parameters)
