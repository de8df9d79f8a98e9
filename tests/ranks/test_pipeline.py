"""A pipeline has the bits of one process. Most is shown with stages in this process, which compute in turn; that real
processes do the same, and what happens when one dies, with the demo model in two."""

import errno
import shutil
import signal
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.assembly import BuiltEngine, build_engine
from penstock.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.kv_cache_manager import KVCacheManager
from penstock.engine.policies import Scheduling
from penstock.errors import ExecutorLostError, InvalidRequestError, ModelLoadError
from penstock.interface.pooling import PoolingParams
from penstock.interface.sampling_params import SamplingParams
from penstock.interface.step import SchedulerOutput, StepOutput
from penstock.interface.structured_outputs import StructuredOutputsParams
from penstock.ranks.build import RankPlace
from penstock.ranks.group import StepOrder
from penstock.ranks.launcher import HostLauncher
from penstock.ranks.pipeline import PipelineExecutor
from penstock.ranks.stage import RankRunner, Stage, StageRunner, split_layers
from penstock.weights.loader import make_model, make_ops, weight_layers
from penstock_lab.convert.pack import convert_model
from tests.answers import MAX_MODEL_LEN, PROMPTS, WATCHED, ask, ask_alone, check, request
from tests.families.case import all_cases
from tests.kernels.packed import levels

pytestmark = [pytest.mark.skipif(not levels(), reason="no native library"), pytest.mark.covers("M19", "M20")]
SIZES = {"hidden_size": 96, "intermediate_size": 200, "vocab_size": 500, "num_hidden_layers": 5}
FORMS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {},
    "int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
}
MODELS = {case.name: case for case in all_cases() if case.name in ("llama", "gemma2", "mixtral")}
CASES = [("llama", "int8"), ("gemma2", "bfloat16"), ("mixtral", "float32")]
OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16", "kernels": "cpu", "threads": 1, "max_num_seqs": len(PROMPTS), "max_model_len": MAX_MODEL_LEN,
    "enable_prefix_caching": False, "max_num_batched_tokens": 2048,
}  # fmt: skip
Make = Callable[..., BuiltEngine]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model of 5 layers, by its name."""
    return {name: str(case.make(tmp_path_factory.mktemp(name), seed=7, **SIZES)[1]) for name, case in MODELS.items()}


@pytest.fixture(scope="module", params=CASES, ids=["-".join(case) for case in CASES])
def make(request: pytest.FixtureRequest, directories: dict[str, str]) -> Make:
    model, form = request.param
    own = OPTIONS | {"model": directories[model]} | FORMS[form]
    return lambda **options: build_engine(EngineConfig.from_options(**(own | options)))


class StagesHere:
    """The stages of a pipeline in this process. A step passes through them when it is collected.

    Attributes:
        weight_bytes: of each stage.
        fail: called with each step and the index of a stage before it computes.
    """

    def __init__(self, built: BuiltEngine, num_stages: int) -> None:
        self.depth = num_stages
        self.fail: Callable[[SchedulerOutput, int], None] = lambda step, stage: None
        self.weight_bytes: list[int] = []
        self._stages: list[StageRunner] = []
        self._orders: deque[StepOrder] = deque()
        self._sampled: dict[str, list[int]] = {}
        config, model_config, groups = built.config, built.model_config, built.engine.kv_cache.groups
        directory = Path(config.model)
        for layers in split_layers(model_config.num_hidden_layers, num_stages):
            stage, ops = Stage(layers, model_config.num_hidden_layers), make_ops(config, model_config)
            model = make_model(config, model_config, directory, ops, RankPlace(stage=stage))
            self.weight_bytes.append(sum(layer.num_bytes for _, layer in weight_layers(model)))
            runner = RankRunner(model, ops, groups, config, model_config, None, None, layers)
            self._stages.append(StageRunner(runner, stage))

    def submit(self, plan: SchedulerOutput) -> StepOrder:
        order, self._sampled = StepOrder(plan, self._sampled), {}
        self._orders.append(order)
        return order

    def collect(self, order: StepOrder) -> StepOutput:
        assert self._orders.popleft() is order
        activations, error = None, None
        for index, stage in enumerate(self._stages):
            if error is not None:
                stage.skip(order.plan, order.sampled)
                continue
            try:
                self.fail(order.plan, index)
                activations = stage.compute(order.plan, order.sampled, activations)
            except Exception as raised:
                error = raised
            if isinstance(activations, tuple):
                activations = tuple(None if part is None else np.array(part) for part in activations)
        if error is not None:
            raise error
        assert isinstance(activations, StepOutput)
        self._sampled.update((name, result.new_token_ids) for name, result in activations.results.items())
        return activations

    def shutdown(self) -> None:
        self._stages.clear()


def pipelined(built: BuiltEngine, num_stages: int) -> Engine:
    """Another engine like this one, on stages here."""
    scheduler, model = built.config.scheduler, built.model_config
    assert scheduler.max_num_batched_tokens is not None
    return Engine(
        StagesHere(built, num_stages),
        KVCacheManager(built.engine.kv_cache.groups, enable_prefix_caching=built.config.cache.enable_prefix_caching),
        scheduling=Scheduling(
            max_num_seqs=scheduler.max_num_seqs, max_num_batched_tokens=scheduler.max_num_batched_tokens
        ),
        max_model_len=MAX_MODEL_LEN,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
    )


def test_the_bits_are_those_of_one_process(make: Make) -> None:
    """Guards against a stage that rounds what it hands on, computes another's layer or misses a token, with prompts in
    chunks, found prefixes, preempted requests, and all log-probabilities."""
    whole = make()
    alone = ask_alone(whole.engine)
    everybody = list(map(request, range(len(PROMPTS))))
    check(ask(pipelined(make(max_num_batched_tokens=33), 2), map(request, WATCHED)), alone)
    prefixes = pipelined(make(enable_prefix_caching=True, max_num_batched_tokens=64), 3)
    for _ in range(2):
        found = ask(prefixes, [request(index, prompt_logprobs=False) for index in WATCHED])
        check(found, alone, prompts=False)
    assert found[5][-1].num_cached_tokens == 64
    block_bytes = whole.cache_bytes // whole.engine.kv_cache.num_blocks
    few = 9 * len(whole.engine.kv_cache.groups)
    tight = pipelined(make(max_num_batched_tokens=30, kv_cache_memory_bytes=few * block_bytes), 4)
    last = sorted(everybody, key=lambda item: int(item.request_id) in WATCHED)
    check(ask(tight, last), alone)
    assert tight.stats().num_preemptions_total > 0
    assert tight.kv_cache.num_free == tight.kv_cache.num_blocks


@pytest.mark.parametrize("name", list(MODELS))
def test_a_stage_loads_its_layers_only(name: str, directories: dict[str, str]) -> None:
    """Guards against a stage that holds what others compute, or an embedding and a tied head that both get lost."""
    built = build_engine(EngineConfig.from_options(**OPTIONS | {"model": directories[name]}))
    stages = StagesHere(built, 4)
    (whole,) = StagesHere(built, 1).weight_bytes
    first, *middle, last = stages.weight_bytes
    assert [len(layers) for layers in split_layers(5, 4)] == [2, 1, 1, 1]
    assert middle[0] == middle[1] < whole / 4
    table = 500 * 96 * 2
    assert first - 2 * middle[0] == table
    assert table <= last - middle[0] < 1.5 * table  # packed, which pads
    assert sum(stages.weight_bytes) == whole


@pytest.mark.parametrize(("name", "form"), CASES)
def test_stages_map_their_part_of_converted_weights(
    name: str, form: str, directories: dict[str, str], tmp_path: Path
) -> None:
    """Guards against a stage of a converted model that takes another stage's weights, or misses a tied embedding."""
    own = OPTIONS | {"model": directories[name]} | FORMS[form]
    numerics = {key: value for key, value in own.items() if key in ("model", "dtype", "quantization")}
    convert_model(EngineConfig.from_options(**numerics), tmp_path / "converted")
    converted = build_engine(EngineConfig.from_options(**own | {"model": str(tmp_path / "converted")}))
    alone = ask_alone(build_engine(EngineConfig.from_options(**own)).engine, WATCHED[:3])
    check(ask(pipelined(converted, 3), map(request, alone)), alone)


@pytest.mark.parametrize("where", range(3))
def test_a_stage_that_fails_costs_nobody_a_token(where: int, directories: dict[str, str]) -> None:
    """Guards against stages that disagree about rows or tokens after one of them could not compute a step."""
    own = OPTIONS | {"model": directories["llama"], "max_num_batched_tokens": 40}
    built = build_engine(EngineConfig.from_options(**own))
    few = ask_alone(built.engine, WATCHED[:4])
    engine = pipelined(built, 3)
    assert isinstance(engine.executor, StagesHere)
    to_fail = [1, 30, 31]

    def fail(step: SchedulerOutput, stage: int) -> None:
        if stage == where and to_fail and step.step_id >= to_fail[0] and not engine.scheduler.is_trying:
            del to_fail[0]
            raise OSError("of the moment")

    engine.executor.fail = fail
    check(ask(engine, map(request, few)), few)
    assert not to_fail


@pytest.fixture
def demo() -> Iterator[BuiltEngine]:
    """The demo model in four processes: two stages of two ranks."""
    options = OPTIONS | {
        "model": "demo", "pipeline_parallel_size": 2, "tensor_parallel_size": 2, "max_num_batched_tokens": 40,
    }  # fmt: skip
    built = build_engine(EngineConfig.from_options(**options))
    yield built
    built.engine.shutdown()


def test_processes_compute_what_one_does(demo: BuiltEngine) -> None:
    """Guards against a message between processes that loses a bit, a row or an answer; against processes that wait for
    one another; and against a rank that is given another's cache."""
    whole = build_engine(EngineConfig.from_options(**OPTIONS | {"model": "demo"}))
    alone = ask_alone(whole.engine)
    check(ask(demo.engine, map(request, range(len(PROMPTS)))), alone)
    assert isinstance(demo.engine.executor, PipelineExecutor)
    assert [item.cache_bytes * 10 / demo.cache_bytes for item in demo.engine.executor.ready] == [3, 3, 2, 2]
    assert {span.stage for span in demo.engine.executor.spans} == {0, 1}
    others = [
        replace(request(0), params=params)
        for params in (
            SamplingParams.for_pooling(PoolingParams(pooling_type="MEAN")),
            SamplingParams(seed=1, max_tokens=8, mirostat=2),
            SamplingParams(
                seed=1, max_tokens=20, structured_outputs=StructuredOutputsParams(regex="[a-z]{2,9}-[0-9]+")
            ),
            SamplingParams(temperature=0.0, max_tokens=6, use_beam_search=True, n=3),
        )
    ]
    for item in others:
        wanted, found = (ask(built.engine, [item])[0] for built in (whole, demo))
        assert [output.new_token_ids for output in found] == [output.new_token_ids for output in wanted]
        assert found[-1].pooled == wanted[-1].pooled
        assert found[-1].hypotheses == wanted[-1].hypotheses
    whole.engine.shutdown()


def test_what_cannot_be_cut_is_refused(directories: dict[str, str]) -> None:
    """Guards against a rank without layers, cores that two ranks are pinned to, and weights that no rank can load."""
    own = OPTIONS | {"model": directories["llama"]}
    with pytest.raises(InvalidRequestError, match="at most 5, one layer per process"):
        build_engine(EngineConfig.from_options(**own, pipeline_parallel_size=6))
    with pytest.raises(InvalidRequestError, match="cpu_affinity"):
        build_engine(EngineConfig.from_options(**own, pipeline_parallel_size=2, cpu_affinity="0"))


def test_a_rank_that_cannot_load_says_why(directories: dict[str, str], tmp_path: Path) -> None:
    """Guards against an engine that waits for a rank which cannot start, or does not tell what was wrong."""
    broken = shutil.copytree(directories["llama"], tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"\0" * 64)
    with pytest.raises(ModelLoadError, match="safetensors"):
        build_engine(EngineConfig.from_options(**OPTIONS | {"model": str(broken), "pipeline_parallel_size": 2}))


class Unlucky(HostLauncher):
    """Cannot start the last rank; the others end at once."""

    def __init__(self, last: int) -> None:
        self.last, self.ends, self.closed = last, [], False

    def connect(self, one: int, other: int) -> tuple[socket.socket, socket.socket]:
        self.ends += (pair := super().connect(one, other))
        return pair

    def start(self, number: int, module: str, words: Sequence[Any]) -> None:
        if number == self.last:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(("last", "reason"), [(4, "Resource temporarily unavailable"), (5, "Broken pipe")])
def test_ranks_that_cannot_be_started_are_an_error_with_its_cause(last: int, reason: str) -> None:
    """Guards against an OSError that says nothing of ranks, as which the command took it for the end of its output; and
    against connections that stay open."""
    launcher = Unlucky(last)
    with pytest.raises(ExecutorLostError, match=f"2 pipeline stages cannot be started: .*{reason}") as caught:
        PipelineExecutor([[b"", b""], [b"", b""]], 64, launcher)
    assert isinstance(caught.value.__cause__, OSError)
    assert launcher.closed
    assert all(end.fileno() < 0 for end in launcher.ends)


def test_the_death_of_a_rank_ends_its_engine(demo: BuiltEngine) -> None:
    """Guards against an engine that waits for ever for a rank that is gone, blames a request for it, or leaves the
    other rank behind."""
    engine = demo.engine
    assert isinstance(engine.executor, PipelineExecutor)
    processes = list(engine.executor._processes)
    engine.add_request(request(0))
    engine.step()
    processes[1].send_signal(signal.SIGKILL)  # which is not the one that hands on, or answers
    with pytest.raises(ExecutorLostError):
        ask(engine, [])
    engine.shutdown()
    assert all(process.poll() is not None for process in processes)
