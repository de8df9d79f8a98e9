"""Count what a model must read and multiply: the numerators of the fractions that benchmarks print.

On the CPU, each native call counts by itself; on a GPU, whose kernels are launched as one, each step.

A weight counts with its packed size, once per call. Attention counts the cached keys and values of every sequence once
per layer, and four operations per pair of a new token and a key, per head and element, times the slices of an int8
cache. An expert counts only if some row of the step chose it, as the native kernels report; on a GPU, rows are taken to
choose evenly. Operations on rows count nothing: what they read is in the caches, and they multiply little.
"""

import ctypes
from collections import Counter
from dataclasses import dataclass

import numpy as np

from penstock import EngineConfig
from penstock.assembly.memory import cached_token_bytes
from penstock.interface.step import SchedulerOutput
from penstock.kernels.attention.items import first_seen
from penstock.kernels.cpu.calls import Arguments
from penstock.kernels.cpu.library import RECORDABLE, PenstockAttentionStep, PenstockCall
from penstock.kernels.cpu.packed import CpuLinear
from penstock.kernels.ops import PackedLinear, Packing
from penstock.layers.decoder import MoE, expert_products
from penstock.layers.module import named_modules
from penstock.layers.weights import Linear, LMHead
from penstock.spec.model_config import ModelConfig
from penstock_lab.bench.samples import Work

KIND_OF_DTYPE = {"float32": "f32", "bfloat16": "bf16", "int8": "int8"}  # the type in which products multiply
NORMS = ("penstock_rms_norm", "penstock_add_rms_norm", "penstock_layer_norm", "penstock_add_layer_norm")
NO_WORK = Work()


@dataclass(frozen=True, slots=True)
class Cost:
    """The operation that a native call computes, its work, and the name of the native function."""

    operation: str
    work: Work
    function: str


class ModelCosts:
    """The work of a model, from its loaded weights and the resolved config with which it was loaded.

    Attributes:
        kinds: the types in which the model's products and attention multiply.
    """

    def __init__(self, model: object, model_config: ModelConfig, config: EngineConfig) -> None:
        dtype, modules = config.numerics.dtype, dict(named_modules(model))
        mixtures = [layer for layer in modules.values() if isinstance(layer, MoE)]
        experts = {id(layer) for layer in expert_products(mixtures)}
        self._products: dict[int, Cost] = {}  # native ones, by address
        self._of_rows, self._of_head, self._expert, kinds = Work(), Work(), Work(), set[str]()  # of a row each
        products = [(name, layer) for name, layer in modules.items() if isinstance(layer, Linear)]
        for name, layer in products:
            for piece, (_, _, packing) in zip(layer.packed, layer.pieces, strict=True):
                work = _product(packing, piece, dtype)
                kinds |= set(work.operations)
                if isinstance(piece, CpuLinear):
                    self._products[piece.address] = Cost(name.rpartition(".")[2], work, "penstock_linear")
                if id(layer) not in experts:
                    (self._of_head if isinstance(layer, LMHead) else self._of_rows).add(work)
        for layer in list(expert_products(mixtures))[:2]:  # all experts are alike
            self._expert.add(_product(layer.spec.packing, layer.packed[0], dtype))
        self._mixtures = len(mixtures), model_config.num_experts, model_config.num_experts_per_tok
        self._layers = {window: len(layers) for layers, window in model_config.cache_groups()}
        groups = {window: model_config.at(layers[0]) for layers, window in model_config.cache_groups()}
        self._num_sinks, self._chunked = model_config.num_sink_tokens, model_config.chunked_windows
        self._token_bytes = {window: cached_token_bytes(config, layer) for window, layer in groups.items()}
        self._kind = KIND_OF_DTYPE[config.cache.kv_cache_dtype]
        slices = 4 * max(1, config.kv_cache_slices)
        self._pair_operations = {
            window: slices * layer.num_attention_heads * layer.head_dim for window, layer in groups.items()
        }
        self._attention: dict[int, Cost] = {}  # by window; 0: no window
        self._programs: dict[int, tuple[object, list[Cost | int]]] = {}  # an attention is kept as its window
        self.kinds = tuple(sorted(kinds | {self._kind}))

    def begin_step(self, scheduler_output: SchedulerOutput) -> None:
        """Set the tokens on which the attention of the following calls works."""
        self._attention = {}
        for window in self._token_bytes:
            work = Work()
            for item in scheduler_output.scheduled:
                work.add(self._attend(item.num_computed_tokens, item.num_new_tokens, window))
            self._attention[window or 0] = Cost("attention", work, "penstock_attend")

    def step(self, scheduler_output: SchedulerOutput) -> Cost:
        """Count the work of a whole step."""
        self.begin_step(scheduler_output)
        rows, sampled = scheduler_output.num_tokens, sum(item.num_samples for item in scheduler_output.scheduled)
        parts = [self._of_rows.times(rows), self._of_head.times(sampled)]
        for window, layers in self._layers.items():
            parts += [self._attention[window or 0].work] * layers
        mixtures, count, chosen = self._mixtures
        if mixtures:
            read = count * (1 - (1 - chosen / count) ** rows)
            parts.append(self.experts(round(mixtures * read), mixtures * rows * chosen))
        whole = Work()
        for part in parts:
            whole.add(part)
        return Cost("step", whole, "")

    def call(self, name: str, arguments: Arguments) -> Cost:
        """Find the operation that a native call computes, and its work without that of chosen experts."""
        if name == "penstock_linear":
            weight, rows = arguments[0], arguments[3]
            cost = self._products[int(weight or 0)]
            return Cost(cost.operation, cost.work.times(int(rows or 0)), name)
        if name == "penstock_attend":
            step = PenstockAttentionStep.from_address(int(arguments[0] or 0))
            return self._attention[step.sliding_window]
        return Cost("norm" if name in NORMS else name.removeprefix("penstock_"), NO_WORK, name)

    def replay(self, calls: "ctypes.Array[PenstockCall]") -> list[Cost]:
        if id(calls) not in self._programs:  # the array is kept, so that no other array gets its id
            found = [self.call(RECORDABLE[call.function], tuple(call.arguments)) for call in calls]
            windows = {id(cost): window for window, cost in self._attention.items()}
            self._programs[id(calls)] = calls, [windows.get(id(cost), cost) for cost in found]
        return [self._attention[item] if isinstance(item, int) else item for item in self._programs[id(calls)][1]]

    def experts(self, read: int, rows: int) -> Work:
        """Count the work of the experts: `read` of them were read, for `rows` pairs of a row and its expert."""
        return Work(read * self._expert.read_bytes, self._expert.times(rows).operations)

    def _attend(self, cached: int, new: int, window: int | None) -> Work:
        """Count the work of one layer for one sequence."""
        positions = np.arange(cached, cached + new)
        seen = positions + 1
        if window is not None:
            first = np.maximum(first_seen(positions, window, chunked=self._chunked), 0)
            seen -= first - np.minimum(first, self._num_sinks)
        keys, read = int(seen.sum()), int(seen[0]) - 1
        return Work(read * self._token_bytes[window], Counter({self._kind: keys * self._pair_operations[window]}))


def _product(packing: Packing, packed: PackedLinear, dtype: str) -> Work:
    """Count the work of one row with a packed weight."""
    n, k = packed.shape
    slices = packing.activation_slices
    kind, passes = ("int8", slices) if slices else (KIND_OF_DTYPE[dtype], 1)
    return Work(packed.num_bytes, Counter({kind: 2 * n * k * passes}))
