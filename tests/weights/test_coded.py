"""Coded checkpoints: what layers keep of their codes, and that every way of serving them gives the same bits."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from penstock.assembly import build_engine
from penstock.assembly.sizes import model_sizes
from penstock.config import EngineConfig
from penstock.errors import InvalidRequestError
from penstock.kernels.backends import load_ops
from penstock.kernels.coding import CodedRows
from penstock.kernels.ops import RowSource, TensorRows
from penstock.kernels.tensors import Array
from penstock.layers.weights import PLAIN_HEAD, HeadLayout, Linear
from penstock.models.config_json import load_model_config
from penstock.weights.loader import kept_layers, load_model, make_factory, open_stored, weight_bytes, weight_layers
from penstock.weights.rows import cut, halved, joined, pieces_of, runs_of
from penstock.weights.safetensors import Checkpoint
from penstock_lab.check.run import Options, check_model
from penstock_lab.convert.pack import convert_model
from penstock_lab.convert.rewrite import rewrite_model
from penstock_lab.planner.fit import Budget
from penstock_lab.planner.forecast import Load
from penstock_lab.planner.planned import PlannedModel
from penstock_lab.planner.report import Question, answer
from penstock_lab.prove.parallel import BASE, answers, start_threads
from tests.coded import CODINGS, code, coded_files, coded_rows  # noqa: F401
from tests.families.case import Case
from tests.hf_models import make_llama
from tests.kernels.packed import levels

pytestmark = pytest.mark.usefixtures("coded_files")
SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 199,
}  # fmt: skip
PROMPT = [(7 + 31 * place) % 199 for place in range(40)]
# As Q4_K_M has them: queries and keys unlike values, and the head unlike the embedding.
MIXED = {
    "q_proj": "Q4_1", "k_proj": "Q4_1", "v_proj": "Q8_0", "o_proj": "K64", "gate_proj": "Q4_0", "up_proj": "Q4_0",
    "down_proj": "K64", "lm_head": "Q8_0", "embed_tokens": "Q4_0",
}  # fmt: skip
KERNELS = ["reference", *(["cpu"] if levels() else [])]


def read(source: RowSource) -> Array:
    return np.asarray(source.read(0, source.shape[0]))


@pytest.mark.parametrize("name", CODINGS)
def test_rows_keep_their_codes(name: str) -> None:
    """Guards against codes that are decoded where they could stay, and against scales of other rows or columns."""
    coding = CODINGS[name]
    one, other = coded_rows(coding, (24, 512)), coded_rows(coding, (8, 512), 1)
    if coding.order:
        other = CodedRows(coding, {**other.parts, "order": one.parts["order"]})
    both = joined([one, other])
    values = np.concatenate([read(one), read(other)])
    assert runs_of(both) == ((32, coding),)
    np.testing.assert_array_equal(read(both), values)
    for source, expected in (
        (cut(both, 20, 30), values[20:30]),
        (joined([cut(both, 4, 6), cut(both, 26, 28)]), np.concatenate([values[4:6], values[26:28]])),
        (halved(both, 8, 8), values.reshape(4, 4, 2, 512).swapaxes(1, 2).reshape(32, 512)),
    ):
        assert isinstance(source, CodedRows)
        np.testing.assert_array_equal(read(source), expected)
    for begin, end in ((0, 256), (256, 512)):
        part = cut(both, begin, end, axis=1)
        assert isinstance(part, CodedRows) != coding.order
        np.testing.assert_array_equal(read(part), values[:, begin:end])
    inside = cut(both, 8, 512, axis=1)
    assert isinstance(inside, CodedRows) == (coding.block is None)
    np.testing.assert_array_equal(read(inside), values[:, 8:])


def test_rows_of_unlike_codings_stay_pieces() -> None:
    """Guards against two codings that are taken for one: names are not compared alone, and orders are not the same
    because both have one."""
    one, other, floats = (
        coded_rows(CODINGS["Q4_0"], (8, 64)),
        coded_rows(CODINGS["Q8_0"], (8, 64)),
        TensorRows(np.ones((8, 64), np.float32)),
    )
    mixed = joined([one, joined([other, floats]), floats])
    assert [(rows, coding and coding.name) for rows, coding in runs_of(mixed)] == [(8, "Q4_0"), (8, "Q8_0"), (16, None)]
    assert runs_of(cut(mixed, 12, 20)) == ((4, CODINGS["Q8_0"]), (4, None))
    np.testing.assert_array_equal(read(cut(mixed, 4, 20)), read(mixed)[4:20])
    ordered = CODINGS["GPTQ with an order"]
    assert len(pieces_of(joined([coded_rows(ordered, (8, 64)), coded_rows(ordered, (8, 64), 1)]))) == 2
    assert runs_of(floats) == runs_of(joined([floats, floats])) == ()


@pytest.fixture
def mixed(tmp_path: Path) -> tuple[Path, Path]:
    return code(make_llama(tmp_path, **SIZES)[1], MIXED)


def load(directory: Path, kernels: str, dtype: str = "float32", **options: Any) -> Any:
    ops = load_ops(kernels, getattr(torch, dtype))
    return load_model(directory, load_model_config(directory), ops, **options)


def test_layers_keep_what_can_be_kept(mixed: tuple[Path, Path]) -> None:
    """Guards against a weight that is decoded in silence, and a weight in pieces whose columns are in another order."""
    model = load(mixed[0], "reference")
    kept = {
        name.removeprefix("model."): [
            (end - begin, packing.coding and packing.coding.name) for begin, end, packing in layer.pieces
        ]
        for name, layer in weight_layers(model)
        if isinstance(layer, Linear)
    }
    assert kept["layers.0.self_attn.qkv_proj"] == [(192, "Q4_1"), (64, "Q8_0")]
    assert kept["layers.1.self_attn.o_proj"] == [(128, "K64")]
    assert kept["layers.1.mlp.gate_up_proj"] == [(1024, "Q4_0")]
    assert kept["lm_head"] == [(199, "Q8_0")]
    assert model.model.embed_tokens.packing.coding == CODINGS["Q4_0"]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    "places",
    [
        MIXED,
        MIXED | {"up_proj": "Q4_1"},
        {"proj": "rows"},
        {"proj": "table", "embed_tokens": "table"},
        {"proj": "GPTQ with an order"},
        {"down_proj": "Q4_K", "_proj": "AWQ"},
    ],
    ids=["mixed", "unlike halves", "scales of rows", "no integers", "order", "leaves without columns"],
)
def test_logits_are_those_of_the_decoded_values(kernels: str, places: dict[str, str], tmp_path: Path) -> None:
    """Guards against a piece with another piece's scales or columns: with three slices, the codes and the values that
    they stand for give nearly the same logits."""
    coded, twin = code(make_llama(tmp_path, **SIZES)[1], places)
    found, expected = (_logits(directory, kernels) for directory in (coded, twin))
    assert np.abs(found - expected).max() < 2e-3 * np.abs(expected).max()


def _logits(directory: Path, kernels: str) -> Array:
    from tests.paged import PagedModel

    model = PagedModel(directory, kernels=kernels, slices=3)
    return np.asarray(model.step({0: PROMPT})[0])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("head", [PLAIN_HEAD, HeadLayout(3, 64)], ids=["plain", "pieces"])
@pytest.mark.parametrize("tied", [True, False])
def test_bytes_are_known_before_loading(kernels: str, head: HeadLayout, tied: bool, tmp_path: Path) -> None:
    """Guards against a plan that counts floats, or both tables of a tied embedding."""
    places = {name: coding for name, coding in MIXED.items() if not tied or name != "lm_head"}
    directory, _ = code(make_llama(tmp_path, **SIZES, tie_word_embeddings=tied)[1], places)
    config, ops = load_model_config(directory), load_ops(kernels, torch.bfloat16)
    stored = open_stored(directory, config, "auto")
    model = load_model(stored, config, ops, head=head)
    make = make_factory(stored, config, ops, head=head, max_positions=1)
    held = 0
    for layer in kept_layers(model, make):
        if isinstance(layer, Linear):
            held += sum(item.num_bytes for item in layer.packed)
        else:
            values = vars(layer).get("_packed") or layer.weight
            held += (
                values.num_bytes
                if hasattr(values, "num_bytes")
                else 4 * values.numel()
                if values.ndim == 1
                else 2 * values.numel()
            )
    assert held == weight_bytes(model, make)
    sizes = model_sizes(config, load_ops(kernels, np.dtype("float32")), head, stored) if kernels == "cpu" else None
    if sizes is not None:
        assert {"Q4_0", "Q4_1", "K64"} <= set(sizes.kinds)
        assert sum(sizes.kinds.values()) == sizes.weights


def _held_bytes(layer: Any) -> int:
    packed = layer.packed if isinstance(layer, Linear) else [item for item in [vars(layer).get("_packed")] if item]
    return sum(item.num_bytes for item in packed) or layer.weight.nbytes


native = pytest.mark.skipif(not levels(), reason="no native library")


@native
@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "activation_dtype": "int8"},
        {"tensor_parallel_size": 2, "mlp_parallel_size": 4, "dtype": "bfloat16"},
    ],
    ids=str,
)
def test_ranks_have_the_bits_of_one_process(options: dict[str, Any], mixed: tuple[Path, Path]) -> None:
    """Guards against a rank that decodes what one process multiplies in codes, and leaves that end elsewhere."""
    base = BASE | {"load_format": "auto", "model": str(mixed[0]), "dtype": "float32"}
    numerics = {name: value for name, value in options.items() if not name.endswith("parallel_size")}
    whole = answers(EngineConfig.from_options(**base | numerics))
    assert answers(EngineConfig.from_options(**base | options), start_threads) == whole
    assert all(answer.token_ids and not answer.errors for answer in whole.values())


def _mixture(directory: Path, places: dict[str, str]) -> tuple[Path, Path]:
    case = Case(
        "mixtral", MixtralForCausalLM, MixtralConfig, {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
    )
    return code(case.make(directory)[1], places)


@native
@pytest.mark.parametrize(
    "options", [{"expert_parallel_size": 2}, {"expert_parallel_size": 2, "tensor_parallel_size": 4}]
)
@pytest.mark.parametrize("unlike", [False, True])
def test_experts_are_coded_alike_or_decoded(unlike: bool, options: dict[str, Any], tmp_path: Path) -> None:
    """Guards against a call that multiplies codes of one expert as those of another, and against ranks that see only
    experts of one kind and keep codes that one process decodes."""
    first = {"layers.0.block_sparse_moe.experts.3.w2": "Q4_1"} if unlike else {}
    directory, twin = _mixture(tmp_path, first | {"w1": "Q4_0", "w2": "K64", "w3": "Q4_0", "gate": "Q8_0"})
    model = load(directory, "cpu")
    kept = [
        [expert.down_proj.spec.packing.coding for expert in model.model.layers[layer].mlp.experts] for layer in range(2)
    ]
    assert kept == [[None if unlike else CODINGS["K64"]] * 4, [CODINGS["K64"]] * 4]
    assert model.model.layers[0].mlp.gate.spec.packing.coding is None  # the table does not allow it
    found, expected, reference = (
        _logits(*item) for item in ((directory, "cpu"), (twin, "cpu"), (directory, "reference"))
    )
    for other in (expected, reference):
        assert np.abs(found - other).max() < 2e-3 * np.abs(expected).max()
    base = BASE | {"load_format": "auto", "model": str(directory), "dtype": "float32"}
    whole = answers(EngineConfig.from_options(**base))
    assert answers(EngineConfig.from_options(**base | options), start_threads) == whole


@native
@pytest.mark.parametrize("coding", ["rows", "table", "AWQ"])
def test_parts_of_every_kind_have_the_bits_of_one_process(coding: str, tmp_path: Path) -> None:
    """Guards against scales of rows that each rank's part is multiplied with, and sums of floats in another order."""
    directory, _ = code(make_llama(tmp_path, **SIZES)[1], {"_proj": coding})
    options = {"dtype": "bfloat16", "tensor_parallel_size": 2}
    base = BASE | {"load_format": "auto", "model": str(directory), "dtype": "bfloat16"}
    whole = answers(EngineConfig.from_options(**base))
    assert answers(EngineConfig.from_options(**base | options), start_threads) == whole
    convert_model(EngineConfig.from_options(model=str(directory), **options), tmp_path / "packed")
    base |= options | {"model": str(tmp_path / "packed")}
    assert answers(EngineConfig.from_options(**base), start_threads) == whole


@native
def test_a_cut_inside_a_block_is_refused(tmp_path: Path) -> None:
    """Guards against a rank that decodes its part, which would change bits, and against an error without a way out."""
    directory, _ = code(make_llama(tmp_path, **SIZES)[1], {"down_proj": "Q4_K"})
    config = {"model": str(directory), **BASE, "load_format": "auto"}
    with pytest.raises(
        InvalidRequestError, match=r"must be 1, 2: .*down_proj.weight \(Q4_K\) has blocks of 256"
    ) as refused:
        build_engine(EngineConfig.from_options(**config, tensor_parallel_size=4))
    assert refused.value.param == "tensor_parallel_size"
    (directory / "coded.json").write_text(json.dumps({"o_proj": "GPTQ with an order"}))
    with pytest.raises(InvalidRequestError, match=r"must be 1: .*o_proj.weight .* stores its columns in another order"):
        build_engine(EngineConfig.from_options(**config, tensor_parallel_size=2))


@native
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_converted_directory_has_the_same_bits(ranks: int, mixed: tuple[Path, Path], tmp_path: Path) -> None:
    """Guards against a packed file that does not say how its weights are coded, or says it of another rank's part."""
    options = {"dtype": "float32", "tensor_parallel_size": ranks}
    convert_model(EngineConfig.from_options(model=str(mixed[0]), **options), tmp_path / "packed")
    base = BASE | {"load_format": "auto", **options}
    whole = answers(EngineConfig.from_options(**base | {"model": str(mixed[0]), "tensor_parallel_size": 1}))
    found = answers(EngineConfig.from_options(**base | {"model": str(tmp_path / "packed")}), start_threads)
    assert found == whole


@pytest.mark.parametrize("form", ["transformers", "merged"])
def test_other_forms_hold_the_decoded_values(form: str, mixed: tuple[Path, Path], tmp_path: Path) -> None:
    """Guards against codes that are written as if they were floats."""
    rewrite_model(str(mixed[0]), tmp_path / "plain", form, 2**30)
    rewrite_model(str(mixed[1]), tmp_path / "twin", form, 2**30)
    plain, twin = (Checkpoint(tmp_path / name) for name in ("plain", "twin"))
    assert plain.entries.keys() == twin.entries.keys()
    for name in twin.entries:
        np.testing.assert_array_equal(read(plain.rows(name)), read(twin.rows(name)))


@native
def test_check_compares_with_the_decoded_weights(tmp_path: Path) -> None:
    """Guards against a check that cannot load what is served, or tries to quantise it."""
    directory, _ = code(make_llama(tmp_path, **SIZES)[1], MIXED)
    report = check_model(Options(model=str(directory), dtype="float32", prompt_len=20))
    assert report.passed
    assert report.against.endswith("with the decoded weights")
    assert "int8 weights" not in [proof.name for proof in report.proofs]


@native
def test_a_plan_counts_codes(mixed: tuple[Path, Path], tmp_path: Path) -> None:
    """Guards against a plan that counts floats, offers to quantise once more, or cuts a block."""
    options = {"model": str(mixed[0]), "threads": 1, "max_num_seqs": 2}
    found = _plan(2**30, 1, **options)
    built = build_engine(EngineConfig.from_options(**options, memory=2**33))
    layers = [layer for _, layer in weight_layers(built.model)]
    held = {id(tensor): tensor.nbytes for layer in layers for tensor in layer.state().values()}
    assert found["devices"][0]["weights_bytes"] == sum(held.values()) == sum(found["weights"].values())
    assert {"Q4_0", "Q4_1", "Q8_0", "K64"} <= set(found["weights"])
    assert {item["precision"] for item in found["largest"]} == {"K64, Q4_0, Q4_1, Q8_0"}
    assert _plan(2**20, 1, **options)["smallest_change"].startswith("memory =")
    code(mixed[1], {"down_proj": "Q4_K"})  # 512 columns are two blocks
    assert _plan(2**20, 8, **options | {"model": str(mixed[1])})["tensor_parallel_size"] == 2


def _plan(num_bytes: int, count: int, **options: Any) -> dict[str, Any]:
    planned = PlannedModel.read(EngineConfig.from_options(**options))
    return answer(planned, Question(Budget(num_bytes, 0, count=count), None, Load((), (), ())))


def test_options_that_do_not_fit_are_refused(mixed: tuple[Path, Path], tmp_path: Path) -> None:
    """Guards against weights that are quantised a second time, and against an option that does nothing."""
    base = {**BASE, "load_format": "auto", "kernels": "auto"}

    def build(directory: Path, **options: Any) -> Any:
        return build_engine(EngineConfig.from_options(model=str(directory), **base, **options))

    with pytest.raises(InvalidRequestError, match=r"quantised already .*Q4_1") as refused:
        build(mixed[0], quantization="int8")
    assert refused.value.param == "quantization"
    with pytest.raises(InvalidRequestError, match=r"activation_dtype.*the weights are not quantised"):
        build(mixed[1], activation_dtype="int8")
    with pytest.raises(InvalidRequestError, match=r"activation_dtype.*quantization = int8 says"):
        build(mixed[1], quantization="int8", activation_dtype="int8")
    tables, _ = code(make_llama(tmp_path, seed=1, **SIZES)[1], {"proj": "table"})
    with pytest.raises(InvalidRequestError, match=r"activation_dtype.*table weights take unquantised"):
        build(tables, activation_dtype="int8-x2")
    auto, given, fewer = (
        build(mixed[0], **options).info
        for options in ({}, {"activation_dtype": "int8-x2"}, {"activation_dtype": "int8"})
    )
    assert "int8-x2: the checkpoint's weights are quantised" in auto.choices_made["activation_dtype"]
    assert auto.system_fingerprint == given.system_fingerprint != fewer.system_fingerprint
