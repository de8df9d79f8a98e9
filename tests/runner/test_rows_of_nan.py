"""Rows whose values are not numbers: their requests fail, the others keep their bits, then and afterwards."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.assembly import build_engine
from penstock.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.interface.messages import EngineRequest
from penstock_lab.prove.completions import Completion, Query, ask_alone
from tests.families.case import Case, all_cases
from tests.kernels.packed import levels

pytestmark = pytest.mark.skipif(not levels(), reason="no native library")
POISON = 77  # the token whose embedding is not finite
FORMS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "int8, int8 cache": {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"},
    "int4-a16": {"dtype": "bfloat16", "quantization": "int4-a16", "quantization_group_size": 32},
}
INTEGERS = ("int8, int8 cache",)  # scales of a row, of a cache block and of a head, beside the attention of all models
PAIRS = [
    (case, form)
    for case in all_cases()
    if case.full
    for form in (FORMS if case.name in ("llama", "gpt-oss", "mixtral") else INTEGERS)
]
LENGTHS = (5, 17, 33, 40)
QUERIES = [
    Query([3 + (7 * i + length) % 70 for i in range(length)], {
        "temperature": 0.8 * (length % 2), "seed": length, "max_tokens": 8, "logprobs": 2, "ignore_eos": True,
        "logit_bias": {POISON: -100.0},  # the healthy do not choose it
    })
    for length in LENGTHS
]  # fmt: skip


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model in which one token's embedding is NaN and infinity."""
    case: Case = request.param
    _, directory = case.make(tmp_path_factory.mktemp(case.name), tie_word_embeddings=False)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][POISON, 0::2] = torch.nan
    tensors["model.embed_tokens.weight"][POISON, 1::2] = torch.inf
    save_file(tensors, file)
    return str(directory)


@pytest.fixture
def engine(request: pytest.FixtureRequest, model: str) -> Iterator[Engine]:
    """A cache in which blocks are used again at once."""
    options = {"model": model, "kernels": "cpu", "threads": 1, "max_model_len": 64, "max_num_seqs": 8}
    made = build_engine(EngineConfig.from_options(**options, **FORMS[request.param], max_num_batched_tokens=24)).engine
    yield made
    made.shutdown()


def in_company(engine: Engine, poisoned: list[list[int]]) -> tuple[dict[int, Completion], list[str | None]]:
    """The answers of QUERIES, and the errors of other prompts that run among them."""
    found = [Completion() for _ in [*QUERIES, *poisoned]]
    for index, prompt in enumerate(poisoned):
        engine.add_request(EngineRequest(str(len(QUERIES) + index), prompt, QUERIES[0].params()))
    for index, query in enumerate(QUERIES):
        engine.add_request(EngineRequest(str(index), query.prompt, query.params()))
    while engine.has_work:
        for output in engine.step():
            found[int(output.request_id)].add(output)
    engine.check_integrity()
    return dict(enumerate(found[: len(QUERIES)])), [answer.error for answer in found[len(QUERIES) :]]


@pytest.mark.parametrize(("model", "engine"), PAIRS, indirect=True, ids=str)
def test_they_touch_nobody(engine: Engine) -> None:
    """Guards against NaN that spreads through a product, an expert, an attention tile or a cache block used again."""
    expected = ask_alone(engine, QUERIES, [(index, 0) for index in range(len(QUERIES))])
    poisoned = [[POISON], [5, POISON, 6], [*range(3, 33), POISON], [*range(3, 50), POISON, 9]]
    for _ in range(3):
        found, errors = in_company(engine, poisoned)
        assert errors == ["the model's logits are not finite (NaN or infinity)"] * len(poisoned)
        for index, answer in found.items():
            assert answer.difference(expected[index, 0]) is None
