"""The parts of a decoder that families share: attention, feed-forward branches, the stack of blocks with its norms, and
the LM head on top of it.

    attention  softmax(q k^T / sqrt(D)) v over the paged cache, causal, with grouped query heads
    plain      out = down(activation(up(y)))
    gated      out = down(activation(gate(y)) * up(y))
    sparse     p = softmax(y router^T);   out = sum over the k largest p_e of p_e * gated_e(y), + gated_shared(y)

In a sparse branch, a router chooses a few of many gated branches, the experts, for each token (Shazeer et al.,
"Outrageously Large Neural Networks", 2017). Only these are computed. Renormalised weights sum to 1, which equals a
softmax over the chosen logits. RouterParams in kernels/metadata.py has the other ways to choose and weigh them. A
shared expert (Dai et al., "DeepSeekMoE", 2024) computes every token; its result may be multiplied by a sigmoid.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.kernels.metadata import AttentionParams, RotaryParams, RouterParams
from penstock.kernels.ops import PackedLinear
from penstock.kernels.tensors import FLOAT32, LOGITS_ROWS, Array, Slot, Tensor, as_array
from penstock.layers.factory import LayerFactory
from penstock.layers.module import CausalLM, ForwardContext, Module, named_modules
from penstock.layers.rotary import Rotary
from penstock.layers.weights import Linear, LMHead
from penstock.spec.model_config import ModelConfig, QueryScale, RopeConfig


class Attention(Module):
    """One product for q, k and v, optional norms of q and k, rotary, attention, and the product that joins the heads.

    The sliding window, if any, comes with the context's metadata for this layer. RMS norms of q and k are over each
    head or over all heads of a token, depending on the size of their weights in the parameter table; layer norms are
    over each head, with weights of its own.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        make: LayerFactory,
        layer: int,
        rotary: Rotary | None = None,
        *,
        scale: float | None = None,
    ) -> None:
        """rotary: None means no rotation, and no factors of the queries. scale: the factor of the scores; None: the
        config's."""
        cfg = cfg.at(layer)
        self.ops = make.ops
        self.layer = layer
        self.rotary = rotary
        self.heads = heads = make.heads(cfg)
        self.eps = cfg.norm_eps
        slopes = make.own_heads(alibi_slopes(cfg.num_attention_heads), cfg)
        self.params = AttentionParams(
            scale=scale or cfg.attention_scale or heads.head_dim**-0.5,
            softcap=cfg.attn_logit_softcapping,
            alibi_slopes=make.ops.tensor(slopes) if cfg.alibi and not cfg.bidirectional else None,
            bias_before_scale=cfg.alibi and cfg.scaled_alibi,
        )
        self._values_are_keys = bool(cfg.values_are_keys) and cfg.values_are_keys[layer]
        name = "qk_proj" if self._values_are_keys else "qkv_proj"
        self._project = make.linear(name)
        setattr(self, name, self._project)
        offset, is_rms = cfg.norm_unit_offset, cfg.qk_norm and cfg.norm == "rms"
        self.q_norm = make.rms_norm("q_norm", self.eps, unit_offset=offset) if is_rms else None
        self.k_norm = make.rms_norm("k_norm", self.eps, unit_offset=offset) if is_rms else None
        self._v_norm = make.ops.tensor(np.ones(heads.head_dim, FLOAT32)) if cfg.value_norm else None
        self.qk_norm = make.head_norms("qk_norm", self.eps) if cfg.qk_norm and not is_rms else None
        is_unit = cfg.qk_unit_norm and cfg.rotates(layer)
        self.unit_norm = make.ops.tensor(np.ones(heads.head_dim, FLOAT32)) if is_unit else None
        self.sinks = make.vector("sinks") if cfg.sink_logits else None
        self.o_proj = make.linear("o_proj")
        # As many tokens as a token sees: behind more tokens, it sees sink tokens as if it were the last of so many.
        self.num_seen = cfg.num_sink_tokens + (cfg.layer_windows[layer] or 0)
        self.sees_sinks = cfg.num_sink_tokens > 0 and rotary is not None
        self.q_out = make.slot("q", (heads.num_heads * (2 if self.sees_sinks else 1), heads.head_dim))
        self.k_out, self.v_out = (make.slot(name, (heads.num_kv_heads, heads.head_dim)) for name in ("k", "v"))
        self.mixed_out = make.slot("mixed", (heads.num_heads * heads.head_dim,))

    @property
    def rotary_params(self) -> RotaryParams:
        """The heads, rotary table and norms of this layer. Read it after the weights are loaded."""
        return RotaryParams(
            self.heads,
            None if self.rotary is None else self.rotary.cos_sin,
            self.unit_norm if self.q_norm is None else self.q_norm.weight,
            self.unit_norm if self.k_norm is None else self.k_norm.weight,
            self.eps,
            None if self.rotary is None else self.rotary.q_scale,
            self._v_norm,
            self._values_are_keys,
        )

    def forward(self, y: Tensor, ctx: ForwardContext) -> Tensor:
        """Map y [T, hidden] dtype to [T, hidden] float32. Stores the new keys and values."""
        tokens = y.shape[0]
        queries = self.q_out(tokens)
        if self.sees_sinks:
            queries = queries.reshape(2, tokens, self.heads.num_heads, self.heads.head_dim)
        out = queries[0] if self.sees_sinks else queries, self.k_out(tokens), self.v_out(tokens)
        qkv = self._project(y) if self.qk_norm is None else self.qk_norm(self._project(y))
        params = self.rotary_params
        _, k, v = self.ops.rotary_qkv(qkv, ctx.positions, params, out=out)
        if self.sees_sinks:
            table = None if params.cos_sin is None else params.cos_sin[: self.num_seen]
            self.ops.rotary_q(qkv, ctx.positions, replace(params, cos_sin=table), out=queries[1])
        cache, meta = ctx.layer(self.layer)
        if self.sinks is not None and self.params.sink_logits is None:  # they are loaded now
            self.params = replace(self.params, sink_logits=self.sinks.weight)
        mixed = self.ops.attend(queries, k, v, cache, meta, self.params, out=self.mixed_out(tokens))
        return self.o_proj(mixed)


def alibi_slopes(num_heads: int) -> Array:
    """Compute the slope by which each head's scores fall with the distance, [H] float32.

    Press et al., "Train Short, Test Long", 2022: 2^(-8 i / n) for i = 1 .. n, where n is the greatest power of two up
    to num_heads. The other heads take every second slope of a model with 2n heads.
    """
    whole = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / whole) for i in range(1, whole + 1)]
    slopes += [2.0 ** (-4.0 * i / whole) for i in range(1, 2 * (num_heads - whole), 2)]
    return np.array(slopes, dtype=FLOAT32)


class RelativeBias(Module):
    """What each head adds to a score because of the distance from the query to the key: ALiBi in both directions, or
    numbers learned for ranges of distances (Raffel et al., "Exploring the Limits of Transfer Learning", 2020)."""

    FARTHEST, RANGES = 128, 16  # in each direction; the last range has all distances from 128 on

    def __init__(self, cfg: ModelConfig, make: LayerFactory) -> None:
        self.ops = make.ops
        self.relative_attention_bias = None if cfg.alibi else make.vector("relative_attention_bias")
        self._slopes = make.own_heads(alibi_slopes(cfg.num_attention_heads), cfg)
        self._context = make.max_positions or cfg.context

    def by_distance(self) -> Tensor:
        """Compute AttentionParams.distance_bias. Call it after the weights are loaded."""
        if self.relative_attention_bias is None:
            distances = np.abs(np.arange(1 - self._context, self._context)).astype(FLOAT32)
            return self.ops.tensor(-self._slopes[:, None] * distances)
        weight, ranges = as_array(self.relative_attention_bias.weight), self._ranges()  # weight: [2 RANGES, heads]
        found = [weight[ranges[:0:-1]], weight[:1], weight[self.RANGES + ranges[1:]]]
        return self.ops.tensor(np.ascontiguousarray(np.concatenate(found).T))

    def _ranges(self) -> Array:
        """List the range of each distance up to FARTHEST: of one distance each at first, then by its logarithm."""
        single, number = self.RANGES // 2, FLOAT32.type
        distances = np.arange(self.FARTHEST + 1, dtype=FLOAT32)
        turns = np.log(np.maximum(distances, 1) / number(single)) / number(math.log(self.FARTHEST / single))
        grown = np.minimum(single + turns * number(self.RANGES - single), self.RANGES - 1)
        return np.where(distances < single, distances, grown).astype(np.int64)


class MLP(Module):
    """Feed-forward branch: up with the activation in the same call, then down."""

    def __init__(self, make: LayerFactory, activation: str) -> None:
        self.up_proj = make.activated_linear("up_proj", activation)
        self.down_proj = make.linear("down_proj")

    def forward(self, y: Tensor) -> Tensor:
        """Map y [T, hidden] dtype to [T, hidden] float32."""
        return self.down_proj(self.up_proj(y))


class XieluMLP(Module):
    """Feed-forward branch: up, the activation xIELU, then down."""

    def __init__(self, make: LayerFactory) -> None:
        self.up_proj = make.linear("up_proj")
        self.act_fn = make.xielu("act_fn")
        self.down_proj = make.linear("down_proj")

    def forward(self, y: Tensor) -> Tensor:
        """Map y [T, hidden] dtype to [T, hidden] float32."""
        return self.down_proj(self.act_fn(self.up_proj(y)))


def feed_forward(cfg: ModelConfig, make: LayerFactory) -> Module:
    """Make the feed-forward branch that the config asks for."""
    if cfg.gated_mlp:
        return GatedMLP(make, cfg.hidden_act)
    return XieluMLP(make) if cfg.hidden_act == "xielu" else MLP(make, cfg.hidden_act)


class GatedMLP(Module):
    """Feed-forward branch: gate and up as one product with the activation in the same call, then down."""

    def __init__(self, make: LayerFactory, activation: str) -> None:
        self.gate_up_proj = make.gated_linear("gate_up_proj", activation)
        self.down_proj = make.linear("down_proj")

    def forward(self, y: Tensor) -> Tensor:
        """Map y [T, hidden] dtype to [T, hidden] float32."""
        return self.down_proj(self.gate_up_proj(y))


class MoE(Module):
    """A router, its experts, and a shared expert. Experts are packed one by one, so that loader, quantiser and planner
    need no special code for them."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory) -> None:
        self.ops = make.ops
        self.activation = cfg.hidden_act
        self.gate = make.linear("gate", is_exact=cfg.exact_router)
        self._correction = None
        if cfg.router_bias:
            name = "correction" if cfg.router_bias == 1 else "moe_statics"
            self._correction = make.vector(name, is_exact=True)
            setattr(self, name, self._correction)
        self.expert_scale = make.vector("expert_scale") if cfg.router_expert_scale else None
        self._router = RouterParams(
            cfg.num_experts_per_tok,
            cfg.router_scores,
            groups=cfg.router_groups,
            top_groups=cfg.router_top_groups,
            renormalize=cfg.norm_topk_prob,
            min_sum=cfg.router_min_sum,
            scale=cfg.routed_scaling_factor,
            threshold=cfg.router_threshold,
        )
        self._weigh_inputs = cfg.weigh_expert_inputs
        experts = [GatedMLP(make.at(f"experts.{index}"), cfg.hidden_act) for index in range(make.num_experts(cfg))]
        self.experts = experts
        self._gate_up, self._down = [item.gate_up_proj for item in experts], [item.down_proj for item in experts]
        self._mixture = make.mixture(cfg, self._down)
        self.ids = make.slot("chosen", (self._router.top_k,), "int64")
        self.weights = make.slot("chosen_weights", (self._router.top_k,), "float32")
        self.out = make.slot("mixture", (cfg.hidden_size,), "float32")
        self._shared = None
        if cfg.shared_expert_gate is not None:  # files name it differently if it has a gate
            name = "shared_expert" if cfg.shared_expert_gate else "shared_experts"
            self._shared = GatedMLP(make.at(name), cfg.hidden_act)
            setattr(self, name, self._shared)
        self.shared_expert_gate = make.linear("shared_expert_gate") if cfg.shared_expert_gate else None
        self._packed: tuple[tuple[PackedLinear, ...], tuple[PackedLinear, ...]] | None = None

    def forward(self, y: Tensor, routed: Tensor | None = None) -> Tensor:
        """Map y [T, hidden] dtype to [T, hidden] float32. routed: what the router reads, [T, hidden] dtype; None: y."""
        tokens = y.shape[0]
        logits = self.gate(y if routed is None else routed)
        chosen = self.ops.route(logits, self.router_params, out=(self.ids(tokens), self.weights(tokens)))
        gate_up, down = self._experts()
        out = self._mixture(
            y, gate_up, down, chosen, self.activation, weigh_inputs=self._weigh_inputs, out=self.out(tokens)
        )
        if self._shared is None:
            return out
        shared = self._shared(y)
        if self.shared_expert_gate is None:
            return self.ops.add(out, shared)
        return self.ops.add_gated(out, shared, self.shared_expert_gate(y))

    @property
    def router_params(self) -> RouterParams:
        """How experts are chosen. Read it after the weights are loaded."""
        params = self._router
        if self._correction is not None:
            params = replace(params, bias=self._correction.weight.reshape(-1))
        return params if self.expert_scale is None else replace(params, expert_scale=self.expert_scale.weight)

    def _experts(self) -> tuple[tuple[PackedLinear, ...], tuple[PackedLinear, ...]]:
        """Collect the packed weights of all experts, gated and down: in the first pass, when all are packed. Layers are
        never loaded again after that."""
        if self._packed is None:
            self._packed = tuple(item.packed[0] for item in self._gate_up), tuple(item.packed[0] for item in self._down)
        return self._packed


# (config, factory, layer index, rotary) -> a module that maps (x, h, ctx) to (x, h). x is the residual stream, h the
# branch that has not been added to it yet, [T, hidden] float32 each.
MakeBlock = Callable[[ModelConfig, LayerFactory, int, Rotary | None], Any]


class DecoderLM(Module):
    """A CausalLM (layers/module.py): a decoder under the name that the parameter table gives it, and the LM head."""

    def __init__(
        self,
        cfg: ModelConfig,
        make: LayerFactory,
        decoder: Callable[[ModelConfig, LayerFactory], Any],
        name: str = "model",
    ) -> None:
        self._decoder = decoder(cfg, make.at(name))
        setattr(self, name, self._decoder)
        self.lm_head = make.lm_head("lm_head", scale=cfg.logit_scale, softcap=cfg.final_logit_softcapping)

    @property
    def decoder(self) -> Any:
        """Find the module with the embedding, the blocks and the final norm."""
        return self._decoder

    def forward(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """Map ids [T] int64 to the hidden states [T, hidden] dtype after the final norm."""
        return self._decoder(input_ids, ctx)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states [M, hidden] dtype, at the wanted positions only, to logits [M, V] float32."""
        return self.lm_head(hidden)


def layer_rotaries(cfg: ModelConfig, make: LayerFactory) -> list[Rotary | None]:
    """Make the rotary table of each layer; layers with the same table share it."""
    shared: dict[tuple[RopeConfig | None, QueryScale | None, int], Rotary] = {}
    found: list[Rotary | None] = []
    for layer in range(cfg.num_hidden_layers):
        rope, own = cfg.layer_rope(layer), cfg.at(layer)
        scale = cfg.query_scale
        if scale is not None and scale.only_unrotated and rope is not None:
            scale = None
        key = rope, scale, own.head_dim
        if key[:2] != (None, None) and key not in shared:
            shared[key] = make.rotary(rope, own, scale)
        found.append(shared.get(key))
    return found


class RMSNormLM(DecoderLM):
    """A DecoderLM whose decoder is an RMSNormDecoder."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory, block: MakeBlock) -> None:
        super().__init__(cfg, make, lambda cfg, make: RMSNormDecoder(cfg, make, block))


class RMSNormDecoder(Module):
    """Embedding, blocks and a final norm, under the names of Llama's checkpoints.

    A layer with a window uses the rotary table of `local_rope`, if the config has one. The residual stream is divided
    by `residual_scale` (ModelConfig.stream).
    """

    def __init__(self, cfg: ModelConfig, make: LayerFactory, block: MakeBlock) -> None:
        cfg = cfg.stream()
        self.embed_tokens = make.embedding("embed_tokens", scale=cfg.embedding_scale)
        rotaries = layer_rotaries(cfg, make)
        self.layers = [block(cfg, make.at(f"layers.{index}"), index, rotary) for index, rotary in enumerate(rotaries)]
        self.norm = make.norm("norm", cfg)

    def forward(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """Map ids [T] int64 to hidden states [T, hidden] dtype."""
        x, h = self.embed_tokens(input_ids), None
        for block in self.layers:
            x, h = block(x, h, ctx)
        return self.norm.add(x, h)[1]


def expert_products(modules: Iterable[object]) -> Iterator[Linear]:
    """Find the products of experts."""
    for module in modules:
        if isinstance(module, MoE):
            for expert in module.experts:
                yield from (expert.gate_up_proj, expert.down_proj)


def slots_of(module: object) -> list[Slot]:
    """List the buffers for the results of a layer."""
    return [value for value in vars(module).values() if isinstance(value, Slot)]


def reserve_results(model: CausalLM, tokens: int, sequences: int) -> None:
    """Let the buffers of results grow to the largest step's, so that no step allocates any."""
    modules = [module for _, module in named_modules(model)]
    experts = {id(layer) for layer in expert_products(modules)}  # one call computes all experts of a layer
    for module in modules:
        rows = max(sequences, LOGITS_ROWS) if isinstance(module, LMHead) else tokens
        for slot in () if id(module) in experts else slots_of(module):
            slot(rows)
