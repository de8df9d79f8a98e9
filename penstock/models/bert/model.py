"""Encoders: BERT (Devlin et al., 2018), RoBERTa and XLM-RoBERTa (Liu et al., 2019), DistilBERT (Sanh et al., 2019),
MPNet (Song et al., 2020), Jina's second BERT (Günther et al., 2023), Nomic BERT (Nussbaum et al., 2024), ModernBERT
(Warner et al., 2024).

x = norm(word[id] + position[p] + type[segment])
block:  x = norm(x + attn(x));  x = norm(x + mlp(x))      LayerNorm behind the sum; a token sees the whole text
        x = x + attn(norm(x));  x = x + mlp(norm(x))      with norms_before (the first layer has no first norm);
                                                          a norm is the last step
head:   logits = out(h), or out(act(dense(h))), perhaps normed before `out`, of the first token
varies by ModelConfig only: positions (learned, rotary, a bias of each distance), windows, biases, the gate and the
    activation of the feed-forward branch
not here: parameter names (table.yaml), which tokens become the vector of a text (runner/pooler.py)
"""

from dataclasses import replace

import numpy as np

from penstock.errors import NotSupportedError
from penstock.layers.decoder import Attention, RelativeBias, feed_forward, layer_rotaries
from penstock.layers.factory import LayerFactory
from penstock.layers.module import ForwardContext, Module, Tensor
from penstock.spec.model_config import ModelConfig


class BertModel(Module):
    """A CausalLM (layers/module.py) in its interface only: the encoder, and a classifier's head if there is one."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory) -> None:
        self.bert = BertEncoder(cfg, make.at("bert"))
        self.head = BertHead(cfg, make) if cfg.labels else None

    def forward(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """Map ids [T] int64 to hidden states [T, hidden] dtype."""
        return self.bert(input_ids, ctx)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states [M, hidden] dtype to logits [M, labels] float32. Raise NotSupportedError without a head."""
        if self.head is None:
            raise NotSupportedError("this encoder has no head, only hidden states", param="model")
        return self.head(hidden)


class BertEncoder(Module):
    """Embeddings and blocks."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory) -> None:
        self.ops = make.ops
        self.embeddings = BertEmbeddings(cfg, make.at("embeddings"))
        self.bias = RelativeBias(cfg, make.at("bias")) if cfg.extra["relative_bias"] or cfg.alibi else None
        layer = PreNormLayer if cfg.extra["norms_before"] else BertLayer
        self.layers = [
            layer(cfg, make.at(f"layers.{index}"), Attention(cfg, make.at(f"layers.{index}.attention"), index, rotary))
            for index, rotary in enumerate(layer_rotaries(cfg, make))
        ]
        self.final_norm = make.layer_norm("final_norm", cfg.norm_eps) if cfg.extra["norms_before"] else None
        self.rounded = make.slot("rounded", (cfg.hidden_size,))

    def forward(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """Map ids [T] int64 to hidden states [T, hidden] dtype."""
        params = self.layers[0].attention.params
        if self.bias is not None and params.distance_bias is None:  # its weights are loaded now
            params = replace(params, distance_bias=self.bias.by_distance())
            for layer in self.layers:
                layer.attention.params = params
        x = self.embeddings(input_ids, ctx)
        for layer in self.layers:
            x = layer(x, ctx)
        return self.final_norm(x) if self.final_norm is not None else self.ops.round(x, out=self.rounded(x.shape[0]))


class BertEmbeddings(Module):
    """The sum of the embeddings of a token, of its position and of its text, normed."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory) -> None:
        self.ops = make.ops
        self.word_embeddings = make.embedding("word_embeddings")
        self.position_embeddings = make.embedding("position_embeddings") if cfg.extra["has_positions"] else None
        self.first_position = cfg.extra.get("first_position", 0)
        self.token_type_embeddings = make.embedding("token_type_embeddings") if cfg.num_token_types else None
        self.LayerNorm = make.layer_norm("LayerNorm", cfg.norm_eps, dtype="float32")

    def forward(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """Map ids [T] int64 to the residual stream [T, hidden] float32."""
        x = self.word_embeddings(input_ids)
        if self.token_type_embeddings is not None:
            x = self.ops.add(x, self.token_type_embeddings(ctx.token_types))
        if self.position_embeddings is not None:
            table = self.position_embeddings.table()[self.first_position :]
            out = self.position_embeddings.out(x.shape[0])
            x = self.ops.add(x, self.ops.embedding(ctx.positions, table, out=out))
        return self.LayerNorm(x)


class BertLayer(Module):
    """Attention and feed-forward, each with a norm behind the sum of its result and the residual stream."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory, attention: Attention) -> None:
        self.ops = make.ops
        self.rounded = make.slot("rounded", (cfg.hidden_size,))
        self.attention = attention
        self.attention_norm = make.layer_norm("attention_norm", cfg.norm_eps, dtype="float32")
        self.mlp = feed_forward(cfg, make.at("mlp"))
        self.mlp_norm = make.layer_norm("mlp_norm", cfg.norm_eps, dtype="float32")

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Map the residual stream x [T, hidden] float32 to the next one."""
        ops, rounded = self.ops, self.rounded(x.shape[0])
        x = self.attention_norm(ops.add(x, self.attention(ops.round(x, out=rounded), ctx)))
        return self.mlp_norm(ops.add(x, self.mlp(ops.round(x, out=rounded))))


class PreNormLayer(Module):
    """Attention and feed-forward, each after a norm of the residual stream. The first layer has no first norm, because
    the embeddings are normed."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory, attention: Attention) -> None:
        self.ops = make.ops
        self.rounded = make.slot("rounded", (cfg.hidden_size,))
        self.attention = attention
        self.attention_norm = make.layer_norm("attention_norm", cfg.norm_eps) if attention.layer > 0 else None
        self.mlp = feed_forward(cfg, make.at("mlp"))
        self.mlp_norm = make.layer_norm("mlp_norm", cfg.norm_eps)

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Map the residual stream x [T, hidden] float32 to the next one."""
        norm = self.attention_norm
        y = norm(x) if norm is not None else self.ops.round(x, out=self.rounded(x.shape[0]))
        x, y = self.mlp_norm.add(x, self.attention(y, ctx))
        return self.ops.add(x, self.mlp(y))


class BertHead(Module):
    """A classifier's head: out(h), or out(act(dense(h))), perhaps with a norm before the last product."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory) -> None:
        self.ops, make = make.ops, make.at("head")
        self.dense = make.activated_linear("dense", cfg.extra["head_act"]) if cfg.extra["dense_head"] else None
        self.norm = make.layer_norm("norm", cfg.norm_eps) if cfg.extra["norms_before"] else None
        self.widened = make.slot("widened", (cfg.hidden_size,), "float32")
        self.out_proj = make.linear("out_proj")

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states [M, hidden] dtype to logits [M, labels] float32."""
        rows = hidden.shape[0]
        if self.dense is not None:
            hidden = self.dense(hidden)
        if self.norm is not None:  # reading rows of a table makes float32 of them
            hidden = self.norm(self.ops.embedding(self.ops.tensor(np.arange(rows)), hidden, out=self.widened(rows)))
        return self.out_proj(hidden)
