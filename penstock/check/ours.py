"""Our side of a comparison: a loaded model, and one recorded pass of a whole prompt.

The caches are paged, as in the engine. The pass never replays a recorded graph: hooks need the Python code to run.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from penstock.check.trace import Call, Trace, float_tensors, replaced, watching
from penstock.kernels.backends import load_ops
from penstock.kernels.metadata import AttentionMetadata, CacheSpec, Heads
from penstock.kernels.ops import Ops
from penstock.layers.attention import Attention
from penstock.layers.context import ForwardContext
from penstock.layers.weights import LayerNorm, RMSNorm, WeightLayer
from penstock.models.config_json import load_model_config
from penstock.planner.memory import free_memory_bytes
from penstock.spec.model_config import ModelConfig
from penstock.weights.loader import load_model

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, eq=False)
class OurModel:
    """One of our models with its weights."""

    directory: Path
    config: ModelConfig
    ops: Ops
    model: nn.Module

    @classmethod
    def load(cls, directory: Path, *, dtype: str, kernels: str, tokens: int) -> "OurModel":
        """Load the model for a prompt of `tokens` tokens.

        Raises:
            ModelLoadError, InvalidRequestError: as load_model.
        """
        config = load_model_config(directory)
        ops = load_ops(kernels, getattr(torch, dtype))
        model = load_model(directory, config, ops, max_model_len=tokens, free_memory=free_memory_bytes)
        return cls(directory, config, ops, cast(nn.Module, model))

    @torch.inference_mode()
    def run(self, ids: list[int], follow: Trace | None = None) -> tuple[Trace, Tensor]:
        """Run one pass over a prompt; return its trace and the logits after each token, [T, V] float32.

        follow: another pass, as in `watching`.
        """
        ctx = self._context(len(ids))
        with _watching(self.model, follow) as trace:
            hidden = self.model(torch.tensor(ids, device=self.ops.device), ctx)
            logits = self.model.compute_logits(hidden)  # type: ignore[operator]
        self._add_head_norms(trace, ctx.positions)
        return trace, logits.clone()

    def _context(self, tokens: int) -> ForwardContext:
        """Return the context of one prompt, from position 0, in blocks 0, 1, 2, ..."""
        config, ops = self.config, self.ops
        num_blocks = -(-tokens // BLOCK_SIZE)
        caches = tuple(
            ops.new_kv_cache(CacheSpec(num_blocks, BLOCK_SIZE, config.num_key_value_heads, config.head_dim, ops.dtype))
            for _ in range(config.num_hidden_layers)
        )
        heads = Heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        metadata, layer_group = [], [0] * config.num_hidden_layers
        for index, (layers, window) in enumerate(config.cache_groups()):
            meta = AttentionMetadata(
                query_start_loc=torch.tensor([0, tokens], dtype=torch.int32),
                seq_lens=torch.tensor([tokens], dtype=torch.int32),
                block_table=torch.arange(num_blocks, dtype=torch.int32)[None],
                slot_mapping=torch.arange(tokens),
                block_size=BLOCK_SIZE,
                sliding_window=window,
            )
            metadata.append(ops.plan(meta, heads, caches[layers[0]]))
            for layer in layers:
                layer_group[layer] = index
        return ForwardContext(torch.arange(tokens, device=ops.device), caches, tuple(metadata), tuple(layer_group))

    def _add_head_norms(self, trace: Trace, positions: Tensor) -> None:
        """Add the norms of q and k to the trace, after the product of q, k and v.

        They are fused with the rotation and so are no calls of their own; here they are computed without it.
        """
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
    """Return every layer that owns parameters, by its name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, WeightLayer)}


@contextmanager
def _watching(model: nn.Module, follow: Trace | None) -> Iterator[Trace]:
    """Do as `watching`, and also record the norms' method `add`, which hooks do not see."""
    with watching(model, follow) as trace, ExitStack() as stack:
        for name, norm in weight_layers(model).items():
            if isinstance(norm, RMSNorm | LayerNorm):
                norm.add = partial(_recorded_add, norm.add, trace, name, follow)  # type: ignore[method-assign]
                stack.callback(delattr, norm, "add")
        yield trace


def _recorded_add(
    add: Callable[..., tuple[Tensor, Tensor]],
    trace: Trace,
    name: str,
    follow: Trace | None,
    x: Tensor,
    h: Tensor | None,
) -> tuple[Tensor, Tensor]:
    total, normed = add(x, h)
    if h is not None:  # otherwise it called itself, and the hook recorded it
        trace.calls.append(Call(name, float_tensors(total), float_tensors(normed)))
        normed = replaced(normed, name, follow)
    return total, normed
