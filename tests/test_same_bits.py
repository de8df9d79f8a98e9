"""The promise: a request's tokens and log-probabilities have the same bits, however it is computed.

Tiny random models with the native kernels, in every form of weights. Attention is still plain torch, whose sums depend
on the batch; here each query row is computed by itself, in float64, so that equal means equal for all the rest.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import LLM, SamplingParams
from penstock.kernels.reference import ReferenceOps
from penstock.outputs import RequestOutput
from tests.hf_models import MAKERS, random_ids
from tests.kernels.packed import levels

pytestmark = pytest.mark.skipif(not levels(), reason="no native library")
FORMS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float32": {"dtype": "float32"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4", "quantization_group_size": 32},
}
LENGTHS = [5, 17, 33, 48, 1, 64, 20, 16, 31, 2, 40, 7, 63, 12, 25, 3, 50, 9, 29, 36]  # Mistral's window is 16 tokens
PROMPTS = [random_ids(length, seed) for seed, length in enumerate(LENGTHS)]
WATCHED = [0, 1, 2, 4, 5]  # whose answers are compared
NUM_TOKENS = 12


def attend_row_by_row(
    self: ReferenceOps, q: Tensor, k_new: Tensor, v_new: Tensor, cache: Any, meta: Any, params: Any, *, out: Any = None
) -> Tensor:
    """Attention of one query row at a time over exactly the keys it sees, in float64."""
    cache.store(k_new, v_new, meta.slot_mapping)
    result = torch.empty(len(q), q[0].numel(), dtype=q.dtype) if out is None else out
    starts, seq_lens = meta.query_start_loc.tolist(), meta.seq_lens.tolist()
    for row, seq_len in enumerate(seq_lens):
        end = starts[row + 1]
        for token in range(starts[row], end):
            last = seq_len - end + token
            first = 0 if meta.sliding_window is None else max(0, last + 1 - meta.sliding_window)
            positions = torch.arange(first, last + 1)[None]
            keys, values = (item[0].double() for item in cache.load(meta.block_table[row][None], positions))
            result[token] = _one_row(q[token].double(), keys, values, params.scale).to(q.dtype)
    return result


def _one_row(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """q [H, D], keys and values [S, Hkv, D] -> [H * D]."""
    group = q.shape[0] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    weights = ((keys * q).sum(-1) * scale).softmax(dim=0)  # [S, H]
    return (weights[:, :, None] * values).sum(0).flatten()


@pytest.fixture(scope="module", params=["llama", "mistral"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Products of several panels and items, so that threads share them.
    sizes = {"hidden_size": 96, "intermediate_size": 200, "vocab_size": 500}
    return MAKERS[request.param](tmp_path_factory.mktemp(request.param), seed=7, **sizes)[1]


@pytest.fixture(scope="module", autouse=True)
def exact_attention() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReferenceOps, "attend", attend_row_by_row)
        yield


@pytest.fixture(scope="module", params=FORMS)
def make(request: pytest.FixtureRequest, directory: Path) -> Callable[..., LLM]:
    """Makes an engine; options may differ, the model and its form do not."""
    form = {"dtype": "bfloat16", "kernels": "cpu", "threads": 1, "max_num_seqs": 20} | FORMS[request.param]
    return lambda **options: LLM(model=str(directory), **form | options)


def ask(llm: LLM, indices: Iterable[int], *, scored: bool = True) -> dict[int, RequestOutput]:
    """The answers to these prompts, asked together. Odd ones are sampled. `scored` asks for the prompt's
    log-probabilities, too, which no cached prefix has."""
    asked = list(indices)
    params = [
        SamplingParams(
            temperature=0.8 * (index % 2),
            seed=3,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            logprobs=3,
            prompt_logprobs=1 if scored else None,
        )
        for index in asked
    ]
    outputs = llm.generate([{"prompt_token_ids": PROMPTS[index]} for index in asked], params)
    return dict(zip(asked, outputs, strict=True))


def answer(output: RequestOutput) -> tuple[Any, ...]:
    """Ids and every reported log-probability, exactly."""
    choice = output.outputs[0]
    assert choice.logprobs is not None
    assert len(choice.token_ids) == len(choice.logprobs) == NUM_TOKENS
    return choice.token_ids, choice.logprobs, output.prompt_logprobs


@pytest.fixture(scope="module")
def alone(exact_attention: None, make: Callable[..., LLM]) -> dict[int, tuple[Any, ...]]:
    """What each request answers by itself, in one piece, on one thread, with nothing cached."""
    with make(enable_prefix_caching=False, max_num_batched_tokens=2048) as llm:
        return {index: answer(ask(llm, [index])[index]) for index in WATCHED}


@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": False},
        {"enable_prefix_caching": False, "threads": 3},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 13, "max_num_seqs": 5},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 13, "max_num_seqs": 5, "threads": 3},
    ],
    ids=["batch of 20", "3 threads", "chunks of 13", "chunks of 13, 3 threads"],
)
def test_in_company(options: dict[str, Any], make: Callable[..., LLM], alone: dict[int, tuple[Any, ...]]) -> None:
    """Guards against a bit that depends on the other rows of a step, on where a chunk ends, or on the threads."""
    with make(**options) as llm:
        found = ask(llm, range(len(PROMPTS)))
    for index, expected in alone.items():
        assert answer(found[index]) == expected, f"prompt {index}"


def test_with_a_warm_prefix(make: Callable[..., LLM], alone: dict[int, tuple[Any, ...]]) -> None:
    """Guards against keys and values whose bits depend on the step that computed them."""
    with make() as llm:
        ask(llm, range(len(PROMPTS)), scored=False)
        found = ask(llm, WATCHED, scored=False)
    assert [found[index].num_cached_tokens for index in WATCHED] == [0, 16, 32, 0, 48]
    for index, expected in alone.items():
        assert answer(found[index])[:2] == expected[:2], f"prompt {index}"


def test_prompts_and_sampling_matter(alone: dict[int, tuple[Any, ...]]) -> None:
    """Guards against a model that always says the same, of which everything above would be true."""
    assert len({tuple(ids) for ids, _, _ in alone.values()}) == len(alone)
