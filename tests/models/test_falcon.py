"""Falcon and BLOOM against Transformers, and what Transformers does beside the mathematics."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.falcon import modeling_falcon

from penstock.errors import ModelLoadError
from penstock.kernels.cpu.library import LEVELS
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.ops import Ops, Packing
from penstock.layers.decoder import alibi_slopes
from penstock.layers.weights import HeadLayout
from penstock.models.config_json import load_model_config, parse_model_config
from penstock.ranks.build import CutSource
from penstock.ranks.sharding import Degrees, Share, cut_all
from penstock.spec.model_config import ModelConfig
from penstock.weights.sources import open_source, read_parameters
from penstock_lab.convert.rewrite import rewrite_model
from tests.families import bloom, falcon
from tests.families.case import Case
from tests.hf_models import hf_logprobs, random_ids
from tests.kernels.packed import levels
from tests.paged import PagedModel
from tests.test_cli import penstock

TOLERANCE = 1e-4
KERNELS = ["reference", *(["cpu"] if levels() else [])]
BY_NAME = {case.name: case for case in falcon.CASES}
native = pytest.mark.skipif(not levels(), reason="no native library")


@pytest.mark.covers("A4", "F13", "F19", "F20")
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("case", [*falcon.CASES, *bloom.CASES], ids=lambda case: case.name)
def test_rows_at_different_positions(case: Case, kernels: str, tmp_path: Path) -> None:
    """Guards against a branch that reads another residual stream than the architecture's, against key/value heads that
    serve other query heads than theirs, and against a rotation, or a bias, by the position of another row. Four
    sequences of different lengths, together in every step: their prompts, then token after token."""
    hf_model, directory = case.make(tmp_path)
    paged = PagedModel(directory, kernels=kernels, num_seqs=4)
    sequences = [random_ids(length + 5, seed=length) for length in (1, 17, 40, 64)]
    steps = [paged.step({row: ids[:-5] for row, ids in enumerate(sequences)})]
    steps += [paged.step({row: [ids[at]] for row, ids in enumerate(sequences)}) for at in range(-5, 0)]
    for row, ids in enumerate(sequences):
        found = torch.cat([step[row] for step in steps])
        torch.testing.assert_close(found, hf_logprobs(hf_model, ids), atol=TOLERANCE, rtol=0)


def separated(hf_model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with each fused product as three, by Transformers' own way to split it."""
    tensors = dict(tensors)
    attention = hf_model.transformer.h[0].self_attention
    for layer, kind in [(layer, kind) for layer in range(2) for kind in ("weight", "bias")]:
        fused = tensors.pop(f"transformer.h.{layer}.self_attention.query_key_value.{kind}", None)
        if fused is None:
            continue
        columns = fused.T if kind == "weight" else fused[None]
        shares = attention._split_heads(columns[None])  # [1, rows, heads, head dim] each
        groups = attention.num_heads // attention.num_kv_heads if attention.new_decoder_architecture else 1
        for part, share, every in zip("qkv", shares, (1, groups, groups), strict=True):
            rows = share[0, :, ::every].flatten(1).T  # key and value heads are repeated for their query heads
            separate = rows if kind == "weight" else rows[:, 0]
            tensors[f"transformer.h.{layer}.self_attention.{part}_proj.{kind}"] = separate.contiguous()
    return tensors


GENERATIONS = pytest.mark.parametrize("name", ["falcon-7b", "falcon-40b", "falcon-rw"])


@GENERATIONS
def test_separate_queries_keys_and_values(name: str, tmp_path: Path) -> None:
    """Guards against an order of the fused product that is only right where it is read back by the same mistake:
    written as three tensors, the model is the same."""
    hf_model, directory = BY_NAME[name].make(tmp_path)
    file = directory / "model.safetensors"
    save_file(separated(hf_model, load_file(file)), file, {"format": "pt"})
    ids = random_ids(20)
    found = PagedModel(directory).step({0: ids})[0]
    torch.testing.assert_close(found, hf_logprobs(hf_model, ids), atol=TOLERANCE, rtol=0)


@pytest.mark.covers("F21")
@GENERATIONS
def test_the_split_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    """Guards against queries, keys and values in another order within a group: written and read by the same mistake,
    every round trip still gives the same bits."""
    hf_model, directory = BY_NAME[name].make(tmp_path)
    expected = separated(hf_model, load_file(directory / "model.safetensors"))
    rewrite_model(str(directory), tmp_path / "separate", "separate", 10**9)
    (file,) = (tmp_path / "separate").glob("*.safetensors")
    found = load_file(file)
    parts = [key for key in expected if re.search(r"\.[qkv]_proj\.", key)]
    assert len(parts) in (6, 12)  # of two layers, with biases or without
    for key in parts:
        assert torch.equal(found[key], expected[key]), key


def test_bias_of_transformers_is_ours_where_bfloat16_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an oracle that was bent until it agreed: Transformers as it is rounds slopes, positions and biases
    to bfloat16. With 8 heads and up to 256 tokens that changes nothing, and the log-probabilities are ours; with
    other numbers of heads the slopes are ours but for that rounding."""
    hf_model, directory = BY_NAME["falcon-rw"].make(tmp_path)
    ids = random_ids(200)
    ours = PagedModel(directory).step({0: ids})[0]
    monkeypatch.setattr(modeling_falcon, "build_alibi_tensor", falcon.rounded_bias)
    torch.testing.assert_close(ours, hf_logprobs(hf_model, ids), atol=TOLERANCE, rtol=0)
    mask = torch.ones(1, 256, dtype=torch.int64)
    for heads, equal in ((6, True), (8, True), (12, False), (32, False)):
        bias = falcon.rounded_bias(mask, heads, torch.float32)
        assert torch.equal(bias, falcon.unrounded_bias(mask, heads, torch.float32)) == equal, heads
        torch.testing.assert_close(bias[:, 0, 1], torch.from_numpy(alibi_slopes(heads)), atol=0, rtol=2**-8)
    far = falcon.rounded_bias(torch.ones(1, 259, dtype=torch.int64), 8, torch.float32)[0, 0]
    assert far[256:].tolist() == [128.0, 128.0, 129.0]  # half of 256, 257 and 258


def test_eager_attention_of_transformers_adds_the_bias_twice(tmp_path: Path) -> None:
    """Guards against trusting that oracle: it is ours with slopes of twice the size, and the other one is ours."""
    hf_model, directory = BY_NAME["falcon-rw"].make(tmp_path)
    ids = random_ids(60)
    once = hf_logprobs(hf_model, ids)
    hf_model.config._attn_implementation = "eager"
    twice = hf_logprobs(hf_model, ids)
    paged = PagedModel(directory, num_seqs=2)
    torch.testing.assert_close(paged.step({0: ids})[0], once, atol=TOLERANCE, rtol=0)
    for block in paged.model.transformer.h:
        params = block.self_attention.params
        block.self_attention.params = replace(params, alibi_slopes=2 * params.alibi_slopes)
    torch.testing.assert_close(paged.step({1: ids})[1], twice, atol=TOLERANCE, rtol=0)
    assert float((once - twice).abs().max()) > 0.1


def packed_columns(ops: Ops, rows: Tensor, x: Tensor) -> Tensor:
    return ops.linear(x, ops.pack_linear(rows))


@native
@pytest.mark.covers("F22")
@pytest.mark.parametrize("level", LEVELS[: len(levels())])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_key_value_groups_are_slices_of_the_products(level: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Guards against a shard that computes other bits than the whole: the 8 groups' own queries, keys and values, as
    the table's unit cuts them, are the columns of the unsplit product, and the 8 products of the groups' share of
    `dense` add up to the unsplit one, in the order of the leaves."""
    case = BY_NAME["falcon-40b"]
    _, directory = case.make(tmp_path, hidden_size=96, num_attention_heads=24, num_kv_heads=8)
    config = load_model_config(directory)
    parameters = read_parameters(config)
    prefix = "transformer.h.0.self_attention"
    qkv, dense = parameters[f"{prefix}.qkv_proj.weight"], parameters[f"{prefix}.o_proj.weight"]
    assert (qkv.unit, dense.unit, dense.leaves, dense.unit_size) == ("kv_group", "kv_group", 8, 12)
    heads, groups, dim = 24, 8, 4
    stored = load_file(directory / "model.safetensors")
    fused = stored[f"{prefix}.query_key_value.weight"].view(groups, heads // groups + 2, dim, 96)
    parts = [fused[:, :-2].reshape(-1, 96), fused[:, -2].reshape(-1, 96), fused[:, -1].reshape(-1, 96)]
    ops = CpuOps(dtype, threads=2, level=level)
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = packed_columns(ops, torch.cat(parts), x).split([part.shape[0] for part in parts], dim=1)
    for part, columns in zip(parts, whole, strict=True):
        found = torch.cat([packed_columns(ops, rows.contiguous(), x) for rows in part.chunk(groups)], dim=1)
        assert torch.equal(found, columns)
    weight = stored[f"{prefix}.dense.weight"]
    sums = [
        packed_columns(ops, weight[:, at : at + 12].contiguous(), x[:, at : at + 12].contiguous())
        for at in range(0, 96, 12)
    ]
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    assert torch.equal(sums[0], ops.linear(x, ops.pack_linear(weight, packing=Packing(leaf_ends=dense.leaf_ends))))


@pytest.mark.covers("F22")
def test_each_rank_s_cut_is_its_group(tmp_path: Path) -> None:
    """Guards against a cut at another place than between the groups: each of 8 ranks has the queries, the key and the
    value of one group, and the columns of `dense` that multiply with them, all as Transformers has stored them."""
    _, directory = BY_NAME["falcon-40b"].make(tmp_path, hidden_size=96, num_attention_heads=24, num_kv_heads=8)
    config = load_model_config(directory)
    parameters, prefix = read_parameters(config), "transformer.h.0.self_attention"
    stored = load_file(directory / "model.safetensors")
    groups = stored[f"{prefix}.query_key_value.weight"].split(5 * 4)  # three queries, a key and a value of 4 rows each
    columns = stored[f"{prefix}.dense.weight"].split(3 * 4, dim=1)
    whole = open_source(directory, config, "auto")
    for rank in range(8):
        cuts = cut_all(parameters, Share(rank, Degrees(8, attention=8)), config)
        source = CutSource(whole, cuts)
        for name, expected in (("qkv_proj", groups[rank]), ("o_proj", columns[rank])):
            own = cuts[f"{prefix}.{name}.weight"].own
            assert torch.equal(torch.as_tensor(source.rows(own).read(0, own.shape[0])), expected), (rank, name)


SMALL: dict[str, Any] = {
    "architectures": ["FalconForCausalLM"],
    "model_type": "falcon",
    "vocab_size": 100,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
}


def read(**fields: Any) -> ModelConfig:
    return parse_model_config(SMALL | fields)


def test_what_a_silent_file_means() -> None:
    """Guards against numbers that old files leave out being asked for, and against reading them from the wrong key."""
    old = read()
    assert (old.num_key_value_heads, old.num_parallel_norms, old.intermediate_size, old.head_dim) == (1, 1, 128, 8)
    assert (old.max_position_embeddings, old.tie_word_embeddings, old.hidden_act) == (2048, True, "gelu")
    assert (old.rope is not None, old.rope.theta, old.alibi, old.attention_bias) == (True, 10000.0, False, False)
    oldest = {name: value for name, value in SMALL.items() if name not in ("hidden_size", "num_attention_heads")}
    oldest = {name: value for name, value in oldest.items() if name != "num_hidden_layers"}
    assert parse_model_config(oldest | {"n_embed": 32, "n_head": 4, "n_layer": 2}) == old
    assert read(num_kv_heads=4) == old  # as Transformers writes it, which computes with one
    assert read(ffn_hidden_size=48).intermediate_size == 48
    with pytest.raises(ModelLoadError, match="hidden_size"):
        parse_model_config({name: value for name, value in SMALL.items() if name != "hidden_size"})


def test_generations() -> None:
    """Guards against an older key that changes a new architecture, and the reverse."""
    new = {"new_decoder_architecture": True, "num_kv_heads": 2}
    for older in ({}, {"multi_query": True}, {"parallel_attn": False}):
        config = read(**new, **older)
        assert (config.num_key_value_heads, config.num_parallel_norms) == (2, 2)
    assert read(**new, num_ln_in_parallel_attn=1).num_parallel_norms == 1
    assert read(new_decoder_architecture=True).num_key_value_heads == 4
    rw = read(alibi=True, parallel_attn=False, multi_query=False, bias=True)
    assert (rw.num_key_value_heads, rw.num_parallel_norms, rw.rope, rw.alibi) == (4, 0, None, True)
    assert (rw.attention_bias, rw.attention_out_bias, rw.mlp_bias) == (True, True, True)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn"),
        ({"num_ln_in_parallel_attn": 3, "new_decoder_architecture": True}, "num_ln_in_parallel_attn"),
        ({"multi_query": False, "num_kv_heads": 2}, "num_kv_heads = 2"),
        ({"num_kv_heads": 3, "new_decoder_architecture": True}, "num_kv_heads"),
        ({"head_dim": 16}, "head_dim"),
        ({"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        ({"activation": "mish"}, "activation"),
        ({"n_embed": 32}, "hidden_size"),
        ({"hidden_size": 36}, "head_dim"),
        ({"intermediate_size": "wide"}, "intermediate_size"),
    ],
)
def test_contradictions_are_named(fields: dict[str, Any], named: str) -> None:
    """Guards against a file that says two things, of which one would be ignored."""
    with pytest.raises(ModelLoadError, match=named):
        read(**fields)


def test_remote_code_is_not_run(tmp_path: Path) -> None:
    """Guards against a file that has to be edited because it names code, which is not needed."""
    _, directory = BY_NAME["falcon-7b"].make(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    auto_map = {"AutoModelForCausalLM": "tiiuae/falcon-7b--modeling_falcon.FalconForCausalLM"}
    (directory / "config.json").write_text(json.dumps(config | {"auto_map": auto_map}))
    found = load_model_config(directory)
    assert (found.architecture, list(found.notes)) == ("FalconForCausalLM", ["auto_map"])


# Falcon-40B's config.json as an accelerator's document prints it, without auto_map.
PRINTED: dict[str, Any] = json.loads("""{
  "_name_or_path": "tiiuae/falcon-40b-instruct", "alibi": false, "apply_residual_connection_post_layernorm": false,
  "architectures": ["FalconForCausalLM"], "attention_dropout": 0.0, "batch_users": false, "bias": false,
  "bos_token_id": 11, "efficient_40b": true, "eos_token_id": 11, "flash_decode": true, "fracture_vocab": true,
  "hidden_dropout": 0.0, "hidden_size": 8192, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
  "model_type": "RefinedWeb", "n_head": 128, "n_head_kv": 8, "n_layer": 60, "new_decoder_architecture": true,
  "num_kv_heads": 8, "padded_lmh": true, "parallel_attn": true, "split_mq": false, "torch_dtype": "bfloat16",
  "transformers_version": "4.33.2", "use_cache": true, "user_rows": 32, "vocab_size": 65024
}""")
FIRST = {"alibi", "apply_residual_connection_post_layernorm", "attention_dropout", "bias", "bos_token_id",
         "eos_token_id", "hidden_dropout", "hidden_size", "initializer_range", "layer_norm_epsilon", "torch_dtype",
         "use_cache", "vocab_size"}  # fmt: skip
OLDER_NAMES = {"num_attention_heads": "n_head", "num_hidden_layers": "n_layer", "num_kv_heads": "n_head_kv"}


def original(config: dict[str, Any], generation: str) -> dict[str, Any]:
    """A config.json of Transformers with the keys of the first releases."""
    kept = {OLDER_NAMES.get(key, key): value for key, value in config.items() if key in FIRST | set(OLDER_NAMES)}
    kept["torch_dtype"] = config["dtype"]
    if generation == "RefinedWebModel":
        del kept["n_head_kv"]
        kept |= {key: config[key] for key in ("multi_query", "parallel_attn")}
    return kept | {"architectures": ["RWForCausalLM"], "model_type": generation}


@pytest.mark.parametrize(
    ("name", "generation"),
    [("falcon-40b", "RefinedWeb"), ("falcon-7b", "RefinedWebModel"), ("falcon-rw", "RefinedWebModel")],
)
def test_the_first_releases_compute_as_transformers_does_today(name: str, generation: str, tmp_path: Path) -> None:
    """Guards against refusing the files that Falcon was published with, and against reading the generation that their
    model_type stands for as another: the same weights under FalconForCausalLM have the same log-probabilities."""
    hf_model, directory = BY_NAME[name].make(tmp_path, tie_word_embeddings=True, max_position_embeddings=2048)
    file, ids = directory / "config.json", random_ids(40)
    config = json.loads(file.read_text())
    today = load_model_config(directory)
    file.write_text(json.dumps(original(config, generation)))
    assert load_model_config(directory) == today
    found = PagedModel(directory).step({0: ids})[0]
    torch.testing.assert_close(found, hf_logprobs(hf_model, ids), atol=TOLERANCE, rtol=0)


def test_the_printed_file_of_40b_is_read(tmp_path: Path) -> None:
    """Guards against one key of that file, which names the accelerator's settings too, making it unreadable."""
    (tmp_path / "config.json").write_text(json.dumps(PRINTED))
    config = load_model_config(tmp_path)
    assert (config.architecture, config.model_type) == ("FalconForCausalLM", "falcon")
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (128, 8, 64)
    assert (config.num_hidden_layers, config.num_parallel_norms, config.dtype) == (60, 2, "bfloat16")


@pytest.mark.parametrize(
    ("generation", "fields", "named"),
    [
        ("RefinedWeb", {"new_decoder_architecture": False}, "new_decoder_architecture = False"),
        ("RefinedWeb", {"parallel_attn": False}, "parallel_attn = False"),
        ("RefinedWeb", {"num_kv_heads": 4}, "num_kv_heads = 4 .* the same as n_head_kv = 8"),
        ("RefinedWebModel", {"new_decoder_architecture": None}, "multi_query is missing; it must be true or false"),
        ("RefinedWebModel", {"multi_query": True}, "new_decoder_architecture = True"),
        ("RefinedWeb", {"unheard_of": 1}, "unheard_of = 1 is unknown"),
    ],
)
def test_the_first_files_are_read_as_strictly(
    generation: str, fields: dict[str, Any], named: str, tmp_path: Path
) -> None:
    """Guards against a file that contradicts the generation its model_type stands for."""
    (tmp_path / "config.json").write_text(json.dumps(PRINTED | {"model_type": generation} | fields))
    with pytest.raises(ModelLoadError, match=named):
        load_model_config(tmp_path)


def test_the_multiple_that_pads_the_vocabulary_is_explained() -> None:
    """Guards against the reading that 512 pads Falcon's vocabulary: 65024 is a multiple of it, 65536 takes 1024."""
    vocab_size = PRINTED["vocab_size"]
    assert [HeadLayout(pad_to=multiple).width(vocab_size) for multiple in (512, 1024)] == [65024, 65536]
    shown = " ".join(penstock("serve", "--help").stdout.split())
    assert "Falcon's 65024 become 65536 with 1024" in shown
