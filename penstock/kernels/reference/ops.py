"""ReferenceOps: plain torch, to be read beside kernels/ops.py, which describes its methods.

It rounds exactly where the contract says: operands are rounded to `dtype` and multiplied in float32, which equals a
bfloat16 product with float32 accumulation. It guarantees a tolerance, not identical bits, because torch may sum in
another order when the number of rows changes; so the leaves of K are not summed separately. Quantised operands are
scaled back before they are multiplied, while the native kernels multiply integers (native/products/products.h) and
scale the sums.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from penstock.errors import NotSupportedError, unsupported
from penstock.kernels.coding import CodedRows, decode
from penstock.kernels.cpu.host import free_memory_bytes
from penstock.kernels.metadata import (
    AttentionMetadata,
    AttentionParams,
    CacheSpec,
    Heads,
    KVCache,
    KVScales,
    RotaryParams,
    RouterParams,
    own,
)
from penstock.kernels.ops import PLAIN, REDUCTION_LEAVES, LoraTable, PackedLinear, Packing, RowSource, XieluCurve
from penstock.kernels.reference import attention, sampling
from penstock.kernels.reference import quantized_kv as kv
from penstock.kernels.reference.attention import Int8KVCache, ReferenceKVCache
from penstock.kernels.reference.quantized_weights import dequantize_int4, dequantize_int8, quantize_int4, quantize_int8
from penstock.kernels.sampling import SamplingTensors, TokenScores
from penstock.kernels.scheme import Scheme
from penstock.kernels.tensors import FIXED_ROWS, Array, Dtype, as_array, as_torch, dtype_of

CLAMP = 7.0  # of clamped_silu
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "clamped_silu": lambda x: x.clamp(max=CLAMP) * torch.sigmoid(1.702 * x.clamp(max=CLAMP)),
    "relu2": lambda x: functional.relu(x).square(),
    "relu": functional.relu,
    "tanh": torch.tanh,
}
CACHE_DTYPES = (torch.float32, torch.bfloat16, torch.float64)  # float64 makes an oracle


class ReferenceLinear:
    """A weight [N, K] and its bias [N], rounded to the model's type, quantised, scaled back, and kept in float32.

    A coded weight has the values of coding.decode, and its activations are quantised as its packing says.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, packing: Packing, order: Tensor | None = None) -> None:
        """order: the column of each stored column of a coded weight that has an order."""
        self.shape = (weight.shape[0], weight.shape[1])
        scheme, coding = packing.scheme, packing.coding
        self._slices = None if scheme is None else scheme.slices
        if coding is not None and coding.is_integer:
            self._slices = packing.slices
        self._leaf_ends = packing.leaf_ends or (weight.shape[1],)
        self._order = order
        self._weight = weight if scheme is None else _through_weight(weight, scheme, self._leaf_ends)
        self._bias = bias
        self.num_bytes = 4 * (weight.numel() + (0 if bias is None else bias.numel()))

    def __call__(self, x: Tensor) -> Tensor:
        if self._slices is None:
            x = x.float()
        elif self._order is None:
            x = _through_activations(x, self._slices, self._leaf_ends)
        else:
            stored = _through_activations(x[:, self._order], self._slices, self._leaf_ends)
            x = torch.empty_like(stored)
            x[:, self._order] = stored
        return functional.linear(x, self._weight, self._bias)

    def take(self, ids: Tensor) -> Tensor:
        """Gather rows of the weight, [T, K] float32."""
        return self._weight[ids]

    def state(self) -> dict[str, Tensor]:
        raise _no_packed_form()


class ReferenceOps:
    """All operations on one device. dtype: the type of weights and of the operands of products."""

    name = "reference"
    is_planned = False
    fixed_rows = FIXED_ROWS
    leaves = REDUCTION_LEAVES

    def __init__(self, dtype: Dtype, device: Any = "cpu") -> None:
        self.dtype: torch.dtype = dtype_of(str(dtype).removeprefix("torch."), torch.float32)
        self.device = torch.device(device)

    def free_bytes(self) -> int:
        return free_memory_bytes()

    def is_lost(self) -> bool:
        return False

    def tensor(self, array: Array) -> Tensor:
        found: Tensor = as_torch(array).to(self.device)
        return found

    def empty(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        return torch.empty(shape, dtype=dtype_of(dtype, self.dtype), device=self.device)

    def pack_linear(
        self, weight: Tensor | RowSource, bias: Tensor | None = None, packing: Packing = PLAIN
    ) -> PackedLinear:
        rounded_bias = None if bias is None else self._round(bias)
        if packing.coding is not None:
            assert isinstance(weight, CodedRows), weight
            parts = weight.read_parts(0, weight.shape[0])
            values, order = self.tensor(decode(packing.coding, parts)), parts.get("order")
            return ReferenceLinear(values, rounded_bias, packing, None if order is None else self.tensor(order))
        whole = weight.read(0, weight.shape[0]) if hasattr(weight, "read") else weight
        return ReferenceLinear(self._round(whole), rounded_bias, packing)

    def packed_bytes(self, shape: tuple[int, ...], packing: Packing = PLAIN, *, bias: bool = False) -> int:
        return 4 * (math.prod(shape) + (shape[0] if bias else 0))

    def restore_linear(
        self, shape: tuple[int, ...], state: Mapping[str, Tensor], packing: Packing = PLAIN
    ) -> PackedLinear:
        raise _no_packed_form()

    def linear(self, x: Tensor, weight: PackedLinear, *, out: Tensor | None = None) -> Tensor:
        return _deliver(own(weight, ReferenceLinear)(x), torch.float32, out)

    def gated_linear(self, x: Tensor, weight: PackedLinear, activation: str, *, out: Tensor | None = None) -> Tensor:
        return self.activate(own(weight, ReferenceLinear)(x), activation, gated=True, out=out)

    def activated_linear(
        self, x: Tensor, weight: PackedLinear, activation: str, *, out: Tensor | None = None
    ) -> Tensor:
        return self.activate(own(weight, ReferenceLinear)(x), activation, out=out)

    def activate(self, x: Tensor, activation: str, *, gated: bool = False, out: Tensor | None = None) -> Tensor:
        gate, up = x.chunk(2, dim=-1) if gated else (x, None)
        if up is not None and activation == "clamped_silu":
            up = up.clamp(-CLAMP, CLAMP) + 1
        return _deliver(ACTIVATIONS[activation](gate) * (1.0 if up is None else up), self.dtype, out)

    def group_rows(self, slots: Array) -> Array:
        return slots

    def lora_shrink(self, x: Tensor, table: LoraTable, slots: Tensor, *, out: Tensor) -> Tensor:
        for slot in set(slots.tolist()) - {-1}:
            rows, rank = slots == slot, int(table.ranks[slot])
            found = torch.einsum("mk,prk->mpr", x[rows].float(), table.a[slot, :, :rank].float())
            out[rows, :, :rank] = found.to(out.dtype)
        return out

    def lora_expand(self, hidden: Tensor, table: LoraTable, slots: Tensor, y: Tensor) -> Tensor:
        for slot in set(slots.tolist()) - {-1}:
            rows, rank = slots == slot, int(table.ranks[slot])
            changed, b = y[rows], table.b[slot, :, :rank].transpose(0, 1).flatten(1)[:, : y.shape[1]].float()
            if table.scaled[slot]:
                changed = changed * table.factors[slot] + table.offsets[slot]
            for piece, (begin, end) in enumerate(itertools.pairwise((0, *table.piece_ends))):
                changed[:, begin:end] += hidden[rows, piece, :rank] @ b[:, begin:end]
            y[rows] = changed
        return y

    def embedding(self, ids: Tensor, weight: Tensor, *, scale: float = 1.0, out: Tensor | None = None) -> Tensor:
        return _deliver(weight[ids].float() * scale, torch.float32, out)

    def packed_embedding(
        self, ids: Tensor, weight: PackedLinear, *, scale: float = 1.0, out: Tensor | None = None
    ) -> Tensor:
        return _deliver(own(weight, ReferenceLinear).take(ids) * scale, torch.float32, out)

    def experts(
        self,
        x: Tensor,
        gate_up: Sequence[PackedLinear],
        down: Sequence[PackedLinear],
        chosen: tuple[Tensor, Tensor],
        activation: str,
        *,
        weigh_inputs: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        ids, weights = chosen
        total = torch.zeros((len(x), down[0].shape[0]), dtype=torch.float32, device=x.device)
        for expert, (gate, plain) in enumerate(zip(gate_up, down, strict=True)):
            rows, places = (ids == expert).nonzero(as_tuple=True)
            weight = weights[rows, places, None]
            inputs = (x[rows] * weight).to(self.dtype) if weigh_inputs else x[rows]
            branch = self.linear(self.gated_linear(inputs, gate, activation), plain)
            total[rows] += branch if weigh_inputs else weight * branch
        return _deliver(total, torch.float32, out)

    def route(
        self, logits: Tensor, params: RouterParams, *, out: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        params.check(logits.shape[1])
        scores = {"softmax": logits.softmax(dim=-1), "sigmoid": logits.sigmoid()}.get(params.scores, logits)
        choice = scores if params.bias is None else scores + params.bias
        if params.groups > 1:
            choice = _best_groups(choice, params)
        ids = _largest(choice, params.top_k)
        mixes = params.scores == "sparsemixer"
        weights = _shares(logits, ids, params.threshold) if mixes else scores.gather(1, ids)
        if params.scores == "chosen_sigmoid":
            weights = weights.sigmoid()
        if params.renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=params.min_sum)
        weights = weights * params.scale
        if params.expert_scale is not None:
            weights = weights * params.expert_scale[ids]
        ids_out, weights_out = out or (None, None)
        return _deliver(ids, torch.int64, ids_out), _deliver(weights, torch.float32, weights_out)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, *, dtype: torch.dtype | None = None, out: Tensor | None = None
    ) -> Tensor:
        return _deliver(_rms_norm(x, weight, eps), dtype or self.dtype, out)

    def add_rms_norm(
        self, x: Tensor, h: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        x += h
        return x, self.rms_norm(x, weight, eps, out=out)

    def layer_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        *,
        dtype: Dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        deviation = x - x.mean(dim=-1, keepdim=True)
        scaled = _rms_norm(deviation, weight, eps)
        return _deliver(scaled if bias is None else scaled + bias, dtype or self.dtype, out)

    def add_layer_norm(
        self, x: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        x += h
        return x, self.layer_norm(x, weight, bias, eps, out=out)

    def add(self, x: Tensor, h: Tensor) -> Tensor:
        x += h
        return x

    def add_gated(self, x: Tensor, h: Tensor, gates: Tensor) -> Tensor:
        x += gates.sigmoid() * h
        return x

    def round(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return _deliver(x, self.dtype, out)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x.mul_(factor)

    def xielu(self, x: Tensor, curve: XieluCurve, *, out: Tensor | None = None) -> Tensor:
        below = torch.expm1(x.clamp(max=curve.bound)) - x
        bent = torch.where(x > 0, curve.convex * x.square(), curve.concave * below)
        return _deliver(bent + curve.linear * x, self.dtype, out)

    def norm_heads(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        heads = x[:, : weight.numel()].view(len(x), *weight.shape)
        heads.copy_(_rms_norm(heads - heads.mean(dim=-1, keepdim=True), weight, eps))
        return x

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return x.div_(cap).tanh_().mul_(cap)

    def rotary_qkv(
        self, qkv: Tensor, positions: Tensor, params: RotaryParams, *, out: tuple[Tensor, Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = params.heads
        q, *pair = torch.split(
            qkv.view(len(qkv), -1, heads.head_dim),
            [heads.num_heads, *[heads.num_kv_heads] * (1 if params.values_are_keys else 2)],
            dim=1,
        )
        k, v = pair[0], pair[-1]
        q, k = _norm_heads(q, params.q_norm, params.eps), _norm_heads(k, params.k_norm, params.eps)
        v = _norm_heads(v, params.v_norm, params.eps)
        if params.q_scale is not None:
            q = q * params.q_scale[positions, None, None]
        if params.cos_sin is not None:
            cos, sin = params.cos_sin[positions, None, :].chunk(2, dim=-1)  # [T, 1, rotary dim / 2]
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        q_out, k_out, v_out = (None, None, None) if out is None else out
        return _deliver(q, self.dtype, q_out), _deliver(k, self.dtype, k_out), _deliver(v, self.dtype, v_out)

    def rotary_q(self, qkv: Tensor, positions: Tensor, params: RotaryParams, *, out: Tensor | None = None) -> Tensor:
        table = params.q_scale if params.cos_sin is None else params.cos_sin
        at = positions if table is None else positions.clamp(max=len(table) - 1)
        return _deliver(self.rotary_qkv(qkv, at, params)[0], self.dtype, out)

    def new_kv_cache(self, spec: CacheSpec) -> KVCache:
        if spec.scales is not None:
            names = KVScales.__dataclass_fields__
            scales = KVScales(**{name: self.tensor(getattr(spec.scales, name)) for name in names})
            spec = replace(spec, scales=scales)
        if spec.dtype == torch.int8:
            if spec.slices not in (0, 2, 3):
                raise unsupported("slices", f"{spec.slices}; 2, 3, or 0 for exact queries")
            _check_scales(spec.scales, (spec.num_kv_heads, spec.head_dim))
            return Int8KVCache(spec, self.device)
        if spec.dtype not in CACHE_DTYPES:
            raise unsupported("dtype", f"{spec.dtype}; one of {CACHE_DTYPES} or int8")
        if spec.slices or spec.scales is not None:
            raise NotSupportedError(f"slices, scales: for an int8 cache, not for {spec.dtype}", param="slices")
        return ReferenceKVCache(spec, self.device)

    def copy_block(self, cache: KVCache, source: int, target: int) -> None:
        caches = own(cache, ReferenceKVCache)
        for part, copy in zip(caches.block(source), caches.block(target), strict=True):
            copy[:] = part

    def read_block(self, cache: KVCache, block_id: int) -> bytes:
        parts = own(cache, ReferenceKVCache).block(block_id)
        return b"".join(as_array(part.view(torch.uint8)).tobytes() for part in parts)

    def write_block(self, cache: KVCache, block_id: int, content: bytes | memoryview) -> None:
        parts = own(cache, ReferenceKVCache).block(block_id)
        sizes = [part.nbytes for part in parts]
        if len(content) != sum(sizes):
            raise ValueError(f"content: {len(content)} bytes, but a block has {sum(sizes)}")
        whole = self.tensor(np.frombuffer(bytearray(content), np.uint8))
        for part, values in zip(parts, torch.split(whole, sizes), strict=True):
            part.view(torch.uint8).view(-1).copy_(values)

    def store_kv(self, cache: KVCache, k: Tensor, v: Tensor, slots: Tensor) -> None:
        own(cache, ReferenceKVCache).store(k, v, slots)

    def load_kv(self, cache: KVCache, slots: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = own(cache, ReferenceKVCache).read(slots)
        return keys.float(), values.float()

    def plan(self, meta: AttentionMetadata, heads: Heads, cache: KVCache) -> AttentionMetadata:
        return meta.to(self.tensor)  # attention in torch needs no plan

    def attend(
        self,
        q: Tensor,
        k_new: Tensor,
        v_new: Tensor,
        cache: KVCache,
        meta: AttentionMetadata,
        params: AttentionParams,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        rows, log_sums = attention.attend(q, k_new, v_new, own(cache, ReferenceKVCache), meta, params)
        if lse is not None:
            lse.copy_(log_sums)
        return _deliver(rows.flatten(1), self.dtype, out)

    def log_softmax(self, logits: Tensor, *, out: Tensor | None = None) -> Tensor:
        return _deliver(logits.log_softmax(dim=-1), torch.float32, out)

    def choose(self, logits: Tensor, params: SamplingTensors) -> tuple[Tensor, Tensor]:
        return sampling.sample(logits, params), logits.amax(dim=-1).isfinite()  # amax propagates NaN

    def token_scores(self, logits: Tensor, ids: Tensor, num_top: int) -> TokenScores:
        logprobs = self.log_softmax(logits)
        columns = ids.clamp(min=0)[:, None]
        ranks = (logprobs > logprobs.gather(1, columns)).sum(dim=-1) + 1
        if num_top:
            columns = torch.cat([columns, _largest(logprobs, num_top)], dim=1)
        return TokenScores(columns, logprobs.gather(1, columns), ranks)

    def fetch(self, tensors: Sequence[Tensor]) -> Callable[[], list[Array]]:
        return lambda: [as_array(tensor) for tensor in tensors]

    def _round(self, tensor: Tensor) -> Tensor:
        """Round to the model's type, and return float32."""
        found: Tensor = as_torch(tensor).to(device=self.device, dtype=self.dtype)
        return found.float().contiguous()


def _check_scales(scales: KVScales | None, shape: tuple[int, int]) -> None:
    for name in KVScales.__dataclass_fields__ if scales is not None else ():
        if getattr(scales, name).shape != shape:
            raise ValueError(f"{name}: {tuple(getattr(scales, name).shape)}; kv heads and head dim are {shape}")


def _no_packed_form() -> NotSupportedError:
    return unsupported("kernels", "'reference' has no packed form of weights; use 'cpu'")


def _deliver(result: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """Convert the result to `dtype`, into `out` if the caller gave a buffer."""
    return result.to(dtype).contiguous() if out is None else out.copy_(result)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def _largest(values: Tensor, count: int) -> Tensor:
    """Find the columns of the largest numbers of each row, the largest and, of equal ones, the first column first."""
    return values.sort(dim=-1, descending=True, stable=True)[1][:, :count]


def _best_groups(choice: Tensor, params: RouterParams) -> Tensor:
    """Give the experts of all groups but the best ones -inf."""
    groups = choice.view(len(choice), params.groups, -1)
    best = _largest(groups.topk(params.group_top, dim=-1)[0].sum(dim=-1), params.top_groups)
    is_best = torch.zeros(groups.shape[:2], dtype=torch.bool, device=choice.device).scatter_(1, best, True)
    return groups.masked_fill(~is_best[..., None], -math.inf).view_as(choice)


def _shares(logits: Tensor, ids: Tensor, threshold: float) -> Tensor:
    """Compute the weights of "sparsemixer", one expert after the other."""
    weights = []
    for at in ids.T:
        best = logits.gather(1, at[:, None])
        hidden = best - logits > threshold * torch.maximum(logits.abs(), best)
        weights.append(logits.masked_fill(hidden, -math.inf).softmax(dim=-1).gather(1, at[:, None]))
        logits = logits.scatter(1, at[:, None], -math.inf)
    return torch.cat(weights, dim=1)


def _norm_heads(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Norm x [T, heads, D], as many elements together as the weight has. None: no norm."""
    if weight is None:
        return x
    return _rms_norm(x.reshape(len(x), -1, len(weight)), weight, eps).view_as(x)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + half) of each head x [T, H, D]; dimensions beyond the table's stay as they are."""
    half = cos.shape[-1]
    a, b, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def _through_weight(weight: Tensor, scheme: Scheme, leaf_ends: Sequence[int]) -> Tensor:
    """Quantise a weight [N, K] float32 and scale it back."""
    if scheme.group_size is None:
        return dequantize_int8(*quantize_int8(weight))
    values, scales = quantize_int4(weight, scheme.group_size, leaf_ends)
    return dequantize_int4(values, scales, scheme.group_size, leaf_ends)


def _through_activations(x: Tensor, slices: int, leaf_ends: Sequence[int]) -> Tensor:
    """Quantise activations [M, K] leaf by leaf and scale them back: [M, K] float32."""
    if not slices:
        return x.bfloat16().float()
    leaves = [x[:, start:end].float() for start, end in itertools.pairwise((0, *leaf_ends))]
    return torch.cat([kv.slices(leaf, slices) for leaf in leaves], dim=-1)
