"""Every family's parameter table, and what needs nothing but a config.json."""

import json
import math
from pathlib import Path

import pytest
import torch
import transformers
from transformers import PreTrainedConfig

from penstock import LLM, SamplingParams
from penstock.errors import ModelLoadError
from penstock.kernels.reference import ReferenceOps
from penstock.layers.factory import LayerFactory
from penstock.models.config_json import parse_model_config
from penstock.models.registry import ARCHITECTURES, find_model
from penstock.spec.param_table import Parameter
from penstock.weights.loader import weight_layers
from penstock_lab.planner.planned import num_elements
from tests.families.case import Case, all_cases, for_cases
from tests.hf_models import all_values, random_ids

Shapes = dict[str, tuple[int, ...]]


def test_every_architecture_is_proved() -> None:
    """Guards against an architecture that is accepted, and of which nothing in this folder is proved."""
    built_in = {
        name for name, item in ARCHITECTURES.items() if item.model_type is not None and hasattr(transformers, name)
    }  # tests/models has those that Transformers lacks
    assert {case.architecture for case in all_cases()} == built_in


def test_defaults_may_be_spelt_out(case: Case) -> None:
    """Guards against a key of Transformers that we call unknown, and against a default that is not its own: config.json
    may hold every key, or only those that differ."""
    whole, short = (json.loads(case.config().to_json_string(use_diff=diff)) for diff in (False, True))
    assert len(whole) > len(short)
    assert parse_model_config(whole) == parse_model_config(short)


@pytest.mark.parametrize("tied", [False, True])
def test_table_and_model_have_the_same_parameters(case: Case, tied: bool) -> None:
    """Guards against drift: a parameter in the model that the table does not list would be neither loaded nor sharded
    nor counted. Names and sizes are also those of Transformers. A family
    that always ties its head, or never does, says so."""
    hf_config = case.config(tie_word_embeddings=tied)
    if (refusal := refused(hf_config)) is not None:
        assert "tie_word_embeddings" in refusal
        assert tied != case.config().tie_word_embeddings
        return
    config = parse_model_config(hf_config.to_dict())
    entry = find_model(config.architecture)
    parameters = entry.read_table().parameters(config)
    model = entry.model_class(config, LayerFactory.single_device(ReferenceOps(torch.float32), parameters))
    declared = {
        f"{prefix}.{name}": shape for prefix, layer in weight_layers(model) for name, shape in layer.shapes.items()
    }
    assert declared == {name: parameter.shape for name, parameter in parameters.items()}
    with torch.device("meta"):
        hf_model = case.model_class(hf_config)
    theirs = {name: tuple(value.shape) for name, value in all_values(hf_model)}
    claimed = [claim for item in parameters.values() if not item.tied_to for claim in held(item, theirs).items()]
    assert dict(claimed) == theirs
    assert num_elements(parameters.values()) == sum(math.prod(shape) for shape in theirs.values())


def refused(config: PreTrainedConfig) -> str | None:
    """Why a config.json cannot be served, if so."""
    try:
        parse_model_config(config.to_dict())
    except ModelLoadError as error:
        return str(error)
    return None


def held(parameter: Parameter, theirs: Shapes) -> Shapes:
    """Names and shapes of Transformers' parameters that hold this one, in the first way in which they can."""
    ways = [layout.sources for layout in parameter.layouts if layout.sources.keys() <= theirs.keys()]
    assert ways, f"Transformers has none of {[list(layout.sources) for layout in parameter.layouts]}"
    return ways[0]


@for_cases(all_cases(shapes=False))
@pytest.mark.covers("J17")
def test_a_config_is_enough_to_run(case: Case, tmp_path: Path) -> None:
    """Guards against an architecture that cannot be tried without its checkpoint."""
    case.config().save_pretrained(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
    with LLM(model=str(tmp_path), load_format="dummy", threads=1) as llm:
        (output,) = llm.generate([{"prompt_token_ids": random_ids(20)}], params)
    assert len(output.outputs[0].token_ids) == 8
    logprobs = [entry.logprob for position in output.prompt_logprobs[1:] for entry in position.values()]
    assert all(math.isfinite(value) for value in logprobs)
    assert len(set(logprobs)) > 10
