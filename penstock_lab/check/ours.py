"""Our side of a comparison: a loaded model, and one recorded pass over a whole prompt.

The caches are paged, as in the engine. The pass never replays a recorded program, because hooks need the Python code.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.config import BLOCK_SIZE_UNIT, BLOCK_SIZE_UNITS
from penstock.kernels.backends import load_ops
from penstock.kernels.metadata import AttentionMetadata, CacheSpec, Heads
from penstock.kernels.ops import Ops
from penstock.layers.decoder import Attention
from penstock.layers.lora import LoraSlots
from penstock.layers.module import ForwardContext, named_modules, replaced
from penstock.layers.weights import LayerNorm, RMSNorm, adapted_products
from penstock.models.config_json import load_model_config
from penstock.models.registry import find_architecture
from penstock.spec.model_config import ModelConfig
from penstock.spec.pooler import usual_pooler
from penstock.weights.loader import Place, load_model, open_reader, open_stored
from penstock_lab.check.twin import Call, Trace, float_tensors, watching


@dataclass(frozen=True, slots=True, eq=False)
class OurModel:
    """One of our models with its weights."""

    directory: Path
    config: ModelConfig
    ops: Ops
    model: Any
    block_size: int
    adapters: LoraSlots | None = None  # the first one holds the adapter of all tokens

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        dtype: str,
        kernels: str,
        tokens: int,
        device: str | None = None,
        adapter: str | None = None,
    ) -> "OurModel":
        """Load the model for a prompt of `tokens` tokens.

        Args:
            device: as in load_ops.
            adapter: directory of a LoRA adapter for all tokens.

        Raises:
            ModelLoadError, InvalidRequestError: as in load_model.
        """
        config = load_model_config(directory)
        ops = load_ops(kernels, getattr(torch, dtype), device)
        block_size = BLOCK_SIZE_UNITS.get(kernels, BLOCK_SIZE_UNIT)
        place, slices = Place(ops.free_bytes), 3 if dtype == "float32" else 2
        if adapter is None:
            model = load_model(directory, config, ops, max_model_len=tokens, place=place, slices=slices)
            return cls(directory, config, ops, model, block_size)
        found = open_reader(config, open_stored(directory, config, "auto").source).read(Path(adapter))
        lora = LoraSlots(ops, 1, max(part.b.shape[1] for part in found.values()), tokens)
        model = load_model(directory, config, ops, max_model_len=tokens, place=place, slices=slices, lora=lora)
        for name, product in adapted_products(model).items():
            product.load(0, found.get(name))
        return cls(directory, config, ops, model, block_size, lora)

    @torch.inference_mode()
    def run(self, ids: list[int], follow: Trace | None = None) -> tuple[Trace, Tensor]:
        """Run one pass over a prompt. Return its trace and what Twin.run returns, float32.

        follow: another trace, as in Trace.
        """
        ctx = self._context(len(ids))
        with _watching(self.model, follow) as trace:
            hidden = self.model(torch.tensor(ids, device=self.ops.device), ctx)
            logits = self._answer(hidden)
        self._add_head_norms(trace, ctx.positions)
        return trace, logits.clone()

    def _answer(self, hidden: Tensor) -> Tensor:
        """Make of hidden states [T, hidden] what a model of this kind is for."""
        config = self.config
        if not config.labels:
            has_head = find_architecture(config.architecture).has_lm_head
            answer: Tensor = self.model.compute_logits(hidden) if has_head else hidden.float()
            return answer
        kind = usual_pooler(config).pooling_type
        rows = {"CLS": hidden[:1], "LAST": hidden[-1:], "MEAN": hidden.mean(dim=0, keepdim=True)}.get(kind, hidden)
        logits: Tensor = self.model.compute_logits(rows)[:, : len(config.labels)]
        return logits if kind == "ALL" else logits[0]

    def _context(self, tokens: int) -> ForwardContext:
        """Make the context for one prompt that begins at position 0, in blocks 0, 1, 2, ..."""
        config, ops, block_size = self.config, self.ops, self.block_size
        if self.adapters is not None:
            self.adapters.choose(np.zeros(tokens, np.int32))
        num_blocks = -(-tokens // block_size)
        caches, attention = [], []
        for layer, window in enumerate(config.layer_windows):
            own = config.at(layer)
            heads = Heads(own.num_attention_heads, own.num_key_value_heads, own.head_dim)
            cache = ops.new_kv_cache(CacheSpec(num_blocks, block_size, heads.num_kv_heads, heads.head_dim, ops.dtype))
            meta = AttentionMetadata(
                query_start_loc=torch.tensor([0, tokens], dtype=torch.int32),
                seq_lens=torch.tensor([tokens], dtype=torch.int32),
                block_table=torch.arange(num_blocks, dtype=torch.int32)[None],
                slot_mapping=torch.arange(tokens),
                block_size=block_size,
                sliding_window=window,
                chunked=config.chunked_windows,
                bidirectional=config.bidirectional,
            )
            caches.append(cache)
            attention.append(ops.plan(meta, heads, cache))
        positions = torch.arange(tokens, device=ops.device)
        types = torch.zeros_like(positions) if config.num_token_types else None
        return ForwardContext(positions, tuple(caches), tuple(attention), tuple(range(len(caches))), types)

    def _add_head_norms(self, trace: Trace, positions: Tensor) -> None:
        """Add the norms of q and k to the trace, after the product of q, k and v.

        The norms are fused with the rotation, so they are not separate calls; here they are computed without it.
        """
        for name, module in named_modules(self.model):
            if not isinstance(module, Attention) or module.q_norm is None or module.k_norm is None:
                continue
            product = trace.last(f"{name}.qkv_proj") or trace.last(f"{name}.qk_proj")
            if product is None:
                continue
            norms = replace(module.rotary_params, cos_sin=None)
            q, k, _ = self.ops.rotary_qkv(product.outputs[0], positions, norms)
            at = trace.index(product) + 1
            trace[at:at] = [Call(f"{name}.q_norm", (), float_tensors(q)), Call(f"{name}.k_norm", (), float_tensors(k))]


@contextmanager
def _watching(model: object, follow: Trace | None) -> Iterator[Trace]:
    """Record what `watching` records, and also calls of the norms' method `add`, which hooks do not see."""
    with watching(model, follow) as trace, ExitStack() as stack:
        for name, norm in named_modules(model):
            if isinstance(norm, RMSNorm | LayerNorm):
                stack.enter_context(replaced(norm, "add", partial(_recorded_add, norm.add, trace, name)))
        yield trace


def _recorded_add(
    add: Callable[..., tuple[Tensor, Tensor]], trace: Trace, name: str, x: Tensor, h: Tensor | None
) -> tuple[Tensor, Tensor]:
    total, normed = add(x, h)
    if h is not None:  # otherwise the norm called itself, and the hook recorded that
        normed = trace.record(name, float_tensors(total), normed)
    return total, normed
