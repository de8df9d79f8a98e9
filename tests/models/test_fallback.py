"""The fallback: decoders of Transformers that have no family here run by their own modules, with the engine's promises.

tools/fallback_classes.py tries all of them, and docs/models.md has its table; here, some are chosen at random.
"""

import random
import re
from collections.abc import Callable
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
from penstock.models.config_json import parse_model_config
from penstock_lab.prove.every_draft import EveryDraft
from tests.answers import LENGTHS, PROMPTS, WATCHED, ask, ask_alone, check, check_resumed, request
from tests.coded import code, coded_files  # noqa: F401
from tests.fakes_drafts import Oracle
from tests.families.llama import CASES
from tests.hf_models import Made
from tests.kernels.packed import levels
from tools import fallback_classes
from tools.structure import ROOT

pytestmark = pytest.mark.skipif(not levels(), reason="no native library")
ROW = re.compile(r"^\| `(\w+)` \| (.+) \|$", re.MULTILINE)
NUM_CHOSEN = 6
LLAMA = next(case for case in CASES if case.name == "llama")
FORMS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4", "quantization_group_size": 32},
    "int8 cache": {"kv_cache_dtype": "int8"},
}


def table() -> dict[str, str]:
    """The table of docs/models.md: what it says of each class."""
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    return dict(ROW.findall(text.partition("<!-- fallback -->")[2].partition("<!-- end -->")[0]))


def chosen() -> list[str]:
    """Some of the classes that are said to work, others with each version of Transformers."""
    working = sorted(name for name, said in table().items() if said == "works")
    return sorted(random.Random(transformers.__version__).sample(working, NUM_CHOSEN))


def test_the_table_has_every_class() -> None:
    """Guards against classes of a newer Transformers that were never tried."""
    assert sorted(table()) == fallback_classes.classes()


@pytest.mark.parametrize("name", chosen())
def test_greedy_tokens_and_bits(name: str, tmp_path: Path) -> None:
    """Guards against a module of Transformers that computes a token otherwise beside other tokens, and against scores,
    windows or a head that the engine computes otherwise."""
    assert fallback_classes.why_not(name, tmp_path) is None


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


def test_it_is_chosen_and_said(tmp_path: Path) -> None:
    """Guards against a fallback that is chosen silently."""
    fallback_classes.make("ArceeForCausalLM", tmp_path)
    built = fallback_classes.engine(tmp_path, model_impl="auto")
    assert built.info.choices_made["model_impl"].startswith("transformers: its own modules compute ArceeForCausalLM")
    again = fallback_classes.engine(tmp_path, model_impl="auto", hf_overrides={"rope_theta": 5000.0})
    assert built.info.system_fingerprint != again.info.system_fingerprint


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Qwen2MoeForCausalLM", "sums of torch's depend on the batch"),
        ("BloomForCausalLM", "does not go through Transformers' attention interface"),
        ("Qwen3NextForCausalLM", "it keeps other state than keys and values"),
    ],
)
def test_what_cannot_run_is_refused_by_name(name: str, why: str, tmp_path: Path) -> None:
    """Guards against a model that runs, and whose answers depend on the batch."""
    fallback_classes.tiny_config(name).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=why) as caught:
        build_engine(EngineConfig.from_options(model=str(tmp_path), load_format="dummy"))
    assert name in str(caught.value)


@pytest.mark.parametrize("name", ["", "Arcee", "ForCausalLM"])
def test_a_part_of_a_name_is_no_class(name: str) -> None:
    """Guards against AttributeError's traceback for a name that is contained in one that Transformers has."""
    with pytest.raises(ModelLoadError, match=f"architectures = '{name}' is not supported"):
        parse_model_config({"architectures": [name], "model_type": "arcee"})


def test_unknown_keys_and_rotary_types_are_refused(tmp_path: Path) -> None:
    """Guards against a key that Transformers would ignore, and frequencies that depend on the batch."""
    fallback_classes.tiny_config("ArceeForCausalLM").save_pretrained(tmp_path)
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
