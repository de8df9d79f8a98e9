"""Every family against Transformers: the same weights and tokens give the same log-probabilities.

Through the model alone, over a paged cache whose blocks are shuffled among slots full of NaN.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from penstock.models.config_json import load_model_config
from tests.families.case import Case, all_cases, for_cases
from tests.hf_models import Made, hf_logprobs, random_ids
from tests.kernels.packed import levels
from tests.paged import PagedModel

MODELS = for_cases(all_cases(shapes=False))
FULL = for_cases([case for case in all_cases() if case.full])
KERNELS = ["reference", *(["cpu"] if levels() else [])]
TOLERANCE = 1e-4
SEEDS = range(2)
NUM_SEQS = 4
LENGTH = 97  # tokens: 96 next ones of each sequence, 768 in all


@pytest.mark.matrix("float32")
@pytest.mark.matrix("KV cache")
@pytest.mark.matrix("paged attention")
def test_float32(made: Made) -> None:
    """Guards against any slip in the mathematics, in a merge of weights or in a mask. 70 tokens are more than any
    window and more than the old context of every rotary scaling. Whole; token by token; in chunks of 7 behind a cached
    prefix; each of them packed with another sequence, through shuffled blocks among slots full of NaN."""
    compare(made, KERNELS[-1])


@FULL
def test_float32_of_the_reference(made: Made) -> None:
    """Guards against the same in the kernels that are the specification of the others."""
    compare(made, "reference")


def compare(made: Made, kernels: str) -> None:
    hf_model, directory = made
    ids, other = random_ids(70), random_ids(33, seed=1)
    expected, expected_other = hf_logprobs(hf_model, ids), hf_logprobs(hf_model, other)

    paged = PagedModel(directory, kernels=kernels, num_seqs=4)
    whole = paged.step({0: ids, 1: other})
    torch.testing.assert_close(whole[0], expected, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(whole[1], expected_other, atol=TOLERANCE, rtol=0)

    decoded = [paged.step({2: ids[:40]})[2]] + [paged.step({2: [token]})[2] for token in ids[40:]]
    torch.testing.assert_close(torch.cat(decoded), expected, atol=TOLERANCE, rtol=0)

    chunks = [paged.step({3: ids[start : start + 7], 1: [5]})[3] for start in range(0, len(ids), 7)]
    torch.testing.assert_close(torch.cat(chunks), expected, atol=TOLERANCE, rtol=0)


@dataclass
class Truth:
    """Sequences for one bfloat16 model, and the log-probability of each next token: computed in float32 from the same
    weights, and by Transformers in bfloat16."""

    directory: Path
    sequences: list[list[int]]
    exact: Tensor
    theirs: Tensor


@pytest.fixture(scope="session")
def all_truths() -> dict[str, list[Truth]]:
    """By case, each computed once: pytest takes a case up again for other lists of cases."""
    return {}


@pytest.fixture(scope="module")
def truths(case: Case, make_model: Callable[..., Made], all_truths: dict[str, list[Truth]]) -> list[Truth]:
    """Of each seed."""
    if case.name in all_truths:
        return all_truths[case.name]
    made = [make_model(case, seed, torch.bfloat16) for seed in SEEDS]
    # As Transformers loads it: a model that is converted by `.to` would round its rotary frequencies too.
    models = [
        AutoModelForCausalLM.from_pretrained(made[0][1], dtype=dtype, attn_implementation=case.attention)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    found = all_truths[case.name] = []
    for seed, (source, directory) in zip(SEEDS, made, strict=True):
        sequences = [random_ids(LENGTH, seed=NUM_SEQS * seed + row) for row in range(NUM_SEQS)]
        for model in models:
            model.load_state_dict(source.state_dict())  # the weights of this seed; frequencies stay as they were loaded
        exact, theirs = (next_tokens(hf_batch(model, sequences), sequences) for model in models)
        found.append(Truth(directory, sequences, exact, theirs))
    return found


def hf_batch(model: PreTrainedModel, sequences: list[list[int]]) -> Tensor:
    """Transformers' log-probabilities after each token of sequences of one length, [B, n, V] float32."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor(sequences), use_cache=False).logits
    return logits.float().log_softmax(dim=-1)


def next_tokens(logprobs: Iterable[Tensor], sequences: list[list[int]]) -> Tensor:
    """Log-probabilities after each token, [n, V] of each sequence -> those of the tokens that follow, all in a row."""
    pairs = zip(logprobs, sequences, strict=True)
    return torch.cat([rows[torch.arange(len(ids) - 1), torch.tensor(ids[1:])] for rows, ids in pairs])


def computed(truth: Truth, kernels: str, way: str) -> Tensor:
    """Ours, in one step or one token a step."""
    sequences, rows = truth.sequences, range(len(truth.sequences))
    options = {"dtype": "bfloat16", "num_seqs": len(rows), "max_len": LENGTH}
    if way == "prefill":
        step = PagedModel(truth.directory, kernels=kernels, **options).step(dict(enumerate(sequences)))
        return next_tokens((step[row] for row in rows), sequences)
    paged = PagedModel(truth.directory, kernels=kernels, recorded=kernels == "cpu", **options)
    steps = [paged.step({row: [sequences[row][at]] for row in rows}) for at in range(LENGTH)]
    return next_tokens((torch.cat([step[row] for step in steps]) for row in rows), sequences)


def check_error(truths: list[Truth], kernels: str, way: str) -> None:
    """The error is at most 1.1 times Transformers' own: RMS over the next-token log-probabilities of 768 positions,
    two seeds pooled. Of experts it is the error that 9 of 10 positions stay below: where a router's choice is close,
    both may choose another expert than the truth does, and a few such positions make up the whole RMS.
    """
    ours = torch.cat([computed(truth, kernels, way) - truth.exact for truth in truths])
    theirs = torch.cat([truth.theirs - truth.exact for truth in truths])
    assert len(ours) == 768
    has_experts = load_model_config(truths[0].directory).num_experts > 0
    size = nine_of_ten if has_experts else root_mean_square
    our_error, their_error = size(ours).item(), size(theirs).item()
    assert our_error <= 1.1 * their_error, f"ours {our_error:.5f}, Transformers' {their_error:.5f}"


def root_mean_square(errors: Tensor) -> Tensor:
    return errors.square().mean().sqrt()


def nine_of_ten(errors: Tensor) -> Tensor:
    return errors.abs().quantile(0.9)


@MODELS
@pytest.mark.matrix("bfloat16")
@pytest.mark.covers("F41")
def test_bfloat16(truths: list[Truth]) -> None:
    """Guards against a value that is rounded twice. The same bfloat16 weights, computed in float32, are the truth."""
    check_error(truths, KERNELS[-1], "prefill")


@FULL
def test_bfloat16_token_by_token(truths: list[Truth]) -> None:
    """Guards against the same in steps of few tokens, and in what the cache holds. Of every family, test_engine.py
    proves that an answer, computed token by token, has the bits of the same text as one prompt."""
    check_error(truths, KERNELS[-1], "decode")


@FULL
def test_bfloat16_of_the_reference(truths: list[Truth]) -> None:
    """Guards against a rounding point of the specification that the native kernels do not have."""
    check_error(truths, "reference", "prefill")
