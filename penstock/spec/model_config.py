"""ModelConfig and RopeConfig: the numbers of one model, as models/config_json.py reads them. No torch."""

import sys
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from penstock.errors import ModelLoadError
from penstock.spec.quantization import Quantization


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding with the frequencies theta^(-2i/D), scaled as `rope_type` says (layers/rotary.py).

    Attributes:
        rope_type: "default"; "linear" divides all frequencies by factor; "llama3" and "yarn" divide only the slow ones;
            "dynamic" raises theta with the position; "longrope" divides each frequency by a number of its own;
            "proportional" sets the slow ones to 0, so that D is the whole head, and divides the others by factor.
        partial_rotary_factor: the fraction of each head that is rotated, starting with its first element; for
            "proportional", the fraction of the frequencies that are not 0.
        interleaved: checkpoints hold the two elements of each rotated pair side by side, not as two halves. The loader
            reorders the rows of q and k, so that all models are rotated alike; attention is not changed by it.
        original_max_position_embeddings: the context before scaling.
        low_freq_factor, high_freq_factor: for "llama3". A frequency is divided if it makes fewer turns than the first
            within the original context, and kept if it makes more turns than the second.
        beta_slow, beta_fast: for "yarn", the same two bounds; `truncate` widens them to whole dimensions.
        short_factor, long_factor: for "longrope", divisors of each frequency: the short ones if the served context is
            within the original context, otherwise the long ones.
        attention_factor: for "yarn" and "longrope", a factor of cosines and sines.
    """

    theta: float = 10000.0
    rope_type: str = "default"
    partial_rotary_factor: float = 1.0
    interleaved: bool = False
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_slow: float = 1.0
    beta_fast: float = 32.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    attention_factor: float = 1.0

    def rotary_dim(self, head_dim: int) -> int:
        """Compute D, the number of rotated elements of a head. If D is odd, one more element is rotated."""
        return head_dim if self.rope_type == "proportional" else int(head_dim * self.partial_rotary_factor)

    def check(self, head_dim: int) -> None:
        """Raise ModelLoadError unless 2 .. head_dim elements are rotated, with one factor per frequency."""
        rotary_dim = self.rotary_dim(head_dim)
        frequencies = (rotary_dim + 1) // 2
        if not 2 <= 2 * frequencies <= head_dim:
            raise ModelLoadError(
                f"config.json: partial_rotary_factor = {self.partial_rotary_factor:g} makes {2 * frequencies} elements "
                f"of a head rotate; it must be from 2 to head_dim = {head_dim}"
            )
        for name, factors in (("short_factor", self.short_factor), ("long_factor", self.long_factor)):
            if self.rope_type == "longrope" and len(factors) != frequencies:
                raise ModelLoadError(
                    f"config.json: {name} has {len(factors)} numbers; it must have {frequencies}, one per pair of the "
                    f"{rotary_dim} elements that are rotated"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryScale:
    """A factor of the queries that grows with the position p: 1 + beta * log(1 + floor((p + offset) / length)).

    Attributes:
        only_unrotated: it applies only in layers without rotary embedding.
    """

    beta: float
    length: float
    offset: int = 0
    only_unrotated: bool = False


class LayerHeads(NamedTuple):
    """The heads of one layer's attention."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The numbers of one model, with Transformers' names. Fields that most models lack have defaults.

    Attributes:
        hidden_act: "silu", "gelu" (exact), "gelu_tanh", "relu", "relu2" (its square), "xielu" or "clamped_silu"
            (kernels/ops.py).
        gated_mlp: the feed-forward branch is down(act(gate(y)) * up(y)), otherwise down(act(up(y))).
        norm: the kind of the norms of the residual stream, of q and of k: "rms" or "layer".
        norm_bias: these norms have a bias, other than those of q and k.
        norm_unit_offset: the norms multiply by 1 + weight.
        branch_norms: Llama's block has RMS norms behind its branches, too.
        dtype: type of the checkpoint: "float32", "bfloat16" or "float16". If the file does not say: float32, or
            bfloat16 beside codes.
        layer_heads: for each layer, its heads; empty: num_attention_heads, num_key_value_heads and head_dim hold in all
            layers. `at` gives the numbers of one layer.
        layer_windows: for each layer, how many tokens a token sees, itself included; None: all.
        bidirectional: a token sees the whole text, also what comes after it: an encoder, which continues no text.
        num_sink_tokens: how many first tokens every token sees besides its window (assembly/streaming.py).
        chunked_windows: windows do not slide: the text is cut into chunks as long as the window, and a token sees
            itself and the tokens before it in its own chunk.
        rope: rotary embedding; None: positions enter in another way (ALiBi, or learned positions).
        local_rope: rotary embedding of the layers with a window, if it differs.
        rotary_layers: for each layer, whether it has rotary embedding; empty: all have it.
        query_scale: a factor of the queries that depends on the position; None: no factor.
        attention_bias, attention_out_bias, mlp_bias, lm_head_bias: whether there is a bias in the products for q, k and
            v, in the product after attention, in those of the feed-forward branch, and in the LM head.
        qk_norm: q and k are normed before the rotation: each head by itself or, with qk_norm_together, all heads of
            a token together.
        qk_unit_norm: in layers with rotary embedding, each head of q and k is divided by the root of its mean square.
        value_norm: values are RMS-normed, each head by itself, without weights.
        values_are_keys: for each layer, whether its values are its keys before their norm; empty: in no layer.
        embedding_scale: factor of the token embeddings.
        embedding_norm: the token embeddings are normed before they become the residual stream.
        residual_scale: factor of each branch when it is added to the residual stream. The stream is kept divided by it
            (`stream`), so that the addition needs no product.
        attention_scale: factor of the scores; None is 1 / sqrt(head_dim).
        logit_scale: factor of the logits.
        attn_logit_softcapping, final_logit_softcapping: soft caps of scores and of logits.
        sink_logits: each head has a learned logit that takes part in every softmax and has no value.
        alibi: scores get a bias that falls with the distance (Press et al., 2022): before they are scaled or, without
            scaled_alibi, after.
        num_parallel_norms: attention and feed-forward read the same residual stream, after one shared norm (1) or one
            each (2); 0: one branch follows the other.
        num_experts: number of experts in a sparse feed-forward branch; 0: no such branch.
        norm_topk_prob: the weights of the chosen experts are divided by their sum.
        sparse_layers: for each layer, whether its feed-forward branch is a mixture of experts.
        router_scores, router_bias, router_groups, router_top_groups, router_min_sum, router_threshold,
            routed_scaling_factor, router_expert_scale: how a router chooses and weighs experts: `scores`, the axes with
            which files hold the `bias` (0: there is none), `groups`, `top_groups`, `min_sum`, `threshold` and `scale`
            of RouterParams in kernels/metadata.py, and whether there is an `expert_scale`.
        exact_router: the weight of a router keeps float32, if a checkpoint has it.
        weigh_expert_inputs: the weights of experts multiply what they read, not their results.
        shared_expert_gate: whether a gate for each token multiplies the result of the shared expert, which is added to
            those of the chosen ones; None: there is no shared expert. shared_expert_intermediate_size is its width.
        max_seq_length: the length to which sentence-transformers cuts texts; None: it does not say.
        num_token_types: how many embeddings there are of the texts of a pair, which are added to those of their tokens;
            0: none.
        labels: the names of the classes to which a classifier assigns a text, or each token; its head has a row for
            each. (): it is no classifier.
        label_activation: what makes scores of its logits: "softmax", "sigmoid" or "identity".
        num_nextn_predict_layers: checkpoints may hold this many layers after the last one, which predict further
            tokens. They are not used.
        quantization: how the checkpoint's weights are coded; None: they are floats.
        extra: values that only a family in a user's own file knows.
        eos_token_ids: tokens that end a text; generation_config.json takes precedence over config.json.
        default_sampling: temperature, top_p, top_k, min_p, repetition_penalty, max_tokens as far as
            generation_config.json gives them. Transformers samples only if `do_sample` is true, so the first four
            apply only then, and `do_sample: false` means temperature 0. The repetition penalty and max_tokens (there
            called `max_new_tokens`) always apply.
        model_impl: the registered version of the architecture that computes the model, an engine option; "auto": the
            default version.
        ignored_generation: sorted keys of generation_config.json that would change the answer or are unknown. They are
            not applied, and the user is warned.
        is_text_part: whether the checkpoint is multimodal, so that some of its tensors are not for text.
        notes: what a user has to know about the file: the key that it is about -> one line.
        source: the contents of config.json, for a class of Transformers (models/transformers/).
    """

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str
    layer_windows: tuple[int | None, ...]
    rope: RopeConfig | None
    layer_heads: tuple[LayerHeads, ...] = ()
    chunked_windows: bool = False
    bidirectional: bool = False
    local_rope: RopeConfig | None = None
    num_sink_tokens: int = 0
    rotary_layers: tuple[bool, ...] = ()
    query_scale: QueryScale | None = None
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    lm_head_bias: bool = False
    qk_norm: bool = False
    qk_norm_together: bool = False
    qk_unit_norm: bool = False
    value_norm: bool = False
    values_are_keys: tuple[bool, ...] = ()
    gated_mlp: bool = True
    norm: str = "rms"
    norm_bias: bool = False
    norm_unit_offset: bool = False
    branch_norms: bool = False
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    residual_scale: float = 1.0
    attention_scale: float | None = None
    logit_scale: float = 1.0
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    sink_logits: bool = False
    alibi: bool = False
    scaled_alibi: bool = True
    num_parallel_norms: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    sparse_layers: tuple[bool, ...] = ()
    router_scores: str = "softmax"
    router_bias: int = 0
    router_groups: int = 1
    router_top_groups: int = 1
    router_min_sum: float = 0.0
    router_threshold: float = 0.0
    routed_scaling_factor: float = 1.0
    exact_router: bool = False
    router_expert_scale: bool = False
    weigh_expert_inputs: bool = False
    shared_expert_gate: bool | None = None
    shared_expert_intermediate_size: int = 0
    max_seq_length: int | None = None
    num_token_types: int = 0
    labels: tuple[str, ...] = ()
    label_activation: str = "softmax"
    num_nextn_predict_layers: int = 0
    quantization: Quantization | None = None
    extra: dict[str, Any] = field(default_factory=dict, hash=False)
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    default_sampling: dict[str, Any] = field(default_factory=dict, hash=False)
    model_impl: str = "auto"
    ignored_generation: tuple[str, ...] = field(default=(), repr=False)  # repr has only what answers depend on
    is_text_part: bool = field(default=False, repr=False)
    notes: dict[str, str] = field(default_factory=dict, repr=False, hash=False)
    source: dict[str, Any] = field(default_factory=dict, repr=False, hash=False, compare=False)

    @property
    def context(self) -> int:
        """Compute the largest number of tokens in a text: max_position_embeddings times any dynamic rotary factor."""
        stretch = self.rope.factor if self.rope is not None and self.rope.rope_type == "dynamic" else 1.0
        return int(self.max_position_embeddings * stretch)

    @property
    def longest_context(self) -> int:
        """Compute the largest context that a user may ask for: with "yarn", the original one times the factor. There is
        no limit beside sink tokens, because no token sees farther than they and its window reach."""
        if self.num_sink_tokens:
            return sys.maxsize
        if self.rope is None or self.rope.rope_type != "yarn":
            return self.context
        return max(self.context, int(self.rope.original_max_position_embeddings * self.rope.factor))

    def rotates(self, layer: int) -> bool:
        """Tell whether a layer has rotary embedding."""
        return self.rope is not None and (not self.rotary_layers or self.rotary_layers[layer])

    def at(self, layer: int) -> "ModelConfig":
        """Return the numbers with the heads of one layer."""
        return replace(self, **self.layer_heads[layer]._asdict()) if self.layer_heads else self

    def layer_rope(self, layer: int) -> RopeConfig | None:
        """Find the rotary embedding of a layer; None: it has none."""
        if not self.rotates(layer):
            return None
        return self.rope if self.layer_windows[layer] is None or self.local_rope is None else self.local_rope

    def ropes(self) -> list[tuple[RopeConfig, int]]:
        """List each rotary embedding with the size of the heads that it rotates, ordered by first layer."""
        found = [(self.layer_rope(layer), self.at(layer).head_dim) for layer in range(self.num_hidden_layers)]
        return list(dict.fromkeys((rope, size) for rope, size in found if rope is not None))

    def stream(self) -> "ModelConfig":
        """Return the numbers for a residual stream that is divided by residual_scale.

        Norms of the stream give the same results with eps / residual_scale^2. Norms of anything else would not, so a
        family with such norms (of q and k, or behind a branch) multiplies its branches itself.
        """
        if self.residual_scale == 1.0:
            return self
        return replace(
            self,
            embedding_scale=self.embedding_scale / self.residual_scale,
            norm_eps=self.norm_eps / self.residual_scale**2,
        )

    def cache_groups(self) -> list[tuple[tuple[int, ...], int | None]]:
        """Group the layers with the same window and heads: (their indices, the window), ordered by first layer.

        The keys and values of a group's layers have one shape, so that its blocks have one size.
        """
        groups: dict[tuple[int | None, LayerHeads | None], list[int]] = {}
        for index, window in enumerate(self.layer_windows):
            groups.setdefault((window, self.layer_heads[index] if self.layer_heads else None), []).append(index)
        return [(tuple(layers), window) for (window, _), layers in groups.items()]
