"""Recorded forward passes: the tokens and log-probabilities of the model itself, whatever changes between steps."""

import mmap
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.assembly import build_engine
from penstock.config import EngineConfig
from penstock.interface.messages import EngineRequest
from penstock.interface.sampling_params import SamplingParams
from penstock.interface.step import CacheGroup
from penstock.kernels.backends import load_ops
from penstock.kernels.scheme import Scheme
from penstock.kernels.tensors import FIXED_ROWS
from penstock.layers.module import ForwardContext
from penstock.runner.model_runner import ModelRunner, RecordedModel
from tests.fakes import FakeOps, TinyModel, resolved_config, tiny_config
from tests.hf_models import make_mistral, make_qwen3, random_ids
from tests.kernels.packed import levels
from tests.paged import PagedModel
from tests.weights.files import FILES

pytestmark = pytest.mark.skipif(not levels(), reason="no native library")
ROWS = 8


def native(directory: Path, **options: Any) -> PagedModel:
    return PagedModel(directory, kernels="cpu", num_seqs=4, **options)


class Counting:
    """A model that counts its own runs."""

    def __init__(self, model: Any) -> None:
        self.model, self.runs = model, 0

    def __call__(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        self.runs += 1
        result: Tensor = self.model(input_ids, ctx)
        return result


def quantised(options: dict[str, Any]) -> Callable[[Path], tuple[Path, dict[str, Any]]]:
    return lambda directory: (make_mistral(directory)[1], options)


def in_file(name: str) -> Callable[[Path], tuple[Path, dict[str, Any]]]:
    return lambda directory: (next(file for file in FILES if file.name == name).make(directory)[0], {})


@pytest.mark.parametrize(
    "make",
    {
        "mistral": quantised({}),
        "qwen3": lambda directory: (make_qwen3(directory)[1], {}),
        "int8": quantised({"scheme": Scheme.parse("int8", None)}),
        "int4": quantised({"scheme": Scheme.parse("int4", 32)}),
        # Codes: with integers and bfloat16, in pieces, in another order, and experts.
        **{name: in_file(name) for name in ("Q4_K_M", "awq", "gptq act-order", "nf4", "experts in one tensor")},
    }.values(),
    ids=["mistral", "qwen3", "int8", "int4", "Q4_K_M", "awq", "act-order", "nf4", "experts"],
)
def test_programs_have_the_models_bits(make: Callable[[Path], tuple[Path, dict[str, Any]]], tmp_path: Path) -> None:
    """Guards against an address, a block table or a length that a program keeps from the step that it was recorded in,
    and against weights whose products cannot be recorded. Sequences come and grow; steps of one, two and three tokens
    alternate with long ones, for which buffers grow."""
    directory, options = make(tmp_path)
    plain, recorded = native(directory, **options), native(directory, recorded=True, **options)
    counting = recorded.model._model = Counting(recorded.model._model)
    counting.compute_logits = counting.model.compute_logits
    ids = [random_ids(60, seed=seed) for seed in range(4)]
    steps = [{row: ids[row][at : at + 1] for row in range(1 + at % 3)} for at in range(12)]
    steps.insert(5, {3: ids[3] + ids[2]})
    assert len(ids[3] + ids[2]) > FIXED_ROWS
    for new in steps:
        for found, expected in zip(recorded.step(new).values(), plain.step(new).values(), strict=True):
            assert torch.equal(found, expected)
    assert counting.runs == 4  # three recordings, and the step that is too long for one


@pytest.mark.parametrize("foreign", [lambda x: x * 2, lambda x: x.add_(1), lambda x: x + int(x[0, 0])])
def test_a_model_that_computes_by_itself_is_never_recorded(foreign: Any, tmp_path: Path) -> None:
    """Guards against arithmetic of a model's own that a program would leave out."""
    _, directory = make_mistral(tmp_path)
    plain, recorded = native(directory), native(directory)
    for paged in (plain, recorded):
        norm, model = paged.model.model.norm, paged.model
        norm.add = lambda x, h, norm=norm: (x, foreign(type(norm).add(norm, x, h)[1]))
        assert model.model.norm.add is norm.add
    recorded.model = RecordedModel(recorded.model, recorded.ops)
    for token in range(4):
        assert torch.equal(recorded.step({0: [token]})[0], plain.step({0: [token]})[0])
    assert not recorded.model._recordable


def test_inputs_of_programs_are_checked(tmp_path: Path) -> None:
    """Guards against a token id or a position that was checked only in the step that was recorded."""
    _, directory = make_mistral(tmp_path)
    paged = native(directory, recorded=True)
    for _ in range(2):
        paged.step({0: [3]})
    with pytest.raises(ValueError, match="outside of its table"):
        paged.step({0: [10**6]})


def test_the_runner_records_where_the_backend_can() -> None:
    """Guards against a runner that quietly runs every step's Python."""
    group = CacheGroup((0,), None, 8, 16)
    for ops, expected in ((load_ops("cpu", torch.float32), True), (FakeOps(), False)):
        runner = ModelRunner(TinyModel(), ops, [group], resolved_config(), tiny_config(40, (1, 1, 2)))
        assert isinstance(runner.model, RecordedModel) == expected


@pytest.mark.covers("C5")
def test_a_decode_step_allocates_nothing_that_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against logits, hidden states, block tables or lists that a step makes anew or keeps: over whole steps of
    the engine, from the plan to its outputs. What a step may make is small: numbers per row, not vectors of the model.
    """
    built = build_engine(EngineConfig.from_options(model="demo", kernels="cpu", max_num_seqs=ROWS))
    engine = built.engine
    for row in range(ROWS):
        params = SamplingParams(temperature=float(row % 2), seed=row, max_tokens=80, ignore_eos=True)
        engine.add_request(EngineRequest(str(row), random_ids(20 + row, seed=row), params))
    for _ in range(40):  # programs are recorded, buffers have grown
        engine.step()

    def no_pages(*_: Any, **__: Any) -> Any:
        raise AssertionError("a step mapped memory")

    monkeypatch.setattr(mmap, "mmap", no_pages)
    peaks = []
    tracemalloc.start()
    try:
        engine.step()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(30):
            tracemalloc.reset_peak()
            at = tracemalloc.get_traced_memory()[0]
            assert len(engine.step()) == ROWS
            peaks.append(tracemalloc.get_traced_memory()[1] - at)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    logits_bytes = 4 * ROWS * built.info.vocab_size
    assert max(peaks) < logits_bytes / 4
    assert grown < 30 * ROWS * 200  # token ids, and a hash where a block was filled
