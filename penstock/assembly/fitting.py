"""Choose the precision and the context at which a model fits this machine, for one conversation at a time.

A precision fits if the memory that is free has room for the weights and for a context of ENOUGH tokens, or of all that
the model has. The first of PRECISIONS that fits is taken, with a context of at most MOST tokens: a longer one costs
memory that a conversation hardly ever uses. What is planned is what the engine then allocates (assembly/memory.py).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.assembly.engine import PlannedEngine, plan_engine
from penstock.config import EngineConfig
from penstock.errors import InvalidRequestError, invalid
from penstock.kernels.cpu.host import resident_bytes, usable_memory_bytes
from penstock.kernels.cpu.library import chosen_level

PRECISIONS = (None, "int8", "int4")
ENOUGH, MOST, LEAST = 4096, 32768, 64  # tokens of a context
GIB, UNLIMITED = 2**30, 2**50


@dataclass(frozen=True, slots=True)
class Fitting:
    """One way in which a model fits.

    Attributes:
        precision: what its weights are kept in.
        max_model_len: tokens of the context that there is room for.
        num_bytes: memory of the whole engine.
        weight_bytes: memory of the weights.
        options: the options of EngineConfig that make this engine, besides the model.
    """

    precision: str
    max_model_len: int
    num_bytes: int
    weight_bytes: int
    options: dict[str, Any]


def fit_here(options: Mapping[str, Any]) -> Fitting:
    """Choose the best precision that fits. What `options` has is kept, and whatever it leaves open is chosen.

    Raises:
        ModelLoadError: the model cannot be served.
        InvalidRequestError: no precision fits, or an option does not fit the model.
    """
    refusal: InvalidRequestError | None = None
    best: Fitting | None = None
    for found in _each(options):
        if isinstance(found, InvalidRequestError):
            refusal = refusal or found
        elif found[1]:
            return found[0]
        elif best is None or found[0].max_model_len > best.max_model_len:
            best = found[0]
    if best is None and refusal is not None:
        raise _too_large(options) if _is_open(options, refusal) else refusal
    if best is None:
        raise invalid("model", "no precision was planned")
    return best


def _is_open(options: Mapping[str, Any], refusal: InvalidRequestError) -> bool:
    """Tell whether a model is too large for the machine, rather than for a limit that the user has set."""
    return refusal.param == "memory" and not {"memory", "kv_cache_memory_bytes"} & set(options)


def _too_large(options: Mapping[str, Any]) -> InvalidRequestError:
    """Make the error for a model that fits at no precision: it says what the smallest one takes."""
    for precision in reversed(PRECISIONS):
        smallest = {"max_model_len": LEAST, **options, "max_num_seqs": 1, "memory": UNLIMITED}
        try:
            planned = plan_engine(EngineConfig.from_options(**{"quantization": precision} | smallest))
        except InvalidRequestError:
            continue  # the weights are quantised already, or not even the cache fits
        total = 0 if planned.memory is None else planned.memory.total
        name = planned.config.numerics.quantization or planned.codings or planned.config.numerics.dtype
        sizes = f"{total / GIB:.1f} GiB as {name}, and may have {usable_memory_bytes() / GIB:.1f} GiB here"
        return invalid("model", f"it is too large for this machine: it takes {sizes}")
    return invalid("model", "it is too large for this machine")


def fittings(options: Mapping[str, Any]) -> list[Fitting]:
    """List all precisions that fit, the best first.

    Raises:
        ModelLoadError: the model cannot be served.
    """
    return [found[0] for found in _each(options) if not isinstance(found, InvalidRequestError)]


def _each(options: Mapping[str, Any]) -> Iterator[tuple[Fitting, bool] | InvalidRequestError]:
    """Plan each precision: yield what fits and whether its context is long enough, or why it does not fit."""
    for precision in PRECISIONS if "quantization" not in options else (options["quantization"],):
        given = {"max_num_seqs": 1, **options} | ({} if precision is None else {"quantization": precision})
        is_limited = "memory" in given or "kv_cache_memory_bytes" in given
        can_plan = given.get("kernels") != "reference" and chosen_level() is not None  # torch's memory is its own
        limit = {} if is_limited or not can_plan else {"memory": resident_bytes() + usable_memory_bytes()}
        try:
            planned = plan_engine(EngineConfig.from_options(**given | limit))
            length = planned.config.scheduler.max_model_len or 0
            if "max_model_len" not in options and length > MOST:
                planned = plan_engine(EngineConfig.from_options(**given | limit | {"max_model_len": MOST}))
        except InvalidRequestError as error:
            yield error
            if error.param not in ("memory", "kv_cache_memory_bytes"):
                return  # the weights are quantised already, or an option is wrong
            continue
        yield _fitting(planned, given, is_limited=is_limited), length >= min(ENOUGH, planned.model_config.context)


def _fitting(planned: PlannedEngine, given: dict[str, Any], *, is_limited: bool) -> Fitting:
    config, memory = planned.config, planned.memory
    chosen = {name: value for name, value in given.items() if name != "model"}
    chosen["max_model_len"] = length = config.scheduler.max_model_len or 0
    if memory is not None and not is_limited:
        chosen["kv_cache_memory_bytes"] = memory.cache.num_bytes
    precision = config.numerics.quantization or planned.codings or config.numerics.dtype
    entries = {} if memory is None else memory.entries
    return Fitting(precision, length, 0 if memory is None else memory.total, entries.get("weights", 0), chosen)
