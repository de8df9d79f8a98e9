"""Embeddings and hidden states as the engine gives them, against Transformers and against themselves."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from penstock import LLM, InvalidRequestError, ModelLoadError, PoolingParams, RequestFailedError, SamplingParams
from penstock.errors import NotSupportedError
from penstock.interface.pooling import MAX_POOLED_BYTES, PoolerConfig
from penstock.models.config_json import parse_model_config
from penstock.models.registry import _without_head, find_architecture, find_model
from penstock.spec.pooler import read_pooler
from penstock.weights.hub import resolve_model
from penstock.weights.safetensors import TensorEntry
from penstock.weights.sources import match
from tests.families.case import Case
from tests.hf_models import make_qwen3, random_ids
from tests.kernels.packed import levels
from tests.lab.compat.test_instances import one_an_architecture

pytestmark = [pytest.mark.skipif(not levels(), reason="no native library"), pytest.mark.covers("F25")]
KINDS = ("LAST", "MEAN", "CLS", "ALL")
PROMPTS = [{"prompt_token_ids": random_ids(length, length)} for length in (1, 5, 40, 70, 128)]
Vectors = list[npt.NDArray[np.float32]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model without a head, as Qwen3-Embedding is stored, and its directory."""
    model, directory = make_qwen3(tmp_path_factory.mktemp("embedding"))
    model.model.save_pretrained(directory / "base")
    return model.model, directory / "base"


@pytest.fixture(scope="module")
def llm(made: tuple[Any, Path]) -> Iterator[LLM]:
    with LLM(str(made[1]), dtype="float32", max_model_len=128, threads=1) as made_llm:
        yield made_llm


def vectors(llm: LLM, kind: str, prompts: list[Any] = PROMPTS, *, normalize: bool = False) -> Vectors:
    outputs = llm.encode(prompts, PoolingParams(pooling_type=kind, normalize=normalize))
    return [output.outputs.data for output in outputs]


def test_hidden_states_are_those_of_transformers(llm: LLM, made: tuple[Any, Path]) -> None:
    """Guards against a wrong position, a mean over the wrong tokens, a missing final norm, and tensors of a model
    without a head that are not found by their names. A prompt fills the whole context."""
    for kind in KINDS:
        for prompt, found in zip(PROMPTS, vectors(llm, kind), strict=True):
            with torch.no_grad():
                states = made[0](torch.tensor([prompt["prompt_token_ids"]])).last_hidden_state[0].numpy()
            expected = {"LAST": states[-1], "MEAN": states.mean(axis=0), "CLS": states[0], "ALL": states}[kind]
            assert found.shape == expected.shape
            assert np.abs(found - expected).max() < 2e-5


def test_bits_are_the_same_in_a_crowd_and_in_chunks(llm: LLM, made: tuple[Any, Path]) -> None:
    """Guards against a mean whose order of adding follows the chunks, and states that an int8 cache or a preemption
    changes: each alone and whole, against all at once, in pieces of 13 tokens, on 2 threads, without room for all."""
    expected = {kind: [vectors(llm, kind, [prompt])[0].tobytes() for prompt in PROMPTS] for kind in KINDS}
    pass_ = llm.forward(PROMPTS[2], skip_lm_head=True).last_hidden_state
    assert expected["ALL"][2] == pass_.tobytes()
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "threads": 2, "max_num_batched_tokens": 13}
    room = 2**20
    with LLM(str(made[1]), **options, max_num_seqs=5, kv_cache_memory_bytes=room) as crowd:
        params = [PoolingParams(pooling_type=kind, normalize=False) for kind in KINDS for _ in PROMPTS]
        found = [output.outputs.data.tobytes() for output in crowd.encode(PROMPTS * len(KINDS), params)]
        assert found == [item for kind in KINDS for item in expected[kind]]
        again = crowd.encode(PROMPTS, params[: len(PROMPTS)])  # of the last token: the rest is in the cache
        assert [output.outputs.data.tobytes() for output in again] == expected["LAST"]
        assert again[-1].num_cached_tokens == 112
        crowd.built.engine.check_integrity()


def test_a_text_ends_with_eos_where_the_tokenizer_config_says_so(tmp_path: Path) -> None:
    """Guards against vectors of e5-mistral's kind other than their authors', who trained on texts with EOS."""
    directory = shutil.copytree(resolve_model("demo"), tmp_path / "model")
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "add_eos_token": True}))
    pooler = {"add_eos_token": False}
    for given, are_ended in ((None, True), ({"normalize": True}, True), (pooler, False)):
        with LLM(str(directory), pooler_config=given, threads=1) as model:
            tokenizer = model.get_tokenizer()
            assert tokenizer is not None
            ids = tokenizer.encode("A dog.")
            assert ids[-1] != tokenizer.eos_token_id
            expected = [*ids, tokenizer.eos_token_id] if are_ended else ids
            by_text, by_ids = model.embed(["A dog.", {"prompt_token_ids": expected}])
            assert by_text.outputs.embedding == by_ids.outputs.embedding
            assert len(by_text.prompt_token_ids) == len(expected)
            assert ("pooler_config" in model.engine.model_info.choices_made) == are_ended
            (output,) = model.generate(["A dog."], SamplingParams(max_tokens=1))
            assert output.prompt_token_ids == ids


def test_embeddings_and_scores(llm: LLM) -> None:
    """Guards against vectors that are not of length 1, a score of a text with itself that is not 1, dimensions cut
    after the length was made 1, and pairs that are mixed up."""
    embeddings = [output.outputs for output in llm.embed(PROMPTS)]
    assert all(abs(np.linalg.norm(item.embedding) - 1) < 1e-6 for item in embeddings)
    assert embeddings[0].hidden_size == 48
    first, *others = [np.array(item.embedding) for item in embeddings]
    scores = [output.outputs.score for output in llm.score(PROMPTS[0], PROMPTS)]
    assert scores == pytest.approx([1.0, *(float(first @ other) for other in others)])
    pairs = [output.outputs.score for output in llm.score(PROMPTS, PROMPTS[::-1])]
    assert pairs[0] == scores[-1]
    assert pairs[2] == pytest.approx(1.0)
    assert llm.embed([]) == []
    cut = PoolerConfig(hidden_size=48, is_matryoshka=True)
    assert cut.settle(PoolingParams(dimensions=7), 1).dimensions == 7


def test_what_is_refused(llm: LLM) -> None:
    """Guards against a value that is accepted and ignored, and a text from a model that has no head."""
    prompt = PROMPTS[1]
    for call, word in (
        (lambda: llm.generate(prompt), "no language-model head"),
        (lambda: llm.embed(prompt, PoolingParams(dimensions=8)), "dimensions"),
        (lambda: llm.embed(prompt, PoolingParams(pooling_type="ALL")), "encode gives all"),
        (lambda: llm.embed({"prompt_token_ids": random_ids(129, 1)}), "exceed the context of 128"),
        (lambda: llm.embed(prompt, SamplingParams()), "pooling_params"),  # type: ignore[arg-type]
        (lambda: llm.embed([prompt], [PoolingParams()] * 2), "2 for 1 prompts"),
        (lambda: llm.encode(prompt, pooling_task="rank"), "pooling_task"),
        (lambda: llm.encode(prompt, PoolingParams(task="embed"), pooling_task="token_embed"), "pooling_task"),
        (lambda: llm.encode(prompt, pooling_task="classify"), "no classifier's head"),
        (lambda: llm.encode(prompt, PoolingParams(pooling_type="CLS"), pooling_task="token_embed"), "pooling_type"),
        (lambda: llm.score(PROMPTS[:2], PROMPTS[:3]), "text_1"),
        (lambda: PoolingParams(pooling_type="MAX"), "pooling_type"),
        (lambda: PoolingParams(truncate_prompt_tokens=0), "truncate_prompt_tokens"),
        (lambda: SamplingParams(pooling=PoolingParams(), temperature=0.0, max_tokens=5), "max_tokens"),
        (lambda: replace(SamplingParams.for_pooling(PoolingParams()), top_k=4), "top_k"),
        (lambda: LLM("demo", pooler_config={"pooling": "MEAN"}), "pooler_config"),
        (lambda: PoolerConfig(hidden_size=64).settle(PoolingParams(pooling_type="ALL"), MAX_POOLED_BYTES), "at most"),
    ):
        refused(call, word)


def refused(call: Callable[[], Any], word: str) -> None:
    with pytest.raises(InvalidRequestError, match=word):
        call()


def test_prompts_are_truncated(llm: LLM) -> None:
    """Guards against a cut at the wrong end, and prompt_token_ids that were not computed."""
    ids = random_ids(200, 5)
    for params, kept in (
        (PoolingParams(truncate_prompt_tokens=7), ids[:7]),
        (PoolingParams(truncate_prompt_tokens=7, truncation_side="left"), ids[-7:]),
        (PoolingParams(truncate_prompt_tokens=-1), ids[:128]),
        (PoolingParams(truncate_prompt_tokens=500), ids[:128]),
    ):
        (cut,) = llm.embed({"prompt_token_ids": ids}, params)
        assert cut.prompt_token_ids == kept
        assert cut.outputs == llm.embed({"prompt_token_ids": kept})[0].outputs


@pytest.mark.parametrize("case", one_an_architecture(), ids=str)
def test_every_family_without_its_head(case: Case) -> None:
    """Guards against a family whose checkpoints without a head are refused, or lack a tensor by its name. That the
    values are right is proved of one, and of each with its head."""
    config = case.config()
    with torch.device("meta"):
        decoder, *_ = case.model_class(config).children()  # base_model of Llama 4 has the head, too
    states = decoder.state_dict()
    values = config.to_dict() | {"architectures": [_without_head(case.architecture)]}
    model = parse_model_config(values)
    assert not find_architecture(model.architecture).has_lm_head
    table = find_model(model.architecture).read_table()
    entries = {name: TensorEntry(Path("x"), tuple(value.shape), "F32", 0) for name, value in states.items()}
    found = match(entries, {item.name: item for item in table.parameters(model).values()}, table)
    assert "lm_head.weight" not in found.layouts


def test_a_bad_number_costs_its_own_request(made: tuple[Any, Path]) -> None:
    """Guards against NaN in an answer, and against one that ends the requests beside it."""
    with LLM(str(made[1]), dtype="float32", max_model_len=128) as llm:
        runner = llm.built.engine.executor._runner  # type: ignore[attr-defined]
        take = runner._pooler.pool

        def poisoned(hidden: Any, *args: Any) -> Any:
            hidden[0] = np.nan  # the first token of the first request
            return take(hidden, *args)

        runner._pooler.pool = poisoned
        with pytest.raises(RequestFailedError, match="not finite"):
            vectors(llm, "MEAN")
        assert np.isfinite(vectors(llm, "LAST", PROMPTS[1:])[0]).all()  # whose first token it does not use


def write(directory: Path, modules: Any, **pooling: Any) -> PoolerConfig:
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return read_pooler(directory, PoolerConfig(hidden_size=48))


def test_what_sentence_transformers_writes(tmp_path: Path) -> None:
    """Guards against a model that is pooled in another way than it was trained for, without a word; and against a path
    that leads out of the directory."""
    assert read_pooler(tmp_path, PoolerConfig(hidden_size=48)) == PoolerConfig(hidden_size=48)
    names = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize", "Dense": "2_Dense"}
    modules = {name: {"type": f"sentence_transformers.models.{name}", "path": path} for name, path in names.items()}
    both = [modules["Transformer"], modules["Pooling"]]
    mean = write(tmp_path, both, pooling_mode_mean_tokens=True, pooling_mode_cls_token=False)
    assert (mean.pooling_type, mean.normalize, mean.unsupported) == ("MEAN", False, None)
    last = write(tmp_path, [*both, modules["Normalize"]], pooling_mode_lasttoken=True)
    assert (last.pooling_type, last.normalize) == ("LAST", True)
    dense = write(tmp_path, [*both, modules["Dense"]], pooling_mode_cls_token=True)
    for problem in (dense, write(tmp_path, both, pooling_mode_max_tokens=True)):
        with pytest.raises(NotSupportedError, match="not supported"):
            problem.settle(PoolingParams(), 1)
        assert problem.with_options({"pooling_type": "MEAN"}).settle(PoolingParams(), 1).pooling_type == "MEAN"
    for wrong in ({}, [1], [{**modules["Pooling"], "path": "../other"}], [{**modules["Pooling"], "path": 3}]):
        with pytest.raises(ModelLoadError):
            write(tmp_path, wrong, pooling_mode_mean_tokens=True)
    (tmp_path / "modules.json").unlink()
    (tmp_path / "config.json").write_text('{"matryoshka_dimensions": [16, 32]}')
    cut = read_pooler(tmp_path, PoolerConfig(hidden_size=48))
    assert cut.settle(PoolingParams(dimensions=32), 1).dimensions == 32
    refused(lambda: cut.settle(PoolingParams(dimensions=31), 1), "one of 16, 32")
