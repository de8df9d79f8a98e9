"""Windows through the whole engine: memory that does not grow, in blocks and in rings, one window a group of layers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.assembly import BuiltEngine, build_engine
from penstock.config import EngineConfig
from penstock.interface.messages import EngineRequest
from penstock.interface.sampling_params import SamplingParams
from tests.families.case import Case, all_cases, for_cases
from tests.hf_models import Made, hf_logprobs, random_ids
from tests.kernels.packed import levels

KERNELS = ["reference", *(["cpu"] if levels() else [])]


def build(directory: Path, **options: Any) -> BuiltEngine:
    common: dict[str, Any] = {
        "model": str(directory),
        "dtype": "float32",
        "max_num_seqs": 2,
        "max_num_batched_tokens": 24,
    }
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


WINDOWED = [case for case in all_cases() if (case.sliding_window or 0) > 1]


@for_cases(WINDOWED)
@pytest.mark.matrix("window")
@pytest.mark.covers("M8")
def test_ten_windows_take_the_memory_of_one(case: Case, made: Made) -> None:
    """Guards against blocks behind a window that stay, against a ring that is read where it was written over, and
    against layers that see with another layer's window: every log-probability is the model's own."""
    follow_ten_windows(case, made, KERNELS[-1])


@for_cases([case for case in WINDOWED if case.name in ("mistral", "llama4")])
def test_ten_windows_with_the_reference(case: Case, made: Made) -> None:
    """Guards against the same where there are no native kernels: windows that slide and windows that are chunks."""
    follow_ten_windows(case, made, "reference")


def follow_ten_windows(case: Case, made: Made, kernels: str) -> None:
    hf_model, directory = made
    window = case.sliding_window
    assert window is not None
    prompts = [random_ids(70, 1), random_ids(9, 2)]
    blocks = build(directory, kernels=kernels, max_model_len=512)
    ids, logprobs, peaks = follow(blocks, prompts, 10 * window)
    for prompt, answer, entries in zip(prompts, ids, logprobs, strict=True):
        exact = hf_logprobs(hf_model, prompt + answer)[len(prompt) - 1 : -1]
        found = torch.tensor([entry.logprobs[0] for entry in entries])
        torch.testing.assert_close(found, exact.gather(1, torch.tensor(answer)[:, None])[:, 0], atol=2e-4, rtol=0)
    groups = blocks.engine.kv_cache.groups
    windowed = [group.sliding_window is not None for group in groups]
    assert {group.sliding_window for group in groups} - {None} == {window}
    # Behind a window at most window - 1 old and, of all sequences together, 24 new tokens, each in a block more.
    most = 2 * (-(-(window - 1) // 16) + 1) + 2
    assert all(peak <= most for peak, slides in zip(peaks, windowed, strict=True) if slides)
    assert blocks.engine.stats().num_preemptions_total == 0  # or blocks would be freed by computing requests again
    short = build(directory, kernels=kernels, max_model_len=128)
    for group, longer, slides in zip(short.engine.kv_cache.groups, groups, windowed, strict=True):
        assert (group.num_blocks == longer.num_blocks) == slides

    rows = build(directory, kernels=kernels, max_model_len=512, block_size=512)
    ring = -(-window // 16) * 16
    assert [group.block_size for group in rows.engine.kv_cache.groups] == [ring if w else 512 for w in windowed]
    row_ids, row_logprobs, row_peaks = follow(rows, prompts, 10 * window)
    assert row_peaks == [2] * len(groups)
    assert row_ids == ids
    if kernels == "cpu":
        assert row_logprobs == logprobs
