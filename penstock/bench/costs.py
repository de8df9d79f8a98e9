"""What the steps of a model must read and multiply: the numerators of the fractions that benchmarks print.

Weights count as packed, once per step; the LM head only if a token is sampled. Attention counts the cached keys and
values of every sequence once per step, and four operations per pair of a new token and a key, head and element, times
the slices over an int8 cache. Only the experts that some row of the step chose count, as counted by the kernels.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from penstock.config import EngineConfig
from penstock.interface.step import SchedulerOutput
from penstock.layers.lm_head import LMHead
from penstock.layers.mlp import MoE
from penstock.layers.weights import Linear
from penstock.planner.memory import cached_token_bytes
from penstock.spec.model_config import ModelConfig

KINDS = {"float32": "f32", "bfloat16": "bf16", "int8": "int8"}  # type that multiplies, by kv_cache_dtype


@dataclass(slots=True)
class Work:
    """Bytes read, and operations by the type that multiplies (as bench.machine.KINDS)."""

    read_bytes: int = 0
    operations: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Work") -> None:
        self.read_bytes += other.read_bytes
        self.operations.update(other.operations)


class ModelCosts:
    """Counts the work of a model's steps."""

    def __init__(self, model: nn.Module, model_config: ModelConfig, config: EngineConfig) -> None:
        """Take a loaded model, its config.json, and the resolved config it was loaded with."""
        dtype, kv_cache_dtype = config.numerics.dtype, config.cache.kv_cache_dtype
        self._body, self._head, self._expert = Work(), Work(), Work()
        mixtures = [layer for layer in model.modules() if isinstance(layer, MoE)]
        for product in _products(*(mixture.experts[0] for mixture in mixtures[:1])):  # all experts are alike
            self._expert.add(_product(product, dtype))
        of_experts = set(_products(*(mixture.experts for mixture in mixtures)))
        for layer in _products(model):
            if layer not in of_experts:
                part = self._head if isinstance(layer, LMHead) else self._body
                part.add(_product(layer, dtype))
        self._windows = [window for layers, window in model_config.cache_groups() for _ in layers]
        self._token_bytes = cached_token_bytes(config, model_config)
        self._kind = KINDS[kv_cache_dtype]
        self._pair_operations = 4 * model_config.num_attention_heads * model_config.head_dim
        self._pair_operations *= max(1, config.kv_cache_slices)

    def step(self, scheduler_output: SchedulerOutput) -> Work:
        """Return the work of one step without its experts."""
        tokens = scheduler_output.num_tokens
        sampled = sum(item.num_samples for item in scheduler_output.scheduled)
        work = _times(self._body, tokens)
        work.add(_times(self._head, sampled))
        for item in scheduler_output.scheduled:
            for window in self._windows:
                work.add(self._attention(item.num_computed_tokens, item.num_new_tokens, window))
        return work

    def experts(self, read: int, rows: int) -> Work:
        """Return the work of mixtures of experts: experts that were read, and pairs of a row and its expert."""
        return Work(read * self._expert.read_bytes, _times(self._expert, rows).operations)

    def _attention(self, cached: int, new: int, window: int | None) -> Work:
        """Return the work of one layer for one sequence."""
        seen = cached if window is None else min(cached, window - 1)
        keys = sum(min(cached + index + 1, window or cached + new) for index in range(new))
        return Work(seen * self._token_bytes, Counter({self._kind: keys * self._pair_operations}))


def _products(*modules: nn.Module) -> Iterator[Linear]:
    """Yield every product with a weight in these modules."""
    return (layer for module in modules for layer in module.modules() if isinstance(layer, Linear))


def _product(layer: Linear, dtype: str) -> Work:
    """Return the work of one row through one weight."""
    n, k = layer.spec.shape
    scheme = layer.spec.packing.scheme
    if scheme is not None and scheme.slices:
        kind, passes = "int8", scheme.slices
    else:
        kind, passes = "f32" if dtype == "float32" else "bf16", 1
    return Work(layer.packed.num_bytes, Counter({kind: 2 * n * k * passes}))


def _times(work: Work, rows: int) -> Work:
    """Return the work for a number of rows: weights are read once for any number, and not at all for none."""
    operations = Counter({kind: count * rows for kind, count in work.operations.items()})
    return Work(work.read_bytes if rows else 0, operations)
