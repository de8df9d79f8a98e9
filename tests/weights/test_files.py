"""Every format of weights that is read: values, logits, bits, ranks, conversion, plan, damage.

`make matrix` writes what these tests show into docs/files.md.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.assembly import BuiltEngine, build_engine
from penstock.config import EngineConfig
from penstock.kernels.tensors import Array
from penstock.models.config_json import load_model_config
from penstock.weights.loader import weight_layers
from penstock.weights.rows import read_rows
from penstock.weights.sources import open_source, read_parameters
from penstock_lab.convert.pack import convert_model
from penstock_lab.convert.rewrite import rewrite_model
from penstock_lab.planner.fit import Budget
from penstock_lab.planner.forecast import Load
from penstock_lab.planner.planned import PlannedModel
from penstock_lab.planner.report import Question, answer
from penstock_lab.prove.hostile_files import Reader
from penstock_lab.prove.parallel import BASE, answers, start_threads
from tests.answers import MAX_MODEL_LEN, PROMPTS, ask, ask_alone, check, check_resumed, request
from tests.hf_models import hf_logprobs, random_ids
from tests.kernels.packed import levels
from tests.paged import PagedModel
from tests.weights.files import FILES, MUTATIONS, File, copied, parts_of

KERNELS = ["reference", *(["cpu"] if levels() else [])]
LOGPROBS = {3: 1e-4, 2: 1e-2}  # int8 slices of activations -> bound of the largest difference
WATCHED = [0, 1, 5, 8]  # of tests/answers.py
ENGINE: dict[str, Any] = {"kernels": "cpu", "max_num_seqs": len(PROMPTS), "max_model_len": MAX_MODEL_LEN}
WHOLE = ENGINE | {"threads": 1, "max_num_batched_tokens": 2048, "enable_prefix_caching": False}
CROWD = ENGINE | {"threads": 2, "max_num_batched_tokens": 30}
native = pytest.mark.skipif(not levels(), reason="no native library")


def for_each_row(files: list[File]) -> pytest.MarkDecorator:
    """Decorator: the test takes the last file of each row. What it proves is not of reading, but of what was read."""
    found = list({file.row: file for file in files}.values())
    return pytest.mark.parametrize("file", found, ids=str, indirect=True, scope="module")


ROWS = for_each_row(FILES)


@dataclass(frozen=True)
class Made:
    """A model: what a user names, the directory of its twin, and the options with which engines are built."""

    place: Path
    twin: Path

    def config(self, **options: Any) -> EngineConfig:
        return EngineConfig.from_options(model=str(self.place), **options)

    def logprobs(self, kernels: str = KERNELS[-1], slices: int = 3) -> Tensor:
        return logprobs(self.place, kernels, slices)


def logprobs(place: Path, kernels: str = KERNELS[-1], slices: int = 3) -> Tensor:
    return PagedModel(place, kernels=kernels, slices=slices).step({0: random_ids(60)})[0]


@pytest.fixture(scope="module", params=FILES, ids=str)
def file(request: pytest.FixtureRequest) -> File:
    found: File = request.param
    return found


@pytest.fixture(scope="module")
def made(file: File, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(*file.make(tmp_path_factory.mktemp("files")))


@pytest.fixture(scope="module")
def theirs(made: Made) -> Tensor:
    """Compute the log-probabilities [60, V] of the dequantised twin with Transformers."""
    model = AutoModelForCausalLM.from_pretrained(made.twin, dtype=torch.float32).eval()
    return hf_logprobs(model, random_ids(60))


@pytest.fixture(scope="module")
def whole(made: Made) -> BuiltEngine:
    """An engine that computes each prompt in one step, on one thread."""
    return build_engine(made.config(**WHOLE))


def values(place: Path) -> dict[str, Array]:
    """Every parameter, as layers read it."""
    config = load_model_config(place)
    source = open_source(place, config, "auto")
    found = {name: source.rows(parameter) for name, parameter in read_parameters(config).items()}
    return {name: read_rows(rows, 0, rows.shape[0]).astype(np.float32) for name, rows in found.items()}


def check_values(place: Path, twin: Path) -> None:
    found, expected = values(place), values(twin)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # Where a format has two scales, its package may multiply them first, so that a product is rounded differently.
        np.testing.assert_allclose(found[name], value, rtol=3e-6, atol=3e-7 * np.abs(value).max(), err_msg=name)


@pytest.mark.matrix("values")
def test_values_are_those_of_the_twin(made: Made) -> None:
    """Guards against codes that are read as another row's, layer's or expert's."""
    check_values(made.place, made.twin)


@pytest.mark.matrix("logits")
def test_logits_are_those_of_the_twin_in_transformers(made: Made, theirs: Tensor) -> None:
    """Guards against weights that are read rightly one by one, but joined, cut or multiplied wrongly."""
    for slices, bound in LOGPROBS.items():
        assert (made.logprobs(slices=slices) - theirs).abs().max() < bound


@ROWS
def test_logits_of_the_reference(made: Made, theirs: Tensor) -> None:
    """Guards against the same where there are no native kernels."""
    for slices, bound in LOGPROBS.items():
        assert (made.logprobs("reference", slices) - theirs).abs().max() < bound


@native
@ROWS
@pytest.mark.matrix("same bits")
def test_same_bits_in_a_crowd(made: Made, whole: BuiltEngine) -> None:
    """Guards against a format that is multiplied with other sums in a batch, in a chunk, after a cached prefix, on more
    threads, or after the engine has died."""
    alone = ask_alone(whole.engine, WATCHED)
    assert len({tuple(ids) for ids, _, _ in alone.values()}) == len(alone)
    engine = build_engine(made.config(**CROWD)).engine
    check(ask(engine, map(request, range(len(PROMPTS)))), alone)
    again = ask(engine, [request(index, prompt_logprobs=False) for index in WATCHED])
    assert max(again[index][-1].num_cached_tokens for index in WATCHED) > 0
    check(again, alone, prompts=False)
    check_resumed(engine, alone)


@native
@pytest.mark.matrix("2 ranks")
@for_each_row([file for file in FILES if file.splits])
def test_two_ranks_have_the_bits_of_one_process(made: Made) -> None:
    """Guards against a rank that decodes or cuts what one process multiplies whole."""
    options = BASE | {"load_format": "auto"}
    split = made.config(tensor_parallel_size=2, **options)
    assert answers(split, start_threads) == answers(made.config(**options))


@native
@ROWS
@pytest.mark.matrix("convert")
def test_a_converted_model_is_the_same(made: Made, tmp_path: Path) -> None:
    """Guards against packed weights with other bits, and against codes that are written as if they were floats."""
    convert_model(made.config(dtype="float32"), tmp_path / "packed")
    assert torch.equal(logprobs(tmp_path / "packed"), made.logprobs())
    rewrite_model(str(made.place), tmp_path / "plain", "transformers", 2**30)
    found, expected = values(tmp_path / "plain"), values(made.place)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=2**-8, err_msg=name)  # of bfloat16, if the model says so


@native
@pytest.mark.matrix("plan")
def test_a_plan_counts_what_is_loaded(file: File, made: Made, whole: BuiltEngine) -> None:
    """Guards against a plan that counts floats for codes, or leaves a weight out."""
    question = Question(Budget(2**30, 0, count=1), None, Load((), (), ()))
    found = answer(PlannedModel.read(made.config(**WHOLE)), question)
    held = {id(tensor): tensor.nbytes for _, layer in weight_layers(whole.model) for tensor in layer.state().values()}
    assert found["devices"][0]["weights_bytes"] == sum(held.values()) == sum(found["weights"].values())
    assert ({*found["weights"]} <= {"float32", "bfloat16", "padding"}) == file.is_float


@pytest.fixture(scope="module")
def read() -> Iterator[Callable[[str, Path], str]]:
    with Reader() as reader:
        yield reader.read


@native
@pytest.mark.matrix("damaged")
def test_damaged_files(
    made: Made, read: Callable[[str, Path], str], pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    """Guards against a traceback, a crash, a hang or an unbounded array: each file loads or is refused in one line."""
    place, random = copied(made.place, tmp_path), Random(made.place.name)
    kind = "gguf" if place.is_file() else "checkpoint"
    files, results = [(file, file.read_bytes()) for file in parts_of(place)], set()
    assert read(kind, files[0][0]) == "loaded"
    for number in range(pytestconfig.getoption("--mutations")):
        damaged, sound = files[number % len(files)]
        damaged.write_bytes(MUTATIONS[damaged.suffix](random, sound))
        result = read(kind, damaged)
        assert result in ("loaded", "refused"), f"mutation {number} of {damaged.name}: {result}"
        results.add(result)
        damaged.write_bytes(sound)
    assert "refused" in results
