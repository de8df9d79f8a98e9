"""Windows through the whole engine: memory that does not grow, in blocks and in rings, one window a group of layers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.build import BuiltEngine, build_engine
from penstock.config import EngineConfig
from penstock.engine.messages import EngineRequest
from penstock.sampling_params import SamplingParams
from tests.hf_models import hf_logprobs, make_mistral, make_qwen2, random_ids
from tests.kernels.packed import levels

WINDOW = 16
KERNELS = ["reference", *(["cpu"] if levels() else [])]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    """One model whose layers all have a window, and one where only the second has."""
    mixed = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    return {
        "all": make_mistral(tmp_path_factory.mktemp("all"), seed=2),
        "mixed": make_qwen2(tmp_path_factory.mktemp("mixed"), seed=2, **mixed),
    }


def build(directory: Path, **options: Any) -> BuiltEngine:
    common = {"model": str(directory), "dtype": "float32", "max_num_seqs": 2, "max_num_batched_tokens": 24}
    return build_engine(EngineConfig.from_options(**{**common, **options}))


def follow(
    built: BuiltEngine, prompts: list[list[int]], count: int
) -> tuple[list[list[int]], list[list[Any]], list[int]]:
    """Greedy ids and log-probabilities after each prompt, and the most blocks each group had in use at once."""
    engine, pools = built.engine, built.engine.kv_cache.pools
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=1)
    for index, prompt in enumerate(prompts):
        engine.add_request(EngineRequest(str(index), prompt, params))
    ids: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[Any]] = [[] for _ in prompts]
    peaks = [0] * len(pools)
    while engine.has_work:
        for output in engine.step():
            ids[int(output.request_id)] += output.new_token_ids
            logprobs[int(output.request_id)] += output.logprobs or []
        peaks = [max(peak, pool.num_blocks - pool.num_free) for peak, pool in zip(peaks, pools, strict=True)]
    return ids, logprobs, peaks


@pytest.mark.covers("M8")
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("which", ["all", "mixed"])
def test_ten_windows_take_the_memory_of_one(which: str, kernels: str, models: Any) -> None:
    """Guards against blocks behind a window that stay, against a ring that is read where it was written over, and
    against layers that see with another layer's window: every log-probability is the model's own."""
    hf_model, directory = models[which]
    prompts = [random_ids(70, 1), random_ids(9, 2)]
    blocks = build(directory, kernels=kernels, max_model_len=512)
    ids, logprobs, peaks = follow(blocks, prompts, 10 * WINDOW)
    for prompt, answer, entries in zip(prompts, ids, logprobs, strict=True):
        exact = hf_logprobs(hf_model, prompt + answer)[len(prompt) - 1 : -1]
        found = torch.tensor([entry.logprobs[0] for entry in entries])
        torch.testing.assert_close(found, exact.gather(1, torch.tensor(answer)[:, None])[:, 0], atol=2e-4, rtol=0)
    groups = blocks.engine.kv_cache.groups
    windowed = [group.sliding_window == WINDOW for group in groups]
    assert windowed == ([True] if which == "all" else [False, True])
    # Behind a window at most window - 1 old and, of all sequences together, 24 new tokens, each in a block more.
    assert peaks[-1] <= 2 * 2 + 2
    short = build(directory, kernels=kernels, max_model_len=128)
    assert short.engine.kv_cache.groups[-1].num_blocks == groups[-1].num_blocks

    rows = build(directory, kernels=kernels, max_model_len=512, block_size=512)
    assert [group.block_size for group in rows.engine.kv_cache.groups] == [16 if w else 512 for w in windowed]
    row_ids, row_logprobs, row_peaks = follow(rows, prompts, 10 * WINDOW)
    assert row_peaks == [2] * len(groups)
    assert row_ids == ids
    if kernels == "cpu":
        assert row_logprobs == logprobs
