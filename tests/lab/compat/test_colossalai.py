"""ColossalAI's quick start on our engine: as printed, with Transformers' tokens; bad values refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from penstock import LLM, InvalidRequestError, NotSupportedError, RequestFailedError, SamplingParams
from penstock.client.open_requests import OpenRequest
from penstock.weights.hub import MODEL_DIR
from penstock_lab.compat.colossalai import (
    InferenceConfig,
    InferenceEngine,
    ModulePolicyDescription,
    Policy,
    SubModuleReplacementDescription,
)
from penstock_lab.compat.colossalai_config import FIXED
from tests.hf_models import TINY, make_llama, randomise
from tests.lab.compat.test_instances import hf_greedy

QUICK_START = """
# First, create a model in "transformers" way, you can provide a model config or use the default one.
model = transformers.LlamaForCausalLM(config)
# Second, create an inference_config
inference_config = InferenceConfig(
                dtype=args.dtype,
                max_batch_size=args.max_batch_size,
                max_input_len=args.seq_len,
                max_output_len=args.output_len,
            )
# Third, create an engine with model and config
engine = InferenceEngine(model, tokenizer, inference_config, verbose=True)

# Try fast infrence now!
prompts = {'Nice to meet you, Colossal-Inference!'}
engine.generate(prompts)
"""
PROMPTS = ["Once upon a time", "Tom and Anna", "The dog said that it would"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def model(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return make_llama(tmp_path_factory.mktemp("model"), vocab_size=len(tokenizer))[0]


def engine_of(model: Any, tokenizer: Any, **fields: Any) -> InferenceEngine:
    config = {"dtype": torch.float32, "max_input_len": 32, "max_output_len": 16, **fields}
    return InferenceEngine(model, tokenizer, InferenceConfig(**config))


@pytest.fixture(scope="module")
def engine(model: PreTrainedModel, tokenizer: Any) -> InferenceEngine:
    return engine_of(model, tokenizer)


@pytest.mark.covers("C1", "C9")
def test_the_quick_start_runs_as_printed(tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a quick start that needs editing: a set of prompts, all names, `verbose`."""
    config = LlamaConfig(**TINY | {"vocab_size": len(tokenizer)})
    names: dict[str, Any] = {
        "transformers": transformers,
        "config": config,
        "tokenizer": tokenizer,
        "args": SimpleNamespace(dtype="fp32", max_batch_size=2, seq_len=32, output_len=12),
        "InferenceConfig": InferenceConfig,
        "InferenceEngine": InferenceEngine,
    }
    exec(QUICK_START, names)
    model, engine = names["model"], names["engine"]
    randomise(model, 0)  # weights that were packed do not change with the object
    text, ids = engine.generate(list(names["prompts"]), return_token_ids=True)
    assert text[0].startswith(next(iter(names["prompts"])))
    assert len(ids[0]) <= 12
    assert "kernels = " in capsys.readouterr().err


@pytest.mark.covers("C1")
def test_tokens_are_those_of_transformers(model: PreTrainedModel, tokenizer: Any) -> None:
    """Guards against another order, another template, or end tokens that count in one of the two only."""
    engine = engine_of(model, tokenizer, ignore_eos=True)
    expected = [hf_greedy(model, tokenizer(prompt)["input_ids"]) for prompt in PROMPTS]
    texts, ids = engine.generate(PROMPTS, return_token_ids=True)
    assert ids == expected
    whole = [tokenizer(prompt)["input_ids"] + answer for prompt, answer in zip(PROMPTS, ids, strict=True)]
    assert texts == tokenizer.batch_decode(whole, skip_special_tokens=True)
    assert sorted(engine.generate(set(PROMPTS))) == sorted(texts)
    assert engine.generate(PROMPTS[0]) == texts[:1]
    rows = [tokenizer(prompt)["input_ids"][:3] for prompt in PROMPTS]
    for given in (rows, torch.tensor(rows), np.array(rows), [torch.tensor(row) for row in rows]):
        found = engine.generate(prompts_token_ids=given, return_token_ids=True)[1]
        assert found == [hf_greedy(model, row) for row in rows]


@pytest.mark.covers("C1", "C2")
def test_requests_wait_for_steps(model: PreTrainedModel, tokenizer: Any) -> None:
    """Guards against an add_request that generates at once, and against answers under the wrong number."""
    engine = engine_of(model, tokenizer, ignore_eos=True, max_batch_size=2)
    engine.add_request(request_ids=[7, 3], prompts=PROMPTS[:2])
    engine.add_request(5, prompts=PROMPTS[2], max_new_tokens=4)
    ended, steps = [], 0
    while engine.llm.engine.has_unfinished_requests():
        ended += engine.step()
        steps += 1
    assert steps > 16
    found = {item.request_id: item for item in ended}
    for number, prompt, count in ((7, PROMPTS[0], 16), (3, PROMPTS[1], 16), (5, PROMPTS[2], 4)):
        assert found[number].prompt == prompt
        assert found[number].output_token_id == hf_greedy(model, tokenizer(prompt)["input_ids"], count)
    engine.add_request(prompts=PROMPTS[1])
    texts = engine.generate(PROMPTS[0])
    assert [text.startswith(prompt) for text, prompt in zip(texts, (PROMPTS[1], PROMPTS[0]), strict=True)] == [True] * 2


@pytest.mark.covers("C1")
def test_results_ascend_by_number_whoever_ends_first(engine: InferenceEngine) -> None:
    """Guards against results in the order in which requests end: the caller pairs them with his prompts."""
    for number, prompt, count in ((30, PROMPTS[2], 9), (10, PROMPTS[0], 6), (20, PROMPTS[1], 2)):
        engine.add_request(number, prompt, max_new_tokens=count)
    texts = engine.generate()
    assert [text.startswith(prompt) for text, prompt in zip(texts, PROMPTS, strict=True)] == [True] * 3


def test_answers_outlive_the_failure_of_another_request(engine: InferenceEngine, monkeypatch: Any) -> None:
    """Guards against finished answers that are lost because another request failed in the same step."""
    make_output = OpenRequest.make_output

    def broken(request: OpenRequest) -> Any:
        if request.request_id == "71" and request.choices[0].finish_reason is not None:
            raise KeyError("scripted")
        return make_output(request)

    monkeypatch.setattr(OpenRequest, "make_output", broken)
    engine.add_request([70, 71, 72], PROMPTS, max_new_tokens=4)
    with pytest.raises(RequestFailedError, match=r"request 71: .*scripted"):
        engine.generate()
    texts = engine.generate()
    assert [text.startswith(prompt) for text, prompt in zip(texts, PROMPTS[::2], strict=True)] == [True] * 2
    assert engine.step() == []


@pytest.mark.covers("C9")
def test_a_generation_config_of_transformers(model: PreTrainedModel, tokenizer: Any) -> None:
    """Guards against settings that are taken and ignored."""
    engine = engine_of(model, tokenizer)
    prompt = tokenizer(PROMPTS[0])["input_ids"]
    free = hf_greedy(model, prompt, 12)
    end = free[5]

    def answer(**fields: Any) -> list[int]:
        return engine.generate(PROMPTS[0], None, True, GenerationConfig(**fields))[1][0]

    assert answer(max_new_tokens=3) == free[:3]
    assert answer(max_length=len(prompt) + 4, eos_token_id=[0]) == free[:4]
    assert answer(eos_token_id=end) == free[: free.index(end) + 1]
    penalised = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, repetition_penalty=1.7)
    assert answer(max_new_tokens=8, repetition_penalty=1.7) == penalised[0, len(prompt) :].tolist()
    drawn = answer(do_sample=True, temperature=5.0, max_new_tokens=8, eos_token_id=[0])
    assert drawn != free[:8]
    assert answer(do_sample=True, top_k=1, max_new_tokens=8, eos_token_id=[0]) == free[:8]
    for fields in ({"num_beam_groups": 2}, {"guidance_scale": 2.0}):
        with pytest.raises(InvalidRequestError, match=f"generation_config: {next(iter(fields))}.*: not supported"):
            answer(**fields)
    with pytest.raises(InvalidRequestError, match="at most max_output_len = 16"):
        answer(max_new_tokens=17)


@pytest.mark.covers("C10")
def test_lengths_and_ends_of_a_generation_config_beside_the_models(tokenizer: Any, tmp_path: Any) -> None:
    """Guards against a max_length that counts although max_new_tokens is given, which Transformers lets win, and
    against the model's own end token that still ends an answer although the config names another one."""
    model = make_llama(tmp_path, vocab_size=len(tokenizer))[0]
    prompt = tokenizer(PROMPTS[0])["input_ids"]
    free = hf_greedy(model, prompt, 12)
    end = next(token for token in free[2:] if token not in free[:2])
    model.config.eos_token_id = model.generation_config.eos_token_id = end
    engine = engine_of(model, tokenizer)

    def answer(**fields: Any) -> list[int]:
        found = engine.generate(PROMPTS[0], None, True, GenerationConfig(**fields))[1][0]
        theirs = model.generate(torch.tensor([prompt]), GenerationConfig(do_sample=False, pad_token_id=0, **fields))
        assert found == theirs[0, len(prompt) :].tolist()
        return found

    assert answer(max_new_tokens=12) == free[: free.index(end) + 1]
    assert answer(max_new_tokens=12, eos_token_id=[0]) == free
    for longest in (1, 4):
        assert answer(max_new_tokens=2, max_length=len(prompt) + longest) == free[:2]


@pytest.mark.covers("C3")
def test_longer_classes_of_prompts_come_first(model: PreTrainedModel, tokenizer: Any) -> None:
    """Guards against classes that end elsewhere than at thirds of max_input_len, or that are taken in another order:
    length * 3 // (max_input_len + 1), as ColossalAI's request handler computes it."""
    engine = engine_of(model, tokenizer, max_batch_size=1)
    lengths = (10, 11, 22, 5, 32, 21)
    for length in lengths:
        engine.add_request(length, prompts_token_ids=[list(range(7, 7 + length))], max_new_tokens=2)
    assert [item.request_id for item in iter_ended(engine)] == [22, 32, 11, 21, 10, 5]


@pytest.mark.covers("C4")
@pytest.mark.parametrize(("ratio", "started"), [(1.2, [5, 5, 11]), (None, [5, 5, 11]), (0.8, [9, 9, 9])])
def test_the_ratio_decides_between_prompts_and_decoding(
    model: PreTrainedModel, tokenizer: Any, ratio: float | None, started: list[int]
) -> None:
    """Guards against a prefill_ratio that is accepted and ignored. While 5 decode, 4 wait, then 5, then 6: by the
    default of 1.2 the six begin, by 0.8 the four, and then five wait for nine."""
    engine = engine_of(model, tokenizer, prefill_ratio=ratio, max_batch_size=16, ignore_eos=True)
    client: Any = engine.llm.engine
    engine.add_request(prompts_token_ids=[[number, 3] for number in range(5)])
    engine.step()
    found = []
    for waiting in range(4, 7):
        count = waiting - client.engine.stats().num_waiting
        engine.add_request(prompts_token_ids=[[waiting, 4, number] for number in range(count)])
        engine.step()
        found.append(client.engine.stats().num_running)
    assert found == started
    with pytest.raises(InvalidRequestError, match="prefill_ratio: 0 is not allowed"):
        InferenceConfig(prefill_ratio=0)


class Scaled(torch.nn.Module):
    """A norm whose results are scaled."""

    def __init__(self, norm: torch.nn.Module, factor: float) -> None:
        super().__init__()
        self.norm, self.factor = norm, factor

    @classmethod
    def from_native_module(cls, module: torch.nn.Module, process_group: Any = None, *, factor: float) -> "Scaled":
        return cls(module, factor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.norm(x) * self.factor
        return scaled


class OtherBranch(Policy):
    """A feed-forward branch with another activation, behind a norm of its own, and other attributes and weights."""

    factor = 0.25

    def preprocess(self) -> Any:
        self.model.steps = ["preprocess"]
        return self.model

    def postprocess(self) -> Any:
        self.model.steps.append("postprocess")
        return self.model

    def module_policy(self) -> dict[Any, ModulePolicyDescription]:
        norm = SubModuleReplacementDescription("post_attention_layernorm", Scaled, {"factor": self.factor})
        missing = SubModuleReplacementDescription("self_attn.q_norm", Scaled, ignore_if_not_exist=True)

        def forward(mlp: Any, x: torch.Tensor) -> Any:
            return mlp.down_proj(torch.relu(mlp.gate_proj(x)) * mlp.up_proj(x) * mlp.times)

        return {
            LlamaDecoderLayer: ModulePolicyDescription(sub_module_replacement=[norm, missing]),
            "LlamaRMSNorm": ModulePolicyDescription(param_replacement=[lambda module: module.weight.data.mul_(0.5)]),
            "LlamaMLP": ModulePolicyDescription({"times": 3.0}, method_replacement={"forward": forward}),
        }


def by_hand(tokenizer: Any, directory: Path, factor: float) -> PreTrainedModel:
    """Change a model as OtherBranch does, without a policy."""
    model: Any = make_llama(directory, vocab_size=len(tokenizer))[0]
    for norm in (module for name, module in model.named_modules() if name.endswith("norm")):
        norm.weight.data.mul_(0.5)
    for layer in model.model.layers:
        layer.post_attention_layernorm = Scaled(layer.post_attention_layernorm, factor)
        mlp = layer.mlp
        mlp.forward = lambda x, mlp=mlp: mlp.down_proj(torch.relu(mlp.gate_proj(x)) * mlp.up_proj(x) * 3.0)
    return cast(PreTrainedModel, model)


@pytest.mark.covers("C13", "C14")
def test_a_policy_replaces_modules_of_an_instance(tokenizer: Any, tmp_path: Path) -> None:
    """Guards against replaced modules, attributes and methods of which the engine reads only the weights: its answers
    are those of Transformers with the modules that the policy leaves. Another policy, of the same name, is another
    model; one that matches nothing is refused."""
    found = []
    for factor in (0.25, 4.0):
        model = make_llama(tmp_path, vocab_size=len(tokenizer))[0]
        prompt = tokenizer(PROMPTS[2])["input_ids"]
        plain = hf_greedy(model, prompt)
        config = InferenceConfig(dtype="fp32", max_input_len=32, max_output_len=16, ignore_eos=True)
        policy = type("OtherBranch", (OtherBranch,), {"factor": factor})
        engine = InferenceEngine(model, tokenizer, config, model_policy=policy)
        found.append(engine.generate(PROMPTS[2], return_token_ids=True)[1][0])
        assert found[-1] == hf_greedy(model, prompt) == hf_greedy(by_hand(tokenizer, tmp_path, factor), prompt) != plain
        assert model.steps == ["preprocess", "postprocess"]
    assert found[0] != found[1]

    class Nothing(Policy):
        def module_policy(self) -> dict[Any, ModulePolicyDescription]:
            return {"MixtralAttention": ModulePolicyDescription()}

    class Elsewhere(Nothing):
        def preprocess(self) -> Any:
            return torch.nn.Module()

    for given, said in (
        (Nothing, "MixtralAttention is the class of no module"),
        (Elsewhere, "preprocess must change the model in place"),
        (object(), "must be a Policy"),
    ):
        with pytest.raises(InvalidRequestError, match=f"model_policy: .*{said}"):
            InferenceEngine(model, tokenizer, model_policy=given)


@pytest.mark.covers("C23")
def test_streamingllm(model: PreTrainedModel, tokenizer: Any, engine: InferenceEngine) -> None:
    """Guards against sizes that are swapped, or that change nothing in silence."""
    sizes = {"start_token_size": 1, "generated_token_size": 6}
    found = engine_of(model, tokenizer, enable_streamingllm=True, **sizes).generate(PROMPTS)
    options = {"attention_sinks": 1, "sliding_window": 6, "dtype": "float32"}
    with LLM(model=model, tokenizer=tokenizer, **options) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=16))
    assert found == [prompt + output.outputs[0].text for prompt, output in zip(PROMPTS, outputs, strict=True)]
    assert found != engine.generate(PROMPTS)
    for name, value in sizes.items():
        with pytest.raises(InvalidRequestError, match=f"{name}: {value} is not allowed; .*without enable_streamingllm"):
            InferenceConfig(**{name: value})


@pytest.mark.covers("C9", "C10")
@pytest.mark.parametrize(
    "fields",
    [
        {"output_scores": True},
        {"output_attentions": True},
        {"return_dict_in_generate": True},
        {"prompt_lookup_num_tokens": 3},
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"temperature": "hot"},
        {"no_repeat_ngram_size": 7000},
        {"max_new_tokens": 10**6},
    ],
    ids=str,
)
def test_a_bad_generation_config_is_refused_and_forgotten(engine: InferenceEngine, fields: dict[str, Any]) -> None:
    """Guards against a field that changes nothing, in silence; an error that is none of a request's; and a config that
    stays after its error, so that every later call fails too."""
    (expected,) = engine.generate(PROMPTS[0])
    for prompts in (PROMPTS[0], None):
        with pytest.raises(InvalidRequestError, match=next(iter(fields))):
            engine.generate(prompts, generation_config=fields)
    assert engine.generate(PROMPTS[0]) == [expected]


@pytest.mark.covers("C9", "C11")
def test_processors_of_the_inference_config(model: PreTrainedModel, tokenizer: Any) -> None:
    """Guards against the logits processors of ColossalAI's own config that are refused, or have another meaning."""
    engine = engine_of(model, tokenizer, no_repeat_ngram_size=2, forced_eos_token_id=9)
    prompt = torch.tensor([tokenizer(PROMPTS[0])["input_ids"]])
    options = {"max_new_tokens": 16, "do_sample": False, "no_repeat_ngram_size": 2, "forced_eos_token_id": 9}
    expected = model.generate(prompt, **options)[0, prompt.shape[1] :].tolist()
    assert engine.generate(PROMPTS[0], return_token_ids=True)[1][0] == expected
    assert expected[-1] == 9


@pytest.mark.covers("C9")
def test_numbers_that_are_given_and_numbers_that_are_not(engine: InferenceEngine) -> None:
    """Guards against a request without a number that gets one in use: 0, where another was given as 0."""
    engine.add_request([0, 2], prompts=PROMPTS[:2])
    engine.add_request(None, prompts=PROMPTS)
    numbers = sorted(item.request_id for item in iter_ended(engine))
    assert len(numbers) == len(set(numbers)) == 5


def test_a_template_of_ones_own(model: PreTrainedModel, tokenizer: Any) -> None:
    """Guards against a template that is checked and not applied."""
    engine = engine_of(model, tokenizer, prompt_template="User: {input_text} {x}")
    engine.add_request(prompts="hi")
    assert [item.prompt for item in iter_ended(engine)] == ["User: hi {x}"]


def iter_ended(engine: InferenceEngine) -> list[Any]:
    ended = []
    while engine.llm.engine.has_unfinished_requests():
        ended += engine.step()
    return ended


def test_beams_drafts_and_ranks(tokenizer: Any, tmp_path: Path) -> None:
    """Guards against a search with other results than Transformers', drafts and ranks that change tokens, and a draft
    model that is not asked."""
    model = make_llama(tmp_path, vocab_size=len(tokenizer))[0]
    model.save_pretrained(tmp_path)
    ids = tokenizer(PROMPTS[0])["input_ids"]

    def answer(source: Any, **fields: Any) -> Any:
        engine = engine_of(source, tokenizer, **fields)
        try:
            if fields.get("use_spec_dec"):
                engine.enable_spec_dec(model, 3)
                assert engine.llm.engine.engine.speculation is not None
            return engine.generate(prompts_token_ids=[ids], return_token_ids=True)[1][0]
        finally:
            engine.shutdown()

    ends = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    searched = model.generate(torch.tensor([ids]), num_beams=3, early_stopping=True, **ends)[0, len(ids) :].tolist()
    assert answer(model, beam_width=3, early_stopping=True) == searched
    greedy = answer(model)
    assert greedy != searched
    assert answer(model, use_spec_dec=True) == greedy
    assert answer(str(tmp_path), tp_size=2) == greedy
    engine = engine_of(model, tokenizer)
    with pytest.raises(InvalidRequestError, match="needs use_spec_dec"):
        engine.enable_spec_dec(model)
    config = GenerationConfig(num_beams=3, early_stopping=True, **ends)
    assert engine.generate(prompts_token_ids=[ids], return_token_ids=True, generation_config=config)[1][0] == searched
    engine.shutdown()


@pytest.mark.covers("C9")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_batch_size": 0}, "max_batch_size: 0 is not allowed; it must be an integer from 1"),
        ({"max_input_len": "8"}, "max_input_len: '8' is not allowed; it must be an integer from 1"),
        ({"max_output_len": True}, "max_output_len: True is not allowed"),
        ({"dtype": "int3"}, "dtype: 'int3' is not allowed; it must be one of fp16"),
        ({"block_size": 17}, "block_size: 17 is not allowed; it must be a multiple of 16"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype: fp8 is not built; int8"),
        ({"kv_cache_dtype": "x"}, "kv_cache_dtype: 'x' is not allowed; it must be one of"),
        ({"temperature": -1.0}, "temperature: -1.0 is not allowed"),
        ({"top_p": 2.0, "do_sample": True}, "top_p: 2.0 is not allowed"),
        ({"prompt_template": "llama"}, "prompt_template: 'llama' is not allowed"),
        ({"beam_width": 0}, "beam_width: 0 is not allowed; it must be an integer from 1"),
        ({"early_stopping": True}, "early_stopping: True is not allowed; it must be false with a beam_width of 1"),
        ({"max_n_spec_tokens": 3}, "max_n_spec_tokens: 3 is not allowed; it must be 5 without use_spec_dec"),
    ],
)
def test_bad_values_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    """Guards against a value that is taken, and either ignored or found out in the middle of a step."""
    with pytest.raises(InvalidRequestError) as caught:
        InferenceConfig(**fields)
    assert str(caught.value).startswith(message)
    assert caught.value.param == next(iter(fields))


@pytest.mark.covers("C9")
@pytest.mark.parametrize("name", FIXED)
def test_what_means_nothing_here_is_refused_with_the_reason(name: str) -> None:
    """Guards against options that are accepted and ignored."""
    value = getattr(InferenceConfig(), name)
    with pytest.raises(NotSupportedError, match=name):
        InferenceConfig(**{name: not value if isinstance(value, bool) else (value or 1) + 1})


def test_wrong_requests_leave_nothing_behind(model: PreTrainedModel, tokenizer: Any) -> None:
    """Guards against half of a call that waits in the engine."""
    engine = engine_of(model, tokenizer)
    for arguments in (
        {"prompts": ["fine", ""]},
        {"prompts": "word " * 40},
        {"prompts": {"a": 1}},
        {"prompts_token_ids": [[1, 2], [10**6]]},
        {"prompts": ["a", "b"], "request_ids": [1, 1]},
        {"prompts": ["a", "b"], "request_ids": [1]},
        {},
    ):
        with pytest.raises(InvalidRequestError):
            engine.add_request(**arguments)
        assert not engine.llm.engine.has_unfinished_requests(), arguments
    with pytest.raises(InvalidRequestError, match="must be an InferenceConfig"):
        InferenceEngine(model, tokenizer, {})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=r"max_model_len.* = 512"):
        InferenceEngine(model, tokenizer, InferenceConfig(max_input_len=600))


@pytest.mark.covers("C9")
def test_the_context_is_the_longest_prompt_and_the_longest_answer(model: PreTrainedModel, tokenizer: Any) -> None:
    """Guards against a context that is one token longer: a model of just that length could not be loaded."""
    engine = engine_of(model, tokenizer, max_input_len=400, max_output_len=112)
    assert engine.llm.engine.model_info.max_model_len == model.config.max_position_embeddings == 512
    with pytest.raises(InvalidRequestError, match=r"max_model_len.* = 512"):
        engine_of(model, tokenizer, max_input_len=401, max_output_len=112)
