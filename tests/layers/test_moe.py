"""The sparse feed-forward layer: what a token's experts make of it, and that nobody else is computed."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from penstock.kernels.backends import load_ops
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.ops import Ops, PackedLinear
from penstock.kernels.reference import ReferenceOps
from penstock.kernels.scheme import Scheme
from penstock.layers.decoder import MoE
from penstock.layers.factory import LayerFactory
from penstock.layers.module import get_submodule
from penstock.models.config_json import parse_model_config
from penstock.models.registry import find_model
from penstock.runner.model_runner import RecordedModel
from penstock.spec.model_config import ModelConfig
from penstock.weights.loader import weight_layers
from penstock_lab.bench.native import expert_counts
from tests.families.mixtral import CASES
from tests.hf_models import TINY, random_ids
from tests.kernels.packed import levels
from tests.paged import PagedModel

EXPERTS, TOP_K, HIDDEN, INNER = 8, 2, 48, 24
BACKENDS = ["reference", *(["cpu"] if levels() else [])]
needs_library = pytest.mark.skipif(not levels(), reason="no native library")


def config(**fields: Any) -> ModelConfig:
    """Of a Qwen3-MoE, which can say everything that the layer asks for."""
    numbers = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "moe_intermediate_size": INNER}
    theirs = Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"], **TINY | numbers | {"norm_topk_prob": True} | fields)
    return parse_model_config(theirs.to_dict())


def made(
    ops: Ops, cfg: ModelConfig, weights: dict[str, Tensor] | None = None, scheme: Scheme | None = None
) -> tuple[MoE, dict[str, Tensor]]:
    """The layer, and its weights by name: those given, or random ones."""
    parameters = find_model(cfg.architecture).read_table().parameters(cfg)
    make = LayerFactory.single_device(ops, parameters, scheme=scheme)
    layer = MoE(cfg, make.at("model.layers.0.mlp"))
    generator = torch.Generator().manual_seed(3)
    weights = weights or {
        f"{name}.weight": torch.randn(part.shapes["weight"], generator=generator) / part.shapes["weight"][1] ** 0.5
        for name, part in weight_layers(layer)
    }
    for name, weight in weights.items():
        get_submodule(layer, name.removesuffix(".weight")).load({"weight": weight})
    return layer, weights


def rows(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


def by_the_formula(y: Tensor, weights: dict[str, Tensor], top_k: int) -> Tensor:
    """Mixtral's own words, token by token in float64: the k largest logits, a softmax over those, a weighted sum."""
    weights = {name: value.double() for name, value in weights.items()}
    out = torch.zeros(len(y), HIDDEN, dtype=torch.float64)
    for row, token in enumerate(y.double()):
        logits, chosen = (weights["gate.weight"] @ token).topk(top_k)
        for p, expert in zip(logits.softmax(0), chosen.tolist(), strict=True):
            gate, up = (weights[f"experts.{expert}.gate_up_proj.weight"] @ token).chunk(2)
            out[row] += p * (weights[f"experts.{expert}.down_proj.weight"] @ (gate.sigmoid() * gate * up))
    return out


@pytest.mark.covers("M16", "M17")
@pytest.mark.parametrize("kernels", BACKENDS)
@pytest.mark.parametrize("top_k", [1, TOP_K, EXPERTS])
def test_equals_a_softmax_over_the_chosen(kernels: str, top_k: int) -> None:
    """Guards against weights that do not sum to 1, a gate applied to the wrong half, and a row at another's expert."""
    layer, weights = made(load_ops(kernels, torch.float32), config(num_experts_per_tok=top_k))
    y = rows(20)
    torch.testing.assert_close(layer(y).double(), by_the_formula(y, weights, top_k), atol=1e-5, rtol=0)


@pytest.mark.covers("M16", "M17")
@pytest.mark.parametrize("kernels", BACKENDS)
@pytest.mark.parametrize("family", ["mixtral", "renormalised", "as they are"])
def test_equals_the_layer_of_transformers(kernels: str, family: str) -> None:
    """Guards against weights that are renormalised where the file says not to, or are not where it says so."""
    layer, weights = made(load_ops(kernels, torch.float32), config(norm_topk_prob=family != "as they are"))
    numbers = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "experts_implementation": "eager"}
    if family == "mixtral":
        theirs = MixtralSparseMoeBlock(MixtralConfig(**TINY | numbers | {"intermediate_size": INNER}))
    else:
        sizes = {"moe_intermediate_size": INNER, "norm_topk_prob": family == "renormalised"}
        theirs = Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**TINY | numbers | sizes))
    stacked = {
        f"experts.{name}": torch.stack([weights[f"experts.{expert}.{name}.weight"] for expert in range(EXPERTS)])
        for name in ("gate_up_proj", "down_proj")
    }
    theirs.load_state_dict({"gate.weight": weights["gate.weight"], **stacked})
    y = rows(20)
    with torch.no_grad():
        torch.testing.assert_close(layer(y), theirs(y[None])[0], atol=1e-5, rtol=0)


@pytest.mark.covers("M17")
@pytest.mark.parametrize("kernels", BACKENDS)
def test_ties_go_to_the_lowest_expert(kernels: str) -> None:
    """Guards against a choice that depends on who sorted: a router of zeros finds all experts equally likely."""
    layer, _ = made(load_ops(kernels, torch.float32), config())
    layer.gate.load({"weight": torch.zeros(EXPERTS, HIDDEN)})
    layer(rows(3))
    assert layer.ids(3).tolist() == [[0, 1]] * 3
    assert layer.weights(3).tolist() == [[0.5, 0.5]] * 3


class CountingOps(ReferenceOps):
    """Counts the rows that go through each weight."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.rows: Counter[int] = Counter()

    def linear(self, x: Tensor, weight: PackedLinear, *, out: Tensor | None = None) -> Tensor:
        self.rows[id(weight)] += len(x)
        return super().linear(x, weight, out=out)

    def gated_linear(self, x: Tensor, weight: PackedLinear, activation: str, *, out: Tensor | None = None) -> Tensor:
        self.rows[id(weight)] += len(x)
        return super().gated_linear(x, weight, activation, out=out)


def chosen_by(layer: MoE, tokens: int) -> Counter[int]:
    """How many rows of the last pass went to each expert."""
    return Counter(layer.ids(tokens).flatten().tolist())


@pytest.mark.covers("M18")
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_work_grows_with_the_chosen_experts_only(top_k: int) -> None:
    """Guards against a dense layer in disguise, which multiplies by every expert and throws most of it away: counted
    for each weight, k / E of a dense layer's products are made, and those of experts without tokens not at all."""
    ops = CountingOps()
    layer, _ = made(ops, config(num_experts_per_tok=top_k))
    for tokens in (1, 3, 40):
        ops.rows.clear()
        layer(rows(tokens, seed=tokens))
        chosen = chosen_by(layer, tokens)
        for index, expert in enumerate(layer.experts):
            assert ops.rows[id(expert.gate_up_proj.packed[0])] == chosen[index]
            assert ops.rows[id(expert.down_proj.packed[0])] == chosen[index]
        assert sum(chosen.values()) == tokens * top_k
    assert top_k == EXPERTS or chosen_by(layer, 1).total() < EXPERTS


@needs_library
@pytest.mark.covers("M18")
def test_the_native_operation_counts_what_it_computes() -> None:
    """Guards against figures of a benchmark that count experts nobody chose, or one expert once for each of its rows;
    700 rows are more than one pass."""
    ops = CpuOps(torch.float32, threads=2)
    layer, _ = made(ops, config(num_experts=40))
    for tokens in (1, 5, 700):
        before = expert_counts(ops)
        layer(rows(tokens, seed=tokens))
        read, multiplied = (after - was for after, was in zip(expert_counts(ops), before, strict=True))
        assert (read, multiplied) == (len(chosen_by(layer, tokens)), tokens * TOP_K)


@needs_library
@pytest.mark.parametrize("scheme", [None, "int8"])
def test_a_row_has_the_same_bits_whoever_else_is_there(scheme: str | None) -> None:
    """Guards against a sum whose order depends on how the rows of a batch fall on the experts."""
    parsed = None if scheme is None else Scheme.parse(scheme)
    layer, _ = made(CpuOps(torch.bfloat16, threads=2), config(), scheme=parsed)
    y = rows(90).bfloat16()
    together = layer(y).clone()
    for count in (1, 7, 40):
        assert torch.equal(layer(y[:count].contiguous()), together[:count])


@needs_library
@pytest.mark.parametrize("case", [CASES[0], CASES[5]], ids=lambda case: case.name)
def test_recorded_steps_choose_anew(case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a program that keeps the experts of the step it was recorded in, and against a model that records
    nothing because its router allocates."""
    monkeypatch.setattr("tests.paged.load_ops", lambda _, dtype, **options: load_ops("cpu", dtype, threads=2))
    _, directory = case.make(tmp_path)
    plain, recorded = PagedModel(directory, num_seqs=2), PagedModel(directory, num_seqs=2)
    recorded.model = RecordedModel(recorded.model, recorded.ops)
    for first, second in zip(random_ids(12), random_ids(12, seed=1), strict=True):
        for found, expected in zip(*(each.step({0: [first], 1: [second]}).values() for each in (recorded, plain)),
                                   strict=True):  # fmt: skip
            assert torch.equal(found, expected)
    assert recorded.model._recordable


@needs_library
def test_a_step_without_tokens_or_with_nan_is_no_crash() -> None:
    """Guards against an empty batch, and against a token of NaN that takes others with it."""
    layer, _ = made(CpuOps(torch.float32, threads=2), config())
    assert layer(rows(0)).shape == (0, HIDDEN)
    y = rows(6)
    alone = layer(y).clone()
    y[2] = float("nan")
    spoilt = layer(y)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(spoilt[others], alone[others])
    assert spoilt[2].isnan().all()


def stacked(names: Sequence[str], tensors: dict[str, Tensor], to: str) -> dict[str, Tensor]:
    """Tensors of single experts, joined and stacked as Transformers 5 holds them in memory."""
    layers = sorted({name.split(".experts.")[0] for name in tensors if ".experts." in name})
    result = {name: value for name, value in tensors.items() if ".experts." not in name}
    for layer in layers:
        count = len({name.split(".")[5] for name in tensors if name.startswith(f"{layer}.experts.")})
        each = [[tensors[f"{layer}.experts.{expert}.{name}.weight"] for name in names] for expert in range(count)]
        target = layer.replace("block_sparse_moe", "mlp")
        result[f"{target}.experts.{to}"] = torch.stack([torch.cat(parts) for parts in each])
    return result


@pytest.mark.covers("M16")
@pytest.mark.parametrize("case", [CASES[0], CASES[5]], ids=lambda case: case.name)
def test_checkpoints_with_stacked_experts_are_read(case: Any, tmp_path: Path) -> None:
    """Guards against experts in another order, or gate and up exchanged, where one tensor holds all experts."""
    _, directory = case.make(tmp_path)
    ids, file = random_ids(30), directory / "model.safetensors"
    expected = PagedModel(directory).step({0: ids})[0]
    tensors = load_file(file)
    gate, up, down = ("w1", "w3", "w2") if case.architecture.startswith("Mixtral") else (
        "gate_proj", "up_proj", "down_proj",
    )  # fmt: skip
    both = stacked([gate, up], tensors, "gate_up_proj") | stacked([down], tensors, "down_proj")
    save_file(both, file, metadata={"format": "pt"})
    assert len(both) < len(tensors)
    assert torch.equal(PagedModel(directory).step({0: ids})[0], expected)
