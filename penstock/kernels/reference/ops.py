"""ReferenceOps: plain torch, written to be read beside kernels/ops.py.

It rounds exactly where the contract says: operands are rounded to `dtype` and multiplied in float32, which is what a
bfloat16 product with float32 accumulation is. It promises a tolerance and not bits: torch may sum in another order
when the number of rows changes, and `leaves` is not obeyed for the same reason.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.ops import AttentionMetadata, KVCache, PackedLinear
from penstock.kernels.reference import attention, sampling
from penstock.kernels.sampling import SamplingTensors

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


class ReferenceLinear:
    """A weight [N, K] and its bias [N], rounded to the model's type and then kept in float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self.shape = (weight.shape[0], weight.shape[1])
        self.num_bytes = 4 * (weight.numel() + (0 if bias is None else bias.numel()))

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x.float(), self.weight, self.bias)


class ReferenceOps:
    """All operations on one device.

    Attributes:
        dtype: type of weights and of what products read.
        device: where all tensors live.
    """

    name = "reference"

    def __init__(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.dtype = dtype
        self.device = torch.device(device)

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None, *, leaves: int = 1) -> PackedLinear:
        """`leaves` is for backends that promise bits."""
        return ReferenceLinear(self._round(weight), None if bias is None else self._round(bias))

    def linear(self, x: Tensor, weight: PackedLinear, *, out: Tensor | None = None) -> Tensor:
        return _deliver(_own(weight)(x), torch.float32, out)

    def gated_linear(self, x: Tensor, weight: PackedLinear, activation: str, *, out: Tensor | None = None) -> Tensor:
        gate, up = _own(weight)(x).chunk(2, dim=-1)
        return _deliver(ACTIVATIONS[activation](gate) * up, self.dtype, out)

    def embedding(self, ids: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
        return _deliver(weight[ids], torch.float32, out)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
        return _deliver(_rms_norm(x, weight, eps), self.dtype, out)

    def add_rms_norm(
        self, x: Tensor, h: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        x += h
        return x, self.rms_norm(x, weight, eps, out=out)

    def rotary_qkv(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor | None,
        heads: tuple[int, int, int],
        *,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
        out: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_heads, num_kv_heads, head_dim = heads
        q, k, v = torch.split(qkv.view(len(qkv), -1, head_dim), [num_heads, num_kv_heads, num_kv_heads], dim=1)
        q = q if q_norm is None else _rms_norm(q, q_norm, eps)
        k = k if k_norm is None else _rms_norm(k, k_norm, eps)
        if cos_sin is not None:
            cos, sin = cos_sin[positions, None, :].chunk(2, dim=-1)  # [T, 1, rotary dim / 2]
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        q_out, k_out, v_out = (None, None, None) if out is None else out
        return _deliver(q, self.dtype, q_out), _deliver(k, self.dtype, k_out), _deliver(v, self.dtype, v_out)

    def new_kv_cache(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> KVCache:
        return attention.ReferenceKVCache((num_blocks, block_size, num_kv_heads, head_dim), dtype, self.device)

    def attend(
        self,
        q: Tensor,
        k_new: Tensor,
        v_new: Tensor,
        cache: KVCache,
        meta: AttentionMetadata,
        *,
        scale: float,
        out: Tensor | None = None,
    ) -> Tensor:
        if not isinstance(cache, attention.ReferenceKVCache):
            raise TypeError(f"a cache of another backend: {type(cache).__name__}")
        return _deliver(attention.attend(q, k_new, v_new, cache, meta, scale).flatten(1), self.dtype, out)

    def log_softmax(self, logits: Tensor, *, out: Tensor | None = None) -> Tensor:
        return _deliver(logits.log_softmax(dim=-1), torch.float32, out)

    def sample(self, logits: Tensor, params: SamplingTensors) -> Tensor:
        return sampling.sample(logits, params)

    def _round(self, tensor: Tensor) -> Tensor:
        """Rounded to the model's type, in float32."""
        return tensor.to(device=self.device, dtype=self.dtype).float().contiguous()


def _own(weight: PackedLinear) -> ReferenceLinear:
    if not isinstance(weight, ReferenceLinear):
        raise TypeError(f"a weight packed by another backend: {type(weight).__name__}")
    return weight


def _deliver(result: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """The result in its type; in `out`, where the caller gave a buffer."""
    return result.to(dtype).contiguous() if out is None else out.copy_(result)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + half) of each head x [T, H, D]; dimensions beyond the table's stay as they are."""
    half = cos.shape[-1]
    a, b, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)
