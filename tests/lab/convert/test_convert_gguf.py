"""GGUF files converted and checked: what the metadata says becomes the files of a directory."""

from pathlib import Path

from penstock import LLM, EngineConfig, SamplingParams
from penstock.models.config_json import load_model_config
from penstock.tokenizer.hf import load_tokenizer
from penstock_lab.check.run import Options, check_model
from penstock_lab.convert.pack import convert_model
from penstock_lab.convert.rewrite import rewrite_model
from tests.families.case import all_cases
from tests.hf_models import TINY, randomise
from tests.tokenizer.vocabularies import byte_level
from tests.weights.gguf_files import write_gguf

FIELDS = {"vocab_size": 600, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def _write(path: Path) -> Path:
    case = next(case for case in all_cases() if case.name == "llama-plain")
    model = case.model_class(case.config(**FIELDS)).eval()
    randomise(model, seed=0)
    return write_gguf(model, path, "Q4_0", tokenizer=byte_level(), template=TEMPLATE)


def test_a_converted_file_is_a_whole_model(tmp_path: Path) -> None:
    """Guards against a directory without the tokenizer or the configuration, which were in the file only."""
    path = _write(tmp_path / "model.gguf")
    config, tokenizer = load_model_config(path), load_tokenizer(path)
    convert_model(EngineConfig.from_options(model=str(path)), tmp_path / "packed")
    rewrite_model(str(path), tmp_path / "decoded", "transformers", 2**62)
    for name in ("packed", "decoded"):
        found = load_tokenizer(tmp_path / name)
        assert load_model_config(tmp_path / name) == config
        assert found.encode("Once upon a time, <note>") == tokenizer.encode("Once upon a time, <note>")
        assert found.chat_template is not None
        assert found.chat_template.text == TEMPLATE
        assert (found.bos_token_id, found.eos_token_id) == (TINY["bos_token_id"], TINY["eos_token_id"])


def test_a_file_and_its_packed_form_answer_alike(tmp_path: Path) -> None:
    """Guards against another place of a model that some part of the engine does not know, and against lost bits."""
    path = _write(tmp_path / "model.gguf")
    convert_model(EngineConfig.from_options(model=str(path)), tmp_path / "packed")
    answers = []
    for place in (path, tmp_path / "packed"):
        with LLM(model=str(place), max_model_len=64) as llm:
            output = llm.generate(["Once upon a time"], SamplingParams(max_tokens=12, seed=1, ignore_eos=True))[0]
            answers.append((output.outputs[0].token_ids, output.outputs[0].text))
    assert answers[0] == answers[1]
    assert len(answers[0][0]) == 12


def test_a_file_is_compared_with_transformers(tmp_path: Path) -> None:
    """Guards against a check that does not know where the weights are, or compares with other values."""
    report = check_model(Options(model=str(_write(tmp_path / "model.gguf"))))
    assert report.passed
    assert "with the decoded weights" in report.against
