"""What each rank holds of a model: everything once, whole leaves, and no more than its share."""

import itertools
import random
from pathlib import Path

import numpy as np
import pytest

from penstock.config import DEGREES, EngineConfig
from penstock.errors import InvalidRequestError
from penstock.kernels.ops import TensorRows
from penstock.models.config_json import load_model_config
from penstock.ranks.build import CutSource
from penstock.ranks.sharding import Cut, Degrees, Part, Share, cut_all, divisible_heads, is_beginning
from penstock.ranks.sharding_map import ShardingMap, split_by_map
from penstock.spec.model_config import ModelConfig
from penstock.weights.sources import read_parameters
from penstock_lab.prove import tiny_models
from penstock_lab.prove.parallel import draw_map

BASE = {"load_format": "dummy", "threads": 1}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return tiny_models.write(tmp_path_factory.mktemp("models"))


class CountingSource:
    """Parameters of which every element is a number of its own."""

    def rows(self, parameter):
        return TensorRows(np.arange(parameter.num_elements).reshape(parameter.shape))


@pytest.mark.covers("F24", "F29", "M28")
@pytest.mark.parametrize("name", ["Llama", "Falcon", "Gemma 2", "Qwen3-MoE"])
def test_every_element_is_held_where_it_belongs(models: dict[str, str], name: str) -> None:
    """Guards against a row or column that no rank of a block has, or that two have: a silent wrong answer. And against
    ranks that all hold every expert."""
    config = load_model_config(Path(models[name]))
    parameters = read_parameters(config)
    experts = (1, 2) if config.num_experts else (1,)
    for (attention, mlp), spread in itertools.product(((1, 2), (2, 1), (2, 8)), experts):
        size = max(attention, mlp, spread)
        degrees = Degrees(size, attention, mlp, min(mlp, 4), spread, min(mlp, size // spread))
        counts = {name: np.zeros(item.num_elements, np.int64) for name, item in parameters.items()}
        for rank in range(size):
            cuts = cut_all(parameters, Share(rank, degrees), config)
            source = CutSource(CountingSource(), cuts)
            for cut in cuts.values():
                rows = source.rows(cut.own)
                assert tuple(rows.shape) == cut.own.shape
                counts[cut.whole.name][rows.read(0, rows.shape[0]).ravel()] += 1
                if cut.own.leaf_ends:
                    assert cut.own.leaf_ends[-1] == cut.own.shape[-1]
                    assert len(cut.own.leaf_ends) == 8 // cut.part.degree
        for parameter, count in counts.items():
            assert count.min() == count.max() >= 1, parameter
            if ".experts." in parameter:  # the ranks beyond those that the experts are distributed over hold them again
                assert count.max() == size // degrees.mixture, parameter


def columns(cut: Cut) -> int:
    """How many features come after a product."""
    if cut.wiring.gathers_result:
        return cut.wiring.gathers_result[-1]
    selected = sum(end - begin for begin, end in cut.wiring.selects_result)
    return selected or cut.own.shape[0] // (2 if "gate_up" in cut.own.name else 1)


def check_branch(first: Cut, last: Cut, own: ModelConfig) -> None:
    """Check that the product which ends a branch gets the features that come out of the one which begins it."""
    features, wiring = columns(first), last.wiring
    if first.whole.unit is not None:  # queries, keys and values; attention makes one feature of each query's
        heads = own.num_attention_heads, own.num_key_value_heads
        assert features == (heads[0] + 2 * heads[1]) * own.head_dim
        features = heads[0] * own.head_dim
    selected = sum(end - begin for begin, end in wiring.selects_input) or features
    assert last.own.shape[1] == (wiring.gathers_input[-1] if wiring.gathers_input else selected)
    assert columns(last) == own.hidden_size


@pytest.mark.covers("J9", "J12", "J13")
@pytest.mark.parametrize("name", ["Llama", "Falcon", "Gemma 2", "Qwen3-MoE"])
def test_every_map_can_be_computed(models: dict[str, str], name: str) -> None:
    """Guards against a weight that nobody holds, features that a product gets too few or too many of, parts of a sum
    that are no leaves, and parameters that every rank holds whole although the map splits them."""
    config, chance = load_model_config(Path(models[name])), random.Random(7)
    parameters = read_parameters(config)
    for _ in range(8):
        size, sharding = chance.choice((2, 4, 8)), ShardingMap.from_text(draw_map(Path(models[name]), chance), "map")
        axes, most = sharding.resolve(parameters), max(item for item in divisible_heads(config) if item <= size)
        degrees = Degrees(size, most, size, size, 1, size if config.num_experts else 1)
        degrees = split_by_map(degrees, axes, sharding.hints(parameters), parameters)
        held = {item: np.zeros(parameter.num_elements, np.int64) for item, parameter in parameters.items()}
        for rank in range(size):
            share = Share(rank, degrees)
            cuts = cut_all(parameters, share, config)
            for cut in cuts.values():
                rows = CutSource(CountingSource(), cuts).rows(cut.own)
                assert tuple(rows.shape) == cut.own.shape
                held[cut.whole.name][rows.read(0, rows.shape[0]).ravel()] += 1
            for first in (cut for cut in cuts.values() if is_beginning(cut.whole)):
                module = first.whole.name.rsplit(".", 2)[0]
                last = next(cut for key, cut in cuts.items() if key.startswith(module) and cut.whole.leaves > 1)
                check_branch(first, last, share.config(config))
        for item, parameter in parameters.items():
            assert held[item].min() >= 1
            if axes[item] is not None and len(parameter.shape) == 2 and min(parameter.shape) >= 16:
                assert held[item].max() < size, item


def test_parts_of_a_sum_are_whole_leaves() -> None:
    """Guards against a degree whose borders are not those of the leaves: the bits of its sums would differ."""
    for units in (8, 9, 71, 200):
        whole = [Part(index, 8).bounds(units) for index in range(8)]
        for degree in DEGREES:
            each = 8 // degree
            for index in range(degree):
                leaves = whole[index * each : (index + 1) * each]
                assert Part(index, degree).bounds(units) == (leaves[0][0], leaves[-1][1])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Llama", {"attention_parallel_size": 4}, r"attention_parallel_size: 4 .* at most 2: .* 2 key/value heads"),
        ("Falcon", {"attention_parallel_size": 16}, r"attention_parallel_size: 16 .* at most 8, unless each of 8"),
        ("Llama", {"expert_parallel_size": 2}, r"expert_parallel_size: 2 .* 1: this model has no experts"),
        ("Mixtral", {"tensor_parallel_size": 8, "lm_head_pieces": 999}, r"lm_head_pieces: 999 .* 512"),
        ("Qwen3-MoE", {"expert_parallel_size": 8}, r"expert_parallel_size: 8 .* at most 4: the model has 6 experts"),
        ("Llama", {"tensor_parallel_size": 2, "cpu_affinity": "0"}, r"cpu_affinity: '0' .* auto or none"),
        ("Llama", {"tensor_parallel_size": 2, "kernels": "reference"}, r"kernels: .reference. .* cpu if several"),
        ("Llama", {"tensor_parallel_size": 2, "load_format": "mock"}, r"tensor_parallel_size: .*mock"),
    ],
)
def test_what_cannot_be_split_is_refused_before_it_is_loaded(
    models: dict[str, str], name: str, options: dict[str, object], message: str
) -> None:
    """Guards against a rank that finds out while it loads, and against a message without the value that works."""
    from penstock.assembly import build_engine

    def start(*_: object) -> None:
        raise AssertionError("it began to load")

    with pytest.raises(InvalidRequestError, match=message):
        build_engine(EngineConfig.from_options(model=models[name], **BASE | options), start=start)
