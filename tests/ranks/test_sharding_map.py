"""Sharding maps: JetStream's format, read as it stands and held against a table."""

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.assembly import build_engine
from penstock.config import EngineConfig
from penstock.errors import InvalidRequestError, ModelLoadError
from penstock.models.config_json import load_model_config
from penstock.models.registry import find_model
from penstock.ranks.build import RanksExecutor
from penstock.ranks.sharding_map import ShardingMap
from penstock.spec.param_table import Parameter, ParamTable
from penstock_lab.planner.table_template import table_text
from tests.hf_models import make_llama, make_qwen2

# The example of JetStream's document, to the letter.
JETSTREAM = """
freqs_cis : -1 #  torch.complex64 (16384, 128)
layers.*.self_attn.qkv_proj.weight: 0
layers.*.self_attn.o_proj.weight: 1
layers.*.self_attn.wo.weight : 1 # 1, -1] #  torch.float32 (2048, 2048)
layers.*.self_attn.wq.weight : 0 # -1, 1] #  torch.float32 (2048, 2048)
layers.*.self_attn.wk.weight : 0 # -1, 1] #  torch.float32 (256, 2048)
layers.*.self_attn.wv.weight : 0 # -1, 1] #  torch.float32 (256, 2048)
layers.*.mlp.gate_proj.weight : 0 # -1, 1] #  torch.float32 (16384, 2048)
layers.*.mlp.gate_proj.bias : 0 # -1] #  torch.float32 (16384,)
layers.*.mlp.up_proj.weight : 0 # -1, 1] #  torch.float32 (16384, 2048)
layers.*.mlp.up_proj.bias : 0 # -1] #  torch.float32 (16384,)
layers.*.mlp.down_proj.weight : 1 # 1, -1] #  torch.float32 (2048, 16384)
layers.*.mlp.down_proj.bias : -1 #  torch.float32 (2048,)
layers.*.input_layernorm.weight : -1 #  torch.float32 (2048,)
layers.*.post_attention_layernorm.weight : -1 #  torch.float32 (2048,)
norm.weight : -1 #  torch.float32 (2048,)
embedder.weight : 1 # # 1, -1] #  torch.float32 (256000, 2048)
"""
QWEN2 = """
model.embed_tokens.weight: 1
model.layers.*.input_layernorm.weight: -1
model.layers.*.self_attn.q_proj.weight: 0
model.layers.*.self_attn.k_proj.weight: 0
model.layers.*.self_attn.v_proj.weight: 0
model.layers.*.self_attn.qkv_proj.bias: 0
model.layers.*.self_attn.o_proj.weight: 1
model.layers.*.post_attention_layernorm.weight: -1
model.layers.*.mlp.gate_up_proj.weight: -1
model.layers.*.mlp.down_proj.weight: 0
model.norm.weight: -1
lm_head.weight: 0
"""
LAYER = "model.layers.*"


@pytest.fixture(scope="module")
def parameters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Parameter]:
    _, directory = make_qwen2(tmp_path_factory.mktemp("model"))
    return find_model("Qwen2ForCausalLM").read_table().parameters(load_model_config(directory))


def resolve(text: str, parameters: dict[str, Parameter]) -> dict[str, int | None]:
    return ShardingMap.from_text(text, "map.yaml").resolve(parameters)


@pytest.mark.covers("J9")
def test_the_document_s_example_is_read() -> None:
    """Guards against comments, spaces and brackets of the example that are taken for something."""
    axes = ShardingMap.from_text(JETSTREAM, "gemma.yaml").axes
    assert len(axes) == 17
    assert axes["freqs_cis"] == -1
    assert axes["layers.*.self_attn.wo.weight"] == 1
    assert axes["layers.*.mlp.gate_proj.bias"] == 0
    assert axes["embedder.weight"] == 1


@pytest.mark.covers("J9")
def test_the_example_fits_gemma_as_it_is_printed(tmp_path: Path) -> None:
    """Guards against names of the reference code that are not known: a weight in two spellings, biases that the model
    does not have, a table of rotations, names without the prefix. Of another family, what is not known is reported."""
    _, directory = make_llama(tmp_path, tie_word_embeddings=True)
    config = load_model_config(directory)
    gemma, llama = (find_model(name).read_table() for name in ("GemmaForCausalLM", "LlamaForCausalLM"))
    wanted = ShardingMap.from_text(JETSTREAM, "gemma.yaml")
    axes = wanted.of(gemma).resolve(gemma.parameters(config))
    assert axes["model.embed_tokens.weight"] == axes["model.layers.1.self_attn.o_proj.weight"] == 1
    assert axes["model.layers.0.self_attn.qkv_proj.weight"] == axes["model.layers.0.mlp.gate_up_proj.weight"] == 0
    assert axes["model.norm.weight"] is axes["lm_head.weight"] is None
    with pytest.raises(ModelLoadError) as caught:
        wanted.of(llama).resolve(llama.parameters(config))
    said = str(caught.value)
    assert "layers.*.self_attn.wo.weight is not a parameter (is layers.*.attention.wo.weight meant?)" in said
    assert "model.embed_tokens.weight is not named" in said
    assert "freqs_cis" not in said


@pytest.mark.covers("J9")
def test_every_parameter_has_its_axis(parameters: dict[str, Parameter]) -> None:
    """Guards against a map that is read and not used, and against -1 for the last axis."""
    axes = resolve(QWEN2, parameters)
    assert axes.keys() == parameters.keys()
    assert axes["model.layers.1.self_attn.qkv_proj.weight"] == 0
    assert axes["model.layers.0.self_attn.o_proj.weight"] == 1
    assert axes["model.layers.0.mlp.gate_up_proj.weight"] is None
    assert axes["model.layers.1.mlp.down_proj.weight"] == 0
    assert axes["model.embed_tokens.weight"] == 1


@pytest.mark.covers("J9", "J22")
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (f"{LAYER}.mlp.down_proj.weight: 0\n", "", rf"{LAYER}.mlp.down_proj.weight is not named"),
        ("model.norm.weight", "model.norms.weight", r"norms.weight is not a parameter \(is model.norm.weight meant"),
        (
            "model.norm.weight: -1",
            "model.norm.weight: 1",
            r"model.norm.weight: axis 1 is out of range; it must be 0, or",
        ),
        ("o_proj.weight: 1", "o_proj.weight: 2", r"o_proj.weight: axis 2 is out of range; it must be 0 .. 1, or -1"),
        ("v_proj.weight: 0", "v_proj.weight: 1", r"q_proj.weight, .*v_proj.weight are one parameter and must be"),
        (
            f"{LAYER}.self_attn.v_proj.weight: 0\n",
            "",
            r"v_proj.weight is not named, which is another piece of .*qkv_proj.weight",
        ),
        (
            "lm_head",
            f"{LAYER}.self_attn.qkv_proj.weight: 1\nlm_head",
            r"qkv_proj.weight is named twice, and .*, as .*q_proj",
        ),
        ("lm_head.weight: 0", "lm_head.weight: -2", r"lm_head.weight'?: -2 is not allowed; it must be an axis from 0"),
        ("lm_head.weight: 0", "lm_head.weight: true", "True is not allowed"),
        ("lm_head.weight: 0", "lm_head.weight: 0\nmodel.norm.weight: 0", "duplicate key"),
    ],
)
def test_what_does_not_fit_is_named(old: str, new: str, said: str, parameters: dict[str, Parameter]) -> None:
    """Guards against a weight that nobody splits, or that two lines split."""
    assert old in QWEN2
    with pytest.raises(ModelLoadError, match=said.replace("*", r"\*") if LAYER in said else said):
        resolve(QWEN2.replace(old, new), parameters)


def test_a_printed_map_fits(parameters: dict[str, Parameter], tmp_path: Path) -> None:
    """Guards against a command that prints what the option then refuses; and a tied head may be named or not."""
    for tied in (False, True):
        _, directory = make_llama(tmp_path / str(tied), tie_word_embeddings=tied)
        config = load_model_config(directory)
        own = find_model("LlamaForCausalLM").read_table().parameters(config)
        text = table_text(directory, sharding=True)
        assert resolve(text, own) == {name: item.shard for name, item in own.items()}
    assert resolve(text.replace("lm_head.weight", "# "), own)["lm_head.weight"] is None


def test_a_hint_that_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    """Guards against a hint that is accepted and ignored: tokens, which are not split, and heads that cannot be; and
    against parts that are asked for beside a map, which says them."""
    _, directory = make_llama(tmp_path, num_key_value_heads=1)
    file, map_text = tmp_path / "map.yaml", table_text(directory, sharding=True)
    options = {"model": str(directory), "tensor_parallel_size": 2, "sharding_config": str(file)}
    for line, more, said in (
        ("layers.*.mlp : 0", {}, "tokens are not split"),
        ("model.layers.*.self_attn : 1", {}, "the heads of this model are not split"),
        ("", {"attention_parallel_size": 1}, "left out: sharding_config"),
        ("", {"expert_parallel_size": 2}, "1: sharding_config"),
    ):
        file.write_text(f"{map_text}{line}\n")
        with pytest.raises(InvalidRequestError, match=said):
            build_engine(EngineConfig.from_options(**options, **more), start=never)


def never(*_: object) -> RanksExecutor:
    raise AssertionError("it began to load")


MIXED = """
h.*.c_attn.weight: {shape: [[q, kv, kv], hidden], from: {names: [h.*.c_attn.weight], transposed: true}}
h.*.experts.*.up.weight: {shape: [expert_intermediate, hidden], from: {names: [h.*.experts.up], stacked: true}}
"""


def test_axes_are_those_of_the_named_tensor(tmp_path: Path) -> None:
    """Guards against the axis of a tensor on its side, or of a stack, taken for the parameter's."""
    _, directory = make_llama(tmp_path)
    config = replace(load_model_config(directory), num_experts=3, moe_intermediate_size=4)
    mixed = ParamTable.from_text(MIXED, "mixed.yaml").parameters(config)
    axes = resolve("h.*.c_attn.weight: 1\nh.*.experts.up: 1", mixed)
    assert axes["h.1.c_attn.weight"] == 0
    assert axes["h.0.experts.2.up.weight"] == 0
    assert set(resolve("h.*.c_attn.weight: 0\nh.*.experts.*.up.weight: 1", mixed).values()) == {1}
    with pytest.raises(ModelLoadError, match=r"axis 0 is out of range; it must be 1 .. 2"):
        resolve("h.*.c_attn.weight: 0\nh.*.experts.up: 0", mixed)


@pytest.mark.covers("J9")
def test_the_engine_takes_a_map(tmp_path: Path) -> None:
    """Guards against an option that is accepted and ignored: the file is held against the model, and the engine says
    what it is good for."""
    _, directory = make_llama(tmp_path)
    file = tmp_path / "map.yaml"
    file.write_text(table_text(directory, sharding=True))
    options = {"model": str(directory), "load_format": "dummy", "kernels": "reference"}
    built = build_engine(EngineConfig.from_options(sharding_config=str(file), **options))
    assert "splits 10 of 15 parameters; on one device nothing is split" in built.config.reasons["sharding_config"]
    assert built.info.choices_made["sharding_config"] == built.config.reasons["sharding_config"]
    file.write_text(JETSTREAM)
    for name, said in ((str(file), "embedder.weight is not a parameter"), (str(tmp_path), "is not a file"), ("\0", "")):
        with pytest.raises(InvalidRequestError, match=f"sharding_config: .*{said}") as caught:
            build_engine(EngineConfig.from_options(sharding_config=name, **options))
        assert caught.value.param == "sharding_config"
