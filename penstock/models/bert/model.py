"""Encoders: BERT (Devlin et al., 2018), RoBERTa and XLM-RoBERTa (Liu et al., 2019), Nomic BERT (Nussbaum et al., 2024).

x = norm(word[id] + position[p] + type[segment])
block:  x = norm(x + attn(x));  x = norm(x + mlp(x))      LayerNorm behind the sum; a token sees the whole text
head:   logits = out(h), or out(tanh(dense(h))) of the first token
varies by ModelConfig only: learned or rotary positions, biases, the gate and the activation of the feed-forward branch
not here: parameter names (table.yaml), which tokens become the vector of a text (runner/pooler.py)
"""

from penstock.errors import NotSupportedError
from penstock.layers.decoder import Attention, feed_forward, layer_rotaries
from penstock.layers.factory import LayerFactory
from penstock.layers.module import ForwardContext, Module, Tensor
from penstock.layers.rotary import Rotary
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
        rotaries = layer_rotaries(cfg, make)
        self.layers = [BertLayer(cfg, make.at(f"layers.{index}"), index, item) for index, item in enumerate(rotaries)]
        self.rounded = make.slot("rounded", (cfg.hidden_size,))

    def forward(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """Map ids [T] int64 to hidden states [T, hidden] dtype."""
        x = self.embeddings(input_ids, ctx)
        for layer in self.layers:
            x = layer(x, ctx)
        return self.ops.round(x, out=self.rounded(x.shape[0]))


class BertEmbeddings(Module):
    """The sum of the embeddings of a token, of its position and of its text, normed."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory) -> None:
        self.ops = make.ops
        self.word_embeddings = make.embedding("word_embeddings")
        self.position_embeddings = make.embedding("position_embeddings") if cfg.rope is None else None
        self.first_position = cfg.extra.get("first_position", 0)
        self.token_type_embeddings = make.embedding("token_type_embeddings")
        self.LayerNorm = make.layer_norm("LayerNorm", cfg.norm_eps, dtype="float32")

    def forward(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """Map ids [T] int64 to the residual stream [T, hidden] float32."""
        x = self.ops.add(self.word_embeddings(input_ids), self.token_type_embeddings(ctx.token_types))
        if self.position_embeddings is not None:
            table = self.position_embeddings.table()[self.first_position :]
            out = self.position_embeddings.out(x.shape[0])
            x = self.ops.add(x, self.ops.embedding(ctx.positions, table, out=out))
        return self.LayerNorm(x)


class BertLayer(Module):
    """Attention and feed-forward, each with a norm behind the sum of its result and the residual stream."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory, index: int, rotary: Rotary | None) -> None:
        self.ops = make.ops
        self.rounded = make.slot("rounded", (cfg.hidden_size,))
        self.attention = Attention(cfg, make.at("attention"), index, rotary)
        self.attention_norm = make.layer_norm("attention_norm", cfg.norm_eps, dtype="float32")
        self.mlp = feed_forward(cfg, make.at("mlp"))
        self.mlp_norm = make.layer_norm("mlp_norm", cfg.norm_eps, dtype="float32")

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Map the residual stream x [T, hidden] float32 to the next one."""
        ops, rounded = self.ops, self.rounded(x.shape[0])
        x = self.attention_norm(ops.add(x, self.attention(ops.round(x, out=rounded), ctx)))
        return self.mlp_norm(ops.add(x, self.mlp(ops.round(x, out=rounded))))


class BertHead(Module):
    """A classifier's head: out(h), or out(tanh(dense(h)))."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory) -> None:
        self.ops = make.ops
        self.dense = make.at("head").linear("dense") if cfg.extra["dense_head"] else None
        self.out_proj = make.at("head").linear("out_proj")
        self.rounded = make.slot("head.rounded", (cfg.hidden_size,))

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states [M, hidden] dtype to logits [M, labels] float32."""
        if self.dense is not None:
            hidden = self.ops.round(self.ops.softcap(self.dense(hidden), 1.0), out=self.rounded(hidden.shape[0]))
        return self.out_proj(hidden)
