"""The fallback: decoders of Transformers that have no family here run by their own modules, with the engine's promises.

tools/fallback_classes.py tries all of them, and docs/models.md has its table; here, some are chosen at random.
"""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from penstock import ModelLoadError
from penstock.assembly import BuiltEngine, build_engine
from penstock.config import EngineConfig
from penstock.engine.speculation import Speculation
from penstock.errors import InvalidRequestError
from penstock.models import registry
from penstock.models.config_json import load_model_config, parse_model_config
from penstock.models.transformers.derive import blocks_of
from penstock.weights.sources import read_parameters, read_table
from penstock_lab.prove.every_draft import EveryDraft
from penstock_lab.prove.parallel import BASE, answers, draw_map, start_threads
from tests.answers import LENGTHS, PROMPTS, WATCHED, ask, ask_alone, check, check_resumed, request
from tests.coded import code, coded_files  # noqa: F401
from tests.fakes_drafts import Oracle
from tests.families.llama import CASES
from tests.hf_models import Made
from tests.kernels.packed import levels
from tools import fallback_classes

pytestmark = pytest.mark.skipif(not levels(), reason="no native library")
NUM_CHOSEN = 8
# All that may change a bit, at once: chunks, a crowd, threads, and prefixes from the cache.
ARRANGED = [{"max_num_batched_tokens": 13, "max_num_seqs": 5, "threads": 2, "enable_prefix_caching": True}]
LLAMA = next(case for case in CASES if case.name == "llama")
FORMS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4", "quantization_group_size": 32},
    "int8 cache": {"kv_cache_dtype": "int8"},
}


def chosen() -> list[str]:
    """Some of the classes that are said to work, others with each version of Transformers."""
    working = sorted(name for name, said in fallback_classes.table().items() if said == "works")
    return sorted(random.Random(transformers.__version__).sample(working, NUM_CHOSEN))


def test_the_table_has_every_class() -> None:
    """Guards against classes of a newer Transformers that were never tried."""
    assert sorted(fallback_classes.table()) == fallback_classes.classes()


@pytest.mark.parametrize("name", chosen())
def test_greedy_tokens_and_bits(name: str, tmp_path: Path) -> None:
    """Guards against a module of Transformers that computes a token otherwise beside other tokens, and against scores,
    windows or a head that the engine computes otherwise."""
    assert fallback_classes.why_not(name, tmp_path, ARRANGED) is None


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A Llama, whose family is here too."""
    return LLAMA.make(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def build(made: Made) -> Callable[..., BuiltEngine]:
    return lambda **options: fallback_classes.engine(made[1], **options)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_of_weights_and_cache(form: dict[str, Any], build: Callable[..., BuiltEngine]) -> None:
    """Guards against products that are not the engine's: they would not be quantised, or have bits of a batch."""
    alone = ask_alone(build(**form).engine)
    plain = ask_alone(build().engine)
    assert all(alone[index][1] != plain[index][1] for index in WATCHED)
    engine = build(**form, max_num_batched_tokens=30, threads=2).engine
    check(ask(engine, map(request, range(len(PROMPTS)))), alone)
    check_resumed(engine, alone)


def test_the_tokens_of_the_ported_family(build: Callable[..., BuiltEngine]) -> None:
    """Guards against a fallback that is compared with itself: the family's own code says the same."""
    theirs = ask_alone(build(model_impl="auto").engine)
    ours = ask_alone(build().engine)
    assert [theirs[index][0] for index in WATCHED] == [ours[index][0] for index in WATCHED]


@pytest.mark.usefixtures("coded_files")
def test_coded_weights(tmp_path: Path) -> None:
    """Guards against codes that are decoded for torch's products, or read into another layer."""
    _, directory = LLAMA.make(tmp_path)
    coded, decoded = (fallback_classes.engine(at) for at in code(directory, {"_proj": "rows"}))
    kept = [layer for layer in coded.model.modules() if getattr(layer, "spec", None) and layer.spec.is_coded]
    assert len(kept) == 14  # of two layers
    ours, theirs = (ask_alone(built.engine) for built in (coded, decoded))
    assert [item[0] for item in ours.values()] == [item[0] for item in theirs.values()]


def test_drafts_change_nothing(build: Callable[..., BuiltEngine]) -> None:
    """Guards against a layer in which a rejected draft leaves something behind."""
    alone = ask_alone(build().engine)
    engine = build().engine
    oracle = Oracle(lambda name, text, count: alone[int(name)][0][len(text) - LENGTHS[int(name)] :][:count], 0.7)
    engine.speculate(Speculation(oracle, 5, policy=EveryDraft()))
    check(ask(engine, map(request, WATCHED)), alone)
    stats = engine.stats()
    assert 0 < stats.num_accepted_tokens_total < stats.num_draft_tokens_total


SPLIT = {  # a class -> how many of its products ranks split, beside embedding and head: features between, or results
    "Starcoder 2": ("Starcoder2ForCausalLM", 6, 0),  # heads and neurons, as Transformers' plan says
    "OLMo 3": ("Olmo3ForCausalLM", 3, 2),  # norms over all heads; keys are too few rows
    "OPT": ("OPTForCausalLM", 0, 6),  # it has no plan
    "Granite MoE": ("GraniteMoeForCausalLM", 8, 2),  # experts
}


@pytest.mark.parametrize("name", SPLIT)
def test_any_split_has_the_bits_of_one_process(name: str, tmp_path: Path) -> None:
    """Guards against modules that are given a part and compute as with the whole, and against a split of nothing."""
    architecture, num_between, num_gathered = SPLIT[name]
    fallback_classes.make(architecture, tmp_path)
    parameters = read_parameters(replace(load_model_config(tmp_path), model_impl=registry.FALLBACK)).values()
    layer = [
        item for item in parameters if "layers.0." in item.name and len(item.shape) == 2 and item.shard is not None
    ]
    assert [item.is_gathered for item in layer].count(True) == num_gathered
    assert [item.is_gathered for item in layer].count(False) == num_between
    fixed: dict[str, Any] = BASE | {
        "model": str(tmp_path),
        "load_format": "auto",
        "dtype": "bfloat16",
        "model_impl": registry.FALLBACK,
    }
    whole = answers(EngineConfig.from_options(**fixed))
    if name == "Starcoder 2":  # as processes, once
        assert answers(EngineConfig.from_options(**fixed, tensor_parallel_size=2)) == whole
        assert answers(EngineConfig.from_options(**fixed, pipeline_parallel_size=2)) == whole
    assert answers(EngineConfig.from_options(**fixed, tensor_parallel_size=4), start_threads) == whole
    for seed in range(3):
        file = tmp_path / "map.yaml"
        file.write_text(draw_map(tmp_path, random.Random(seed), registry.FALLBACK))
        split = {"tensor_parallel_size": 2, "sharding_config": str(file)}
        assert answers(EngineConfig.from_options(**fixed, **split), start_threads) == whole, file.read_text()


def test_layers_that_share_more_than_states_are_no_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a stage that computes with what it has of the text, which is nothing."""
    values = json.loads(fallback_classes.tiny_config("HeliumForCausalLM").to_json_string())
    assert list(blocks_of("HeliumForCausalLM", values)) == ["model.layers.0", "model.layers.1"]
    rotary = transformers.models.helium.modeling_helium.HeliumRotaryEmbedding
    own = rotary.forward
    monkeypatch.setattr(rotary, "forward", lambda self, x, **ids: tuple(x.sum() + item for item in own(self, x, **ids)))
    with pytest.raises(ModelLoadError, match="its layers pass on more than hidden states"):
        blocks_of("HeliumForCausalLM", values)


def test_it_is_chosen_and_said(tmp_path: Path) -> None:
    """Guards against a fallback that is chosen silently."""
    fallback_classes.make("HeliumForCausalLM", tmp_path)
    built = fallback_classes.engine(tmp_path, model_impl="auto")
    assert built.info.choices_made["model_impl"].startswith("transformers: its own modules compute HeliumForCausalLM")
    again = fallback_classes.engine(tmp_path, model_impl="auto", hf_overrides={"rope_theta": 5000.0})
    assert built.info.system_fingerprint != again.info.system_fingerprint


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("JetMoeForCausalLM", "sums of torch's depend on the batch"),
        ("HYV4ForCausalLM", "computes its experts otherwise"),
        ("MptForCausalLM", "does not go through Transformers' attention interface"),
        ("Qwen3NextForCausalLM", "it keeps other state than keys and values"),
    ],
)
def test_what_cannot_run_is_refused_by_name(name: str, why: str, tmp_path: Path) -> None:
    """Guards against a model that runs, and whose answers depend on the batch."""
    fallback_classes.tiny_config(name).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=why) as caught:
        build_engine(EngineConfig.from_options(model=str(tmp_path), load_format="dummy"))
    assert name in str(caught.value)


@pytest.mark.parametrize("name", ["", "Helium", "ForCausalLM"])
def test_a_part_of_a_name_is_no_class(name: str) -> None:
    """Guards against AttributeError's traceback for a name that is contained in one that Transformers has."""
    with pytest.raises(ModelLoadError, match=f"architectures = '{name}' is not supported"):
        parse_model_config({"architectures": [name], "model_type": "helium"})


def test_a_published_config_of_deepseek() -> None:
    """Guards against a file that is refused for keys that Transformers does not read, or for tensors of a layer that
    predicts further tokens, and against one that computes otherwise."""
    config = fallback_classes.tiny_config("DeepseekV3ForCausalLM").to_dict() | {
        "ep_size": 1, "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 1,
    }  # fmt: skip
    found = parse_model_config(config)
    table = read_table(found)
    ignored = [table.ignores(f"model.layers.{found.num_hidden_layers + at}.eh_proj.weight") for at in (-1, 0, 1)]
    assert ignored == [False, True, False]
    with pytest.raises(ModelLoadError, match=r"scoring_func = 'softmax' is not allowed"):
        parse_model_config(config | {"scoring_func": "softmax"})


def test_unknown_keys_and_rotary_types_are_refused(tmp_path: Path) -> None:
    """Guards against a key that Transformers would ignore, and frequencies that depend on the batch."""
    fallback_classes.tiny_config("HeliumForCausalLM").save_pretrained(tmp_path)
    scaled = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
    for overrides, why in (({"no_such_key": 3}, "no_such_key"), (scaled, "longest text of a batch")):
        with pytest.raises(ModelLoadError, match=why):
            fallback_classes.engine(tmp_path, load_format="dummy", hf_overrides=overrides)


def test_without_transformers(build: Callable[..., BuiltEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an import that fails in the middle."""
    registry.fallback.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidRequestError, match=r"penstock\[transformers\]"):
        build()
