"""The complete answer of `penstock plan`: whether a model fits, how fast it is, what would change that. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from penstock import EngineConfig
from penstock.assembly.memory import ModelSizes
from penstock.kernels.scheme import Scheme
from penstock.ranks.sharding import Share
from penstock.spec.model_config import ModelConfig
from penstock_lab.planner.fit import Budget, Fit, Fitter
from penstock_lab.planner.forecast import Forecaster, Load, as_json
from penstock_lab.planner.machines import THIS_MACHINE, Hardware, OnChip
from penstock_lab.planner.operator import (
    FLOATS,
    MODES,
    UNIFIED_BUFFER,
    OperatorCall,
    check_buffers,
    plan_call,
    schedule,
    tiles,
)
from penstock_lab.planner.placement import Placement, operation_bytes, plan_placement

PROMPT_LENS, CONTEXT = (128, 1024), 1024  # used for predictions if the user names no lengths


class Source(Protocol):
    """A model as the planner sees it (weights/planned.py)."""

    @property
    def model(self) -> ModelConfig:
        """The config values of the model."""

    @property
    def together(self) -> bool:
        """The argument `together` of ranks.sharding.divisible_heads."""

    @property
    def num_elements(self) -> int:
        """The number of weights; tied weights count once."""

    @property
    def formats(self) -> str:
        """The codings of a quantised checkpoint's weights; empty for others."""

    @property
    def possible(self) -> tuple[int, ...]:
        """The numbers of parts into which the weights can be cut."""

    def resolved(self, num_ranks: int = 0) -> EngineConfig:
        """Resolve the config for a number of ranks; 0: the number in the config."""

    def sizes(self, scheme: Scheme | None, share: Share | None, layers: range | None = None) -> ModelSizes:
        """Count the bytes of the model, or of a rank's part of it, or of a stage with some layers."""

    def layer_shapes(self) -> Mapping[str, tuple[tuple[int, ...], ...]]:
        """List the shapes of the first layer's parameters by operation ("mlp.up_proj"), and of the "host"."""


@dataclass(frozen=True, slots=True)
class Question:
    """The question about a model. Empty fields of the load get defaults."""

    budget: Budget
    hardware: Hardware | None
    load: Load
    placement: Placement | None = None


def answer(source: Source, question: Question) -> dict[str, Any]:
    """Compute every figure, as JSON.

    Raises:
        InvalidRequestError: an option does not fit the model, the hardware or the other options.
    """
    fitter = fitter_of(source, question.budget)
    fit = fitter.fit()
    share = None if fit.degrees.size == 1 else Share(0, fit.degrees)
    hardware = question.hardware
    result: dict[str, Any] = {
        "hardware": THIS_MACHINE if hardware is None else hardware.name,
        "devices": [device.as_json() for device in fit.devices],
        "fits": fit.fits,
        "smallest_change": fit.smallest_change,
        "predictions": [],
        "what_if": {},
        "tensor_parallel_size": fit.degrees.size,
        "pipeline_parallel_size": fit.config.parallel.pipeline_parallel_size,
        "max_model_len": fit.config.scheduler.max_model_len,
        "entries": fit.devices[0].entries,
        "weights": dict(source.sizes(fit.config.numerics.scheme, share, fitter.stages(fit.config)[0]).kinds),
        "cache_bytes_per_token": fitter.token_bytes(fit),
        "largest": [asdict(item) for item in fitter.largest(fit.config, fit.degrees)],
    }
    if hardware is not None and hardware.has_rates:
        forecaster, load = Forecaster(source.model, source.sizes, hardware, source.formats), _filled(question.load, fit)
        result["predictions"] = as_json(forecaster.predict(fit, load))
        result["what_if"] = {name: as_json(found) for name, found in forecaster.what_if(fit, load).items()}
    if question.placement is not None:
        sizes = operation_bytes(source.model, source.layer_shapes(), question.placement.head_pad)
        result["placement"] = plan_placement(source.model, sizes, question.placement).figures()
        result["fits"] = fit.fits and result["placement"]["fits"]
    if hardware is not None and hardware.on_chip is not None:
        result["operator"] = operator_figures(hardware.on_chip, source.model, fit.config, _filled(question.load, fit))
    return result


def fitter_of(source: Source, budget: Budget) -> Fitter:
    return Fitter(
        source.model,
        source.sizes,
        source.resolved,
        budget,
        source.together,
        source.num_elements,
        source.formats,
        source.possible,
    )


def operator_figures(chip: OnChip, model: ModelConfig, config: EngineConfig, load: Load) -> dict[str, Any]:
    """Compute tiles, blocks and times of the attention operator on one core, and its tiling for each batch of a load,
    with every stream at max_model_len tokens. The operator has no float32, so a float32 model has no tiling."""
    group = model.num_attention_heads // model.num_key_value_heads
    context, dtype = config.scheduler.max_model_len or 1, config.numerics.dtype
    cache = "int8" if config.cache.kv_cache_dtype == "int8" else dtype
    calls = {
        batch: OperatorCall(
            [context] * batch, model.num_attention_heads, model.num_key_value_heads, model.head_dim,
            layout="BSND", query=dtype, cache=cache, output=dtype, block_size=config.cache.block_size or 0,
            per_token=cache == "int8" and config.cache.kv_cache_scales is None,
        )
        for batch in (load.batches if dtype in FLOATS else ())
    }  # fmt: skip
    return {
        "tilings": [{"batch": batch} | asdict(plan_call(call, chip.cores)) for batch, call in calls.items()],
        "unified_buffer": dict(UNIFIED_BUFFER),
        "unified_buffer_bytes": check_buffers(chip.buffer_bytes),
        "buffer_bytes": chip.buffer_bytes,
        "tiles": asdict(tiles(group, model.head_dim)),
        "schedules": [asdict(schedule(chip, group, model.head_dim, context, mode)) for mode in MODES],
    }


def _filled(load: Load, fit: Fit) -> Load:
    """Fill the empty fields of a load with defaults that the config serves."""
    most, length = fit.config.scheduler.max_num_seqs, fit.config.scheduler.max_model_len or 1
    return Load(
        load.batches or _distinct([1, most]),
        load.prompt_lens or _distinct([min(prompt, length) for prompt in PROMPT_LENS]),
        load.contexts or [min(CONTEXT, length)],
    )


def _distinct(values: Sequence[int]) -> list[int]:
    return list(dict.fromkeys(values))
