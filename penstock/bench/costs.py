"""Count what the steps of a model must read and multiply: the numerators of the fractions that benchmarks print.

Weights count as packed, once per step; the LM head only if a token is sampled. Attention counts the cached keys and
values of every sequence once per step, and four operations per pair of a new token and a key, head and element, times
the slices of an int8 cache. Experts count only if some row of the step chose them, as counted by the kernels.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.config import EngineConfig
from penstock.interface.step import SchedulerOutput
from penstock.layers.lm_head import LMHead
from penstock.layers.mlp import MoE
from penstock.layers.module import named_modules
from penstock.layers.weights import Linear
from penstock.planner.memory import cached_token_bytes
from penstock.spec.model_config import ModelConfig

KIND_OF_DTYPE = {"float32": "f32", "bfloat16": "bf16", "int8": "int8"}  # the type that multiplies


@dataclass(slots=True)
class Work:
    """Bytes read, and operations by the type that multiplies (bench.machine.KINDS)."""

    read_bytes: int = 0
    operations: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Work") -> None:
        self.read_bytes += other.read_bytes
        self.operations.update(other.operations)

    def times(self, rows: int) -> "Work":
        """Return the work for a number of rows: weights are read once for any number, and not at all for none."""
        operations = Counter({kind: count * rows for kind, count in self.operations.items()})
        return Work(self.read_bytes if rows else 0, operations)


class ModelCosts:
    """The work of a model's steps, by its loaded weights and the resolved config it was loaded with."""

    def __init__(self, model: object, model_config: ModelConfig, config: EngineConfig) -> None:
        dtype = config.numerics.dtype
        self._body, self._head, self._expert = Work(), Work(), Work()
        mixtures = [layer for _, layer in named_modules(model) if isinstance(layer, MoE)]
        for product in _products(*(mixture.experts[0] for mixture in mixtures[:1])):  # all experts have the same shape
            self._expert.add(_product(product, dtype))
        for layer in set(_products(model)).difference(
            _products(*(expert for mixture in mixtures for expert in mixture.experts))
        ):
            part = self._head if isinstance(layer, LMHead) else self._body
            part.add(_product(layer, dtype))
        self._windows = [window for layers, window in model_config.cache_groups() for _ in layers]
        self._token_bytes = cached_token_bytes(config, model_config)
        self._kind = KIND_OF_DTYPE[config.cache.kv_cache_dtype]
        elements = model_config.num_attention_heads * model_config.head_dim
        self._pair_operations = 4 * elements * max(1, config.kv_cache_slices)

    def step(self, scheduler_output: SchedulerOutput) -> Work:
        """Return the work of one step without its experts."""
        work = self._body.times(scheduler_output.num_tokens)
        work.add(self._head.times(sum(item.num_samples for item in scheduler_output.scheduled)))
        for item in scheduler_output.scheduled:
            for window in self._windows:
                work.add(self._attention(item.num_computed_tokens, item.num_new_tokens, window))
        return work

    def experts(self, read: int, rows: int) -> Work:
        """Return the work of experts, of which `read` were read, for `rows` pairs of a row and its expert."""
        return Work(read * self._expert.read_bytes, self._expert.times(rows).operations)

    def _attention(self, cached: int, new: int, window: int | None) -> Work:
        """Return the work of one layer for one sequence."""
        seen = cached if window is None else min(cached, window - 1)
        keys = sum(min(cached + index + 1, window or cached + new) for index in range(new))
        return Work(seen * self._token_bytes, Counter({self._kind: keys * self._pair_operations}))


def _products(*modules: object) -> Iterator[Linear]:
    """Yield every product with a weight in the modules."""
    return (layer for module in modules for _, layer in named_modules(module) if isinstance(layer, Linear))


def _product(layer: Linear, dtype: str) -> Work:
    """Return the work of one row through one weight."""
    n, k = layer.spec.shape
    scheme = layer.spec.packing.scheme
    if scheme is not None and scheme.slices:
        kind, passes = "int8", scheme.slices
    else:
        kind, passes = KIND_OF_DTYPE[dtype], 1
    return Work(layer.packed.num_bytes, Counter({kind: 2 * n * k * passes}))
