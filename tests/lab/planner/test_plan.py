"""`penstock plan`: its ledger is the engine's, to the byte; its times are bytes and operations over rates."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import EngineConfig, InvalidRequestError
from penstock.assembly import build_engine
from penstock.cli.main import main
from penstock.layers.module import named_modules
from penstock.layers.weights import WeightLayer
from penstock.ranks.build import RankPlan, make_runner
from penstock.ranks.sharding import Degrees
from penstock.ranks.stage import Stage, split_layers
from penstock.runner.model_runner import RecordedModel
from penstock.weights.loader import make_ops
from penstock_lab.planner import costs
from penstock_lab.planner.costs import ModelWork, Products, UniformBatch, decode_time, prefill_time, step_time
from penstock_lab.planner.fit import Budget
from penstock_lab.planner.forecast import Forecaster, Load
from penstock_lab.planner.machines import Hardware, load_hardware, names
from penstock_lab.planner.planned import PlannedModel
from penstock_lab.planner.report import Question, answer, fitter_of
from tests.kernels.packed import levels

GIB = 2**30
PLENTY = 16 * GIB  # for engines in this process, which may have more than a GiB from other tests
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 96, "intermediate_size": 200,
    "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 500,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
FALCON = {
    "architectures": ["FalconForCausalLM"], "model_type": "falcon", "hidden_size": 128, "num_attention_heads": 8,
    "num_kv_heads": 2, "num_hidden_layers": 3, "vocab_size": 500, "new_decoder_architecture": True,
    "parallel_attn": True, "bias": False, "alibi": False, "multi_query": True, "torch_dtype": "bfloat16",
    "max_position_embeddings": 256, "layer_norm_epsilon": 1e-5,
}  # fmt: skip
SEVEN_BILLION = LLAMA | {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096,
}  # fmt: skip
GEMMA = LLAMA | {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 32, "hidden_act": "gelu_pytorch_tanh",
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
FAMILIES = {"llama": LLAMA, "mixtral": MIXTRAL, "falcon": FALCON}
FORMS = {
    "bfloat16": {},
    "int8": {"quantization": "int8"},
    "int4, int8 cache": {"quantization": "int4", "quantization_group_size": 32, "kv_cache_dtype": "int8"},
    "float32": {"dtype": "float32"},
}
needs_library = pytest.mark.skipif(not levels(), reason="no native library")


def written(directory: Path, config: dict[str, Any]) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def asked(directory: str, budget: Budget, hardware: Hardware | None = None, **options: Any) -> dict[str, Any]:
    planned = PlannedModel.read(EngineConfig.from_options(model=directory, **options), hardware)
    return answer(planned, Question(budget, hardware, Load((), (), ())))


# --- memory --------------------------------------------------------------------------------------------------------


@needs_library
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_is_what_the_engine_allocates(family: str, form: str, tmp_path: Path) -> None:
    """Guards against a plan that counts a scale, a padding, a tied head or a cache otherwise than the engine does."""
    directory = written(tmp_path, FAMILIES[family])
    options = {"threads": 1, "max_num_seqs": 3, **FORMS[form]}
    result = asked(directory, Budget(GIB, 0), **options)
    built = build_engine(EngineConfig.from_options(model=directory, load_format="dummy", memory=PLENTY, **options))
    (device,) = result["devices"]
    assert device["cache_bytes"] == built.cache_bytes
    layers = [layer for _, layer in named_modules(built.model) if isinstance(layer, WeightLayer)]
    allocated = {id(tensor): tensor.nbytes for layer in layers for tensor in layer.state().values()}
    assert device["weights_bytes"] == sum(allocated.values()) == sum(result["weights"].values())
    built.engine.shutdown()


def test_a_gpu_is_planned_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against GPUs that are counted as processors are, and kernels that are imported for it."""
    for name in ("torch", "triton"):
        monkeypatch.setitem(sys.modules, name, None)
    directory, gpu = written(tmp_path, LLAMA), load_hardware("h200-sxm")
    config = EngineConfig.from_options(model=directory, memory=2 * GIB)
    planned = PlannedModel.read(config, gpu)
    fit = fitter_of(planned, Budget(2 * GIB, 0)).fit()
    assert (fit.config.cache.block_size, fit.config.scheduler.max_num_seqs) == (128, 256)
    assert fit.config.reasons["device"] == "cuda: h200-sxm"
    assert {"reserve", "scratch"} <= set(fit.devices[0].entries)
    assert "runtime" not in fit.devices[0].entries
    native = PlannedModel.read(EngineConfig.from_options(model=directory, kernels="cpu"), gpu)
    assert native.resolved().cache.block_size == 16
    with pytest.raises(InvalidRequestError, match="unless --hardware names the GPU"):
        PlannedModel.read(replace(config, numerics=replace(config.numerics, device="cuda")))
    wide = written(tmp_path / "wide", LLAMA | {"head_dim": 320})
    with pytest.raises(InvalidRequestError, match="have 320 elements; there, they may have 256; --kernels cpu plans"):
        PlannedModel.read(EngineConfig.from_options(model=wide), gpu)


@needs_library
def test_the_parts_of_all_ranks_are_the_whole(tmp_path: Path) -> None:
    """Guards against a rank's part that is counted as the whole, or of which something is left out."""
    directory = written(tmp_path, LLAMA)
    whole = asked(directory, Budget(GIB, 0, count=1))
    parts = asked(directory, Budget(GIB, 0, count=2), tensor_parallel_size=2)
    assert [device["name"] for device in parts["devices"]] == ["device 0", "device 1"]
    assert sum(device["cache_bytes"] for device in parts["devices"]) == whole["devices"][0]["cache_bytes"]
    values = sum(parts["weights"][kind] for kind in ("bfloat16",)) * 2
    assert values == whole["weights"]["bfloat16"]


@needs_library
@pytest.mark.covers("M19")
@pytest.mark.parametrize("family", [*FAMILIES, "gemma 2"])
def test_a_stage_of_a_pipeline_is_what_its_process_allocates(family: str, tmp_path: Path) -> None:
    """Guards against a stage that is counted with the embedding or the head of another one, or with too many layers;
    tied weights are in the first stage and in the last."""
    config = FAMILIES.get(family, GEMMA) | {"tie_word_embeddings": True}
    directory, stages = written(tmp_path, config), 2
    options: dict[str, Any] = {"threads": 1, "max_num_seqs": 3, "pipeline_parallel_size": stages}
    result = asked(directory, Budget(GIB, 0, count=stages), **options)
    assert result["fits"]
    assert [device["name"] for device in result["devices"]] == ["stage 1", "stage 2"]
    planned = PlannedModel.read(EngineConfig.from_options(model=directory, load_format="dummy", **options))
    fit = fitter_of(planned, Budget(GIB, 0, count=stages)).fit()
    plan = RankPlan(fit.config, planned.model, Path(directory), fit.groups, Degrees())
    for device, layers in zip(result["devices"], split_layers(3, stages), strict=True):
        ops = make_ops(fit.config, planned.model)
        runner = make_runner(plan, ops, 0, None, None, Stage(layers, 3))
        assert device["cache_bytes"] == runner.cache_bytes
        model = runner.model._model if isinstance(runner.model, RecordedModel) else runner.model
        own = [layer for _, layer in named_modules(model) if isinstance(layer, WeightLayer)]
        allocated = {id(tensor): tensor.nbytes for layer in own for tensor in layer.state().values()}
        assert device["weights_bytes"] == sum(allocated.values())
    single = EngineConfig.from_options(model=directory, load_format="dummy", threads=1, max_num_seqs=3)
    alone = PlannedModel.read(single)
    machine = load_hardware("h100-sxm")
    (whole,) = Forecaster(alone.model, alone.sizes, machine).works(fitter_of(alone, Budget(GIB, 0)).fit())
    works = Forecaster(planned.model, planned.sizes, machine).works(fit)
    assert sum(sum(count for count, _ in work.windows) for work in works) == 3
    for kind in ("layers", "experts"):  # the head's operations of a model are those of its last stage
        parts = [sum(getattr(work, kind).num_bytes.values()) for work in works]
        assert sum(parts) == sum(getattr(whole, kind).num_bytes.values())
    of_ranks = asked(directory, Budget(GIB, 0, count=4), **options, tensor_parallel_size=2)
    assert [item["name"] for item in of_ranks["devices"]] == [f"stage {s}, rank {r}" for s in (1, 2) for r in (0, 1)]


@needs_library
@pytest.mark.covers("J21")
def test_the_fewest_devices_that_hold_it(tmp_path: Path) -> None:
    """Guards against a model of 7B that is put on one device of 12 GB, or on more devices than it takes."""
    directory = written(tmp_path, SEVEN_BILLION)
    result = asked(directory, Budget(12 * 10**9, 0, count=8))
    assert result["fits"]
    assert result["tensor_parallel_size"] == 2
    assert asked(directory, Budget(16 * 10**9, 0, count=8))["tensor_parallel_size"] == 1
    alone = asked(directory, Budget(12 * 10**9, 0, count=1))
    assert not alone["fits"]
    assert alone["devices"][0]["total_bytes"] > alone["devices"][0]["budget_bytes"]
    assert alone["smallest_change"] == "quantization = int8"
    assert asked(directory, Budget(12 * 10**9, 0), quantization="int8")["fits"]


@needs_library
def test_one_byte_decides(tmp_path: Path) -> None:
    """Guards against a plan that is off by a byte at the edge of the budget, where the engine would be refused."""
    directory = written(tmp_path, LLAMA)
    options = {"max_model_len": 256, "max_num_seqs": 1}
    total = asked(directory, Budget(GIB, 0), **options)["devices"][0]["total_bytes"]
    assert asked(directory, Budget(total, 0), **options)["fits"]
    refused = asked(directory, Budget(total - 1, 0), **options)
    assert not refused["fits"]
    assert refused["devices"][0]["total_bytes"] == total


# --- the command ---------------------------------------------------------------------------------------------------


@needs_library
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a field of the JSON that is missing, an exit code that hides a refusal, and torch."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = written(tmp_path / "model", LLAMA)
    rows = ["--batch", "1", "4", "--prompt-len", "32", "--context", "64"]
    assert main(["plan", directory, "--hardware", "h100-sxm", *rows, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {"hardware", "devices", "fits", "smallest_change", "predictions"} <= set(result)
    assert [(item["phase"], item["batch"]) for item in result["predictions"]] == [
        ("prefill", 1), ("prefill", 4), ("decode", 1), ("decode", 4),
    ]  # fmt: skip
    assert set(result["what_if"]) == {
        "quantization = int8", "quantization = int4", "kv_cache_dtype = int8", "twice the bandwidth",
    }  # fmt: skip
    assert main(["plan", directory, "--memory", "1MiB", "--json"]) == 1
    found = capsys.readouterr()
    assert json.loads(found.out)["fits"] is False
    assert "bench machine" in found.err  # nothing was measured here, so there are no times
    assert main(["plan", directory, "--hardware", "this"]) == 2
    assert "measure it with `penstock bench machine`" in capsys.readouterr().err
    assert main(["plan", directory, "--hardware", "h100-sxm", "--context", "257"]) == 2
    assert "--context: 257 must be from 1 to max_model_len = 256" in capsys.readouterr().err
    assert main(["plan", directory, "--pipeline-parallel-size", "2", "--hardware", "tpu-v5e-8"]) == 0
    assert "in 2 stages: it fits" in capsys.readouterr().out.replace("\n", "")
    assert main(["plan", directory, "--pipeline-parallel-size", "3", "--devices", "2x1GiB"]) == 2
    assert "devices: 2 are too few for a model that is split over 3" in capsys.readouterr().err.replace("--", "")
    assert main(["plan", directory, "--hardware", "ascend-910b"]) == 0
    assert "attention operator: 160896 of 196608 bytes" in capsys.readouterr().out


# --- hardware ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names())
def test_every_file_is_read(name: str) -> None:
    """Guards against a file of the package that is not valid, or that does not say where its figures come from."""
    found = load_hardware(name)
    assert found.name == name
    assert found.source
    assert found.has_rates


# --- times ---------------------------------------------------------------------------------------------------------

MACHINE = Hardware(
    "m", "test", GIB, {"other": 100.0}, {"bfloat16": 1000.0, "int8": 2000.0}, link_bytes_per_s=10.0, link_latency_s=0.5,
    step_s=0.25, sequence_s=0.125,
)  # fmt: skip
WORK = ModelWork(
    layers=Products({"bfloat16": 200}, {"bfloat16": 400}), head=Products({"bfloat16": 50}, {"bfloat16": 100}),
    experts=Products(), num_experts=0, chosen=0, token_bytes=4, cache_type="bfloat16", pair_operations=8,
    windows=((2, None),),
)  # fmt: skip


def test_a_step_by_hand() -> None:
    """Guards against a part of a step that is left out, counted twice, or divided by another rate."""
    found = step_time(WORK, MACHINE, UniformBatch(sequences=3, rows=1, cached=9))
    assert found.read == pytest.approx((200 + 50 + 2 * 3 * 9 * 4) / 100)
    assert found.multiply == pytest.approx((3 * 400 + 3 * 100 + 2 * 3 * 10 * 8) / 1000)
    assert found.host == pytest.approx(0.25 + 3 * 0.125)
    assert found.exchange == 0.0
    assert found.seconds == pytest.approx(max(found.read, found.multiply) + found.host)
    assert found.bound == "memory bandwidth"
    shared = replace(WORK, gathers=4, gather_width=5, head_width=10, degrees=Degrees(2, 2, 2, 2))
    assert step_time(shared, MACHINE, UniformBatch(3, 1, 9)).exchange == pytest.approx(
        (4 * 3 * 5 * 4 + 3 * 10 * 4 / 2) / 10 + 5 * 0.5
    )
    faster = costs.twice_the_bandwidth(MACHINE)
    assert step_time(WORK, faster, UniformBatch(3, 1, 9)).read == pytest.approx(found.read / 2)


@pytest.mark.covers("M20", "M21")
def test_a_pipeline_by_hand() -> None:
    """Guards against stages that compute at the same time for the same rows, against groups that follow one another
    faster than the slowest stage, and against x and h, or the engine's own time, that count too often or not at all."""
    works = [replace(WORK, gather_width=5), replace(WORK, gather_width=5, head=Products({"bfloat16": 150}, {}))]
    quiet = replace(MACHINE, step_s=0.0, sequence_s=0.0)

    def group(work: ModelWork, hardware: Hardware, rows: int) -> tuple[costs.StepTime, float]:
        step = decode_time(work, hardware, rows, 10)
        return step, step.seconds

    one, two = decode_time(works[0], MACHINE, 2, 10).seconds, decode_time(works[1], quiet, 2, 10).seconds
    link = 2 * 5 * 4 * 2 / 10 + 0.5
    parts, seconds = costs.pipelined(works, MACHINE, 4, 0, group)
    assert seconds == pytest.approx(max(one + two + link, 2 * max(one, two)))
    assert (parts.exchange, parts.host) == (link, 0.25 + 2 * 0.125)
    _, prompts = costs.pipelined(works, MACHINE, 4, 3, group)
    assert prompts == pytest.approx(one + two + 3 * (link - 0.5) + 0.5 + max(one, two))
    _, alone = costs.pipelined(works, MACHINE, 1, 0, group)
    assert alone == pytest.approx(sum(group(w, m, 1)[1] for w, m in zip(works, (MACHINE, quiet), strict=True)) + 4.5)
    assert costs.pipelined(works[:1], MACHINE, 4, 0, group)[1] == decode_time(works[0], MACHINE, 4, 10).seconds


def test_products_of_few_rows_and_attention_have_rates_of_their_own() -> None:
    """Guards against measured rates that are not used, an interpolation that jumps, and attention at products' rate."""
    measured = replace(
        MACHINE, rows_bytes_per_s={"bfloat16": {8: 50.0, 32: 20.0}},
        attend_prompt_operations_per_s={"bfloat16": 400.0}, attend_streams_operations_per_s={"bfloat16": 80.0},
    )  # fmt: skip
    seconds = [measured.product_seconds("bfloat16", 100, 200.0 * rows, rows) for rows in (1, 8, 20, 32, 256, 512)]
    assert seconds == pytest.approx([1.0, 2.0, 3.5, 5.0, 51.2, 102.4])
    assert measured.product_seconds("int8", 100, 800.0, 8) == 0.4  # of which nothing was measured
    one = step_time(WORK, measured, UniformBatch(1, 1, 9))
    assert one.multiply == pytest.approx(2.5 + 2 * 10 * 8 / 80)
    assert (one.bound, step_time(WORK, measured, UniformBatch(1, 1, 1)).bound) == ("compute", "memory bandwidth")
    prompt = step_time(WORK, measured, UniformBatch(1, 512, 0))
    assert prompt.multiply == pytest.approx(512 * 0.4 + 0.5 + 2 * 512 * 513 / 2 * 8 / 400)


def test_a_window_ends_what_is_read() -> None:
    """Guards against a layer with a window whose cost grows with the context."""
    near = replace(WORK, windows=((2, 16),))
    assert decode_time(near, MACHINE, 1, 1000).read == decode_time(near, MACHINE, 1, 10000).read
    assert decode_time(near, MACHINE, 1, 10).read == decode_time(WORK, MACHINE, 1, 10).read
    long_prompt = UniformBatch(1, 20, 0)
    pairs = 16 * 17 / 2 + 4 * 16
    expected = (20 * 400 + 100 + 2 * pairs * 8) / 1000
    assert step_time(near, MACHINE, long_prompt).multiply == pytest.approx(expected)


def test_experts_are_read_where_a_row_chooses_them() -> None:
    """Guards against a mixture whose experts are all read for one row, or computed for rows that chose others."""
    sparse = replace(WORK, experts=Products({"bfloat16": 800}, {"bfloat16": 1600}), num_experts=8, chosen=2)
    one = step_time(sparse, MACHINE, UniformBatch(1, 1, 0))
    assert one.read == pytest.approx((250 + 800 / 4) / 100)
    assert one.multiply == pytest.approx((500 + 1600 / 4 + 16) / 1000)
    many = step_time(sparse, MACHINE, UniformBatch(100, 1, 0))
    assert many.read == pytest.approx((250 + 800) / 100)


@given(batch=st.integers(1, 8), prompt=st.integers(1, 40), chunk=st.integers(1, 32), context=st.integers(1, 5000))
@settings(max_examples=40)
def test_more_work_takes_longer(batch: int, prompt: int, chunk: int, context: int) -> None:
    """Guards against a time that falls with more streams, longer prompts or contexts, or smaller chunks."""
    _, seconds = prefill_time(WORK, MACHINE, batch, prompt, chunk)
    assert seconds > 0
    assert prefill_time(WORK, MACHINE, batch + 1, prompt, chunk)[1] > seconds
    assert prefill_time(WORK, MACHINE, batch, prompt + 1, chunk)[1] >= seconds
    step = decode_time(WORK, MACHINE, batch, context).seconds
    assert decode_time(WORK, MACHINE, batch + 1, context).seconds > step
    assert decode_time(WORK, MACHINE, batch, context + 1).seconds >= step


def test_a_type_without_a_rate_is_refused() -> None:
    """Guards against a time that is made up for a type that the hardware cannot multiply."""
    with pytest.raises(InvalidRequestError, match="m has no operations_per_s for float32; it has bfloat16, int8"):
        MACHINE.multiplying("float32")
    assert MACHINE.multiplying("int4") == 2000.0
