"""Placements computed on simulated chips: equal to a run without chips, within their budgets, by their clock."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from penstock import EngineConfig, InvalidRequestError, PoolingParams, SamplingParams
from penstock.cli.main import main
from penstock.interface.messages import EngineRequest
from penstock.kernels.metadata import AttentionMetadata
from penstock.kernels.tensors import Array
from penstock_lab.bench.placement import Trial, run_placement
from penstock_lab.chips.machine import OverBudgetError
from penstock_lab.chips.ops import RowsOfStep
from penstock_lab.planner.machines import Hardware, load_hardware
from penstock_lab.planner.placement import FOLDER, Placement, load_placement
from tests.kernels.packed import levels

pytestmark = pytest.mark.skipif(not levels(), reason="no native library")
FALCON: dict[str, Any] = {
    "architectures": ["FalconForCausalLM"], "model_type": "falcon", "hidden_size": 64, "num_attention_heads": 16,
    "num_kv_heads": 8, "num_hidden_layers": 2, "vocab_size": 250, "new_decoder_architecture": True,
    "parallel_attn": True, "bias": False, "alibi": False, "multi_query": True, "max_position_embeddings": 64,
    "layer_norm_epsilon": 1e-5, "torch_dtype": "bfloat16",
}  # fmt: skip
OLDER = FALCON | {"new_decoder_architecture": False, "num_attention_heads": 8}
SEVEN_B = OLDER | {"num_kv_heads": 1, "multi_query": True}
RW = OLDER | {"num_kv_heads": 8, "multi_query": False, "parallel_attn": False, "alibi": True, "bias": True}
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 250,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
BIG = FALCON | {
    "hidden_size": 8192, "num_attention_heads": 128, "num_hidden_layers": 60, "vocab_size": 65024,
    "max_position_embeddings": 2048,
}  # fmt: skip
RUN = ("--run", "--placement", "falcon-40b-galaxy")
GALAXY = load_hardware("wormhole-galaxy")


def chips(first: int, count: int) -> tuple[int, ...]:
    return tuple(range(first, first + count))


def trial(directory: Path, model: dict[str, Any], hardware: Hardware = GALAXY, **changes: Any) -> Trial:
    """A small model on the placement of Falcon-40B, for 4 rows, with changes."""
    (directory / "config.json").write_text(json.dumps(model))
    config = EngineConfig.from_options(
        model=str(directory), load_format="dummy", dtype="float32", threads=1, max_model_len=16
    )  # in float32 each bit of a sum is seen
    placement: Placement = replace(load_placement("falcon-40b-galaxy"), **{"rows": 4} | changes)
    return Trial.of(config, placement, hardware)


@pytest.mark.covers("F24", "F27", "F28", "F29")
def test_falcons_placement_equals_the_plain_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a part that is computed twice or not at all, sums in another order, a chip that holds what is
    another's, and epochs out of order: 60 layers, attention over 16 chips, MLP over 8, the head padded in 8 parts."""
    (tmp_path / "config.json").write_text(json.dumps(BIG))
    fields = yaml.safe_load((FOLDER / "falcon-40b-galaxy.yaml").read_text()) | {"rows": 4}
    (tmp_path / "four.yaml").write_text(yaml.safe_dump(fields))
    words = ["plan", str(tmp_path), "--hardware", "wormhole-galaxy", "--placement", str(tmp_path / "four.yaml")]
    words += ["--tensor-parallel-size", "8", "--max-model-len", "16", "--batch", "1", "--run", "--hidden-size", "64"]
    assert main([*words, "--trace", str(tmp_path / "trace.json"), "--json", "--threads", "1"]) == 0
    run = json.loads(capsys.readouterr().out)["run"]
    assert run["equal"]
    assert run["tokens"] == 4 * 3
    layer = 2 * (4 * 64 + 64 * (64 + 2 * 8 * 4) + 64 * 64)  # norms, q, k and v, output
    for chip in run["chips"]:
        kind = 0 if chip["chip"] < 16 else 1 if chip["chip"] < 24 else 2
        dram = (60 * layer // 16, 60 * 2 * 2 * 64 * 256 // 8, 2 * 64 * 65536 // 8)[kind]
        assert chip["peak_dram_bytes"] == dram
        assert chip["streamed"] == run["steps"] * dram
        cache = (2 * 2 * 4 * 16 * 8 * 4 // 16, 0, 0)[kind]
        resting = dram // (60, 60, 1)[kind] + cache
        assert resting < chip["peak_sram_bytes"] < resting + (4096, 4096, 2**18)[kind]  # buffers of four tokens
    events = [item for item in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if item["ph"] == "X"]
    assert {item["tid"] for item in events} == set(range(32))
    epochs: dict[str, tuple[float, float]] = {}  # of the first step: begin and end
    for item in events:
        if item["args"]["step"] == events[0]["args"]["step"]:
            epoch = item["name"].split(".")[1] if item["name"].startswith("layers") else "head"
            begin, end = epochs.get(epoch, (item["ts"], 0.0))
            epochs[epoch] = min(begin, item["ts"]), max(end, item["ts"] + item["dur"])
    assert list(epochs)[:60] == [str(layer) for layer in range(60)]
    assert all(one[1] <= other[0] + 1e-9 for one, other in itertools.pairwise(epochs.values()))


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "40B, head left out": (FALCON, {"chips_of": {"attention": chips(0, 16), "mlp": chips(16, 8)}}),
    "40B, overrides": (FALCON, {"overrides": (("layers.1.mlp", chips(20, 4)), ("layers.0.attention", chips(0, 4)))}),
    "40B, each operation by itself": (FALCON, {"overrides": (
        ("*.ln_attn", (0,)), ("*.ln_mlp", (1,)), ("*.qkv_proj", chips(2, 4)), ("*.rotary", chips(6, 3)),
        ("*.attend", chips(8, 4)), ("*.o_proj", chips(2, 3)), ("layers.1.attention.add", (15,)),
        ("*.up_proj", chips(16, 3)), ("*.activation", chips(19, 2)), ("*.down_proj", chips(16, 8)), ("lm_head.1", (5,)),
    )}),
    "Llama, operations by themselves": (LLAMA, {"overrides": (
        ("*.post_attention_layernorm", (31,)), ("*.activation", (29, 30)), ("*.attend", (0, 1)), ("*.qkv_proj", (3,)),
    ), "chips_of": {"attention": chips(0, 4), "mlp": chips(4, 12)}}),
    "7B, a head over 4 chips": (
        SEVEN_B, {"chips_of": {"attention": chips(0, 4), "mlp": chips(4, 3), "lm_head": chips(7, 5)}, "head_pad": 0}
    ),
    "RW, one branch after the other": (RW, {"chips_of": {"attention": chips(0, 2), "mlp": chips(16, 8)}}),
    "Mistral, a window": (
        LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 3},
        {"chips_of": {"attention": chips(0, 2), "mlp": chips(16, 8)}},
    ),
    "Llama, resident": (
        LLAMA, {"chips_of": {"attention": chips(0, 4), "mlp": chips(4, 12), "lm_head": (31,)}, "weights": "resident"}
    ),
}  # fmt: skip


@pytest.mark.covers("F24", "F25", "F29", "F30")
@pytest.mark.parametrize("name", CASES)
def test_any_placement_equals_the_plain_run(tmp_path: Path, name: str) -> None:
    """Guards against parts of an uneven split, biases added twice, slopes of other heads, a head on the host, and an
    operation with chips of its own that is computed on others, or on none."""
    model, changes = CASES[name]
    made = trial(tmp_path, model, **changes)
    figures, machine = run_placement(made)
    assert figures["equal"]
    plan = made.plan
    operations = [item for epoch in plan.epochs for item in epoch if item.weight_bytes or item.name.count(".") == 3]
    assert {device.chip for device in machine.devices if device.dram.peak + device.sram.peak} == {
        chip for operation in operations for chip in operation.chips
    }
    assert {(item.name, item.chips) for item in operations} == {  # all work on their chips, also those without weights
        (name, tuple(dict.fromkeys(span.chip for span in machine.spans if span.operation == name)))
        for name in {span.operation for span in machine.spans}
    }
    if made.placement.weights == "streamed":
        assert figures["streamed"] == figures["steps"] * plan.streamed_bytes
        assert sum(device.dram.peak for device in machine.devices) == plan.streamed_bytes
    else:
        assert figures["streamed"] == 0
    if "lm_head" not in made.placement.chips_of:
        assert figures["epochs"] == 2


@pytest.mark.covers("F30")
def test_an_operation_on_chips_of_its_own_receives_its_operand(tmp_path: Path) -> None:
    """Guards against operands that are moved between chips for nothing: on the chips of its branch, each of 8 has what
    it needs of the attention's input and of the sums."""
    own = {
        "ln_mlp": (chips(16, 1), 64), "rotary": (chips(17, 2), 128), "attend": (chips(19, 4), 2 * 16 * 4 * 2),
        "o_proj": (chips(23, 2), 64), "add": (chips(25, 1), 64), "activation": (chips(26, 2), 256),
        "down_proj": (chips(28, 4), 256),
    }  # fmt: skip
    chips_of, found = {"attention": chips(0, 8), "mlp": chips(8, 8)}, []
    for overrides in ((), tuple((f"layers.1.*.{name}", where) for name, (where, _) in own.items())):
        _, machine = run_placement(trial(tmp_path, FALCON, chips_of=chips_of, overrides=overrides))
        sums: dict[str, int] = {}
        for span in machine.spans:
            if span.operation.startswith("layers.1") and span.what not in ("norms", "qkv_proj", "up_proj"):
                sums[span.what] = sums.get(span.what, 0) + span.work.received
        found.append({name: size for name, size in sums.items() if size})
    tokens = 2 + 3 + 4 + 2 + 4 * 2  # of four prompts, and two steps with a token of each
    own["attention"] = own.pop("attend")
    assert found == [{}, {name: 2 * tokens * size for name, (_, size) in own.items()}]


@pytest.mark.covers("M21", "F28")
@pytest.mark.parametrize(("rows", "micro_batches"), [(2, 1), (2, 2), (8, 1), (8, 4)])
def test_any_number_of_rows_equals_the_plain_run(tmp_path: Path, rows: int, micro_batches: int) -> None:
    """Guards against a chip's share that is kept from the step before: as long as no row begins or ends, the runner
    changes the metadata of a step in place, and whether a row ends in between depends on their number."""
    made = trial(tmp_path, FALCON | {"num_hidden_layers": 4}, rows=rows)
    figures, _ = run_placement(made, micro_batches)
    assert figures["equal"]
    assert (figures["rows"], figures["tokens"]) == (rows, 3 * rows)


def test_what_a_step_has_of_some_rows() -> None:
    """Guards against tokens of another chip's rows, and pairs beyond a window that are counted."""
    meta = AttentionMetadata(
        query_start_loc=np.array([0, 1, 4, 6], np.int32),
        seq_lens=np.array([5, 3, 7], np.int32),  # 4, 0 and 5 tokens are cached
        block_table=np.array([[3], [0], [2]], np.int32),
        slot_mapping=np.array([52, 0, 1, -1, 37, 38]),
        block_size=16,
        sliding_window=4,
    )
    found = RowsOfStep.of(meta, (2, 4))
    assert found.tokens.tolist() == [0, 4, 5]
    assert found.meta.block_table.tolist() == [[1], [0]]
    assert found.meta.slot_mapping.tolist() == [20, 5, 6]
    assert (found.cached, found.pairs) == (3 + 3, 4 + 4 + 4)
    found = RowsOfStep.of(meta, (0, 2))
    assert found.meta.slot_mapping.tolist() == [0, 1, -1]
    assert (found.cached, found.pairs) == (0, 1 + 2 + 3)
    assert len(RowsOfStep.of(meta, (1, 2)).tokens) == 0


def test_another_order_of_sums_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a comparison that is too coarse to see the last bit of a sum."""

    def one_after_the_other(parts: list[Array], out: Array) -> None:
        out[:] = 0
        for part in parts:
            out += part

    monkeypatch.setattr("penstock_lab.chips.layers.tree_sum", one_after_the_other)
    assert not run_placement(trial(tmp_path, FALCON))[0]["equal"]


@pytest.mark.covers("F25")
def test_without_a_head_hidden_states_come_back(tmp_path: Path) -> None:
    """Guards against hidden states that only a head on the chips could use."""
    made = trial(tmp_path, FALCON, chips_of={"attention": chips(0, 16), "mlp": chips(16, 8)})
    params = SamplingParams.for_pooling(PoolingParams(pooling_type="ALL", normalize=False))
    found = []
    for engine in (made.on_chips()[0], made.alone()):
        engine.add_request(EngineRequest("hidden", [5, 6, 7], params))
        (output,) = [output for _ in range(4) if engine.has_work for output in engine.step()]
        found.append(output.pooled)
    assert found[0] == found[1] is not None


@pytest.mark.covers("F28", "F30")
def test_one_byte_over_a_budget_is_refused_by_name(tmp_path: Path) -> None:
    """Guards against a chip that holds more than it can, and against a refusal that does not say which and what."""
    machine = trial(tmp_path, FALCON).on_chips()[1]
    sram, dram = (max(getattr(device, kind).peak for device in machine.devices) for kind in ("sram", "dram"))
    fitting = {"sram_per_chip": sram, "dram_per_chip": dram}
    trial(tmp_path, FALCON, **fitting).on_chips()
    with pytest.raises(OverBudgetError) as refused:
        trial(tmp_path, FALCON, **fitting | {"sram_per_chip": sram - 1}).on_chips()
    chip = refused.value.chip
    assert machine.devices[chip].sram.peak == sram
    assert f"chip {chip}: lm_head buffers: " in str(refused.value)
    assert f"bytes of SRAM, 1 more than are left of its {sram - 1}" in str(refused.value)
    with pytest.raises(InvalidRequestError, match=f"bytes of DRAM on chip .*, 1 more than its {dram - 1}"):
        trial(tmp_path, FALCON, **fitting | {"dram_per_chip": dram - 1}).on_chips()


@pytest.mark.covers("M20", "M21")
@pytest.mark.parametrize(("micro_batches", "tokens"), [(1, 1), (2, 1), (4, 1), (2, 3)])
def test_the_bubble_of_a_pipeline_on_chips(tmp_path: Path, micro_batches: int, tokens: int) -> None:
    """Guards against steps that wait for chips which they do not use, and against stages that begin before their input,
    or a row's next token before its last: (P - 1) / (M + P - 1) of the time stages are idle, with one token."""
    stages = 4
    overrides = [(f"layers.{stage}.attention", (2 * stage,)) for stage in range(stages)]
    overrides += [(f"layers.{stage}.mlp", (2 * stage + 1,)) for stage in range(stages)]
    made = trial(
        tmp_path, FALCON | {"num_hidden_layers": stages}, replace(GALAXY, link_bytes_per_s=0.0),
        overrides=tuple(overrides), chips_of={"attention": (0,), "mlp": (1,)},
    )  # fmt: skip
    engine, machine = made.on_chips(depth=micro_batches)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0)
    for row in range(4):
        engine.add_request(EngineRequest(str(row), [3], params))
    while engine.has_work:
        engine.step()
    assert len({span.step for span in machine.spans}) == micro_batches * tokens
    busy = sum(span.seconds for span in machine.spans if span.operation.endswith(".mlp"))  # the slower branch
    bubble = 1 - busy / (stages * machine.seconds)
    assert bubble == pytest.approx(1 - micro_batches * tokens / (micro_batches - 1 + stages * tokens))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trace", "x.json"], "trace: only allowed with --run"),
        ([*RUN, "--micro-batches", "33"], "--micro-batches: 33 is not allowed"),
        (["--run"], "run: it needs a --placement"),
        ([*RUN, "--hidden-size", "60"], "--hidden-size: 60 is not allowed"),
        ([*RUN, "--quantization", "int8"], "quantization: simulated chips"),
    ],
)
def test_what_cannot_be_computed_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    """Guards against an option that is ignored."""
    (tmp_path / "config.json").write_text(json.dumps(FALCON))
    assert main(["plan", str(tmp_path), "--hardware", "wormhole-galaxy", *words]) == 2
    assert message in capsys.readouterr().err
