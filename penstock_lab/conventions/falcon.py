"""Falcon-40B's decode backend (Tenstorrent), in the names of its document: Falcon's version "efficient-40b".

    LLM(model, model_impl="efficient-40b")                          the engine, with this graph
    RWForCausalLM.main_forward_part(input_ids, position_ids=..., ...) the graph itself, a function of its arguments

The graph has one shape. A step has 32 user rows, each with one new token or none, and reads and returns the whole cache
as a flat list of tensors; with 60 layers and 8 key/value heads they are 960:

    input_ids, position_ids, kv_mask_id   [1, 32] int64; kv_mask_id is the slot of each row's token, -1 in empty rows
    attention_mask                        [1, 32, S] bool, the slots that a row sees
    past_key_values                       per layer G keys, then G values, [1, 32, S, D] each
    hidden_states                         [1, 32, hidden]; those of empty rows are NaN, and change no other row

Every group (a key/value head with its query heads) has products of its own, wq_list, wk_list, wv_list and dense_list.
Attention is in two parts, the cache and the new token, so it does not wait for the cache, which is updated without a
scatter: cache * read_mask + new * write_mask. With `fuse`, a layer has one product for all groups, one attention, and
one call for a sum and the norm after it; no bit changes. Neither do `fracture_attn` (the parts of all queries) and
`fracture_mlp` (the parts of the feed-forward branch).

Its arithmetic is the engine's, so a token has the engine's bits. Two things differ from the document for that: a layer
adds attention to the residual stream before it adds the feed-forward branch, and rounds as kernels/ops.py says.

Letters: S slots of a row (seqlen), G key/value heads, H query heads, D head dim, T packed tokens of the engine.
"""

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.errors import fail, unsupported
from penstock.kernels.attention.items import GRANULE
from penstock.kernels.metadata import AttentionMetadata, AttentionParams, CacheSpec, Heads, KVCache
from penstock.kernels.ops import Ops, Packing, RowSource, SplittingOps, TensorRows
from penstock.kernels.reference.attention import Scoring, finish
from penstock.kernels.tensors import as_array, as_torch, tree_sum
from penstock.layers.factory import LayerFactory
from penstock.layers.module import ForwardContext
from penstock.layers.weights import ActivatedLinear, Linear, cut_rows, whole
from penstock.models.falcon.model import FalconForCausalLM
from penstock.ranks.layers import RankFactory, row_magnitudes
from penstock.spec.model_config import ModelConfig
from penstock_lab.chips.parts import Part, parts_of
from penstock_lab.conventions.tiled_attention import attend_parts

USER_ROWS = 32
OPTIONS = ("fuse", "fracture_attn", "fracture_mlp")
FRACTURES = (0, 1, 2, 4, 8)  # parts of the feed-forward branch; 0 as 1
Bounds = Sequence[tuple[int, int]]


# --- the operator ----------------------------------------------------------------------------------------------------


def flash_decode_attention(
    Q: Tensor, Ks: Sequence[Tensor], Vs: Sequence[Tensor], attn_masks: Sequence[Tensor | None], *, loops: int = 2
) -> Tensor:
    """Attend to several sets of keys, here the cache and the new token, in plain torch.

    Args:
        Q: queries of one key/value head, [1, users, heads, D].
        Ks, Vs: keys and values of each set, [1, users, keys, D].
        attn_masks: of each set, [1, users, heads, keys] bool, true where a query sees a key; None: it sees all.
        loops: 2 gathers the statistics of all sets in a first loop and multiplies with the values in a second one; 1
            is the online softmax, which rescales what it has at every set.

    Returns:
        [1, users, heads, D].

    Raises:
        InvalidRequestError: loops is neither 1 nor 2.
    """
    sets = [
        (k[0, :, :, None], v[0, :, :, None], None if mask is None else mask[0, :, :, None])
        for k, v, mask in zip(Ks, Vs, attn_masks, strict=True)
    ]
    out, _ = finish(attend_parts(Q[0, :, None], sets, Scoring(Q.shape[-1] ** -0.5), loops=loops))
    return out[None, :, 0]


class NativeOperator:
    """The engine's attention over the same two sets: the cache, whose seen slots are stored in a block for each row,
    and the new token, which is not stored."""

    def __init__(self, ops: Ops, head_dim: int, slots: int) -> None:
        self._ops, self._dim = ops, head_dim
        self._block = -(-(slots + 1) // GRANULE) * GRANULE
        self._caches: dict[int, KVCache] = {}  # by the number of key/value heads
        self._step: tuple[Tensor, Tensor, AttentionMetadata] | None = None  # mask, slots, metadata

    def __call__(
        self, q: Tensor, ks: Sequence[Tensor], vs: Sequence[Tensor], seen: Tensor, params: AttentionParams
    ) -> Tensor:
        """Attend to the cache and the new tokens of G groups.

        q: [1, 32, H, D]; ks, vs: the cache [G, 32, S, D], then the new tokens [G, 32, 1, D]; seen: [32, S] bool.

        Returns:
            [1, 32, H, D].
        """
        (k_old, k_new), (v_old, v_new) = ks, vs
        groups, users = k_old.shape[0], k_old.shape[1]
        if groups not in self._caches:
            spec = CacheSpec(users, self._block, groups, self._dim, self._ops.dtype)
            self._caches[groups] = self._ops.new_kv_cache(spec)
        cache = self._caches[groups]
        slots, meta = self._plan(seen, users)
        keys, values = (x.permute(1, 2, 0, 3)[seen].contiguous() for x in (k_old, v_old))  # packed: [N, G, D]
        self._ops.store_kv(cache, keys, values, slots)
        planned = self._ops.plan(meta, Heads(q.shape[2], groups, self._dim), cache)
        key, value = (x[:, :, 0].transpose(0, 1).contiguous() for x in (k_new, v_new))
        mixed: Tensor = as_torch(self._ops.attend(q[0].contiguous(), key, value, cache, planned, params))
        return mixed.view(q.shape)

    def _plan(self, seen: Tensor, users: int) -> tuple[Tensor, AttentionMetadata]:
        """Find where the seen slots are stored, and describe the step; layers of a step share both."""
        step = self._step
        if step is None or not torch.equal(step[0], seen):
            counts = seen.sum(dim=1)
            row, _ = seen.nonzero(as_tuple=True)
            place = torch.cat([torch.arange(count) for count in counts.tolist()])
            meta = AttentionMetadata(
                torch.arange(users + 1, dtype=torch.int32),
                (counts + 1).to(torch.int32),
                torch.arange(users, dtype=torch.int32)[:, None],
                torch.full((users,), -1),
                self._block,
                None,
            )
            step = self._step = seen.clone(), row * self._block + place, meta
        return step[1:]


# --- products in parts -----------------------------------------------------------------------------------------------


class ListLinear(Linear):
    """The products of a ModuleList, each with some rows of one weight: x [M, K] -> the columns of all of them."""

    def __init__(self, like: Linear, bounds: Bounds) -> None:
        Linear.__init__(self, like.ops, like.spec, like.out)
        self.pieces = [(begin, end, like.spec.packing) for begin, end in bounds]

    def _sources(self, weight: Any) -> Sequence[Any]:
        return cut_rows(weight, [(begin, end) for begin, end, _ in self.pieces])


class ListActivated(ListLinear, ActivatedLinear):
    """The same with an activation."""

    def __init__(self, like: ActivatedLinear, bounds: Bounds) -> None:
        super().__init__(like, bounds)
        self.activation = like.activation


class ListSum(Linear):
    """x [M, K] -> x @ weight.T + bias [M, N] float32, as the sum of products that have some leaves of K each."""

    def __init__(self, like: Linear, parts: Sequence[Part]) -> None:
        super().__init__(like.ops, like.spec, like.out)
        self.parts = parts

    def load(self, values: Mapping[str, Tensor | RowSource]) -> None:
        weight, scheme = whole(values["weight"]), self.spec.packing.scheme
        ops: Any = self.ops
        self.bias = as_torch(whole(values["bias"])).to(ops.dtype).float() if self.spec.bias else None
        self.scales = None
        if scheme is None:
            parts = [(TensorRows(part.of(weight)), Packing(part.ends)) for part in self.parts]
            self.packed = tuple(ops.pack_linear(rows, None, packing) for rows, packing in parts)
            return
        magnitudes, found = row_magnitudes(TensorRows(weight)), []
        for part in self.parts:
            found.append(ops.pack_part(TensorRows(part.of(weight)), magnitudes, Packing(part.ends, scheme)))
        self.packed, self.scales = tuple(packed for packed, _ in found), as_torch(found[0][1])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(x.shape[0])
        products = [
            as_array(self.ops.linear(x[:, slice(*part.depth)].contiguous(), packed))
            for part, packed in zip(self.parts, self.packed, strict=True)
        ]
        tree_sum(products, as_array(out))
        if self.scales is not None:
            out *= self.scales
        if self.bias is not None:
            out += self.bias
        return out


# --- the graph -------------------------------------------------------------------------------------------------------


def apply_rotary_pos_emb(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of heads [1, heads, users, D] by cos and sin [1, 1, users, D]."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


class DecoderLayer:
    """A block of Falcon over user rows."""

    def __init__(self, block: Any, cfg: ModelConfig, operator: NativeOperator, parts: int, *, fuse: bool) -> None:
        """parts: of all queries. fuse: compute the groups together."""
        self.block, self.attention, self.operator, self.fuse = block, block.self_attention, operator, fuse
        self.groups, self.num_heads, self.head_dim = cfg.num_key_value_heads, cfg.num_attention_heads, cfg.head_dim
        self.heads_each = cfg.num_attention_heads // parts
        self.is_parallel, self.shares_norm = cfg.num_parallel_norms > 0, cfg.num_parallel_norms == 1

    def forward(
        self,
        hidden_states: Tensor,
        *,
        layer_past: Sequence[Tensor],
        attention_mask: Tensor,
        kv_read_mask: Tensor,
        kv_write_mask: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Compute the residual stream after this layer, and its cache with the new tokens.

        hidden_states: [32, hidden] float32, which is written over; layer_past: G keys and G values [1, 32, S, D];
        attention_mask: [1, 32, H / G, S] bool; kv_read_mask, kv_write_mask: [1, 32, S, D]; cos, sin: [1, 1, 32, D],
        or None for a model that does not rotate.
        """
        block, ops = self.block, self.block.ops
        norm = block.ln_attn if self.is_parallel and not self.shares_norm else block.input_layernorm
        y = norm(hidden_states).clone()  # another norm may use the same buffer
        z = block.ln_mlp(hidden_states).clone() if self.is_parallel and not self.shares_norm else y
        branch, keys, values = self._attend(y, layer_past, attention_mask[0, :, 0], cos, sin)
        if self.is_parallel:
            x = ops.add(hidden_states, branch)
        elif self.fuse:
            x, z = block.post_attention_layernorm.add(hidden_states, branch)
        else:
            x = ops.add(hidden_states, branch)
            z = block.post_attention_layernorm(x)
        output = ops.add(x, block.mlp(z))
        merged = [
            cache * kv_read_mask + new * kv_write_mask for cache, new in zip(layer_past, keys + values, strict=True)
        ]
        return output, merged[: self.groups], merged[self.groups :]

    def _attend(
        self, y: Tensor, layer_past: Sequence[Tensor], seen: Tensor, cos: Tensor | None, sin: Tensor | None
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Compute the branch [32, hidden], and the new keys and values of each group, [1, 32, 1, D]."""
        queries, keys, values = self._project(y, cos, sin)
        keys_cache, values_cache = layer_past[: self.groups], layer_past[self.groups :]
        params, slopes = self.attention.params, self.attention.params.alibi_slopes
        if self.fuse:
            ks, vs = ([torch.cat([*old]), torch.cat(new)] for old, new in ((keys_cache, keys), (values_cache, values)))
            mixed = [self.operator(torch.cat(queries, dim=2), ks, vs, seen, params)]
        else:
            mixed = []
            for part, q in enumerate(queries):
                first = part * self.heads_each
                i, own = first * self.groups // self.num_heads, params
                if slopes is not None:
                    own = replace(params, alibi_slopes=slopes[first : first + self.heads_each].clone())
                ks, vs = [keys_cache[i], keys[i]], [values_cache[i], values[i]]
                mixed.append(self.operator(q, ks, vs, seen, own))
        return self.attention.o_proj(torch.cat(mixed, dim=2).reshape(len(y), -1)), keys, values

    def _project(
        self, y: Tensor, cos: Tensor | None, sin: Tensor | None
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Compute the parts of the queries [1, 32, heads, D], and each group's key and value [1, 32, 1, D]."""
        product = self.attention.qkv_proj(y).view(1, len(y), -1, self.head_dim)
        query, key, value = product.split([self.num_heads, self.groups, self.groups], dim=2)
        if cos is not None and sin is not None:
            query, key = (apply_rotary_pos_emb(x.transpose(1, 2), cos, sin).transpose(1, 2) for x in (query, key))
        query, key, value = (x.to(self.attention.ops.dtype) for x in (query, key, value))
        return [*query.split(self.heads_each, dim=2)], [*key.split(1, dim=2)], [*value.split(1, dim=2)]


class SequentialCaller:
    """The layers one after the other, from and to a flat list of the whole cache."""

    def __init__(self, layers: Sequence[DecoderLayer]) -> None:
        self.layers = layers

    def __call__(
        self, hidden_states: Tensor, cos: Tensor | None, sin: Tensor | None, attention_mask: Tensor, *args: Tensor
    ) -> tuple[Tensor, ...]:
        """Compute (hidden_states, *flattened_kv) of the same arguments, with kv_mask_id as the last one.

        hidden_states: [1, 32, hidden]; attention_mask: [1, 32, H / G, S]; kv_mask_id: [1, 32].
        """
        *flattened_kv, kv_mask_id = args
        slots, head_dim = flattened_kv[0].shape[2:]
        write = (torch.arange(slots) == kv_mask_id[..., None]).to(flattened_kv[0].dtype)
        kv_write_mask = write[..., None].expand(-1, -1, -1, head_dim)
        kv_read_mask = 1 - kv_write_mask
        x, result, each = hidden_states[0].clone(), [], len(flattened_kv) // len(self.layers)
        for i, block in enumerate(self.layers):
            x, key_past, value_past = block.forward(
                x,
                layer_past=flattened_kv[i * each : (i + 1) * each],
                attention_mask=attention_mask,
                kv_read_mask=kv_read_mask,
                kv_write_mask=kv_write_mask,
                cos=cos,
                sin=sin,
            )
            result.extend(key_past + value_past)
        return x[None], *result


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """The results of a step.

    Attributes:
        logits: [1, 32, V'], with the padding; None without the head.
        last_hidden_state: [1, 32, hidden] after the final norm.
        past_key_values: the cache with the new tokens, a list like the one that was given.
        seconds: how long the step took, if it was asked for.
    """

    logits: Tensor | None
    last_hidden_state: Tensor
    past_key_values: list[Tensor]
    seconds: float | None = None


class RWForCausalLM(FalconForCausalLM):
    """Falcon with products in lists, whose forward pass is the graph. The engine calls it as it calls every model."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory) -> None:
        """Build the graph without weights. `cfg.extra` may have its options:

        fuse: compute all groups of a layer together; fracture_attn: parts of all queries, a multiple of the key/value
        heads (0: as many as these); fracture_mlp: parts of the feed-forward branch.

        Raises:
            NotSupportedError: ranks share the model, or its attention has a window.
            InvalidRequestError: a fracture is not possible.
        """
        if isinstance(make, RankFactory):
            raise unsupported("model_impl", "the graph is not shared by ranks; fracture it")
        if any(cfg.layer_windows):
            raise unsupported("sliding_window", "the graph has no window")
        super().__init__(cfg, make)
        fuse, fracture_attn, fracture_mlp = (cfg.extra.get(name, 0) for name in OPTIONS)
        groups, heads = cfg.num_key_value_heads, cfg.num_attention_heads
        parts = fracture_attn or groups
        if parts % groups or heads % parts or (fuse and parts != groups):
            raise fail(
                "fracture_attn", fracture_attn, f"0, or a multiple of {groups} that divides {heads}; 0 with fuse"
            )
        if fracture_mlp not in FRACTURES:
            raise fail("fracture_mlp", fracture_mlp, f"one of {', '.join(map(str, FRACTURES))}")
        self.cfg, self.ops, self.num_slots = cfg, make.ops, make.max_positions or cfg.context
        operator = NativeOperator(make.ops, cfg.head_dim, self.num_slots)
        for index, block in enumerate(self.decoder.h):
            at = make.at(f"transformer.h.{index}")
            if not fuse:
                _make_lists(block.self_attention, at, cfg, parts)
            if fracture_mlp > 1:
                _fracture(block.mlp, at, fracture_mlp)
        self._blocks = SequentialCaller(
            [DecoderLayer(block, cfg, operator, parts, fuse=fuse) for block in self.decoder.h]
        )

    def init_kv_cache(self, device: str = "cpu") -> list[Tensor]:
        """Make an empty cache: zeros [1, 32, S, D], for each layer G keys and G values."""
        return init_kv_cache(self.cfg, self.num_slots, self.ops.dtype, device)

    def main_forward_part(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor,
        attention_mask: Tensor,
        kv_mask_id: Tensor,
        past_key_values: Sequence[Tensor],
        inputs_embeds: Tensor | None = None,
        profile_runtime: bool = False,
        on_device_lm_head: bool = True,
    ) -> ForwardOutput:
        """Compute one step of all user rows, and change none of the arguments.

        Args:
            input_ids, position_ids, kv_mask_id: [1, 32] int64.
            attention_mask: [1, 32, S] bool, which does not include the new tokens.
            past_key_values: as `init_kv_cache` makes them.
            inputs_embeds: [1, 32, hidden] float32 in place of the embeddings of input_ids.
            profile_runtime: measure the time.
            on_device_lm_head: compute logits; otherwise hidden states come back.

        Raises:
            InvalidRequestError: an argument has another shape or type.
        """
        started = time.perf_counter()
        self._check(input_ids, position_ids, attention_mask, kv_mask_id, past_key_values)
        transformer, users = self.decoder, input_ids.shape[1]
        empty = kv_mask_id < 0
        if inputs_embeds is None:
            inputs_embeds = transformer.word_embeddings(input_ids[0])[None]
        hidden_states = inputs_embeds.masked_fill(empty[..., None], float("nan"))
        cos, sin = self._rotary_emb(position_ids)
        group = self.cfg.num_attention_heads // self.cfg.num_key_value_heads
        dense_mask = attention_mask[:, :, None].expand(-1, -1, group, -1)
        hidden, *past = self._blocks(hidden_states, cos, sin, dense_mask, *past_key_values, kv_mask_id)
        last = transformer.ln_f(hidden[0]).clone()[None]
        logits = self.compute_logits(last[0]).view(1, users, -1).clone() if on_device_lm_head else None
        return ForwardOutput(logits, last, past, time.perf_counter() - started if profile_runtime else None)

    def _rotary_emb(self, position_ids: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Look up cos and sin [1, 1, 32, D] of each row's position."""
        rotary = self.decoder.h[0].self_attention.rotary
        if rotary is None:
            return None, None
        cos, sin = rotary.cos_sin[position_ids].chunk(2, dim=-1)
        return torch.cat([cos, cos], dim=-1)[None], torch.cat([sin, sin], dim=-1)[None]

    def _check(self, input_ids: Tensor, position_ids: Tensor, mask: Tensor, kv_mask_id: Tensor, past: Any) -> None:
        row, whole_number = [1, USER_ROWS], torch.int64
        for name, given, shape, dtype in (
            ("input_ids", input_ids, row, whole_number),
            ("position_ids", position_ids, row, whole_number),
            ("kv_mask_id", kv_mask_id, row, whole_number),
            ("attention_mask", mask, [*row, self.num_slots], torch.bool),
        ):
            if ([*given.shape], given.dtype) != (shape, dtype):
                raise fail(name, f"{[*given.shape]} {given.dtype}", f"{shape} {dtype}")
        count = 2 * self.cfg.num_key_value_heads * self.cfg.num_hidden_layers
        shape = [*row, self.num_slots, self.cfg.head_dim]
        if len(past) != count or any([*x.shape] != shape for x in past):
            raise fail("past_key_values", f"{len(past)} tensors", f"{count} tensors {shape}")

    # --- as a model of the engine ------------------------------------------------------------------------------------

    def forward(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """Map packed ids [T] int64 to hidden states [T, hidden] dtype, in steps of one token of up to 32 sequences."""
        _, meta = ctx.layer(0)
        starts, lengths = as_array(meta.query_start_loc), as_array(meta.seq_lens)
        hidden = torch.empty(len(input_ids), self.cfg.hidden_size, dtype=self.ops.dtype)
        for first in range(0, len(lengths), USER_ROWS):
            chosen = range(first, min(first + USER_ROWS, len(lengths)))
            rows = [(int(starts[b]), int(starts[b + 1]), int(lengths[b])) for b in chosen]
            self._run(input_ids, ctx, torch.as_tensor(meta.block_table)[list(chosen)].long(), rows, hidden)
        return hidden

    def _run(
        self, input_ids: Tensor, ctx: ForwardContext, tables: Tensor, rows: list[tuple[int, int, int]], hidden: Tensor
    ) -> None:
        """Compute the new tokens of up to 32 sequences: (first token, past-the-last token, length) each."""
        _, meta = ctx.layer(0)
        cached = [length - (end - begin) for begin, end, length in rows]
        row = torch.tensor([index for index, count in enumerate(cached) for _ in range(count)], dtype=torch.int64)
        place = torch.tensor([place for count in cached for place in range(count)], dtype=torch.int64)
        slots = tables[row, place // meta.block_size] * meta.block_size + place % meta.block_size
        past = self._read(ctx, row, place, slots)
        for step in range(max(end - begin for begin, end, _ in rows)):
            inputs, active = self._inputs(input_ids, rows, cached, step)
            output = self.main_forward_part(**inputs, past_key_values=past, on_device_lm_head=False)
            tokens = [begin + step for begin, end, _ in rows if begin + step < end]
            hidden[tokens] = output.last_hidden_state[active]
            kept = active[..., None, None]  # the rows of others are NaN now
            past = [torch.where(kept, new, old) for new, old in zip(output.past_key_values, past, strict=True)]
        row = torch.tensor([index for index, (begin, end, _) in enumerate(rows) for _ in range(begin, end)])
        place = torch.tensor([count + at for (begin, end, _), count in zip(rows, cached, strict=True)
                              for at in range(end - begin)])  # fmt: skip
        new = torch.as_tensor(meta.slot_mapping)[rows[0][0] : rows[-1][1]]
        groups = self.cfg.num_key_value_heads
        for layer in range(self.cfg.num_hidden_layers):
            stored = [x[0, row, place] for x in past[2 * groups * layer : 2 * groups * (layer + 1)]]
            keys, values = (torch.stack(part, dim=1) for part in (stored[:groups], stored[groups:]))
            self.ops.store_kv(ctx.layer(layer)[0], keys, values, new)

    def _read(self, ctx: ForwardContext, row: Tensor, place: Tensor, slots: Tensor) -> list[Tensor]:
        """Read the cached tokens of all layers."""
        past = self.init_kv_cache()
        if len(slots):
            each = 2 * self.cfg.num_key_value_heads
            for layer in range(self.cfg.num_hidden_layers):
                found = torch.cat([*self.ops.load_kv(ctx.layer(layer)[0], slots)], dim=1).to(self.ops.dtype)
                for index, x in enumerate(past[layer * each : (layer + 1) * each]):
                    x[0, row, place] = found[:, index]
        return past

    def _inputs(
        self, input_ids: Tensor, rows: list[tuple[int, int, int]], cached: list[int], step: int
    ) -> tuple[dict[str, Any], Tensor]:
        """Make the inputs of one step, and say which rows are in use, [1, 32] bool."""
        active = torch.zeros(1, USER_ROWS, dtype=torch.bool)
        ids, positions = (torch.zeros(1, USER_ROWS, dtype=torch.int64) for _ in range(2))
        for index, ((begin, end, _), count) in enumerate(zip(rows, cached, strict=True)):
            if begin + step < end:
                active[0, index], ids[0, index], positions[0, index] = True, input_ids[begin + step], count + step
        return static_inputs(ids, positions, active, self.num_slots), active


def static_inputs(input_ids: Tensor, position_ids: Tensor, active: Tensor, slots: int) -> dict[str, Any]:
    """Make the inputs of a step of rows [1, 32] that store their tokens at the slots of their positions."""
    return {
        "input_ids": input_ids,
        "position_ids": position_ids,
        "attention_mask": (torch.arange(slots) < position_ids[..., None]) & active[..., None],
        "kv_mask_id": torch.where(active, position_ids, -1),
    }


def init_kv_cache(cfg: ModelConfig, slots: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """Make an empty cache for 32 user rows. device: "meta" takes no memory."""
    count = 2 * cfg.num_key_value_heads * cfg.num_hidden_layers
    return [torch.zeros(1, USER_ROWS, slots, cfg.head_dim, dtype=dtype, device=device) for _ in range(count)]


def _make_lists(attention: Any, make: LayerFactory, cfg: ModelConfig, parts: int) -> None:
    """Split the products of attention into wq_list, wk_list, wv_list and dense_list, as the parameter table divides
    queries, keys and values."""
    pieces = make.parameters[f"{make.prefix}self_attention.qkv_proj.weight"].layouts[-1].pieces
    counts = parts, cfg.num_key_value_heads, cfg.num_key_value_heads
    qkv = [size // count for size, count in zip(pieces, counts, strict=True) for _ in range(count)]
    dense = [cfg.hidden_size * (i + 1) // parts - cfg.hidden_size * i // parts for i in range(parts)]
    for name, sizes in (("qkv_proj", qkv), ("o_proj", dense)):
        linear, ends = getattr(attention, name), [*itertools.accumulate(sizes)]
        if not linear.spec.pieces:  # rows that are coded differently are products of their own
            setattr(attention, name, ListLinear(linear, list(zip([0, *ends], ends, strict=False))))
    attention._project = attention.qkv_proj


def _fracture(mlp: Any, make: LayerFactory, count: int) -> None:
    """Split a feed-forward branch into parts of the features between its products."""
    parameters = [make.parameters[f"{make.prefix}mlp.{name}.weight"] for name in ("up_proj", "down_proj")]
    if mlp.up_proj.spec.is_coded or mlp.down_proj.spec.is_coded:
        raise fail("fracture_mlp", count, "0 for weights that keep the codes of their checkpoint")
    if mlp.down_proj.spec.packing.scheme is not None and not isinstance(make.ops, SplittingOps):
        raise fail("fracture_mlp", count, "0 for quantised weights, unless native kernels compute")
    up, down = (parts_of(parameter, range(count)) for parameter in parameters)
    mlp.up_proj = ListActivated(mlp.up_proj, [rows for part in up for rows in part.rows])
    mlp.down_proj = ListSum(mlp.down_proj, down)
