"""How much memory a model's weights and rotary tables take, counted before anything is allocated."""

from collections.abc import Iterable, Mapping

from penstock.errors import ModelLoadError
from penstock.kernels.ops import Ops
from penstock.quant.scheme import Scheme, scheme_of
from penstock.spec.model_config import ModelConfig
from penstock.spec.param_table import Parameter

REFERENCE_BYTES = 4  # per weight: the reference keeps every weight as float32
GROUP_SCALE_BITS = 16  # per int4 group
ROTARY_BYTES = 4  # per element of a table; only a few positions at a time are computed in float64


def stored_bytes(parameters: Iterable[Parameter], ops: Ops, scheme: Scheme | None) -> int:
    """Return the bytes that a backend keeps of the parameters, without padding."""
    return sum(-(-item.num_elements * _bits(item, ops, scheme) // 8) for item in parameters)


def shares_rows(parameter: Parameter, scheme: Scheme | None) -> bool:
    """Return whether a tied parameter keeps the values of the other one: a head that is whole and not quantised."""
    return parameter.tied_to is not None and scheme_of(parameter.quant, scheme) is None


def rotary_bytes(model_config: ModelConfig, max_model_len: int | None = None) -> int:
    """Return the bytes of the cosine and sine tables, one for each kind of rotary embedding that the model has."""
    positions = max_model_len or model_config.context
    ropes = [rope for rope in (model_config.rope, model_config.local_rope) if rope is not None]
    return sum(ROTARY_BYTES * positions * rope.rotary_dim(model_config.head_dim) for rope in ropes)


def _bits(parameter: Parameter, ops: Ops, scheme: Scheme | None) -> int:
    """Return the bits per element, rounded up."""
    if ops.name == "reference":
        return 8 * REFERENCE_BYTES
    scheme = scheme_of(parameter.quant, scheme)
    if scheme is None:
        return 8 * int(ops.dtype.itemsize)
    return scheme.weight_bits + (-(-GROUP_SCALE_BITS // scheme.group_size) if scheme.group_size else 0)


def check_memory(needs: Mapping[str, int], free: int) -> None:
    """Raise ModelLoadError if one of the needs (what for -> bytes) exceeds `free` bytes."""
    for what, needed in needs.items():
        if needed > free:
            raise ModelLoadError(
                f"the {what} need {needed / 2**20:,.1f} MiB according to config.json; only {free / 2**20:,.1f} MiB "
                f"are free"
            )
