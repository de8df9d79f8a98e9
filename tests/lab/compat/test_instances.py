"""Model and tokenizer objects of Transformers, given as they are: the same answers as from their directory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, ElectraConfig, ElectraForMaskedLM, PreTrainedModel

from penstock import LLM, AsyncLLM, InvalidRequestError, ModelLoadError, NotSupportedError, SamplingParams
from penstock.tokenizer.hf import adopt_tokenizer, load_tokenizer
from penstock.weights.hub import MODEL_DIR
from tests.families.case import Case, all_cases
from tests.hf_models import make_llama, random_ids

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
OPTIONS: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 4, "kernels": "reference"}
PROMPTS = [{"prompt_token_ids": random_ids(length, length)} for length in (3, 20, 9)]


def one_an_architecture() -> list[Case]:
    """The first case of each."""
    return list({case.architecture: case for case in reversed(all_cases())}.values())


def hf_greedy(model: PreTrainedModel, ids: list[int], count: int = 16) -> list[int]:
    """What Transformers' own generate answers, without its end tokens, and without its cache, which keeps everything
    for a window of one token."""
    options: dict[str, Any] = {"do_sample": False, "use_cache": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        found = model.generate(torch.tensor([ids]), max_new_tokens=count, **options)
    return found[0, len(ids) :].tolist()


def answers(model: Any, **options: Any) -> list[list[int]]:
    with LLM(model=model, **{**OPTIONS, **options}) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.covers("C13")
@pytest.mark.parametrize("case", one_an_architecture(), ids=lambda case: case.name)
def test_a_model_object_answers_as_its_directory_and_as_transformers(case: Case, tmp_path: Path) -> None:
    """Guards against names or layouts in memory (stacked experts, tied heads) that the loader reads otherwise."""
    model, directory = case.make(tmp_path)
    found = answers(model)
    assert found == answers(str(directory))
    assert found == [hf_greedy(model, prompt["prompt_token_ids"]) for prompt in PROMPTS]


@pytest.mark.covers("C13")
def test_the_engine_takes_the_objects_type_and_keeps_nothing_of_it(tmp_path: Path) -> None:
    """Guards against a config that names another type than the weights have, and against weights that are shared."""
    model, _ = make_llama(tmp_path)
    with LLM(model=model.to(torch.bfloat16), **OPTIONS) as llm:
        assert llm.config.numerics.dtype == "bfloat16"
        before, fingerprint = llm.generate(PROMPTS, GREEDY), llm.engine.model_info.system_fingerprint
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        after = llm.generate(PROMPTS, GREEDY)
        assert [item.outputs[0].token_ids for item in after] == [item.outputs[0].token_ids for item in before]
    with LLM(model=model, **OPTIONS) as llm:
        assert llm.engine.model_info.system_fingerprint != fingerprint


def test_settings_of_the_objects_generation_config_count(tmp_path: Path) -> None:
    """Guards against end tokens and defaults that only a directory has."""
    model, _ = make_llama(tmp_path)
    model.generation_config.eos_token_id = [7, 9]
    model.generation_config.max_new_tokens = 5
    with LLM(model=model, **OPTIONS) as llm:
        assert llm.engine.model_info.eos_token_ids == (7, 9)
        assert llm.get_default_sampling_params().max_tokens == 5


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    """Guards against a traceback from the middle of loading."""
    with pytest.raises(ModelLoadError, match="an object of type dict is not supported"):
        LLM(model={})
    with pytest.raises(InvalidRequestError, match="model: None is not allowed"):
        LLM(model=None)
    with pytest.raises(ModelLoadError, match="an encoder"):
        LLM(model=ElectraForMaskedLM(ElectraConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1)))
    model, _ = make_llama(tmp_path)
    with pytest.raises(ModelLoadError, match="on the meta device and has no values"):
        LLM(model=model.to("meta"))
    model, _ = make_llama(tmp_path)
    model.lm_head = torch.nn.Linear(48, 199, bias=True)
    with pytest.raises(ModelLoadError, match=r"unknown: lm_head\.bias"):
        LLM(model=model)


def test_an_engine_in_another_process_refuses_an_object(tmp_path: Path) -> None:
    """Guards against a pickle of a whole model, or a message about a string."""
    with pytest.raises(NotSupportedError, match="another process"):
        AsyncLLM(model=make_llama(tmp_path)[0])


TEXTS = ["Once upon a time", "Tom's  dog\n", "naïve 猫 🙂", " <|user|> hi"]


@pytest.mark.covers("C13")
def test_a_tokenizer_object_is_as_good_as_its_files() -> None:
    """Guards against special tokens, templates or an end token that get lost on the way, and against a changed
    original: ours turns truncation and padding off."""
    given, ours = AutoTokenizer.from_pretrained(MODEL_DIR), load_tokenizer(MODEL_DIR)
    given(["a", "much longer text"], padding=True, truncation=True, max_length=3)
    padding = given.backend_tokenizer.padding
    adopted = adopt_tokenizer(given)
    assert given.backend_tokenizer.padding == padding
    for text in TEXTS:
        assert adopted.encode(text) == ours.encode(text) == given(text)["input_ids"]
        assert adopted.decode(ours.encode(text)) == ours.decode(ours.encode(text))
    assert (adopted.bos_token_id, adopted.eos_token_id) == (ours.bos_token_id, ours.eos_token_id)
    assert adopted.special_ids == ours.special_ids
    assert adopt_tokenizer(ours) is ours
    messages = [{"role": "user", "content": "Hi"}]
    assert adopted.chat_template is not None
    assert adopted.chat_template.render(messages) == given.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )


def test_an_object_that_can_only_save_itself_is_read_from_what_it_saves() -> None:
    """Guards against tokenizers of Transformers that hide their backend."""

    class Saves:
        def save_pretrained(self, directory: str) -> None:
            AutoTokenizer.from_pretrained(MODEL_DIR).save_pretrained(directory)

    assert adopt_tokenizer(Saves()).encode(TEXTS[0]) == load_tokenizer(MODEL_DIR).encode(TEXTS[0])
    with pytest.raises(InvalidRequestError, match="an object of type int"):
        adopt_tokenizer(3)


def test_text_in_text_out_with_both_objects(tmp_path: Path) -> None:
    """Guards against a model object that only takes ids though it was given a tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    model, _ = make_llama(tmp_path, vocab_size=len(tokenizer))
    with LLM(model=model, tokenizer=tokenizer, **OPTIONS) as llm:
        output = llm.generate("Once upon a time", GREEDY)[0]
    expected = hf_greedy(model, tokenizer("Once upon a time")["input_ids"])
    assert output.outputs[0].token_ids == expected
    assert output.outputs[0].text == tokenizer.decode(expected, skip_special_tokens=True)
