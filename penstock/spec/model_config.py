"""ModelConfig: an architecture's numbers, as models/config_json.py reads them."""

from dataclasses import dataclass, field
from typing import Any

from penstock.spec.rope_config import RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """An architecture's numbers. Names are Transformers'; what has a default is something that most models lack.

    Attributes:
        hidden_act: "silu", "gelu" (exact) or "gelu_tanh".
        norm_eps: of the norms, whichever kind they are.
        dtype: type of the checkpoint: "float32", "bfloat16" or "float16"; float32 where the file is silent.
        layer_windows: for each layer, how many tokens one sees, itself included; None sees all.
        rope: None: positions enter otherwise (alibi, or learned positions).
        local_rope: of the layers with a window, where theirs differs.
        attention_bias: the products for q, k and v have a bias.
        attention_out_bias: so has the product after attention.
        mlp_bias: so have the products of the feed-forward branch.
        qk_norm: q and k are RMS-normed before the rotation.
        embedding_scale: what token embeddings are multiplied by.
        attention_scale: what scores are multiplied by; None is 1 / sqrt(head_dim).
        attn_logit_softcapping, final_logit_softcapping: soft limits of scores and of logits.
        alibi: scores have a bias that falls with the distance (Press et al., 2022), before they are scaled.
        num_parallel_norms: attention and feed-forward read the same residual stream, behind one norm or one each; 0:
            one branch comes after the other.
        num_experts: of a sparse feed-forward branch; 0: none is.
        num_experts_per_tok: how many of them a token goes through.
        moe_intermediate_size: of each expert.
        norm_topk_prob: the weights of the chosen experts are divided by their sum.
        sparse_layers: for each layer, whether its feed-forward branch is made of experts.
        extra: numbers that only a family of a user's own file knows.
        eos_token_ids: tokens that end a text; generation_config.json goes before config.json.
        default_sampling: temperature, top_p, top_k, min_p, repetition_penalty, max_tokens as far as
            generation_config.json gives them. Transformers samples only where `do_sample` is true, so the first four
            count only then, and a file that says `do_sample: false` means temperature 0. The repetition penalty and
            max_tokens (there `max_new_tokens`) also count without. Values the file leaves out are not filled in.
        model_impl: which of the architecture's registered versions computes it, an engine option; "auto" is the default
            one.
        ignored_generation: keys of generation_config.json that would change the answer, or are unknown, and are not
            applied; sorted. For the user to be told.
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
    local_rope: RopeConfig | None = None
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    alibi: bool = False
    num_parallel_norms: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    sparse_layers: tuple[bool, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict, hash=False)
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    default_sampling: dict[str, Any] = field(default_factory=dict, hash=False)
    model_impl: str = "auto"
    ignored_generation: tuple[str, ...] = field(default=(), repr=False)  # repr: what answers depend on

    @property
    def context(self) -> int:
        """How many tokens a text may have: max_position_embeddings, and more where rotary scaling begins there."""
        stretch = self.rope.factor if self.rope is not None and self.rope.rope_type == "dynamic" else 1.0
        return int(self.max_position_embeddings * stretch)

    def cache_groups(self) -> list[tuple[tuple[int, ...], int | None]]:
        """Layers that look equally far back: (their indices, the window), ordered by first layer."""
        groups: dict[int | None, list[int]] = {}
        for index, window in enumerate(self.layer_windows):
            groups.setdefault(window, []).append(index)
        return [(tuple(layers), window) for window, layers in groups.items()]
