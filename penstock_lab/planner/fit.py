"""The fit of a model on some devices: a ledger per device, the number of parts, and what would make it fit. No torch.

The model is split as engines split it: attention, feed-forward and vocabulary into the same number of parts
(spec/shares.py). The smallest number of parts that fits is chosen.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from penstock import EngineConfig, InvalidRequestError
from penstock.assembly.memory import (
    Ledger,
    ModelSizes,
    all_token_bytes,
    plan_given_cache,
    plan_kv_cache,
    smallest_cache_bytes,
)
from penstock.config import DEGREES, MAX_CONTEXT
from penstock.interface.step import CacheGroup
from penstock.kernels.attention.items import ELEMENT_BYTES
from penstock.kernels.scheme import Scheme
from penstock.ranks.sharding import Degrees, Share, find_degrees
from penstock.ranks.stage import config_of, split_layers
from penstock.spec.model_config import ModelConfig

CONTEXT_UNIT = 64  # the largest context is rounded down to a multiple of this
UNLIMITED = 2**62
MIB = 2**20


class Sizes(Protocol):
    """Counts the bytes of a model, or of a rank's part of it, or of a stage with some layers."""

    def __call__(self, scheme: Scheme | None, share: Share | None, layers: range | None = None) -> ModelSizes: ...


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory that devices offer.

    Attributes:
        num_bytes: memory that an engine may take on one device, including its runtime.
        runtime_bytes: memory of a process before it loads a model.
        free_bytes: free memory of this machine, a share of which an engine takes for its cache; None: the plan is for
            other devices, and an engine may take all of num_bytes.
        count: number of devices.
        shared: whether the ranks of a model are processes of one machine; num_bytes is then for all of them together.
    """

    num_bytes: int
    runtime_bytes: int
    free_bytes: int | None = None
    count: int = 1
    shared: bool = False


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """The ledger of one device."""

    name: str
    entries: dict[str, int]
    budget_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(self.entries.values())

    @property
    def workspace_bytes(self) -> int:
        """The bytes of everything except weights, cache and runtime."""
        return self.total_bytes - sum(self.entries.get(name, 0) for name in ("weights", "cache", "runtime"))

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.budget_bytes

    def as_json(self) -> dict[str, int | str]:
        return {
            "name": self.name,
            "weights_bytes": self.entries["weights"],
            "cache_bytes": self.entries["cache"],
            "workspace_bytes": self.workspace_bytes,
            "runtime_bytes": self.entries.get("runtime", 0),
            "total_bytes": self.total_bytes,
            "budget_bytes": self.budget_bytes,
        }


@dataclass(frozen=True, slots=True)
class Fit:
    """The way a model lies on the devices. If it does not fit, the devices show the least that it would take.

    Attributes:
        config: the resolved config; its max_model_len may be reduced to what there is room for.
        smallest_change: the change of one option that makes the model fit; None if it fits, or no single change is
            enough.
        groups: the cache groups that an engine would have; () if the model does not fit.
    """

    config: EngineConfig
    degrees: Degrees
    devices: tuple[DevicePlan, ...]
    fits: bool = True
    smallest_change: str | None = None
    groups: tuple[CacheGroup, ...] = ()


@dataclass(frozen=True, slots=True)
class Largest:
    """The most that fits at one precision: the longest context of a single row, and the rows of max_model_len."""

    precision: str
    kv_cache_dtype: str
    context: int
    rows: int
    weights_bytes: int


@dataclass(frozen=True, slots=True)
class Fitter:
    """Plans one model on devices of one kind.

    Args:
        resolve: returns the resolved config for a number of ranks.
        together: as in ranks.sharding.divisible_heads.
        num_elements: number of elements in all weights, or a lower bound.
        formats: the codings of a quantised checkpoint's weights; empty for others, which can be quantised.
        possible: the numbers of parts into which its weights can be cut.
    """

    model: ModelConfig
    sizes: Sizes
    resolve: Callable[[int], EngineConfig]
    budget: Budget
    together: bool = False
    num_elements: int = 0
    formats: str = ""
    possible: tuple[int, ...] = DEGREES

    def fit(self) -> Fit:
        """Plan with the fewest parts that fit; if none fits, with the most parts."""
        asked = self.resolve(0)
        given = asked.parallel.num_ranks
        if given > 1:
            return self._split(asked)
        stages = asked.parallel.pipeline_parallel_size
        *fewer, most = (degree for degree in self.possible if degree == 1 or degree * stages <= self.budget.count)
        for degree in fewer:
            config = asked if degree == 1 else self.resolve(degree)
            if self._weights_fit(config) and (fit := self._split(config)).fits:
                return fit
        return self._split(asked if most == 1 else self.resolve(most))

    def _weights_fit(self, config: EngineConfig) -> bool:
        """Check that a device has room for its weights. If not, nothing else has to be planned."""
        scheme, ranks = config.numerics.scheme, max(1, config.parallel.num_ranks)
        bits = scheme.weight_bits if scheme is not None else 8 * ELEMENT_BYTES[config.numerics.dtype]
        at_least = 0 if self.formats or len(self.stages(config)) > 1 else self.num_elements * bits // 8 // ranks
        if at_least + self.budget.runtime_bytes > self.budget.num_bytes:
            return False  # clear without counting layers
        degrees = find_degrees(config.parallel, self.model, together=self.together)
        parts = [self.ledger(Share(0, degrees), layers) for layers in self.stages(config)]
        weights = max(part.sizes(config.numerics.scheme).weights for part in parts)
        return weights + self.budget.runtime_bytes <= self.budget.num_bytes

    def token_bytes(self, fit: Fit) -> int:
        """Count the bytes of a token in the first device's cache, in all layers."""
        model = self.ledger(Share(0, fit.degrees), self.stages(fit.config)[0]).model
        return all_token_bytes(fit.config, model)

    def largest(self, config: EngineConfig, degrees: Degrees) -> list[Largest]:
        """Find what fits on the first device at each precision."""
        found = []
        own = config.numerics.quantization or config.numerics.dtype
        for name in (own,) if self.formats else dict.fromkeys((own, "int8", "int4")):
            for cache in dict.fromkeys((config.cache.kv_cache_dtype, "int8")):
                some = quantised(config, name, cache)
                found.append(self._largest_of(some, degrees, self.formats or name))
        return found

    def _largest_of(self, config: EngineConfig, degrees: Degrees, name: str) -> Largest:
        parts, budget = (
            [self.ledger(Share(0, degrees), layers) for layers in self.stages(config)],
            self.budget.num_bytes,
        )
        ledger = max(parts, key=lambda part: part.needed_bytes(config))
        alone = _scheduled(config, max_num_seqs=1)
        low, high = 0, (MAX_CONTEXT if self.model.num_sink_tokens else self.model.context) // CONTEXT_UNIT
        while low < high:
            middle = (low + high + 1) // 2
            needed = ledger.needed_bytes(_scheduled(alone, max_model_len=middle * CONTEXT_UNIT))
            low, high = (middle, high) if needed <= budget else (low, middle - 1)
        one = smallest_cache_bytes(config, ledger.model)
        rest = budget - (ledger.needed_bytes(config) - one)
        weights = ledger.sizes(config.numerics.scheme).weights
        return Largest(name, config.cache.kv_cache_dtype, low * CONTEXT_UNIT, max(0, rest // one), weights)

    def stages(self, config: EngineConfig) -> list[range | None]:
        """List the layers of each stage of a pipeline; None stands for all layers."""
        count = config.parallel.pipeline_parallel_size
        return [None] if count == 1 else [*split_layers(self.model.num_hidden_layers, count)]

    def ledger(self, share: Share, layers: range | None = None) -> Ledger:
        """Make the ledger of a rank, or of a rank of the stage with these layers."""
        part = None if share.degrees.size == 1 else share
        model = self.model if part is None else part.config(self.model)
        model = model if layers is None else config_of(model, layers)
        free = UNLIMITED if self.budget.free_bytes is None else self.budget.free_bytes
        sizes, is_coded = (lambda scheme: self.sizes(scheme, part, layers)), bool(self.formats)
        return Ledger(model, sizes, self.budget.runtime_bytes, free, is_coded=is_coded)

    def _split(self, config: EngineConfig) -> Fit:
        """Plan a config with the number of ranks that it gives."""
        degrees = find_degrees(config.parallel, self.model, together=self.together)
        if self.budget.free_bytes is None:
            config = replace(config, cache=replace(config.cache, memory=self.budget.num_bytes))
        stages, ranks = self.stages(config), range(degrees.size)
        ledgers = [self.ledger(Share(rank, degrees), layers) for layers in stages for rank in ranks]
        whole = self.ledger(Share(0, Degrees()))
        try:
            if self.budget.shared or len(ledgers) == 1:  # one engine plans for all its processes at once
                config, plan = whole.fit(config)
                plans = [plan.cache]
            elif config.cache.kv_cache_memory_bytes is not None:  # for all parts together
                plans = [plan_kv_cache(config, self.model, UNLIMITED)]
            else:
                for ledger in ledgers:
                    config, _ = ledger.fit(config)
                plans = [ledger.plan(config).cache for ledger in ledgers]
        except InvalidRequestError as error:
            if error.param not in ("memory", "kv_cache_memory_bytes"):
                raise
            return self._refused(config, degrees, ledgers)
        found = [_groups_of(config, ledger.model) for ledger in ledgers]
        groups = _fewest(_groups_of(config, self.model), [group for plan in plans for group in plan.groups])
        caches = [
            plan_given_cache(config, ledger.model, UNLIMITED, _fewest(own, groups)).num_bytes
            for ledger, own in zip(ledgers, found, strict=True)
        ]
        devices = self._of_ranks(config, ledgers, caches)
        if all(device.fits for device in devices):
            return Fit(config, degrees, devices, groups=tuple(groups))
        return self._refused(config, degrees, ledgers)

    def _of_ranks(self, config: EngineConfig, ledgers: list[Ledger], caches: list[int]) -> tuple[DevicePlan, ...]:
        budget = self.budget.num_bytes // (len(ledgers) if self.budget.shared else 1)
        stages, size = len(self.stages(config)), len(ledgers) // len(self.stages(config))
        names = [f"device {rank}" for rank in range(len(ledgers))]
        if stages > 1:
            of_rank = [f", rank {rank}" if size > 1 else "" for rank in range(size)]
            names = [f"stage {stage + 1}{rank}" for stage in range(stages) for rank in of_rank]
        return tuple(
            DevicePlan(name, ledger.entries(config) | {"cache": cache}, budget)
            for name, ledger, cache in zip(names, ledgers, caches, strict=True)
        )

    def _refused(self, config: EngineConfig, degrees: Degrees, ledgers: list[Ledger]) -> Fit:
        """Plan the least that a config would take, with a change that makes it fit the device that lacks most."""
        devices = self._of_ranks(config, ledgers, [smallest_cache_bytes(config, ledger.model) for ledger in ledgers])
        worst = max(range(len(devices)), key=lambda rank: devices[rank].total_bytes)
        return Fit(config, degrees, devices, fits=False, smallest_change=self._change(config, ledgers, devices, worst))

    def _change(
        self, config: EngineConfig, ledgers: list[Ledger], devices: tuple[DevicePlan, ...], worst: int
    ) -> str | None:
        """Find the change that makes a config fit at the least cost to the user, or None if no single change does."""
        device, whole = devices[worst], smallest_cache_bytes(config, self.model)
        if config.cache.kv_cache_memory_bytes is not None or (self.budget.free_bytes is not None and device.fits):
            # The given size is too small or too large, or the cache needs more than its default share.
            return f"kv_cache_memory_bytes = {whole}" if device.fits else None
        limited = replace(config, cache=replace(config.cache, memory=device.budget_bytes))
        if (change := ledgers[worst].smallest_change(limited)) is not None:
            return change
        total = sum(item.total_bytes for item in devices) if self.budget.shared else device.total_bytes
        return None if self.budget.free_bytes is not None else f"memory = {-(-total // MIB)}MiB"


def _groups_of(config: EngineConfig, model: ModelConfig) -> list[CacheGroup]:
    """List the cache groups of a model, or of a part of it, whatever their numbers of blocks."""
    return plan_kv_cache(config, model, UNLIMITED, share=None).groups


def _fewest(groups: list[CacheGroup], planned: list[CacheGroup]) -> list[CacheGroup]:
    """Give each cache group the fewest blocks that any part planned for a group like it: all parts have room for
    these. Groups of different stages are alike if they have the same window."""
    return [
        replace(group, num_blocks=min(one.num_blocks for one in planned if _is_like(one, group))) for group in groups
    ]


def _is_like(one: CacheGroup, other: CacheGroup) -> bool:
    return replace(one, layers=(), num_blocks=0) == replace(other, layers=(), num_blocks=0)


def quantised(config: EngineConfig, name: str, cache: str | None = None) -> EngineConfig:
    """Replace a resolved config's quantization (a plain type for none) and its cache type."""
    numerics = config.numerics
    if name in ("bfloat16", "float32"):
        numerics = replace(numerics, quantization=None, quantization_group_size=None)
    elif name != numerics.quantization:
        scheme = Scheme.parse(name)
        size = scheme.group_size if scheme else None
        numerics = replace(numerics, quantization=name, quantization_group_size=size)
    kind = cache or config.cache.kv_cache_dtype
    scales = config.cache.kv_cache_scales if kind == "int8" else None
    return replace(config, numerics=numerics, cache=replace(config.cache, kv_cache_dtype=kind, kv_cache_scales=scales))


def _scheduled(config: EngineConfig, **changes: Any) -> EngineConfig:
    return replace(config, scheduler=replace(config.scheduler, **changes))
