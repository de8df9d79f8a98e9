"""Layer by layer beside Transformers: every family agrees, and what is changed on purpose is named."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.layers.module import get_submodule
from penstock.models.registry import ARCHITECTURES
from penstock.spec.param_table import Parameter
from penstock.weights.sources import read_parameters
from penstock_lab.check.ours import OurModel
from penstock_lab.check.pairs import BLOCK
from penstock_lab.check.parity import ATTENTION, EPSILONS, LOGPROBS, TABLE, Comparison, compare, find_cause
from penstock_lab.check.proofs import NUM_TOKENS, Setting, ask, make_prompts
from penstock_lab.check.target import find_target
from penstock_lab.check.twin import ATTENTIONS, Twin
from tests.families.case import Case, all_cases
from tests.hf_models import make_llama, random_ids
from tests.kernels.packed import levels

KERNELS = "cpu" if levels() else "reference"
CASES = [case for case in all_cases() if not getattr(case, "shape", False)]  # one of each kind, not every size
NO_DEFAULT = {  # architecture -> why there is no default config to shrink
    "Glm4MoeForCausalLM": "its 96 heads do not divide its hidden size of 4096",
    "GraniteMoeHybridForCausalLM": "it is a hybrid, which is not served",
    "InternLM3ForCausalLM": "Transformers has no such class",
    "MiMoForCausalLM": "Transformers has no such class",
}
IDS = random_ids(37)  # more than two windows, and no number of heads


def load(case: Case, tmp_path: Path) -> tuple[OurModel, Twin]:
    _, directory = case.make(tmp_path)
    ours = OurModel.load(directory, dtype="float32", kernels=KERNELS, tokens=len(IDS))
    twin = Twin.load(directory)
    # Transformers has two attentions, and for alibi only the second is the paper's.
    return ours, Twin.load(directory, ATTENTIONS[1]) if compare(ours, twin, IDS).differs_in_attention else twin


def first(found: Comparison) -> str:
    row = next((row for row in found.rows if not row.passed), None)
    assert row is not None, "nothing differs"
    return row.name


@pytest.mark.covers("J7")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_layer_agrees_and_each_is_compared(case: Case, tmp_path: Path) -> None:
    """Guards against a layer that is wrong, and against one that has no row, of which nobody would hear."""
    ours, twin = load(case, tmp_path)
    found = compare(ours, twin, IDS)
    assert all(row.passed for row in found.rows), first(found)
    assert find_cause(found) is None
    assert found.rows[-1].max_error < 1e-4  # the bound of tests/families, whatever the check allows for these weights
    rows = [row.name for row in found.rows]
    for name, parameter in read_parameters(ours.config).items():
        layer = name.rpartition(".")[0]
        inside = [row for row in rows if layer == row.partition(" ")[0] or layer.startswith(f"{row}.")]
        assert parameter.tied_to or layer == "lm_head" or inside, f"no row for {name}"
    for block in range(ours.config.num_hidden_layers):
        kinds = [row.name for row in found.rows if row.block == block]
        assert sum(name.endswith(ATTENTION) for name in kinds) == 1
        assert sum(name.endswith("residual stream") for name in kinds) == 1


@pytest.mark.parametrize(("index", "case"), list(enumerate(CASES)), ids=[case.name for case in CASES])
def test_a_changed_parameter_is_named(index: int, case: Case, tmp_path: Path) -> None:
    """Guards against an error that is found in a later layer, or that goes under. Each family another parameter."""
    ours, twin = load(case, tmp_path)
    state = twin.model.state_dict()
    inside = [item for item in read_parameters(ours.config).values() if BLOCK.match(item.name)]
    parameter = inside[(7 * index + len(inside) // 2) % len(inside)]
    source = held(parameter, state)
    state[source].mul_(1.3)
    found = compare(ours, twin, IDS)
    layer, name = parameter.name.rpartition(".")[0], first(found)
    assert name.partition(" ")[0] == layer or layer.startswith(f"{name}."), f"{source} was changed"
    assert "has different values" in (find_cause(found) or "")


@pytest.mark.parametrize("case", [case for case in CASES if not case.fields.get("tie_word_embeddings")], ids=str)
def test_a_changed_head_is_named(case: Case, tmp_path: Path) -> None:
    """Guards against a bound of the log-probabilities that lets an error of the head pass: one row is 1 % larger."""
    ours, twin = load(case, tmp_path)
    twin.model.get_output_embeddings().weight.data[7].mul_(1.01)
    found = compare(ours, twin, IDS)
    assert first(found) == LOGPROBS or first(found).endswith(TABLE)  # tied: the embedding has changed too
    assert not found.rows[-1].passed


@pytest.mark.parametrize("factor", [1, 1000])
def test_large_logits_may_differ_more(factor: int, tmp_path: Path) -> None:
    """Guards against a bound that fits the logits of a tiny model only: the head of Gemma 3 270M makes more of the same
    rounding errors. An error beyond these is found at every size."""
    _, directory = make_llama(tmp_path)
    tensors = load_file(directory / "model.safetensors")
    save_file(tensors | {"lm_head.weight": factor * tensors["lm_head.weight"]}, directory / "model.safetensors")
    ours = OurModel.load(directory, dtype="float32", kernels=KERNELS, tokens=len(IDS))
    found = compare(ours, twin := Twin.load(directory), IDS)
    assert all(row.passed for row in found.rows)
    assert 2 < found.rows[-1].allowed / found.rows[-1].max_error < 100
    assert (found.rows[-1].max_error > 1e-4) == (factor > 1)
    twin.model.get_submodule("model.norm").weight.data.mul_(1 + 1e-4)
    found = compare(ours, twin, IDS)
    assert not found.rows[-1].passed
    assert first(found) == "model.norm"


def held(parameter: Parameter, state: dict[str, torch.Tensor]) -> str:
    """The first tensor of Transformers' that holds some of it."""
    return next(
        name for layout in parameter.layouts if all(name in state for name in layout.sources) for name in layout.sources
    )


def test_experts_that_no_token_reaches_are_compared(tmp_path: Path) -> None:
    """Guards against a check that passes though an expert has other weights: a prompt goes through some of them."""
    case = next(case for case in all_cases() if case.name == "qwen3-moe-many-experts")
    ours, twin = load(case, tmp_path)
    state = twin.model.state_dict()
    stacked = state["model.layers.1.mlp.experts.down_proj"]
    named = set()
    for expert in range(0, len(stacked), 3):
        stacked[expert, 1, 2] += 0.5
        found = compare(ours, twin, IDS)
        named.add(first(found))
        assert f"model.layers.1.mlp.experts.{expert}.down_proj.weight has different values" in (find_cause(found) or "")
        stacked[expert, 1, 2] -= 0.5
    assert named == {"model.layers.1.mlp", "model.layers.1.mlp (weights of experts, and other single ones)"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_changed_epsilon_is_named(case: Case, tmp_path: Path) -> None:
    """Guards against an epsilon that nobody sees, because the prompt's activations are large."""
    ours, twin = load(case, tmp_path)
    for module in twin.model.modules():
        for name in EPSILONS:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 1e-3)
    found = compare(ours, twin, IDS)
    layer = get_submodule(ours.model, first(found))
    assert type(layer).__name__ in ("RMSNorm", "LayerNorm")
    norms = [place.layer for place in found.places if type(get_submodule(ours.model, place.layer)) is type(layer)]
    assert first(found) == norms[0]
    assert "epsilon" in (find_cause(found) or "")


@pytest.mark.covers("J17")
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES.keys() - NO_DEFAULT.keys()))
def test_every_architecture_runs_without_a_checkpoint(architecture: str, tmp_path: Path) -> None:
    """Guards against a family that works for the configs of the tests and not for Transformers' default one, shrunk:
    its layers agree, and the engine generates with it."""
    target = find_target(architecture, tmp_path, tiny=False)
    ours = OurModel.load(target.directory, dtype="float32", kernels=KERNELS, tokens=len(IDS))
    found = compare(ours, Twin.load(target.directory), IDS)
    assert all(row.passed for row in found.rows), first(found)
    setting = Setting(target.directory, "float32", KERNELS, make_prompts(24, ours.config.vocab_size))
    with setting.engine() as engine:
        answers = ask(engine, setting, [0, 1])
    assert all(len(answer.ids) == NUM_TOKENS for answer in answers)
