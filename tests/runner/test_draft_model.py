"""A draft model on a real engine: its guesses are its own greedy text, and the answers have the bits of no drafts."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, AsyncLLM, InvalidRequestError, SamplingParams
from penstock.assembly import build_engine
from penstock.assembly.drafts import find_draft, make_speculation
from penstock.config import EngineConfig
from penstock.interface.messages import EngineRequest
from penstock.interface.step import DraftQuery
from penstock.models.config_json import load_model_config
from penstock_lab.prove.completions import Query, ask_alone
from penstock_lab.prove.every_draft import EveryDraft
from tests.hf_models import make_llama, make_mistral, random_ids
from tests.kernels.packed import levels

pytestmark = [pytest.mark.skipif(not levels(), reason="no native library"), pytest.mark.covers("C18")]
OPTIONS = {"kernels": "cpu", "threads": 1, "max_model_len": 160, "max_num_seqs": 3, "max_num_batched_tokens": 40}
DRAFTS = {"model": "demo-draft", "num_speculative_tokens": 4}


def test_a_model_that_drafts_for_itself_is_always_right() -> None:
    """Guards, over prompts in chunks, aborts and blocks that change hands, against a draft model that computes another
    text than the one it was asked about."""
    config = EngineConfig.from_options(model="demo", **OPTIONS, speculative_config={"model": "demo"})
    engine = build_engine(config).engine
    speculation, engine.speculation = engine.speculation, None
    assert speculation is not None
    fields = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, "logprobs": 1}
    queries = [Query([7 + i, *range(20, 30 + 11 * i)], fields) for i in range(6)]
    expected = ask_alone(engine, queries, [(i, 0) for i in range(6)])
    engine.speculation, speculation.policy = speculation, EveryDraft()
    found: dict[str, list[int]] = {str(i): [] for i in range(6)}
    for i, query in enumerate(queries):
        engine.add_request(EngineRequest(str(i), query.prompt, query.params()))
    engine.add_request(EngineRequest("left", [3, 4], SamplingParams(temperature=0.0, max_tokens=99, ignore_eos=True)))
    for number in range(1000):
        if not engine.has_work:
            break
        if number == 4:
            engine.abort("left")
        for output in engine.step():
            if output.request_id != "left":
                found[output.request_id] += output.new_token_ids
    assert found == {str(i): expected[i, 0].ids for i in range(6)}
    stats = engine.stats()
    assert stats.num_draft_tokens_total == stats.num_accepted_tokens_total > 80
    engine.shutdown()


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize(("make", "fields"), [(make_llama, {}), (make_mistral, {"sliding_window": 24})])
def test_drafts_are_the_models_own_text(make: Any, fields: dict[str, Any], kernels: str, tmp_path: Path) -> None:
    """Guards against a chain of draft steps that keeps the positions, lengths, slots or plan of its first step: over
    the end of a tile, with rows of different lengths, texts that continue otherwise than drafted, and rows that go."""
    _, directory = make(tmp_path, **fields)
    options = OPTIONS | {"kernels": kernels, "model": str(directory)}
    config = EngineConfig.from_options(**options, speculative_config={"model": str(directory)})
    with LLM(**options) as llm:

        def continued(ids: list[int], count: int) -> list[int]:
            (found,) = llm.generate([ids], SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True))
            return found.outputs[0].token_ids

        model = load_model_config(directory)
        speculation = make_speculation(config.resolve(model), find_draft(config.resolve(model), model, directory))
        assert speculation is not None
        proposer = speculation._proposer
        texts = {str(row): random_ids(length, seed=row) for row, length in enumerate((50, 3, 61))}
        for number in range(6):
            wanted = [DraftQuery(name, text, 3 + 4 * (number + int(name)) % 20) for name, text in texts.items()]
            for query, found in zip(wanted, proposer.propose(wanted), strict=True):
                assert found == continued(query.token_ids, query.count)
                right = found[: number % 4]  # then another token than drafted
                query.token_ids.extend([*right, (found[number % 4 :] or [0])[0] ^ 1])
            if number == 3:
                proposer.forget("1")
                texts["1"] = random_ids(20, seed=9)
        proposer.shutdown()


def test_the_bundled_draft_model_changes_no_bit_and_is_often_right() -> None:
    """Guards against a draft model of another tokenizer, and against rejected drafts that stay in its cache."""
    params = SamplingParams(max_tokens=60, temperature=0.7, seed=3, n=2, logprobs=1, stop=["."], ignore_eos=True)
    prompts = ["Once upon a time there was a", "Tom had a red ball. He"]
    with LLM(**OPTIONS) as llm:
        plain = llm.generate(prompts, params)
    with LLM(**OPTIONS, speculative_config=DRAFTS) as llm:
        llm.client.engine.speculation.policy = EveryDraft()
        drafted = llm.generate(prompts, params)
        assert [one.outputs for one in drafted] == [one.outputs for one in plain]
        stats = llm.client.engine.stats()
    assert stats.num_accepted_tokens_total > 0.2 * stats.num_draft_tokens_total > 0
    accepted = sum(one.num_accepted_tokens for one in drafted)
    assert accepted + sum(one.num_rejected_tokens for one in drafted) <= stats.num_draft_tokens_total
    assert accepted > 0
    assert llm.config.speculation.speculative_config == DRAFTS


def test_a_killed_engine_goes_on_with_its_drafts() -> None:
    """Guards against drafts that reach the journal of open requests, and a next engine that has no proposer."""
    params = SamplingParams(max_tokens=80, temperature=0.8, seed=1, ignore_eos=True, output_kind="delta")

    async def ask(kill: bool) -> list[int]:
        ids: list[int] = []
        async with AsyncLLM("demo", **OPTIONS, speculative_config={"method": "ngram"}) as llm:
            async for output in llm.generate("one two one two one two", params):
                before, ids = len(ids), ids + output.outputs[0].token_ids
                if kill and before < 30 <= len(ids):
                    os.kill(llm.status().pid, signal.SIGKILL)
            assert llm.status().restarts == int(kill)
        return ids

    with LLM(**OPTIONS) as llm:
        expected = llm.generate("one two one two one two", params.settled(output_kind="final_only"))
    assert asyncio.run(ask(kill=True)) == expected[0].outputs[0].token_ids


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path) -> None:
    """Guards against drafts that mean other words, or lie outside of the vocabulary."""
    config = tmp_path / "config.json"
    config.write_text('{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 77, "n_embd": 32, '
                      '"n_layer": 1, "n_head": 2, "n_positions": 64}')  # fmt: skip
    with pytest.raises(InvalidRequestError, match=r"77 tokens.*is not that of"):
        LLM(**OPTIONS, load_format="dummy", speculative_config={"model": str(tmp_path)})


def test_the_plan_has_the_draft_model() -> None:
    """Guards against memory that speculation takes beside the plan."""
    with LLM(**OPTIONS, speculative_config=DRAFTS) as llm:
        assert llm.client.model_info.memory["drafts"] > 2**20
    with LLM(**OPTIONS) as llm:
        assert "drafts" not in llm.client.model_info.memory
