"""TritonOps: the operations of kernels/ops.py on a GPU. A method is a function of the file that has its kernels."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.cpu.host import free_memory_bytes
from penstock.kernels.metadata import (
    AttentionMetadata,
    AttentionParams,
    CacheSpec,
    Heads,
    KVCache,
    RotaryParams,
    RouterParams,
    own,
)
from penstock.kernels.ops import PLAIN, LoraTable, PackedLinear, Packing, RowSource, TensorRows, XieluCurve
from penstock.kernels.sampling import SamplingTensors, TokenScores
from penstock.kernels.tensors import Array, Dtype, as_array, as_torch, dtype_of
from penstock.kernels.triton import (
    attention,
    experts,
    int4,
    lora,
    norms,
    packed,
    products,
    programs,
    rotary,
    rows,
    sampling,
    work,
)
from penstock.kernels.triton import cache as paged
from penstock.kernels.triton.cache import TritonCache
from penstock.kernels.triton.device import LEAVES
from penstock.kernels.triton.experts import Experts
from penstock.kernels.triton.launch import FixedScratch, compilations
from penstock.kernels.triton.lora import Adapters
from penstock.kernels.triton.packed import TritonLinear
from penstock.kernels.triton.quantize import operand
from penstock.kernels.triton.sizes import ALIGNED_ROWS, GATE_BYTES, PROGRAM_ROWS, count_bytes, group_rows
from penstock.kernels.triton.work import PlannedMetadata

STAGED_BYTES = 2**20  # of an array that is copied through pinned memory, at most


class TritonOps:
    """Operations on one device.

    Attributes:
        dtype: the type of weights and of the operands of products.
        scratch: the memory between the kernels of an operation.
        recorder: records passes.
    """

    name = "triton"
    is_planned = True
    fixed_rows = PROGRAM_ROWS[-1]

    def __init__(self, dtype: Dtype, device: Any = "cuda", *, leaves: int = LEAVES) -> None:
        self.leaves = leaves
        self.dtype: torch.dtype = dtype_of(str(dtype).removeprefix("torch."), torch.float32)
        self.device = torch.device(device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", self.device.index or 0)
            torch.cuda.set_device(self.device)
        self.scratch = FixedScratch(self.device)
        self.recorder = programs.Recorder(self.device)
        self._staging = packed.Staging(self.device)
        self._experts: dict[tuple[PackedLinear, ...], Experts] = {}
        self._adapters: dict[LoraTable, Adapters] = {}
        self._constants: dict[int, tuple[Array, Tensor]] = {}  # by the identity of an array

    def free_bytes(self) -> int:
        if self.device.type == "cpu":
            return free_memory_bytes()
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + kept

    def is_lost(self) -> bool:
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except RuntimeError:  # a context that an error has ended repeats the error at every call
            return True
        return False

    def tensor(self, array: Array) -> Tensor:
        found: Tensor = as_torch(array)
        if self.device.type == "cuda" and found.nbytes <= STAGED_BYTES:  # from pinned memory, the host need not wait
            staged = torch.empty(found.shape, dtype=found.dtype, device="cpu", pin_memory=True).copy_(found)
            return staged.to(self.device, non_blocking=True)
        return found.to(self.device)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        return torch.empty(shape, dtype=dtype_of(dtype, self.dtype), device=self.device)

    # --- products with packed weights, mixtures of experts, and the router -------------------------------------------

    def pack_linear(
        self, weight: Tensor | RowSource, bias: Tensor | None = None, packing: Packing = PLAIN
    ) -> PackedLinear:
        source = weight if hasattr(weight, "read") else TensorRows(weight)
        return packed.pack(source, bias, packing, self.dtype, self.device, staging=self._staging)

    def pack_part(
        self, weight: RowSource, magnitudes: Array | None, packing: Packing
    ) -> tuple[PackedLinear, Array | None]:
        known = None if magnitudes is None else self.tensor(magnitudes)[:, None]
        part = packed.pack(weight, None, packing, self.dtype, self.device, known, self._staging)
        if known is None or part.scales is None:
            return part, None
        scales = as_array(part.scales).copy()
        part.scales.fill_(1.0)  # multiplying by 1 changes no bit
        return part, scales

    def add_parts(self, parts: Sequence[Tensor], scales: Array | None, bias: Array | None, *, out: Tensor) -> Tensor:
        together: Any = parts
        if not isinstance(together, Tensor):
            together = self.scratch.begin().empty((len(parts), *out.shape), torch.float32, self.device)
            for place, part in zip(together, parts, strict=True):
                place.copy_(as_torch(part))
        by, plus = (None if term is None else self._constant(term) for term in (scales, bias))
        return rows.add_parts(together, by, plus, out)

    def _constant(self, array: Array) -> Tensor:
        """Keep an array of a weight on the device."""
        if id(array) not in self._constants:
            self._constants[id(array)] = array, self.tensor(array)
        return self._constants[id(array)][1]

    def packed_bytes(self, shape: tuple[int, ...], packing: Packing = PLAIN, *, bias: bool = False) -> int:
        return count_bytes(shape, packing, str(self.dtype).removeprefix("torch."), bias=bias)

    def restore_linear(
        self, shape: tuple[int, ...], state: Mapping[str, Tensor], packing: Packing = PLAIN
    ) -> PackedLinear:
        return packed.assemble(shape, packing, self.dtype, self.device, state)

    def linear(self, x: Tensor, weight: PackedLinear, *, out: Tensor | None = None) -> Tensor:
        return self._product(x, own(weight, TritonLinear), "", torch.float32, out)

    def activated_linear(
        self, x: Tensor, weight: PackedLinear, activation: str, *, out: Tensor | None = None
    ) -> Tensor:
        return self._product(x, own(weight, TritonLinear), activation, self.dtype, out)

    def gated_linear(self, x: Tensor, weight: PackedLinear, activation: str, *, out: Tensor | None = None) -> Tensor:
        whole = own(weight, TritonLinear)
        out = self._output(out, (len(x), whole.shape[0] // 2), self.dtype)
        scratch = self.scratch.begin()
        if whole.has_fused_gate:
            rows_of_x = operand(x, whole, scratch)
            return products.product(rows_of_x, whole, out, scratch, activation=activation, gated=True)
        some = max(1, GATE_BYTES // (4 * whole.shape[0]) // ALIGNED_ROWS) * ALIGNED_ROWS
        for start in range(0, len(x), some):
            part, to = x[start : start + some], out[start : start + some]
            both = self.scratch.begin().empty((len(part), whole.shape[0]), torch.float32, self.device)
            rows.apply("gate", self._multiply(part, whole, "", both), to, activation=activation)
        return out

    def _product(
        self, x: Tensor, weight: TritonLinear, activation: str, dtype: torch.dtype, out: Tensor | None
    ) -> Tensor:
        self.scratch.begin()
        return self._multiply(x, weight, activation, self._output(out, (len(x), weight.shape[0]), dtype))

    def _multiply(self, x: Tensor, weight: TritonLinear, activation: str, out: Tensor) -> Tensor:
        values = operand(x, weight, self.scratch)
        if weight.group_size:
            return int4.product(values, weight, out, activation=activation)
        return products.product(values, weight, out, self.scratch, activation=activation)

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
        out = self._output(out, (len(x), down[0].shape[0]), torch.float32)
        tables = self._table(gate_up), self._table(down)
        scratch = self.scratch.begin()
        return experts.experts(x, *tables, chosen, activation, out, scratch, weigh_inputs=weigh_inputs)

    def _table(self, weights: Sequence[PackedLinear]) -> Experts:
        key = tuple(weights)
        if key not in self._experts:
            self._experts[key] = Experts.of([own(weight, TritonLinear) for weight in weights])
        return self._experts[key]

    def route(
        self, logits: Tensor, params: RouterParams, *, out: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        ids, weights = (None, None) if out is None else out
        shape = len(logits), params.top_k
        to = self._output(ids, shape, torch.int64), self._output(weights, shape, torch.float32)
        return experts.route(logits, params, *to)

    # --- LoRA adapters -----------------------------------------------------------------------------------------------

    group_rows = staticmethod(group_rows)

    def activate(self, x: Tensor, activation: str, *, gated: bool = False, out: Tensor | None = None) -> Tensor:
        out = self._output(out, (len(x), x.shape[1] // (2 if gated else 1)), self.dtype)
        return rows.apply("gate" if gated else "activate", x, out, activation=activation)

    def lora_shrink(self, x: Tensor, table: LoraTable, slots: Tensor, *, out: Tensor) -> Tensor:
        return lora.shrink(x, self._adapters_of(table), slots, out)

    def lora_expand(self, hidden: Tensor, table: LoraTable, slots: Tensor, y: Tensor) -> Tensor:
        return lora.expand(hidden, self._adapters_of(table), slots, y)

    def _adapters_of(self, table: LoraTable) -> Adapters:
        if table not in self._adapters:
            self._adapters[table] = Adapters.of(table)
        return self._adapters[table]

    # --- operations in which every row is computed by itself ---------------------------------------------------------

    def embedding(self, ids: Tensor, weight: Tensor, *, scale: float = 1.0, out: Tensor | None = None) -> Tensor:
        return rows.embed(ids, weight, scale, self._output(out, (len(ids), weight.shape[1]), torch.float32))

    def packed_embedding(
        self, ids: Tensor, weight: PackedLinear, *, scale: float = 1.0, out: Tensor | None = None
    ) -> Tensor:
        whole = own(weight, TritonLinear)
        if whole.scales is not None:
            raise ValueError("a quantised weight has no rows to look up")
        return self.embedding(ids, whole.values, scale=scale, out=out)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, *, dtype: Dtype | None = None, out: Tensor | None = None
    ) -> Tensor:
        return self._norm(x, None, weight, None, eps, out, dtype or self.dtype, centred=False)

    def add_rms_norm(
        self, x: Tensor, h: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return x, self._norm(x, h, weight, None, eps, out, self.dtype, centred=False)

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
        return self._norm(x, None, weight, bias, eps, out, dtype or self.dtype, centred=True)

    def add_layer_norm(
        self, x: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return x, self._norm(x, h, weight, bias, eps, out, self.dtype, centred=True)

    def _norm(
        self,
        x: Tensor,
        h: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        out: Tensor | None,
        dtype: torch.dtype,
        *,
        centred: bool,
    ) -> Tensor:
        return norms.norm(x, h, weight, bias, eps, self._output(out, tuple(x.shape), dtype), centred=centred)

    def norm_heads(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norms.norm_heads(x, weight, eps)

    def add(self, x: Tensor, h: Tensor) -> Tensor:
        return rows.apply("add", x, x, other=h)

    def add_gated(self, x: Tensor, h: Tensor, gates: Tensor) -> Tensor:
        return rows.apply("add gated", x, x, other=h, gates=gates)

    def round(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return rows.apply("round", x, self._output(out, tuple(x.shape), self.dtype))

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return rows.apply("scale", x, x, factor)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return rows.apply("softcap", x, x, cap)

    def xielu(self, x: Tensor, curve: XieluCurve, *, out: Tensor | None = None) -> Tensor:
        return rows.xielu(x, curve, self._output(out, tuple(x.shape), self.dtype))

    def rotary_qkv(
        self, qkv: Tensor, positions: Tensor, params: RotaryParams, *, out: tuple[Tensor, Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if out is None:
            heads = params.heads
            counts = heads.num_heads, heads.num_kv_heads, heads.num_kv_heads
            q, k, v = (self._output(None, (len(qkv), count, heads.head_dim), self.dtype) for count in counts)
            out = q, k, v
        return rotary.rotary_qkv(qkv, positions, params, out)

    def rotary_q(self, qkv: Tensor, positions: Tensor, params: RotaryParams, *, out: Tensor | None = None) -> Tensor:
        heads = params.heads
        q = self._output(out, (len(qkv), heads.num_heads, heads.head_dim), self.dtype)
        return rotary.rotary_qkv(qkv, positions, params, (q, q, q), only_q=True)[0]

    # --- attention and its cache -------------------------------------------------------------------------------------

    def new_kv_cache(self, spec: CacheSpec) -> KVCache:
        return TritonCache.new(spec, self.device)

    def store_kv(self, cache: KVCache, k: Tensor, v: Tensor, slots: Tensor) -> None:
        paged.store(own(cache, TritonCache), k, v, slots)

    def load_kv(self, cache: KVCache, slots: Tensor) -> tuple[Tensor, Tensor]:
        return paged.load(own(cache, TritonCache), slots)

    def copy_block(self, cache: KVCache, source: int, target: int) -> None:
        whole = own(cache, TritonCache)
        for part, copy in zip(whole.block(source), whole.block(target), strict=True):
            copy.copy_(part)

    def read_block(self, cache: KVCache, block_id: int) -> bytes:
        return own(cache, TritonCache).read_block(block_id)

    def write_block(self, cache: KVCache, block_id: int, content: bytes | memoryview) -> None:
        own(cache, TritonCache).write_block(block_id, content)

    def plan(self, meta: AttentionMetadata, heads: Heads, cache: KVCache) -> AttentionMetadata:
        tokens = len(meta.slot_mapping)
        recorded = self.program_rows(tokens) == tokens
        return work.plan(meta, heads, own(cache, TritonCache), self.device, recorded=recorded)

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
        whole, (tokens, num_heads, head_dim) = own(cache, TritonCache), q.shape[-3:]
        if not isinstance(meta, PlannedMetadata):
            heads = Heads(num_heads, whole.spec.num_kv_heads, head_dim)
            meta = work.plan(meta, heads, whole, self.device)
        out = self._output(out, (tokens, num_heads * head_dim), self.dtype)
        return attention.attend(q, (k_new, v_new), whole, meta, params, out, lse, self.scratch.begin())

    # --- from logits to ids ------------------------------------------------------------------------------------------

    def log_softmax(self, logits: Tensor, *, out: Tensor | None = None) -> Tensor:
        out = self._output(out, tuple(logits.shape), torch.float32)
        return sampling.log_softmax(logits, out, self.scratch.begin())

    def choose(self, logits: Tensor, params: SamplingTensors) -> tuple[Tensor, Tensor]:
        return sampling.choose(logits, params, self.scratch.begin())

    def token_scores(self, logits: Tensor, ids: Tensor, num_top: int) -> TokenScores:
        return sampling.token_scores(logits, ids, num_top, self.scratch.begin())

    def fetch(self, tensors: Sequence[Tensor]) -> Callable[[], list[Array]]:
        if self.device.type == "cpu":
            return lambda: [as_array(tensor) for tensor in tensors]
        copies = [torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True) for tensor in tensors]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(self.device))

        def wait() -> list[Array]:
            copied.synchronize()
            return [as_array(copy) for copy in copies]

        return wait

    # --- programs ----------------------------------------------------------------------------------------------------

    @property
    def num_compiled(self) -> int:
        return compilations.count

    def program_rows(self, tokens: int) -> int:
        return programs.rows(tokens)

    def record(
        self,
        forward: Callable[[Sequence[AttentionMetadata]], Tensor],
        attention: Sequence[AttentionMetadata],
        *,
        torch_too: bool = False,
    ) -> tuple[Tensor, programs.TritonProgram | None]:
        return self.recorder.record(forward, attention, torch_too)

    def run_host(self, work: Callable[[], None]) -> None:
        self.recorder.run_host(work)

    def _output(self, out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device) if out is None else out
