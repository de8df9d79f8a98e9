"""Whole engines in Triton's interpreter: the tokens and log-probabilities of Transformers, and a request's own bits.

Models are as small as they can be, because an operation of a program takes 20 microseconds there.
"""

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

pytest.importorskip("triton", reason="an extra")

from penstock import LLM, LoRARequest, RequestOutput, SamplingParams
from penstock.assembly import build_engine, plan_engine
from penstock.config import EngineConfig
from penstock.errors import ExecutorLostError, InvalidRequestError
from penstock.interface.messages import EngineRequest
from penstock.kernels.tensors import Slot
from penstock.kernels.triton import device
from penstock.kernels.triton import ops as backend
from penstock.kernels.triton.ops import TritonOps
from penstock.kernels.triton.programs import TritonProgram
from penstock.layers.module import named_modules
from penstock.layers.weights import Embedding, WeightLayer
from penstock_lab.check import run
from penstock_lab.check.proofs import Setting
from penstock_lab.check.run import Options, check_model
from penstock_lab.planner.fit import Budget
from penstock_lab.planner.machines import Hardware
from penstock_lab.planner.planned import PlannedModel
from penstock_lab.planner.report import fitter_of
from penstock_lab.prove import axes, same_bits
from penstock_lab.prove.every_draft import EveryDraft
from penstock_lab.prove.proof import Outcome, Subject, Trials
from tests.families.case import all_cases
from tests.hf_models import Made, random_ids
from tests.lab.planner.test_plan import GEMMA, LLAMA, MIXTRAL
from tests.lora.peft_adapters import make_adapter
from tests.weights.files import FILES, File
from tests.weights.quantized_files import MODELS, quantise

SMALL = {"vocab_size": 67, "hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4}
SIZES: dict[str, dict[str, Any]] = {
    "llama": SMALL | {"num_hidden_layers": 1},
    "qwen3": SMALL | {"num_hidden_layers": 1, "head_dim": 8},
    "gemma2": SMALL | {"head_dim": 8},
    "mixtral": SMALL | {"num_hidden_layers": 1},
    "falcon-7b": {"vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    "gpt2": {"vocab_size": 67, "n_embd": 32, "n_head": 2, "n_layer": 1},
    "bloom": {"vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=1)
TOLERANCE = {"float32": 2e-5, "bfloat16": 0.05}
BLOCK_BYTES = 128 * 2 * 16 * 2  # of keys and values of the one head of 16 elements


def made(name: str, directory: Path, **fields: Any) -> Made:
    case = next(case for case in all_cases() if case.name == name)
    return case.make(directory, **SIZES[name] | fields)


def start(directory: Path, **options: Any) -> LLM:
    defaults = {"kernels": "triton", "max_model_len": 160, "max_num_seqs": 4, "dtype": "float32"}
    return LLM(model=str(directory), **defaults | options)


def check(model: Any, prompt: list[int], output: RequestOutput, tolerance: float) -> None:
    """The tokens are Transformers', with its log-probabilities."""
    ids, found = output.outputs[0].token_ids, output.outputs[0].logprobs
    assert output.error is None
    assert found is not None
    assert len(ids) == GREEDY.max_tokens
    with torch.no_grad():
        expected = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    for place, token_id, row in zip(found, ids, expected, strict=True):
        assert float(row.max() - row[token_id]) <= 2 * tolerance
        for other, entry in place.items():
            assert abs(entry.logprob - float(row[other])) < tolerance


@pytest.mark.parametrize("name", SIZES)
def test_families(name: str, tmp_path: Path) -> None:
    """Guards against a layer whose arguments only other backends take, and against rows that read each other's."""
    model, directory = made(name, tmp_path)
    prompts = [random_ids(18, 0, 67), random_ids(3, 1, 67)]
    llm = start(directory, max_num_batched_tokens=13)  # the long prompt is computed in two chunks, beside the other
    for prompt, output in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
        check(model, prompt, output, TOLERANCE["float32"])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Made:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1}
    return made("llama", tmp_path_factory.mktemp("llama"), **sizes)


def answers(outputs: list[RequestOutput]) -> list[Any]:
    """The tokens, and their log-probabilities to the bit."""
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def test_same_bits(llama: Made) -> None:
    """Guards against bits that depend on a request's neighbours, on chunks, on the cache, or on a preemption."""
    model, directory = llama
    prompts, params = [random_ids(128, 0, 67), random_ids(130, 1, 67)], [replace(GREEDY, max_tokens=4), GREEDY]
    options = {"dtype": "bfloat16", "max_num_seqs": 2, "max_model_len": 160}
    alone = [answers(start(directory, **options).generate([prompts[at]], params[at]))[0] for at in range(2)]
    # Three blocks: the second prompt needs its second one while the first request still has two.
    crowded = start(directory, **options, max_num_batched_tokens=70, kv_cache_memory_bytes=3 * BLOCK_BYTES)
    outputs = crowded.generate(prompts, params)
    assert answers(outputs) == alone
    check(model, prompts[1], outputs[1], TOLERANCE["bfloat16"])
    assert answers(crowded.generate(prompts[1:], GREEDY)) == alone[1:]
    stats = crowded.engine.engine.stats()
    assert stats.num_preemptions_total
    assert stats.num_cached_tokens_total >= 128


def results(model: Any) -> Iterator[Slot]:
    """The buffers of a model's results."""
    for _, module in named_modules(model):
        yield from (value for value in vars(module).values() if isinstance(value, Slot))


def test_memory(llama: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against memory that is not in the plan, and against scratch memory that grows while requests wait."""
    monkeypatch.setattr(TritonOps, "fixed_rows", 8)
    config = EngineConfig.from_options(model=str(llama[1]), kernels="triton", max_model_len=160, max_num_seqs=4)
    built = build_engine(config)
    planned, ops = built.info.memory, cast(TritonOps, built.ops)
    assert planned is not None
    layers = [layer for _, layer in named_modules(built.model) if isinstance(layer, WeightLayer)]
    kept = [layer for layer in layers if not isinstance(layer, Embedding)]  # the head has its rows
    assert planned["weights"] == sum(layer.num_bytes for layer in kept)
    assert planned["cache"] == built.cache_bytes
    pieces, slots = len(ops.scratch._pieces), {id(slot): slot for slot in results(built.model)}
    buffers = [id(slot._many) for slot in slots.values()]
    assert len(slots) > 8
    built.engine.add_request(EngineRequest("0", random_ids(20, 0, 67), GREEDY, 0))
    while built.engine.has_work:
        built.engine.step()
    built.engine.add_request(EngineRequest("1", random_ids(40, 1, 67), GREEDY, 0))
    built.engine.step()
    assert len(ops.scratch._pieces) == pieces
    assert [id(slot._many) for slot in slots.values()] == buffers
    assert 0 < ops.scratch.peak <= planned["scratch"]


PLANNED: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float32, one block": {"dtype": "float32", "block_size": "max-model-len"},
    "int8": {"quantization": "int8", "max_num_batched_tokens": 64},
    "int4, int8 cache": {"quantization": "int4", "quantization_group_size": 32, "kv_cache_dtype": "int8"},
    "two ranks": {"quantization": "int4", "tensor_parallel_size": 2, "pad_vocab_multiple": 64, "enable_lora": True},
    "adapters": {"enable_lora": True, "max_loras": 3, "max_lora_rank": 64},
}


@pytest.mark.parametrize("form", PLANNED)
@pytest.mark.parametrize("family", [LLAMA, MIXTRAL, GEMMA], ids=["llama", "mixtral", "gemma2"])
def test_the_plan_of_a_gpu_is_the_ledger_of_its_engine(family: dict[str, Any], form: str, tmp_path: Path) -> None:
    """Guards against a plan, made without torch and Triton, that counts something otherwise than the engine."""
    (tmp_path / "config.json").write_text(json.dumps(family))
    gpu, limit = Hardware("gpu", "here", 2**40, kernels="triton"), 2**30
    options = {"model": str(tmp_path), "memory": limit, **PLANNED[form]}
    ledger = plan_engine(EngineConfig.from_options(**options, kernels="triton")).memory
    source = PlannedModel.read(EngineConfig.from_options(**options), gpu)
    fit = fitter_of(source, Budget(limit, 0, count=2)).fit()
    assert ledger is not None
    assert fit.devices[-1].entries == ledger.entries
    assert fit.groups == tuple(ledger.cache.groups)


class Lost(TritonOps):
    """A device whose context an error ends in the first step."""

    def attend(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def is_lost(self) -> bool:
        return True


def test_a_lost_device(llama: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an engine process that fails one request after the other on a device that computes nothing."""
    monkeypatch.setattr(backend, "TritonOps", Lost)
    config = EngineConfig.from_options(model=str(llama[1]), kernels="triton", max_model_len=160)
    built = build_engine(config)
    built.engine.add_request(EngineRequest("0", [1, 2, 3], GREEDY, 0))
    with pytest.raises(ExecutorLostError, match="illegal memory access"):
        built.engine.step()


def test_fingerprint(llama: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against blocks and streams that go on with another architecture's bits, or another kernel's."""

    def fingerprint() -> str:
        config = EngineConfig.from_options(model=str(llama[1]), kernels="triton", max_model_len=160)
        return build_engine(config).info.system_fingerprint

    one = fingerprint()
    assert one.startswith("penstock-4-triton.interpreted.leaves1-float32-")
    monkeypatch.setattr(device, "LEAVES", 8)
    assert fingerprint() != one


def test_coded_weights(tmp_path: Path) -> None:
    """Guards against codes that are packed as values, and an option that is refused for another model's reason."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1}
    _, directory = made("llama", tmp_path, **sizes)
    twin = quantise(directory, *MODELS["fp8"])
    prompt, found = [random_ids(3, 0, 67)], []
    for model, kernels in ((directory, "triton"), (twin, "triton"), (twin, "reference")):
        (output,) = start(model, kernels=kernels).generate(prompt, GREEDY)
        found.append(output)
    assert answers(found[:1]) == answers(found[1:2])
    assert found[0].outputs[0].token_ids == found[2].outputs[0].token_ids
    with pytest.raises(InvalidRequestError, match="kernels = triton, products with FP8_E4M3 weights take"):
        start(directory, activation_dtype="int8-x3")
    with pytest.raises(InvalidRequestError, match="quantised already"):
        start(directory, quantization="int8")


def test_adapters(tmp_path: Path) -> None:
    """Guards against an adapter that meets another product than in PEFT, or a row that does not have its own; and, in a
    crowd, against bits that are not those of an engine that has only the request's adapter, or none. The second time,
    steps are cached and recorded."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1}
    base, directory = made("llama", tmp_path, **sizes)
    models: list[Any] = [base]
    for name, fields in (("a", {"r": 3}), ("b", {"r": 2, "use_dora": True})):
        models.append(make_adapter(copy.deepcopy(base), tmp_path / name, seed=len(models), **fields))
    chosen = [None, LoRARequest("a", str(tmp_path / "a")), LoRARequest("b", str(tmp_path / "b"))]
    prompts = [random_ids(length, length, 67) for length in (18, 3, 5)]
    options = {"enable_lora": True, "max_lora_rank": 4, "max_num_batched_tokens": 13}
    crowd = start(directory, **options, max_loras=2)
    outputs = crowd.generate(prompts, GREEDY, lora_request=chosen)
    for model, prompt, output in zip(models, prompts, outputs, strict=True):
        check(model, prompt, output, TOLERANCE["float32"])
    assert answers(crowd.generate(prompts, GREEDY, lora_request=chosen)) == answers(outputs)
    plain, one = start(directory), start(directory, **options)  # where b takes the place of a
    for engine, prompt, own, output in zip((plain, one, one), prompts, chosen, outputs, strict=True):
        assert answers(engine.generate([prompt], GREEDY, lora_request=own)) == answers([output])


DECODED = ("GGUF, Q4_K_M", "GGUF, IQ4_XS", "AWQ", "GPTQ, `desc_act`", "MXFP4", "NVFP4", "bitsandbytes, NF4")


@pytest.mark.parametrize("file", {file.row: file for file in FILES if file.row in DECODED}.values(), ids=str)
def test_the_weights_of_coded_files(file: File, tmp_path: Path) -> None:
    """Guards against rows of codes that reach a GPU in another order, or not decoded: they are those of the twin whose
    values the format's own package decoded. What multiplies them is the same for every format."""

    def weights(directory: Path) -> dict[str, torch.Tensor]:
        options = {"kernels": "triton", "dtype": "float32", "max_model_len": 32, "max_num_seqs": 1}
        built = build_engine(EngineConfig.from_options(model=str(directory), **options))
        layers = [(name, layer) for name, layer in named_modules(built.model) if isinstance(layer, WeightLayer)]
        return {f"{name}.{key}": value for name, layer in layers for key, value in layer.state().items()}

    found, expected = map(weights, file.make(tmp_path))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert value.dtype == torch.float32
        assert torch.allclose(found[name], value, rtol=2e-6, atol=1e-9), name


def test_a_draft_model(llama: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against drafts, right and wrong ones, that change a bit of the answer, and against several steps of the
    draft model in one call that read another position, or another token, than one by one."""
    steps, decode = list[int](), TritonProgram.decode

    def noting(program: TritonProgram, attention: Any, ids: Any, positions: Any, tokens: Any, vocab_size: int) -> bool:
        steps.append(tokens.shape[1] - 1)
        return decode(program, attention, ids, positions, tokens, vocab_size)

    monkeypatch.setattr(TritonProgram, "decode", noting)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1}
    other = made("llama", tmp_path, **sizes, seed=5)[1]
    prompts, params = [random_ids(3, 0, 67)], replace(GREEDY, max_tokens=7)
    expected = answers(start(llama[1], dtype="bfloat16").generate(prompts, params))
    for draft, is_right in ((llama[1], True), (other, False)):
        drafts = {"model": str(draft), "num_speculative_tokens": 2}
        llm = start(llama[1], dtype="bfloat16", speculative_config=drafts)
        engine = llm.engine.engine
        engine.speculation.policy = EveryDraft()
        assert answers(llm.generate(prompts, params)) == expected
        stats = engine.stats()
        assert stats.num_draft_tokens_total
        assert (stats.num_accepted_tokens_total == stats.num_draft_tokens_total) == is_right
    assert max(steps) > 1


OPTIONS: dict[str, dict[str, Any]] = {
    "int8 weights and cache": {"quantization": "int8", "kv_cache_dtype": "int8"},
    "int4 weights": {"quantization": "int4", "quantization_group_size": 32},
    "int4-a16 weights": {"quantization": "int4-a16", "quantization_group_size": 32, "lm_head_pieces": 3},
    "drafts": {"speculative_config": {"method": "ngram"}},
    "one block": {"block_size": "max-model-len", "pad_vocab_multiple": 16},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, llama: Made) -> None:
    """Guards against an option that the planner or the runner passes on in a form that these kernels do not take."""
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], [9]]
    llm = start(llama[1], max_num_seqs=2, dtype="bfloat16", **OPTIONS[name])
    sampled = SamplingParams(temperature=0.9, top_k=20, top_p=0.9, seed=1, max_tokens=2, ignore_eos=True)
    outputs = llm.generate(prompts, [GREEDY, sampled])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 2]
    if name in ("drafts", "one block"):
        plain = start(llama[1], max_num_seqs=2, dtype="bfloat16").generate(prompts[:1], GREEDY)
        assert answers(outputs[:1]) == answers(plain)
    else:
        reference = start(llama[1], max_num_seqs=2, dtype="bfloat16", **OPTIONS[name] | {"kernels": "reference"})
        other = reference.generate(prompts[:1], GREEDY)[0].outputs[0]
        assert outputs[0].outputs[0].token_ids == other.token_ids
        assert outputs[0].outputs[0].cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=0.1)


def test_a_check_of_a_model(llama: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against a check whose caches have blocks that a GPU does not read, or whose prompts fill none of them."""
    settings: list[Setting] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(run, "make_prompts", lambda length, size: (random_ids(130, 0, size),))
    monkeypatch.setattr(run, "prove", lambda setting: (settings.append(setting), ())[1])  # engines take minutes
    report = check_model(Options(model=str(llama[1]), kernels="triton", dtype="bfloat16"))
    assert report.passed, report
    assert report.kernels == device.name_of("cpu")
    assert report.prompt_len > 128
    assert report.remarks == ("not tested: rings, which no layer has on a GPU",)
    assert settings[0].layouts()["blocks of 512 = blocks of 128"] == {"block_size": 512}


def test_the_proof_of_the_same_bits(llama: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a proof that computes on the CPU, asks for blocks that a GPU does not have, or finds no prefix."""
    for name, value in (("LENGTHS", (2, 66)), ("SHARED", (65,)), ("MAX_TOKENS", 2), ("ENGINES", 1), ("MAX_DELAY", 1)):
        monkeypatch.setattr(same_bits, name, value)
    monkeypatch.setattr(axes, "CROWDS", (3,))
    monkeypatch.setattr(axes, "ENTRY_WEIGHTS", {"offline": 1})
    monkeypatch.setattr(axes, "DISTURBANCES", ("none",))
    monkeypatch.setattr(axes, "SALTS", ("none", None))
    monkeypatch.setattr(axes, "CHOICES", {1: 1})
    monkeypatch.setattr(axes, "KINDS", {name: axes.KINDS[name] for name in ("greedy", "temperature 1")})
    monkeypatch.setattr(axes, "FORMS", {"weights": {"bfloat16": {"dtype": "bfloat16"}}})
    layouts = axes.LAYOUTS_ON_GPU | {"chunk": {"64": {"max_num_batched_tokens": 64}}, "speculation": {"off": {}}}
    layouts |= {"prefixes": {"kept": {}}, "blocks": {"of 128": layouts["blocks"]["of 128"]}}
    monkeypatch.setattr(axes, "LAYOUTS_ON_GPU", layouts)
    kernels = []
    build = same_bits.build_engine
    monkeypatch.setattr(
        same_bits, "build_engine", lambda config: (kernels.append(config.numerics.kernels), build(config))[1]
    )
    outcome = Outcome("same-bits", "", "comparisons")
    subject = Subject(str(llama[1]), {"kernels": "triton"})
    same_bits.SameBits().run(Trials(subject, outcome, goal=9, seed=0))
    assert outcome.passed, outcome
    assert kernels == ["triton"]
    tried = outcome.details["comparisons"]
    assert tried["blocks: of 128"] == outcome.tried
    assert tried.get("prefix: warm", 0) + tried.get("prefix: partial", 0)
    assert "threads" in outcome.figures["left_out"]
