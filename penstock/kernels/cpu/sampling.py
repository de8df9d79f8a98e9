"""Fill the structure from which the native sampler reads what each row asks for."""

from penstock.kernels.cpu.calls import address, optional_address
from penstock.kernels.cpu.library import PenstockSampling
from penstock.kernels.sampling import SamplingTensors, hide
from penstock.kernels.tensors import FLOAT32, INT32, INT64, Tensor, as_array


def fill_sampling(native: PenstockSampling, params: SamplingTensors, rows: int, vocab_size: int) -> None:
    """Fill every field for logits [rows, vocab_size]. The tensors must outlive the call that reads the structure.

    Raises:
        ValueError: a tensor has another shape or type, or a pair is outside the logits.
    """
    native.temperature = address(params.temperature, (rows,), FLOAT32, "temperature")
    native.top_k = optional_address(params.top_k, (rows,), INT64, "top_k")
    native.top_p = optional_address(params.top_p, (rows,), FLOAT32, "top_p")
    native.min_p = optional_address(params.min_p, (rows,), FLOAT32, "min_p")
    native.noise_key = optional_address(params.noise_key, (rows, 3), INT64, "noise_key")
    bias_pairs, bias_values = params.bias or (None, None)
    repetition, repetition_pairs = params.repetition or (None, None)
    frequency, presence, count_pairs, count_values = params.counts or (None, None, None, None)
    native.masked, native.num_masked = _pairs(params.masked, rows, vocab_size, "masked")
    native.bias_pairs, native.num_bias = _pairs(bias_pairs, rows, vocab_size, "bias")
    native.bias_values = optional_address(bias_values, (native.num_bias,), FLOAT32, "bias")
    native.repetition = optional_address(repetition, (rows,), FLOAT32, "repetition")
    native.repetition_pairs, native.num_repetition = _pairs(repetition_pairs, rows, vocab_size, "repetition")
    native.frequency = optional_address(frequency, (rows,), FLOAT32, "frequency")
    native.presence = optional_address(presence, (rows,), FLOAT32, "presence")
    native.count_pairs, native.num_counts = _pairs(count_pairs, rows, vocab_size, "counts")
    native.count_values = optional_address(count_values, (native.num_counts,), FLOAT32, "counts")


def hide_forms(logits: Tensor, params: SamplingTensors) -> None:
    """Set the logits [M, V] of ids that no form allows to -inf.

    Raises:
        ValueError: the bitmaps have another shape or type.
    """
    if params.allowed is None:
        return
    values, rows, bits = map(as_array, (logits, *params.allowed))
    address(bits, (len(rows), -(-values.shape[1] // 32)), INT32, "allowed")
    for row, own in zip(rows, bits, strict=True):
        hide(values[row], own)


def _pairs(pairs: Tensor | None, rows: int, vocab_size: int, name: str) -> tuple[int | None, int]:
    """Find the address and number of the pairs [P, 2], after checking that all of them are inside the logits."""
    if pairs is None or not len(pairs):
        return None, 0
    count = len(pairs)
    at = address(pairs, (count, 2), INT64, name)
    found = as_array(pairs)
    (row, token), (last_row, last_token) = found.min(axis=0).tolist(), found.max(axis=0).tolist()
    if row < 0 or token < 0 or last_row >= rows or last_token >= vocab_size:
        raise ValueError(f"{name}: a pair is outside the logits [{rows}, {vocab_size}]")
    return at, count
