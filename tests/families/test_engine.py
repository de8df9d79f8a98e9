"""Every family in every form of weights and cache, through native kernels: quality, and bits that nothing changes.

Of the engine's promise (tests/test_same_bits.py) this is a sample for each family.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.assembly import BuiltEngine, build_engine
from penstock.config import EngineConfig
from penstock.engine.speculation import Speculation
from penstock.kernels.scheme import Scheme
from penstock_lab.convert.pack import convert_model
from penstock_lab.prove.every_draft import EveryDraft
from penstock_lab.prove.parallel import BASE, answers, start_threads
from tests.answers import LENGTHS, MAX_MODEL_LEN, PROMPTS, ask, ask_alone, check, check_resumed, request
from tests.fakes_drafts import Oracle
from tests.families.case import all_cases, for_cases
from tests.hf_models import Made, hf_logprobs, is_vocabulary, random_ids
from tests.kernels.packed import levels
from tests.paged import PagedModel
from tests.watcher import Watcher

pytestmark = [pytest.mark.skipif(not levels(), reason="no native library")]
MODELS = for_cases(all_cases(shapes=False))
FULL = for_cases([case for case in all_cases() if case.full])


@dataclass(frozen=True)
class Form:
    """How weights and cache are held."""

    quantization: str | None = None
    group_size: int | None = None
    kv_cache_dtype: str = "auto"

    @property
    def options(self) -> dict[str, Any]:
        return {
            "dtype": "bfloat16",
            "quantization": self.quantization,
            "quantization_group_size": self.group_size,
            "kv_cache_dtype": self.kv_cache_dtype,
        }

    def model(self, directory: Path, num_seqs: int = 1) -> PagedModel:
        cache_dtype = None if self.kv_cache_dtype == "auto" else self.kv_cache_dtype
        scheme = Scheme.parse(self.quantization, self.group_size)
        of_form = {"dtype": "bfloat16", "scheme": scheme, "cache_dtype": cache_dtype}
        return PagedModel(directory, kernels="cpu", num_seqs=num_seqs, **of_form)


PLAIN = Form()
WEIGHTS = {"int8": Form("int8"), "int4": Form("int4", 32)}
INT4 = {"int4": WEIGHTS["int4"]}  # of every family: its groups and packing leave the most to go wrong
INT8_CACHE = Form(kv_cache_dtype="int8")
CROWDED = {"int8": Form("int8", kv_cache_dtype="int8")}
# What rounding to a scheme's steps may cost, in units of what random noise of up to half a step on every weight costs.
# int8 rounds activations too, as coarsely as weights, on both sides of a product; next to 4 bits this counts nothing,
# and the search for scales makes their noise smaller.
COSTS = {"int8": (127, 3.0), "int4": (7, 1.0)}
CACHE_COST = 2.0  # in units of what bfloat16 costs against float32: its 8 bits are about as coarse
# Rounding sends a few tokens to other experts, each of which costs hundreds of times what the others do: over one text
# the ratio lies between 0.6 and 3.5 in models with experts, over 16 between 0.9 and 1.55 in all.
CACHE_TEXTS = 16
TEXT = 200  # tokens
WATCHED = [0, 1, 4, 5]  # of tests/answers.py


def columns(forms: dict[str, Form]) -> list[Any]:
    return [pytest.param(form, id=name, marks=pytest.mark.matrix(name)) for name, form in forms.items()]


def scored(model: PagedModel) -> Tensor:
    """Log-probabilities after each token of a text for each of the model's sequences, [sequences * TEXT, V]."""
    return torch.cat([model.step({row: random_ids(TEXT, row)})[row] for row in range(len(model.lengths))])


def rise(exact: Tensor, found: Tensor) -> float:
    """By how much of itself the loss grows, on what the model itself would write, averaged over every next token."""
    best, loss = (-(exact.exp() * logprobs).sum(dim=-1).mean().item() for logprobs in (exact, found))
    return loss / best - 1


def blurred(model: PreTrainedModel, form: Form, seed: int) -> PreTrainedModel:
    """A copy, each weight moved by up to half a step of this form. The head keeps 8 bits, and embeddings all."""
    generator, copy = torch.Generator().manual_seed(seed), deepcopy(model)
    head = copy.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())  # no longer the embedding's own
    blur(head.weight.data, 127, head.weight.shape[1], generator)
    for name, parameter in copy.named_parameters():
        if parameter.ndim > 1 and not is_vocabulary(name):
            blur(parameter.data, COSTS[form.quantization][0], form.group_size or parameter.shape[-1], generator)
    return copy


def blur(weight: Tensor, levels: int, group_size: int, generator: torch.Generator) -> None:
    """Move each element by up to half of the step that its group has with so many levels."""
    for part in weight.split(group_size, dim=-1):
        part += part.abs().amax(dim=-1, keepdim=True) / levels * (torch.rand(part.shape, generator=generator) - 0.5)


@MODELS
@pytest.mark.parametrize("form", columns(INT4))
def test_loss_of_quantised_weights(form: Form, made: Made) -> None:
    """Guards against a scale, a group or a sum that is slightly wrong, and against weights that nobody quantises."""
    check_loss(form, made)


@FULL
@pytest.mark.parametrize("form", columns({"int8": WEIGHTS["int8"]}))
def test_loss_of_the_other_form(form: Form, made: Made) -> None:
    """Guards against the same with a scale for each row, and activations of 8 bits."""
    check_loss(form, made)


def check_loss(form: Form, made: Made) -> None:
    hf_model, directory = made
    exact, quantised = scored(PLAIN.model(directory)), scored(form.model(directory))
    theirs = hf_logprobs(hf_model, random_ids(TEXT))
    noise = [rise(theirs, hf_logprobs(blurred(hf_model, form, seed), random_ids(TEXT))) for seed in range(3)]
    cost = rise(exact, quantised) / (sum(noise) / len(noise))
    assert 0.2 < cost < COSTS[form.quantization][1]


@MODELS
@pytest.mark.matrix("int8 cache")
def test_loss_of_an_int8_cache(made: Made) -> None:
    """Guards against scales or offsets of the wrong head, and against a layer that keeps a cache of another type."""
    exact = scored(PagedModel(made[1], kernels="cpu", num_seqs=CACHE_TEXTS))
    plain, quantised = (scored(form.model(made[1], CACHE_TEXTS)) for form in (PLAIN, INT8_CACHE))
    assert not torch.equal(plain, quantised)
    assert rise(exact, quantised) < CACHE_COST * rise(exact, plain)


@MODELS
@pytest.mark.parametrize("form", columns(INT4))
def test_converted(form: Form, made: Made, tmp_path: Path) -> None:
    """Guards against packed weights in another place, type or layout than those made while loading."""
    check_converted(form, made, tmp_path)


@FULL
@pytest.mark.parametrize("form", columns({"bfloat16": PLAIN, "int8": WEIGHTS["int8"]}))
def test_converted_to_the_other_forms(form: Form, made: Made, tmp_path: Path) -> None:
    """Guards against the same in the packed layouts of these forms, which are the same for all families."""
    check_converted(form, made, tmp_path)


def check_converted(form: Form, made: Made, tmp_path: Path) -> None:
    convert_model(EngineConfig.from_options(model=str(made[1]), **form.options), tmp_path / "packed")
    assert torch.equal(scored(form.model(tmp_path / "packed")), scored(form.model(made[1])))


@pytest.fixture
def build(form: Form, made: Made) -> Callable[..., BuiltEngine]:
    """Makes an engine; options may differ, the model and its form do not."""
    fixed = {
        "model": str(made[1]),
        "kernels": "cpu",
        "max_num_seqs": len(PROMPTS),
        "max_model_len": MAX_MODEL_LEN,
        "enable_prefix_caching": False,
        **form.options,
    }
    return lambda **options: build_engine(EngineConfig.from_options(**fixed | options))


@MODELS
@pytest.mark.covers("F6", "M11")
@pytest.mark.parametrize("form", columns(CROWDED))
def test_same_bits_in_a_crowd(build: Callable[..., BuiltEngine]) -> None:
    """Guards against a bit that depends on the other rows of a step, on where a chunk ends, on the threads, on a cached
    prefix, or on a process that died; and against arithmetic of torch's, whose sums could. What a family computes by
    itself is bfloat16 in this form, too; tests/test_same_bits.py has all forms."""
    alone = ask_alone(build(threads=1, max_num_batched_tokens=2048).engine, WATCHED)
    assert len({tuple(ids) for ids, _, _ in alone.values()}) == len(alone)
    engine = build(threads=2, max_num_batched_tokens=30, enable_prefix_caching=True).engine
    with Watcher() as watcher:
        found = ask(engine, map(request, range(len(PROMPTS))))
    assert not watcher.forbidden
    check(found, alone)
    again = ask(engine, [request(index, prompt_logprobs=False) for index in WATCHED])
    assert [again[index][-1].num_cached_tokens > 0 for index in WATCHED] == [LENGTHS[index] > 16 for index in WATCHED]
    check(again, alone, prompts=False)
    check_resumed(engine, alone)


@MODELS
@pytest.mark.covers("C15")
@pytest.mark.matrix("drafts")
@pytest.mark.parametrize("form", [pytest.param(PLAIN, id="bfloat16")])
def test_drafts_change_nothing(build: Callable[..., BuiltEngine]) -> None:
    """Guards against a layer in which a rejected draft leaves something behind, or a row sees a later draft."""
    alone = ask_alone(build(threads=1).engine, WATCHED)
    engine = build(threads=1).engine
    oracle = Oracle(lambda name, text, count: alone[int(name)][0][len(text) - LENGTHS[int(name)] :][:count], 0.7)
    engine.speculate(Speculation(oracle, 5, policy=EveryDraft()))
    check(ask(engine, map(request, WATCHED)), alone)
    stats = engine.stats()
    assert 0 < stats.num_accepted_tokens_total < stats.num_draft_tokens_total


@MODELS
@pytest.mark.covers("C15")
@pytest.mark.matrix("2 ranks")
def test_two_ranks_have_the_bits_of_one_process(made: Made) -> None:
    """Guards against a weight that is split where the family's arithmetic does not allow it."""
    options = {**BASE, "model": str(made[1]), "dtype": "bfloat16"}
    split = EngineConfig.from_options(**options, tensor_parallel_size=2)
    assert answers(split, start_threads) == answers(EngineConfig.from_options(**options))


@MODELS
@pytest.mark.matrix("kernels")
def test_few_tokens_are_recorded(made: Made) -> None:
    """Guards against a family whose decode steps run all of their Python, and against an address or a length that a
    program keeps from the step in which it was recorded."""
    plain, recorded = (PagedModel(made[1], kernels="cpu", num_seqs=3, recorded=way) for way in (False, True))
    ids = [random_ids(40, seed) for seed in range(3)]
    steps = [{0: ids[0][:20]}, *({row: ids[row][at : at + 1] for row in range(1 + at % 3)} for at in range(20, 32))]
    for new in steps:
        for found, expected in zip(recorded.step(new).values(), plain.step(new).values(), strict=True):
            assert torch.equal(found, expected)
    assert recorded.model._recordable
    assert {tokens for tokens, _ in recorded.model._recorded} >= {1, 2, 3}
