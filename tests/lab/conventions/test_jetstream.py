"""Models written to JetStream's calling convention run unchanged: in the engine, over any cache, in any batch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import LLM, InvalidRequestError, ModelLoadError, NotSupportedError, SamplingParams
from penstock.kernels.reference import ReferenceOps
from penstock.kernels.scheme import Scheme
from penstock.layers.factory import LayerFactory
from penstock.layers.weights import Linear
from penstock.models import registry
from penstock.models.config_json import load_model_config
from penstock.models.registry import find_model, find_versions
from penstock.spec.model_config import ModelConfig
from penstock.weights.loader import load_model
from penstock.weights.sources import read_parameters
from penstock_lab.compat.jetstream import AttentionKernel
from penstock_lab.conventions import jetstream
from penstock_lab.conventions.jetstream import Environment
from tests.families.case import Case, all_cases
from tests.hf_models import MAKERS, hf_logprobs, make_llama, make_mistral, random_ids
from tests.kernels.packed import levels
from tests.lab.compat.test_instances import one_an_architecture
from tests.lab.compat.user_file import imported
from tests.lab.conventions import test_caches as caches
from tests.paged import PagedModel

BACKENDS = ["reference", "cpu"] if levels() else ["reference"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)
PROMPTS = [{"prompt_token_ids": random_ids(length, length)} for length in (3, 40, 17, 64, 1)]

# A port as docs/other_engines.md describes it: the shared kernel in place of hand-written attention.
PORTED = """
from penstock_lab.compat.jetstream import AttentionKernel, register_model
from penstock_lab.conventions.plain_llama import PlainLlama, rotate


class KernelAttention:
    def __init__(self, old, env, layer):
        self.old, self.kernel = old, AttentionKernel(env, layer)

    def __call__(self, x, turn, cache, mask):
        old = self.old
        q, k, v = (
            proj(x).unflatten(2, (-1, old.head_dim)).transpose(1, 2) for proj in (old.q_proj, old.k_proj, old.v_proj)
        )
        out = self.kernel(rotate(q, turn), rotate(k, turn), v, mask, cache)
        return old.o_proj(out.transpose(1, 2).flatten(2))


@register_model("LlamaForCausalLM", "MistralForCausalLM", table="ported.yaml", version="ported", convention="jetstream")
class Ported(PlainLlama):
    def __init__(self, config, env):
        super().__init__(config, env)
        for layer, block in enumerate(self.model.layers):
            block.self_attn.forward = KernelAttention(block.self_attn, env, layer)
"""


def answers(directory: Path, **options: Any) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens and their log-probabilities, of prompts in a crowd and in chunks."""
    common = {"dtype": "float32", "max_model_len": 128, "max_num_batched_tokens": 24, "kernels": "reference"}
    with LLM(model=str(directory), **{**common, **options}) as llm:
        choices = [output.outputs[0] for output in llm.generate(PROMPTS, GREEDY)]
    return [
        (c.token_ids, [entry[t].logprob for t, entry in zip(c.token_ids, c.logprobs, strict=True)]) for c in choices
    ]


def check_equal(found: list[tuple[list[int], list[float]]], expected: list[tuple[list[int], list[float]]]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one[0] == other[0]
        assert one[1] == pytest.approx(other[1], abs=1e-4)


@pytest.mark.covers("F31", "J1", "J2")
@pytest.mark.parametrize("kernels", BACKENDS)
@pytest.mark.parametrize(
    "case",
    [item for item in all_cases(shapes=False) if "plain" in find_versions(item.architecture)],
    ids=lambda case: case.name,
)
def test_all_versions_give_the_same_tokens(case: Case, kernels: str, tmp_path: Path) -> None:
    """Guards against a version that is another model: in a crowd, in chunks, in blocks and in rings."""
    _, directory = case.make(tmp_path, seed=4)
    expected = answers(directory, kernels=kernels)
    for version in find_versions(case.architecture):
        for more in ({}, {"block_size": 128}):
            check_equal(answers(directory, kernels=kernels, model_impl=version, **more), expected)


@pytest.mark.covers("J1", "J6")
@pytest.mark.parametrize("kernels", BACKENDS)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_the_shared_kernel_and_hand_written_attention_agree(
    family: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a kernel that sees other keys than `update` returns. The model stands in a user's file."""
    _, directory = MAKERS[family](tmp_path, seed=4)
    (tmp_path / "ported.py").write_text(PORTED)
    (tmp_path / "ported.yaml").write_text(find_model("LlamaForCausalLM", "plain").table_file.read_text())
    with imported(tmp_path / "ported.py", monkeypatch):
        for options in ({"kernels": kernels}, {"kernels": kernels, "block_size": 128}):
            found = answers(directory, model_impl="ported", **options)
            check_equal(found, answers(directory, model_impl="plain", **options))
        rounded = answers(directory, model_impl="ported", kernels=kernels, kv_cache_dtype="int8")
        assert [ids[:1] for ids, _ in rounded] == [ids[:1] for ids, _ in found]


@pytest.mark.covers("J1", "J2")
@pytest.mark.parametrize(
    ("case", "version"),
    [(case, version) for case in one_an_architecture() for version in find_versions(case.architecture)],
    ids=lambda item: item if isinstance(item, str) else item.name,
)
def test_conformance(case: Case, version: str, tmp_path: Path) -> None:
    """What any registered model must do: logits (no probabilities) of V columns in float32 for every token; rows at
    different positions as if each were alone; chunks as the whole."""
    hf_model, directory = case.make(tmp_path)
    texts = {0: random_ids(33, 0), 1: random_ids(1, 1), 2: random_ids(20, 2)}
    model = PagedModel(directory, num_seqs=3, model_impl=version)
    steps: list[dict[int, list[int]]] = [
        {0: texts[0][:30]},
        {0: texts[0][30:31], 2: texts[2][:7]},  # one row decodes, another begins
        {2: texts[2][7:8], 1: texts[1], 0: texts[0][31:33]},
        {2: texts[2][8:]},
    ]
    found: dict[int, list[Tensor]] = {row: [] for row in texts}
    for step in steps:
        for row, logprobs in model.step(step).items():
            found[row].append(logprobs)
    for row, ids in texts.items():
        logprobs = torch.cat(found[row])
        assert logprobs.shape == (len(ids), hf_model.config.vocab_size)
        torch.testing.assert_close(logprobs, hf_logprobs(hf_model, ids), atol=1e-4, rtol=0)


@pytest.mark.covers("J3", "J4")
@pytest.mark.parametrize("window", [None, caches.WINDOW])
@pytest.mark.parametrize("kind", [*caches.KEPT, *caches.ROUNDED])
def test_any_cache_under_one_model(kind: str, window: int | None, tmp_path: Path) -> None:
    """Guards against a model that needs to know where its keys are kept: six kinds of cache, the same tokens."""
    shape = {"num_attention_heads": caches.HEADS, "num_key_value_heads": caches.HKV, "head_dim": caches.D}
    _, directory = make_llama(tmp_path, vocab_size=caches.VOCAB, hidden_size=64, **shape)
    config = load_model_config(directory)
    plain: Any = load_model(directory, with_version(config, "plain"), ReferenceOps(torch.float32))

    def model(tokens: Tensor, positions: Tensor, views: Any, mask: Tensor) -> Tensor:
        hidden = ~mask & (positions >= 0)[:, None, :, None]
        additive = torch.zeros(mask.shape).masked_fill(hidden, float("-inf"))
        with torch.no_grad():
            logits: Tensor = plain.model(tokens, positions.clamp(min=0), views, additive)
        return logits

    tokens, logits = caches.generate(caches.KEPT["prefill only"](window), 12, caches.MAX_LEN, model=model)
    for chunk in (5, caches.MAX_LEN):
        if kind in caches.KEPT:
            found, found_logits = caches.generate(caches.KEPT[kind](window), 12, chunk, model=model)
            assert found == tokens
            torch.testing.assert_close(found_logits, logits, atol=5e-5, rtol=0)
        else:
            rounded = caches.generate(caches.ROUNDED[kind](window), 12, chunk, forced=tokens, model=model)[1]
            assert 1e-5 < (rounded - logits).abs().max() / logits.abs().max() < 0.02


def with_version(config: ModelConfig, version: str) -> ModelConfig:
    return replace(config, model_impl=version)


@pytest.mark.covers("J14")
def test_two_engines_with_different_environments(tmp_path: Path) -> None:
    """Guards against an environment that is somewhere else than in the constructor's argument."""
    directories = [make_llama(tmp_path, seed=0)[1], make_mistral(tmp_path, seed=1)[1]]
    options: list[dict[str, Any]] = [
        {"dtype": "float32", "kernels": "reference"},
        {"dtype": "bfloat16", "kernels": BACKENDS[-1], "quantization": "int8", "kv_cache_dtype": "int8"},
    ]
    alone = []
    for directory, option in zip(directories, options, strict=True):
        with LLM(model=str(directory), model_impl="plain", max_model_len=128, **option) as llm:
            alone.append([output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)])
    assert alone[0] != alone[1]
    llms = [
        LLM(model=str(directory), model_impl="plain", max_model_len=128, **option)
        for directory, option in zip(directories, options, strict=True)
    ]
    streams = [llm.stream(PROMPTS, GREEDY) for llm in llms]
    together: list[dict[int, list[int]]] = [{}, {}]
    open_streams = [0, 1]
    while open_streams:  # a step of the one, a step of the other
        for which in list(open_streams):
            moved = next(streams[which], None)
            if moved is None:
                open_streams.remove(which)
            else:
                together[which][moved[0]] = moved[1].outputs[0].token_ids
    assert [[found[index] for index in range(len(PROMPTS))] for found in together] == alone


def environment(directory: Path, scheme: Scheme | None = None) -> Environment:
    config = with_version(load_model_config(directory), "plain")
    ops = ReferenceOps(torch.bfloat16)
    return Environment(
        config, ops, LayerFactory.single_device(ops, read_parameters(config), scheme=scheme, max_positions=40)
    )


@pytest.mark.covers("J13", "J14")
def test_what_an_environment_says(tmp_path: Path) -> None:
    """Guards against a sharding hint of an axis that does not exist, which would be found on many devices only, against
    one that returns something else than its tensor, and against a model that cannot see how it is quantised."""
    _, directory = make_llama(tmp_path)
    env, int8 = environment(directory), Scheme.parse("int8")
    assert environment(directory, int8).scheme is int8 is not None
    assert (env.dtype, env.device.type, env.scheme, env.num_positions) == (torch.bfloat16, "cpu", None, 40)
    x = torch.zeros(2, 3)
    for axis in (-2, -1, 0, 1, None):
        assert env.apply_sharding(x, axis=axis) is x
    for axis in (-3, 2):
        with pytest.raises(InvalidRequestError, match=f"axis: {axis} is not allowed; x has 2 axes"):
            env.apply_sharding(x, axis=axis)


def test_linears_are_the_engines_products(tmp_path: Path) -> None:
    """Guards against a hand-written model that silently stays unquantised, or holds its weights twice."""
    _, directory = make_llama(tmp_path, tie_word_embeddings=True)
    config = with_version(load_model_config(directory), "plain")
    model: Any = load_model(directory, config, ReferenceOps(torch.float32))
    linears = [module for module in model.modules() if isinstance(module, nn.Linear | Linear)]
    assert len(linears) == 2 * 7 + 1
    assert not any(value.is_meta for name, value in model.named_parameters() if "norm" in name or "embed" in name)
    assert all(isinstance(module, Linear) and not hasattr(module, "weight") for module in linears)
    exact, rounded = (answers(directory, model_impl="plain", quantization=scheme) for scheme in (None, "int8-x3"))
    assert [ids[0] for ids, _ in exact] == [ids[0] for ids, _ in rounded]
    assert exact != rounded


class Broken(nn.Module):
    """Options of the tests below, as class attributes of its subclasses."""

    def __init__(self, config: ModelConfig, env: Environment) -> None:
        super().__init__()


def broken(**members: Any) -> type[nn.Module]:
    return type("Broken", (Broken,), members)


def test_a_models_own_tensors_are_left_alone_and_its_layers_take_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against 14 GB of random numbers for a model whose weights are about to come, and against tables of the
    model's own that lose their values."""

    def with_tensors(self: Any, config: ModelConfig, env: Environment) -> None:
        nn.Module.__init__(self)
        self.register_buffer("table", torch.empty(3).fill_(2.0))
        self.register_buffer("typed", torch.empty(3, dtype=torch.float64).fill_(3.0))
        self.register_buffer("placed", torch.empty(3, device=env.device, dtype=env.dtype).fill_(4.0))
        self.lm_head = nn.Linear(48, 199, bias=False)
        self.embed = nn.Embedding(199, 48)
        self.others = nn.ModuleList([nn.Linear(3, 4), nn.LayerNorm(48), nn.RMSNorm(48), nn.Conv1d(4, 4, 3)])

    env = environment(make_llama(tmp_path)[1])
    monkeypatch.setattr(jetstream, "swap_linears", lambda model, make, kind: {})  # the table knows none of these layers
    model = jetstream.build(broken(__init__=with_tensors), env.config, env.make)
    assert [buffer.tolist() for buffer in model.buffers()] == [[2.0] * 3, [3.0] * 3, [4.0] * 3]
    assert all(parameter.is_meta for parameter in model.parameters())


def test_models_that_cannot_run_are_refused_when_they_are_made(tmp_path: Path) -> None:
    """Guards against an error in the middle of a step, or a wrong mask that nobody notices."""
    _, directory = make_llama(tmp_path)
    env = environment(directory)
    make = env.make

    def with_linear(self: nn.Module, config: ModelConfig, env: Environment) -> None:
        nn.Module.__init__(self)
        self.lm_head = nn.Linear(3, 4, bias=False)

    with pytest.raises(ModelLoadError, match=r"lm_head\.weight has the shape \[4, 3\] in the model; .* \[199, 48\]"):
        jetstream.build(broken(__init__=with_linear), env.config, make)

    case = next(case for case in all_cases() if case.name == "ministral")
    mixed = load_model_config(case.make(tmp_path / "mixed")[1])
    with pytest.raises(NotSupportedError, match="layers with different windows"):
        jetstream.build(Broken, mixed, make)


def test_mistakes_of_a_model_are_named(tmp_path: Path) -> None:
    """Guards against logits of the wrong shape, and a layer that attends over another layer's keys."""
    _, directory = make_llama(tmp_path)
    model = PagedModel(directory, model_impl="plain")
    adapter: Any = model.model
    head = adapter.model.lm_head.forward
    adapter.model.lm_head.forward = lambda x: head(x)[..., :-1]
    with pytest.raises(Exception, match=r"PlainLlama returned \[1, 3, 198\], not \[1, 3, 199\]"):
        model.step({0: [1, 2, 3]})
    adapter.model.lm_head.forward = head
    kernel = AttentionKernel(adapter.env, 1)
    x = torch.zeros(1, 6, 3, 8)
    adapter.model.forward = lambda tokens, pos, caches, mask: kernel(x, x[:, :2], x[:, :2], mask, caches[0])
    with pytest.raises(InvalidRequestError, match="layer 1 was given the cache of layer 0"):
        model.step({0: [1, 2, 3]})


@pytest.mark.covers("J6")
def test_the_kernel_with_other_masks_and_caches(tmp_path: Path) -> None:
    """Guards against a mask of the model's own that is passed and ignored."""
    _, directory = make_llama(tmp_path, num_attention_heads=6, num_key_value_heads=2)
    model = PagedModel(directory, model_impl="plain")
    adapter: Any = model.model
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 6, 4, 8), torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8)
    kernel, seen = AttentionKernel(adapter.env, 0), []

    def forward(tokens: Tensor, pos: Tensor, caches: Any, mask: Tensor) -> Tensor:
        only_self = torch.full_like(mask, float("-inf")).diagonal_scatter(torch.zeros(1, 1, 4), dim1=2, dim2=3)
        seen.extend(kernel(q, k, v, given, caches[0]) for given in (mask, None, mask.clone(), only_self))
        return torch.zeros(1, 4, 199)

    adapter.model.forward = forward
    model.step({0: [1, 2, 3, 4]})
    own, default, same, alone = seen
    causal = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    for found in (own, default, same):
        torch.testing.assert_close(found, causal, atol=1e-5, rtol=0)
    torch.testing.assert_close(alone, v.repeat_interleave(3, dim=1), atol=1e-5, rtol=0)


@pytest.mark.covers("F31")
def test_a_version_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    """Guards against another spelling that silently takes the default."""
    _, directory = MAKERS["qwen3"](tmp_path)
    with pytest.raises(
        InvalidRequestError, match="model_impl: 'plain' is not allowed; it must be one of auto, default"
    ):
        LLM(model=str(directory), model_impl="plain")
    _, directory = make_llama(tmp_path)
    with pytest.raises(InvalidRequestError, match="must be one of auto, default, plain") as caught:
        LLM(model=str(directory), model_impl="fast")
    assert caught.value.param == "model_impl"
    fingerprints = []
    for version in ("auto", "default", "plain"):
        with LLM(model=str(directory), model_impl=version) as llm:
            fingerprints.append(llm.engine.model_info.system_fingerprint)
    assert fingerprints[2] not in fingerprints[:2]


def test_words_of_a_registration_are_checked() -> None:
    """Guards against a convention or version that is spelt wrongly and found out much later."""
    with pytest.raises(InvalidRequestError, match="convention: 'jet' is not allowed"):
        registry.register_model("XForCausalLM", table="x.yaml", convention="jet")
    with pytest.raises(InvalidRequestError, match="version: 'auto' is not allowed"):
        registry.register_model("XForCausalLM", table="x.yaml", version="auto")


@pytest.mark.covers("J17")
def test_a_config_without_weights_runs_a_version_too(tmp_path: Path) -> None:
    """Guards against random weights that torch's own layers do not get."""
    _, directory = make_llama(tmp_path)
    (directory / "model.safetensors").unlink()
    found = answers(directory, model_impl="plain", load_format="dummy")
    assert [len(ids) for ids, _ in found] == [24] * len(PROMPTS)
    assert len({tuple(ids) for ids, _ in found}) > 1
