"""The loader: what fits is loaded, what does not is named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from penstock.assembly import build_engine
from penstock.config import EngineConfig
from penstock.errors import ModelLoadError
from penstock.kernels.backends import load_ops
from penstock.kernels.reference import ReferenceOps
from penstock.kernels.scheme import Scheme
from penstock.kernels.tensors import as_torch
from penstock.layers.weights import HeadLayout
from penstock.models.config_json import load_model_config
from penstock.models.registry import find_model
from penstock.weights.loader import Place, load_model, open_stored
from penstock.weights.safetensors import SINGLE, Checkpoint, FileRows
from tests.hf_models import hf_logprobs, make_llama, make_qwen2, make_qwen3, random_ids
from tests.kernels.packed import levels
from tests.paged import PagedModel
from tests.weights.tables import replace_tables

Q = "model.layers.0.self_attn.q_proj.weight"


def load(directory: Path, free_memory: Any = None, **options: Any) -> Any:
    place = Place(free_memory)
    return load_model(directory, load_model_config(directory), ReferenceOps(torch.float32), place=place, **options)


def rewrite(directory: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Replace, add or (None) remove tensors of a checkpoint."""
    tensors = load_file(directory / SINGLE) | change
    save_file({name: value for name, value in tensors.items() if value is not None}, directory / SINGLE)


def test_sharded_checkpoints_of_transformers(tmp_path: Path) -> None:
    """Guards against q in one shard and k in the next: they are joined all the same."""
    hf_model, _ = make_qwen2(tmp_path)
    directory = tmp_path / "sharded"
    hf_model.save_pretrained(directory, max_shard_size="20KB")
    assert len(Checkpoint(directory).files) > 3
    ids = random_ids(20)
    torch.testing.assert_close(PagedModel(directory).step({0: ids})[0], hf_logprobs(hf_model, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({Q: None}, rf"missing: {Q}"),
        ({"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}, r"unknown: model\.layers\.0\.self_attn\.q_norm"),
        ({"model.layers.7.mlp.up_proj.weight": torch.ones(8)}, r"unknown: model\.layers\.7"),
        ({Q: None, Q.replace("q_proj", "query"): torch.ones(8)}, r"is .*query.weight meant"),
        ({Q: torch.ones(48, 47)}, rf"{Q} has the shape \[48, 47\]; the configuration requires \[48, 48\]"),
        ({"lm_head.weight": None}, "missing: lm_head"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, torch.Tensor | None], message: str, tmp_path: Path) -> None:
    """Guards against a model that is served with a random or a forgotten tensor."""
    _, directory = make_llama(tmp_path)
    rewrite(directory, change)
    with pytest.raises(ModelLoadError, match=message):
        load(directory)


def test_leftovers_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    """Guards against refusing Llama 2 files, which hold the rotary frequencies as tensors."""
    _, directory = make_llama(tmp_path)
    rewrite(directory, {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    load(directory)


def test_tied_heads_may_be_stored_but_not_differ(tmp_path: Path) -> None:
    """Guards against a checkpoint whose file says tied while its head was trained by itself."""
    _, directory = make_llama(tmp_path, tie_word_embeddings=True)
    embedding = load_file(directory / SINGLE)["model.embed_tokens.weight"]
    assert "lm_head.weight" not in load_file(directory / SINGLE)
    rewrite(directory, {"lm_head.weight": embedding.clone()})
    load(directory)
    rewrite(directory, {"lm_head.weight": embedding + 1})
    with pytest.raises(ModelLoadError, match="tie_word_embeddings"):
        load(directory)


@pytest.mark.parametrize("kernels", ["reference", *(["cpu"] if levels() else [])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_head_is_in_memory_once(kernels: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Guards against a second copy of the largest matrix of a small model, and against embeddings whose bits change
    when they are read out of the packed head. A quantised head, or one in pieces, leaves the table as it is."""
    _, directory = make_llama(tmp_path, tie_word_embeddings=True, vocab_size=80)
    config, ops = load_model_config(directory), load_ops(kernels, dtype)
    ids = torch.tensor([0, 79, 33, 5, 31, 32])
    shared: Any = load_model(directory, config, ops)
    assert not hasattr(shared.model.embed_tokens, "weight")
    for own in ({"head": HeadLayout(pieces=2)}, {"scheme": Scheme.parse("int8")}, {"scheme": Scheme.parse("int4", 32)}):
        model: Any = load_model(directory, config, ops, **own)
        table = model.model.embed_tokens.weight
        assert torch.equal(table, load_file(directory / SINGLE)["model.embed_tokens.weight"].to(dtype))
        assert torch.equal(shared.model.embed_tokens(ids), model.model.embed_tokens(ids))


@pytest.mark.parametrize("stored", [torch.float16, torch.float64])
def test_other_float_types_are_rounded_once(stored: torch.dtype, tmp_path: Path) -> None:
    """Guards against float16 files that keep float16's range or pass through a second rounding."""
    _, directory = make_qwen3(tmp_path)
    tensors = {name: value.to(stored) for name, value in load_file(directory / SINGLE).items()}
    save_file(tensors, directory / SINGLE)
    config = load_model_config(directory)
    model: Any = load_model(directory, config, ReferenceOps(torch.bfloat16))
    expected = tensors["model.layers.1.mlp.down_proj.weight"].bfloat16().float()
    assert torch.equal(model.model.layers[1].mlp.down_proj.packed[0]._weight, expected)
    assert torch.equal(model.model.embed_tokens.weight, tensors["model.embed_tokens.weight"].bfloat16())


def test_tensors_are_read_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a loader that holds the whole checkpoint: nothing is read before its layer takes it."""
    _, directory = make_llama(tmp_path)
    events: list[str] = []
    read, pack = FileRows.read, ReferenceOps.pack_linear

    def noting_read(self: FileRows, start: int, stop: int) -> torch.Tensor:
        events.append("r")
        return read(self, start, stop)

    def noting_pack(self: ReferenceOps, *args: Any, **options: Any) -> Any:
        packed = pack(self, *args, **options)
        events.append("p")
        return packed

    monkeypatch.setattr(FileRows, "read", noting_read)
    monkeypatch.setattr(ReferenceOps, "pack_linear", noting_pack)
    load(directory)
    assert max(len(run) for run in "".join(events).split("p")) <= 5  # q, k, v, the norms or the embedding before them


def test_weights_that_cannot_be_quantised_are_named(tmp_path: Path) -> None:
    """Guards against a damaged checkpoint whose NaN becomes a plausible integer, or a traceback."""
    _, directory = make_llama(tmp_path)
    up = "model.layers.1.mlp.up_proj.weight"
    weight = load_file(directory / SINGLE)[up]
    weight[-1, -1] = float("nan")
    rewrite(directory, {up: weight})
    load(directory)
    with pytest.raises(ModelLoadError, match=rf"{up}: a weight that is not finite"):
        load(directory, scheme=Scheme.parse("int8"))


def test_dummy_weights_need_only_a_config_and_are_always_the_same(tmp_path: Path) -> None:
    """Guards against dummy runs that cannot be compared, and against activations that vanish or explode: the logits
    of a deep dummy model are finite and differ. Another layer count leaves the other layers' weights as they are."""
    _, directory = make_qwen3(tmp_path, num_hidden_layers=12)
    config_text = (directory / "config.json").read_text()
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text(config_text)
    first, second = load(bare, load_format="dummy"), load(bare, load_format="dummy")
    (bare / "config.json").write_text(
        json.dumps(json.loads(config_text) | {"num_hidden_layers": 3, "layer_types": None})
    )
    shallow = load(bare, load_format="dummy")
    for layer in range(3):
        expected = first.model.layers[layer].mlp.gate_up_proj.packed[0]._weight
        assert torch.equal(second.model.layers[layer].mlp.gate_up_proj.packed[0]._weight, expected)
        assert torch.equal(shallow.model.layers[layer].mlp.gate_up_proj.packed[0]._weight, expected)
    assert not torch.equal(
        first.model.layers[0].mlp.gate_up_proj.packed[0]._weight,
        first.model.layers[1].mlp.gate_up_proj.packed[0]._weight,
    )
    (bare / "config.json").write_text(config_text)
    logprobs = PagedModel(bare, load_format="dummy").step({0: random_ids(40)})[0]
    assert torch.isfinite(logprobs).all()
    assert 0.3 < logprobs.std() < 3


@pytest.mark.parametrize(
    ("quantization", "coding"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, "int4"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}, "FP8_E4M3"),
    ],
)
def test_dummy_weights_are_coded_as_the_configuration_says(
    quantization: dict[str, Any], coding: str, tmp_path: Path
) -> None:
    """Guards against speed tests of a quantised model that read weights of twice or four times its size."""
    _, directory = make_qwen3(tmp_path, num_hidden_layers=6)
    bare = tmp_path / "bare"
    bare.mkdir()
    config = json.loads((directory / "config.json").read_text()) | {"quantization_config": quantization}
    (bare / "config.json").write_text(json.dumps(config))
    stored = open_stored(bare, load_model_config(bare), "dummy")
    assert [found.name for found in stored.codings] == [coding]
    first, second = (PagedModel(bare, load_format="dummy").step({0: random_ids(40)})[0] for _ in range(2))
    assert torch.equal(first, second)
    assert torch.isfinite(first).all()
    assert 0.3 < first.std() < 3


@pytest.mark.parametrize(
    ("change", "named"),
    [({"intermediate_size": 2**20, "num_hidden_layers": 4096}, "weights"), ({"head_dim": 2**16}, "rotary tables")],
)
def test_a_model_beyond_the_memory_is_refused(change: dict[str, int], named: str, tmp_path: Path) -> None:
    """Guards against torch's RuntimeError out of a config.json that asks for terabytes: nothing is allocated, and both
    numbers are named. The engine asks for what is really free."""
    _, directory = make_llama(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelLoadError, match=rf"{named} .*need .* MiB.*only 1\.0 MiB are free"):
        load(directory, load_format="dummy", free_memory=lambda: 2**20)
    (directory / "config.json").write_text(json.dumps(config | {"intermediate_size": 2**20, "hidden_size": 2**20}))
    with pytest.raises(ModelLoadError, match=r"weights need .* MiB.*only .* MiB are free"):
        build_engine(EngineConfig.from_options(model=str(directory), load_format="dummy"))


def test_memory_is_counted_to_the_byte(tmp_path: Path) -> None:
    """Guards against a tied head that is counted where the embedding reads its rows, or not counted where it is packed
    otherwise; and against rotary tables of 16 million positions, which nobody counts."""
    _, directory = make_llama(tmp_path, tie_word_embeddings=True)
    table, config = find_model("LlamaForCausalLM").read_table(), load_model_config(directory)
    everything = 4 * sum(item.num_elements for item in table.parameters(config).values())
    needed = everything - 4 * table.parameters(config)["lm_head.weight"].num_elements
    load(directory, load_format="dummy", max_model_len=16, free_memory=lambda: needed)
    pieces: dict[str, Any] = {"load_format": "dummy", "max_model_len": 16, "head": HeadLayout(pieces=2)}
    load(directory, **pieces, free_memory=lambda: everything)
    with pytest.raises(ModelLoadError, match="weights need"):
        load(directory, **pieces, free_memory=lambda: everything - 1)
    scheme = Scheme.parse("int4", 32)
    load(directory, load_format="dummy", scheme=scheme, max_model_len=16, free_memory=lambda: everything)
    with pytest.raises(ModelLoadError, match="weights need"):
        load(directory, load_format="dummy", max_model_len=16, free_memory=lambda: needed - 1)
    with pytest.raises(ModelLoadError, match="rotary tables"):
        load(directory, load_format="dummy", max_model_len=2**24, free_memory=lambda: 2**29 - 1)  # heads of 8


@pytest.mark.skipif(not levels(), reason="no native library")
def test_a_head_counts_as_the_int8_that_it_is(tmp_path: Path) -> None:
    """Guards against the head of an int4 model counted in 4 bits: what is counted is what is packed, to the byte where
    no panel has to be filled up."""
    _, directory = make_llama(tmp_path, vocab_size=256, hidden_size=512, intermediate_size=1024, num_attention_heads=8)
    config, ops = load_model_config(directory), load_ops("cpu", torch.bfloat16)
    for name, bits in (("int4", 4.25), ("int4-a16", 4.25), ("int8", 8)):
        scheme = Scheme.parse(name, 64 if name.startswith("int4") else None)
        model = load_model(directory, config, ops, scheme=scheme)
        scales = 4 * 256
        assert model.lm_head.num_bytes == model.lm_head.packed[0].num_bytes == 256 * 512 + scales
        layer = model.model.layers[0].mlp.gate_up_proj
        assert 8 * layer.num_bytes == 8 * layer.packed[0].num_bytes == bits * 2048 * 512 + 32 * 2048 * (bits == 8)


def test_rotary_tables_end_where_they_are_needed(tmp_path: Path) -> None:
    """Guards against 500 MB of tables for a context of a million tokens that nobody asked for."""
    _, directory = make_llama(tmp_path)
    assert load(directory).model.layers[0].self_attn.rotary.cos_sin.shape[0] == 512
    model = load(directory, max_model_len=100)
    assert model.model.layers[0].self_attn.rotary.cos_sin.shape[0] == 100
    assert model.model.layers[0].self_attn.rotary is model.model.layers[1].self_attn.rotary


def test_a_model_that_differs_from_its_table_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a parameter in a user's table that his model never takes."""
    _, directory = make_llama(tmp_path)
    table = tmp_path / "llama.yaml"
    original = find_model("LlamaForCausalLM")
    table.write_text(original.table_file.read_text() + "\nmodel.extra.weight: {shape: [hidden]}\n")
    replace_tables(monkeypatch, table)
    with pytest.raises(ModelLoadError, match=r"differ in model\.extra\.weight"):
        load(directory, load_format="dummy")
    with pytest.raises(ModelLoadError, match=r"missing: model\.extra\.weight"):
        load(directory)


def use_table(monkeypatch: pytest.MonkeyPatch, file: Path, change: dict[str, Any]) -> None:
    """Llama's table with other entries, from now on."""
    original = find_model("LlamaForCausalLM")
    entries = yaml.safe_load(original.table_file.read_text())
    for name, fields in change.items():
        entries[name] = entries[name] | fields if isinstance(fields, dict) else fields
    file.write_text(yaml.safe_dump(entries, sort_keys=False))
    replace_tables(monkeypatch, file)


def test_a_checkpoint_may_mix_layouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against one way for all layers, and against a tensor that is there twice, in two ways."""
    hf_model, directory = make_llama(tmp_path)
    change = {"model.layers.*.self_attn.qkv_proj.weight": {"or": [{"names": ["fused"], "transposed": True}]}}
    use_table(monkeypatch, tmp_path / "own.yaml", change | {"model.norm.weight": {"or": [["final.scale"]]}})
    tensors = load_file(directory / SINGLE)
    names = [Q.replace("q_proj", f"{piece}_proj") for piece in "qkv"]
    fused = torch.cat([tensors[name] for name in names]).t().contiguous()
    layer = "model.layers.1.self_attn."
    whole = torch.cat([tensors[f"{layer}{piece}_proj.weight"] for piece in "qkv"])
    rewrite(directory, dict.fromkeys(names) | {Q.replace("q_proj", "fused"): fused})
    rewrite(directory, {f"{layer}{piece}_proj.weight": None for piece in "qkv"} | {f"{layer}qkv_proj.weight": whole})
    rewrite(directory, {"model.norm.weight": None, "final.scale": tensors["model.norm.weight"]})
    ids = random_ids(12)
    torch.testing.assert_close(PagedModel(directory).step({0: ids})[0], hf_logprobs(hf_model, ids), atol=1e-4, rtol=0)
    rewrite(directory, {f"{layer}v_proj.weight": tensors[f"{layer}v_proj.weight"]})
    with pytest.raises(ModelLoadError, match=r"unknown: model\.layers\.1\.self_attn\.v_proj"):
        load(directory)
    rewrite(directory, {f"{layer}v_proj.weight": None, Q.replace("q_proj", "fused"): fused.t().contiguous()})
    with pytest.raises(
        ModelLoadError, match=r"fused.weight has the shape \[80, 48\]; the configuration requires \[48, 80\]"
    ):
        load(directory)


def test_the_way_that_is_nearest_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an error that names tensors of another layout than the checkpoint's own."""
    _, directory = make_llama(tmp_path)
    change = {
        "model.layers.*.self_attn.qkv_proj.weight": {"from": ["a", "b", "c"], "or": [["q_proj", "k_proj", "v_proj"]]}
    }
    use_table(monkeypatch, tmp_path / "own.yaml", change)
    rewrite(directory, {Q.replace("q_proj", "v_proj"): None})
    with pytest.raises(ModelLoadError, match=r"tensors missing: model\.layers\.0\.self_attn\.v_proj\.weight$"):
        load(directory)


def test_names_without_the_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against old checkpoints refused for names that begin later, and errors with names it lacks."""
    hf_model, directory = make_llama(tmp_path)
    use_table(monkeypatch, tmp_path / "own.yaml", {"prefix": "model."})
    tensors = load_file(directory / SINGLE)
    bare = {name.removeprefix("model."): value for name, value in tensors.items()}
    save_file(bare | {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, directory / SINGLE)
    ids = random_ids(12)
    torch.testing.assert_close(PagedModel(directory).step({0: ids})[0], hf_logprobs(hf_model, ids), atol=1e-4, rtol=0)
    rewrite(directory, {"layers.0.mlp.down_proj.weight": torch.ones(2, 2)})
    with pytest.raises(ModelLoadError, match=r": layers\.0\.mlp\.down_proj\.weight has the shape \[2, 2\]"):
        load(directory)
    rewrite(directory, {"layers.0.mlp.down_proj.weight": None, "layers.0.mlp.down.weight": torch.ones(2)})
    missing = r"missing: model\.layers\.0\.mlp\.down_proj\.weight \(is layers\.0\.mlp\.down\.weight meant"
    with pytest.raises(ModelLoadError, match=missing):
        load(directory)


def test_an_experts_slice_is_read_from_its_place(tmp_path: Path) -> None:
    """Guards against all experts read for each of them."""
    stack = torch.randn(4, 3, 5).bfloat16()
    save_file({"other": torch.ones(7), "experts": stack}, tmp_path / SINGLE)
    checkpoint = Checkpoint(tmp_path)
    for index in range(4):
        rows = checkpoint.rows("experts", index)
        assert rows.shape == (3, 5)
        assert torch.equal(as_torch(rows.read(1, 3)), stack[index, 1:3])
