"""The LM head in pieces and padded: the same logits, and no token that is none."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.assembly import BuiltEngine, build_engine
from penstock.config import EngineConfig
from penstock.errors import InvalidRequestError, NotSupportedError
from penstock.interface.messages import EngineRequest
from penstock.interface.sampling_params import SamplingParams
from penstock.kernels.backends import load_ops
from penstock.kernels.cpu.library import LEVELS
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.ops import Ops, Packing
from penstock.kernels.reference import ReferenceOps
from penstock.kernels.sampling import NO_TOKEN, SamplingTensors
from penstock.kernels.scheme import Scheme
from penstock.kernels.tensors import Arena
from penstock.layers.weights import PLAIN_HEAD, HeadLayout, LinearSpec, LMHead
from penstock.models.config_json import load_model_config
from penstock.runner.model_runner import RecordedModel
from penstock.weights.loader import load_model
from penstock_lab.convert.pack import convert_model
from tests.answers import Answer, answer, ask, ask_alone
from tests.families import falcon
from tests.hf_models import random_ids
from tests.kernels.packed import levels
from tests.paged import PagedModel

native = pytest.mark.skipif(not levels(), reason="no native library")
HIDDEN = 96
PIECES = [1, 2, 4, 8]
NEVER = float("-inf")


def make_head(
    ops: Ops,
    weight: Tensor,
    layout: HeadLayout = PLAIN_HEAD,
    *,
    bias: Tensor | None = None,
    scheme: str | None = None,
    softcap: float | None = None,
) -> LMHead:
    spec = LinearSpec(tuple(weight.shape), bias is not None, Packing(scheme=Scheme.parse(scheme)))
    out = Arena(ops.empty).slot("lm_head", (layout.width(len(weight)),), "float32")
    head = LMHead(ops, spec, out, softcap=softcap, layout=layout)
    head.load({"weight": weight} | ({} if bias is None else {"bias": bias}))
    return head


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


@native
@pytest.mark.covers("F23", "F24")
@pytest.mark.parametrize("level", LEVELS[: len(levels())])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", [None, "int8", "int8-x2"])
def test_pieces_and_padding_change_no_bit(level: str, dtype: torch.dtype, scheme: str | None) -> None:
    """Guards against a piece that sums in another order because it is narrower, that writes over its neighbour's
    columns, or whose scales are of other columns; and against padding that is felt by what stands before it. Also
    pieces that end within a panel, one that is nothing but padding, a bias, a soft cap, and few and many rows."""
    ops = CpuOps(dtype, threads=2, level=level)
    for vocab_size, bias, softcap in ((199, None, None), (520, random(520, seed=2), 5.0)):
        weight = random(vocab_size, HIDDEN) / 10
        options: dict[str, Any] = {"bias": bias, "scheme": scheme, "softcap": softcap}
        whole = make_head(ops, weight, **options)
        layouts = [HeadLayout(count, pad_to) for count in [*PIECES, 3] for pad_to in (1, 128)]
        heads = [make_head(ops, weight, layout, **options) for layout in layouts]
        for rows in (1, 5, 70):
            x = random(rows, HIDDEN, seed=rows).to(dtype)
            expected = bits(whole(x))
            for head in heads:
                logits = head(x)
                assert logits.shape == (rows, head.width)
                assert torch.equal(bits(logits[:, :vocab_size]), expected), head.layout
                assert bool((logits[:, vocab_size:] == NEVER).all()), head.layout


@pytest.mark.covers("F23", "F24")
def test_pieces_and_padding_on_the_reference() -> None:
    """Guards against a head that only the native kernels can divide."""
    ops = ReferenceOps(torch.float32)
    weight, x = random(199, HIDDEN), random(5, HIDDEN, seed=1)
    expected = make_head(ops, weight, softcap=5.0)(x)
    for layout in [HeadLayout(count, pad_to) for count in PIECES for pad_to in (1, 512)]:
        logits = make_head(ops, weight, layout, softcap=5.0)(x)
        torch.testing.assert_close(logits[:, :199], expected, atol=1e-4, rtol=0)
        assert bool((logits[:, 199:] == NEVER).all())


@pytest.mark.covers("F23")
def test_falcon_is_padded_to_a_power_of_two() -> None:
    """Guards against a width that is not the next multiple: 65024 tokens are 127 x 512, and 65536 columns, 8 pieces of
    8192, when they are filled up to a multiple of 1024."""
    assert HeadLayout(1, 512).width(65024) == 65024
    layout = HeadLayout(8, 1024)
    assert layout.width(65024) == 65536
    assert layout.cuts(65024) == [(index * 8192, (index + 1) * 8192) for index in range(8)]
    assert HeadLayout(8).cuts(65024)[-1] == (7 * 8128, 65024)
    assert HeadLayout(4).cuts(199) == [(0, 49), (49, 99), (99, 149), (149, 199)]


def sampling(rows: int, **fields: Any) -> SamplingTensors:
    """At temperature 2, with the fields given."""
    keys = torch.stack([torch.arange(rows), torch.zeros(rows), torch.zeros(rows)], dim=1).long()
    nothing = SamplingTensors(torch.full((rows,), 2.0), None, None, None, keys, None, None, None, None)
    return replace(nothing, **fields)


def pairs_of(rows: int, ids: range) -> Tensor:
    return torch.cartesian_prod(torch.arange(rows), torch.arange(ids.start, ids.stop))


@pytest.mark.covers("F23")
@pytest.mark.parametrize("kernels", ["reference", *(["cpu"] if levels() else [])])
def test_padding_is_never_sampled(kernels: str) -> None:
    """Guards against a choice among columns that are no tokens: over thousands of draws at a high temperature, with
    top_k from the vocabulary's size on, top_p of 1, a bias for all of the padding, penalties that would lift it, and
    where nothing else is left."""
    ops = load_ops(kernels, torch.float32)
    vocab_size, rows = 5, 600
    head = make_head(ops, random(vocab_size, HIDDEN) / 50, HeadLayout(2, 64))
    logits = head(random(rows, HIDDEN, seed=1)).clone()
    padding = pairs_of(rows, range(vocab_size, 64))
    ones, counts = torch.ones(rows), torch.full((len(padding),), 3.0)
    ways: list[dict[str, Any]] = [{"top_k": torch.full((rows,), top_k)} for top_k in (4, 5, 6, 63, 64)]
    ways += [
        {},
        {"top_p": torch.full((rows,), 1.0), "min_p": torch.zeros(rows)},
        {"top_p": torch.full((rows,), 0.999), "top_k": torch.full((rows,), 64)},
        {"bias": (padding, torch.full((len(padding),), 100.0))},
        {"repetition": (ones * 0.01, padding), "counts": (-ones, -ones, padding, counts)},
        {"temperature": torch.zeros(rows), "noise_key": None},
    ]
    for fields in ways:
        found = ops.choose(logits, sampling(rows, **fields))[0]
        assert 0 <= int(found.min()) <= int(found.max()) < vocab_size, fields
        if "temperature" not in fields and "top_k" not in fields:
            assert len(found.unique()) == vocab_size  # the draws do reach every token
    everything = sampling(rows, masked=pairs_of(rows, range(vocab_size)))
    assert bool((ops.choose(logits, everything)[0] == NO_TOKEN).all())
    assert bool(ops.choose(logits, everything)[1].all())
    assert bool((ops.log_softmax(logits)[:, vocab_size:] == NEVER).all())


def engine_with(directory: Path, **options: Any) -> BuiltEngine:
    names = {"model": str(directory), "max_model_len": 112, "max_num_seqs": 8, "kv_cache_memory_bytes": 2**22}
    return build_engine(EngineConfig.from_options(**names | options))


def forced(engine: BuiltEngine, vocab_size: int) -> dict[int, Answer]:
    """What comes of requests that reach for the end of the vocabulary."""
    sampled = SamplingParams(
        temperature=1.5,
        top_k=500,
        seed=1,
        max_tokens=6,
        ignore_eos=True,
        logprobs=20,
        prompt_logprobs=20,
        logit_bias={vocab_size - 1: 5.0, 0: -3.0},
        repetition_penalty=1.3,
        frequency_penalty=0.5,
    )
    greedy = replace(sampled, temperature=0.0, min_p=0.01)
    prompts = [random_ids(9, seed, vocab_size) for seed in range(2)]
    requests = [EngineRequest(str(i), prompts[i], params) for i, params in enumerate([sampled, greedy])]
    return {index: answer(outputs) for index, outputs in ask(engine.engine, requests).items()}


@pytest.mark.covers("F23", "F24")
@pytest.mark.parametrize("vocab_size", [199, 13])
@pytest.mark.parametrize(
    ("kernels", "options"),
    [
        pytest.param("cpu", {"lm_head_pieces": 4}, marks=native),
        pytest.param("cpu", {"lm_head_pieces": 8, "pad_vocab_multiple": 512}, marks=native),
        pytest.param("cpu", {"pad_vocab_multiple": 64, "quantization": "int8"}, marks=native),
        ("reference", {"lm_head_pieces": 2, "pad_vocab_multiple": 64}),
    ],
    ids=str,
)
def test_the_engine_answers_alike(kernels: str, options: dict[str, Any], vocab_size: int, tmp_path: Path) -> None:
    """Guards against an option that is accepted and ignored, and against padding that reaches an answer: ids and
    log-probabilities (of the prompt too; the 20 most likely, also where there are only 13 tokens; top_k above the
    vocabulary; a bias and penalties) are those of a whole head, to the bit with native kernels."""
    _, directory = falcon.CASES[1].make(tmp_path, vocab_size=vocab_size)
    common: dict[str, Any] = {"kernels": kernels, "dtype": "bfloat16" if kernels == "cpu" else "float32"}
    common |= {name: value for name, value in options.items() if name == "quantization"}
    plain, divided = engine_with(directory, **common), engine_with(directory, **common | options)
    layout = HeadLayout(options.get("lm_head_pieces", 1), options.get("pad_vocab_multiple", 1))
    assert divided.model.lm_head.layout == layout
    assert len(divided.model.lm_head.packed) == layout.pieces
    expected, found = forced(plain, vocab_size), forced(divided, vocab_size)
    if kernels == "cpu":
        assert found == expected
    for index, (ids, logprobs, prompt) in found.items():
        assert ids == expected[index][0]
        assert all(max(entry.token_ids) < vocab_size for entry in [*logprobs, *prompt[1:]])
    if kernels == "cpu" and vocab_size == 199:
        assert ask_alone(divided.engine) == ask_alone(plain.engine)


@pytest.mark.covers("F25")
@pytest.mark.parametrize("kernels", ["reference", pytest.param("cpu", marks=native)])
def test_hidden_states_with_and_without_the_head(kernels: str, tmp_path: Path) -> None:
    """Guards against a head that belongs to the forward pass in one mode and not in the other: without it the hidden
    states come back as Transformers has them, and the head applied to them gives the logits of a step that goes all
    the way, run and recorded."""
    hf_model, directory = falcon.CASES[1].make(tmp_path)
    ids = random_ids(7)
    with torch.no_grad():
        theirs = hf_model.transformer(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
    paged = PagedModel(directory, kernels=kernels, num_seqs=3, max_len=16)
    input_ids, ctx = paged.begin({0: ids})
    hidden = paged.model(input_ids, ctx).clone()
    torch.testing.assert_close(hidden, theirs, atol=1e-4, rtol=0)
    logits = paged.model.compute_logits(hidden).clone()
    if kernels == "cpu":
        whole = RecordedModel(paged.model, paged.ops)
        for row in (1, 2):  # recorded, then recorded
            assert torch.equal(bits(whole.logits(*paged.begin({row: ids}))), bits(logits))
    head = hf_model.lm_head.weight.detach()
    torch.testing.assert_close(logits, theirs @ head.T, atol=1e-4, rtol=0)


@native
def test_a_divided_head_is_recorded(tmp_path: Path) -> None:
    """Guards against an engine that falls back to slow steps, because a piece is more than a view and a product."""
    _, directory = falcon.CASES[1].make(tmp_path)
    ops = load_ops("cpu", torch.float32)
    config = load_model_config(directory)
    paged = PagedModel(directory, kernels="cpu", num_seqs=2, max_len=16)
    paged.model = load_model(directory, config, ops, head=HeadLayout(3, 64))
    paged.ops = ops
    recorded = RecordedModel(paged.model, ops)
    first = recorded.logits(*paged.begin({0: [5, 7]})).clone()
    assert recorded._recorded
    assert torch.equal(bits(recorded.logits(*paged.begin({1: [5, 7]}))), bits(first))


@native
@pytest.mark.parametrize("options", [{"lm_head_pieces": 2}, {"pad_vocab_multiple": 64}], ids=str)
def test_packed_weights_hold_the_head_whole(options: dict[str, int], tmp_path: Path) -> None:
    """Guards against an option that packed weights ignore, on either side of the file."""
    _, directory = falcon.CASES[1].make(tmp_path)
    config = EngineConfig.from_options(model=str(directory), dtype="bfloat16")
    with pytest.raises(NotSupportedError, match="hold the LM head whole"):
        convert_model(EngineConfig.from_options(model=str(directory), **options), tmp_path / "divided")
    convert_model(config, tmp_path / "packed")
    with pytest.raises(NotSupportedError, match="hold the LM head whole"):
        engine_with(tmp_path / "packed", **options)
    assert engine_with(tmp_path / "packed").model.lm_head.layout == PLAIN_HEAD


@pytest.mark.parametrize(
    ("name", "value"),
    [("lm_head_pieces", 0), ("lm_head_pieces", 1025), ("pad_vocab_multiple", 0), ("pad_vocab_multiple", 1.5)],
)
def test_wrong_values_are_named(name: str, value: object) -> None:
    """Guards against a head without pieces."""
    with pytest.raises(InvalidRequestError, match=name):
        EngineConfig.from_options(**{name: value})


def test_no_more_pieces_than_tokens(tmp_path: Path) -> None:
    """Guards against pieces without a column."""
    _, directory = falcon.CASES[1].make(tmp_path, vocab_size=13)
    config = load_model_config(directory)
    EngineConfig.from_options(lm_head_pieces=13).resolve(config)
    with pytest.raises(InvalidRequestError, match=r"lm_head_pieces.*13"):
        EngineConfig.from_options(lm_head_pieces=14).resolve(config)
