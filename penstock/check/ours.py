"""Our side of a comparison: a loaded model, and one pass of a whole prompt through it with every layer watched.

The caches are paged, as in the engine. The pass is never a recorded one, for then no Python would run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from penstock.check.trace import Call, Trace, float_tensors, replaced, watching
from penstock.kernels.backends import load_ops
from penstock.kernels.metadata import AttentionMetadata, Heads, KVCache
from penstock.kernels.ops import Ops
from penstock.layers.attention import Attention
from penstock.layers.context import ForwardContext
from penstock.layers.norm import LayerNorm, RMSNorm
from penstock.layers.weights import WeightLayer
from penstock.models.config_json import load_model_config
from penstock.planner.memory import free_memory_bytes
from penstock.spec.model_config import ModelConfig
from penstock.weights.loader import load_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, eq=False)
class OurModel:
    """A model of ours with its weights."""

    directory: Path
    config: ModelConfig
    ops: Ops
    model: nn.Module

    @classmethod
    def load(cls, directory: Path, *, dtype: str, kernels: str, tokens: int) -> "OurModel":
        """The model, for a prompt of so many tokens.

        Raises:
            ModelLoadError, InvalidRequestError: as load_model.
        """
        config = load_model_config(directory)
        ops = load_ops(kernels, DTYPES[dtype])
        model = load_model(directory, config, ops, max_model_len=tokens, free_memory=free_memory_bytes)
        return cls(directory, config, ops, cast(nn.Module, model))

    @torch.inference_mode()
    def run(self, ids: list[int], follow: Trace | None = None) -> tuple[Trace, Tensor]:
        """One pass over a prompt -> what its layers said, and the logits after each token, [T, V] float32.

        follow: another pass, as in `watching`.
        """
        ctx = self._context(len(ids))
        with _watching(self.model, follow) as trace:
            hidden = self.model(torch.tensor(ids, device=self.ops.device), ctx)
            logits = self.model.compute_logits(hidden)  # type: ignore[operator]
        self._add_head_norms(trace, ctx.positions)
        return trace, logits.clone()

    def _context(self, tokens: int) -> ForwardContext:
        """A prompt alone, from position 0, with a block table as long as it."""
        config = self.config
        num_blocks = -(-tokens // BLOCK_SIZE)
        caches = tuple(
            self.ops.new_kv_cache(num_blocks, BLOCK_SIZE, config.num_key_value_heads, config.head_dim, self.ops.dtype)
            for _ in range(config.num_hidden_layers)
        )
        groups = config.cache_groups()
        metadata = tuple(self._metadata(tokens, num_blocks, window, caches[layers[0]]) for layers, window in groups)
        layer_group = [0] * config.num_hidden_layers
        for index, (layers, _) in enumerate(groups):
            for layer in layers:
                layer_group[layer] = index
        return ForwardContext(torch.arange(tokens, device=self.ops.device), caches, metadata, tuple(layer_group))

    def _metadata(self, tokens: int, num_blocks: int, window: int | None, cache: KVCache) -> AttentionMetadata:
        meta = AttentionMetadata(
            query_start_loc=torch.tensor([0, tokens], dtype=torch.int32),
            seq_lens=torch.tensor([tokens], dtype=torch.int32),
            block_table=torch.arange(num_blocks, dtype=torch.int32)[None],
            slot_mapping=torch.arange(tokens),
            block_size=BLOCK_SIZE,
            sliding_window=window,
        )
        config = self.config
        heads = Heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        return self.ops.plan(meta, heads, cache)

    def _add_head_norms(self, trace: Trace, positions: Tensor) -> None:
        """The norms of q and k are no calls of their own: they are done with the rotation. Here they are done again
        without it, and written down behind the product of q, k and v."""
        for name, module in self.model.named_modules():
            product = trace.of(f"{name}.qkv_proj")
            if not isinstance(module, Attention) or module.q_norm is None or module.k_norm is None or product is None:
                continue
            norms = replace(module.rotary_params, cos_sin=None)
            q, k, _ = self.ops.rotary_qkv(product.outputs[0], positions, norms)
            at = trace.calls.index(product) + 1
            trace.calls[at:at] = [
                Call(f"{name}.q_norm", (), float_tensors(q)),
                Call(f"{name}.k_norm", (), float_tensors(k)),
            ]


def weight_layers(model: nn.Module) -> dict[str, WeightLayer]:
    """Every layer that owns parameters, by its name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, WeightLayer)}


@contextmanager
def _watching(model: nn.Module, follow: Trace | None) -> Iterator[Trace]:
    """As `watching`. A norm that adds a branch first is called by its method `add`, which no hook sees."""
    with watching(model, follow) as trace:
        norms = {name: norm for name, norm in weight_layers(model).items() if isinstance(norm, RMSNorm | LayerNorm)}
        for name, norm in norms.items():
            norm.add = _watched_add(trace, name, norm, follow)  # type: ignore[method-assign]
        try:
            yield trace
        finally:
            for norm in norms.values():
                del norm.add


def _watched_add(  # type: ignore[no-untyped-def]
    trace: Trace, name: str, norm: RMSNorm | LayerNorm, follow: Trace | None
):
    original = norm.add

    def add(x: Tensor, h: Tensor | None) -> tuple[Tensor, Tensor]:
        total, normed = original(x, h)
        if h is not None:  # else it called itself, and the hook saw it
            trace.calls.append(Call(name, float_tensors(total), float_tensors(normed)))
            normed = replaced(normed, name, follow)
        return total, normed

    return add
