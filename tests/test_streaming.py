"""StreamingLLM: sink tokens beside a window, against the paper's own way of computing it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from penstock.assembly import build_engine
from penstock.assembly.streaming import as_served
from penstock.config import EngineConfig, NumericsConfig
from penstock.engine.speculation import Speculation
from penstock.errors import InvalidRequestError
from penstock.interface.messages import EngineRequest
from penstock.interface.sampling_params import SamplingParams
from penstock.kernels.metadata import AttentionParams
from penstock.models.config_json import load_model_config
from penstock.runner.forward_pass import attention_weights
from penstock.spec.model_config import QueryScale
from penstock_lab.planner.planned import PlannedModel
from penstock_lab.prove.every_draft import EveryDraft
from tests.answers import LENGTHS, ask, ask_alone, check, request
from tests.fakes_drafts import Oracle
from tests.hf_models import Made, make_llama, random_ids
from tests.kernels.packed import levels

SINKS, WINDOW, BLOCK = 5, 27, 16
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "threads": 1, "attention_sinks": SINKS, "sliding_window": WINDOW, "block_size": BLOCK,
}  # fmt: skip
PROMPT = random_ids(40)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A Llama whose context is shorter than what is generated."""
    return make_llama(tmp_path_factory.mktemp("llama"), seed=5, max_position_embeddings=64)


def by_the_paper(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """The logits after each token, [T, V]. Keys are kept as they are before the rotation. Each query sees those that
    the cache would hold, and all are rotated at their places in the cache, the query at the last one."""
    config, inner = model.config, model.model
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, model.config.head_dim
    x = inner.embed_tokens(torch.tensor(ids))
    for layer in inner.layers:
        y, attention = layer.input_layernorm(x), layer.self_attn
        q, k, v = (part(y).view(len(ids), -1, dim) for part in (attention.q_proj, attention.k_proj, attention.v_proj))
        rows = []
        for at in range(len(ids)):
            held = sorted({*range(min(SINKS, at + 1)), *range(max(0, at - WINDOW + 1), at + 1)})
            assert len(held) <= SINKS + WINDOW
            cos, sin = inner.rotary_emb(x, torch.arange(len(held))[None])
            keys = apply_rotary_pos_emb(k[held].transpose(0, 1)[None], k[held].transpose(0, 1)[None], cos, sin)[0][0]
            query = apply_rotary_pos_emb(*(q[at][None, :, None],) * 2, cos[:, -1:], sin[:, -1:])[0][0]
            keys, values = (part.repeat_interleave(heads // kv_heads, 0) for part in (keys, v[held].transpose(0, 1)))
            weights = (query @ keys.transpose(1, 2) * dim**-0.5).softmax(-1)  # [H, 1, held]
            rows.append((weights @ values)[:, 0].reshape(-1))
        x = x + attention.o_proj(torch.stack(rows))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.lm_head(inner.norm(x))


@pytest.mark.covers("C23")
@pytest.mark.parametrize(("kernels", "count"), [("cpu", 20 * (SINKS + WINDOW)), ("reference", 5 * (SINKS + WINDOW))])
@torch.inference_mode()
def test_an_endless_text_is_the_paper_s_in_constant_memory(made: Made, kernels: str, count: int) -> None:
    """Guards against sinks that are seen from the wrong position, forgotten, or counted twice beside the window;
    against a text that ends with the model's context; and against blocks that are kept behind the window. A chunk of
    the prompt is longer than the window."""
    if kernels == "cpu" and not levels():
        pytest.skip("no native library")
    model, directory = made
    config = EngineConfig.from_options(
        **OPTIONS, model=str(directory), kernels=kernels, max_model_len=len(PROMPT) + count, max_num_seqs=1,
        max_num_batched_tokens=len(PROMPT),
    )  # fmt: skip
    engine = build_engine(config).engine
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    engine.add_request(EngineRequest("0", PROMPT, params))
    ids, used = list(PROMPT), []
    while engine.has_work:
        for output in engine.step():
            ids += output.new_token_ids
            used.append(engine.kv_cache.num_blocks - engine.kv_cache.num_free)
    most = -(-SINKS // BLOCK) + -(-WINDOW // BLOCK) + 1
    assert max(used[1:]) == most <= engine.kv_cache.num_blocks <= most + -(-len(PROMPT) // BLOCK)
    assert len(ids) == len(PROMPT) + count
    expected = by_the_paper(model, ids).argmax(-1)
    assert ids[len(PROMPT) :] == expected[len(PROMPT) - 1 : -1].tolist()


@pytest.mark.skipif(not levels(), reason="no native library")
def test_drafts_change_nothing(made: Made) -> None:
    """Guards against drafts of which some lie behind the window of others, and against their queries for sinks."""
    options = {**OPTIONS, "kernels": "cpu", "model": str(made[1]), "dtype": "bfloat16", "max_model_len": 112}
    alone = ask_alone(build_engine(EngineConfig.from_options(**options)).engine)
    engine = build_engine(EngineConfig.from_options(**options, speculative_config={"method": "ngram"})).engine
    oracle = Oracle(lambda name, text, count: alone[int(name)][0][len(text) - LENGTHS[int(name)] :][:count], 0.7)
    engine.speculate(Speculation(oracle, 5, policy=EveryDraft()))
    check(ask(engine, map(request, alone)), alone)
    assert 0 < engine.stats().num_accepted_tokens_total < engine.stats().num_draft_tokens_total


def test_weights_that_are_shown_are_those_of_attention() -> None:
    """Guards against a picture of attention in which sinks are missing, or seen from afar."""
    *queries, keys = torch.randn(3, 12, 2, 8, generator=torch.Generator().manual_seed(0)).numpy()
    (q, sink_q), params = queries, AttentionParams(8**-0.5)
    shown = attention_weights(np.stack(queries), keys, params, 4, 2)
    for head in range(2):
        row = [*(sink_q[11, head] @ keys[:2, head].T), *(q[11, head] @ keys[8:, head].T)]
        expected = torch.tensor(row).mul(params.scale).softmax(0)
        torch.testing.assert_close(torch.from_numpy(shown[head, 11, [0, 1, 8, 9, 10, 11]]), expected)
    assert (shown[:, 11, 2:8] == 0).all()


@pytest.mark.skipif(not levels(), reason="no native library")
def test_a_plan_counts_the_window_and_the_sinks(made: Made) -> None:
    """Guards against a plan in which a long text takes the memory of all its tokens."""
    options = {"model": str(made[1]), "load_format": "dummy", "kernels": "cpu", "max_model_len": 50_000}
    config = EngineConfig.from_options(**options, attention_sinks=SINKS, sliding_window=WINDOW)
    planned = PlannedModel.read(config)
    assert planned.resolved().scheduler.max_model_len == 50_000
    assert planned.model.cache_groups() == [((0, 1), WINDOW)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_windows": (8, None)}, "has windows of its own"),
        ({"rope": None}, "has no rotary embedding"),
        ({"rope": "dynamic"}, "has dynamic rotary scaling, which depends on the length"),
        ({"rope": "longrope"}, "has longrope rotary scaling"),
        ({"query_scale": QueryScale(beta=1.0, length=8.0)}, "scales its queries by their positions"),
        ({"model_impl": "transformers"}, "is computed in torch"),
        ({"window": 60}, "sliding_window: 60 is not allowed; it must be at most 59, the model's context"),
    ],
)
def test_other_models_are_refused_in_a_line(made: Made, change: dict[str, Any], message: str) -> None:
    """Guards against sinks that would be seen from no certain position."""
    config, options = load_model_config(made[1]), dict(change)
    numerics = NumericsConfig(
        attention_sinks=SINKS, sliding_window=options.pop("window", 8), model_impl=options.pop("model_impl", "auto")
    )
    if isinstance(options.get("rope"), str):
        options["rope"] = replace(config.rope, rope_type=options["rope"])
    with pytest.raises(InvalidRequestError, match=message):
        as_served(replace(config, **options), numerics)


def test_one_option_without_the_other() -> None:
    """Guards against a window without sinks, which nobody has asked for, and sinks that nothing hides."""
    for name in ("attention_sinks", "sliding_window"):
        with pytest.raises(InvalidRequestError, match=f"{name}: 4 is not allowed; it must be left out, or joined by"):
            NumericsConfig(**{name: 4})
