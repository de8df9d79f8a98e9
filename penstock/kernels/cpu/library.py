"""Finds the native library, if the package was installed with a compiler, and declares its functions. No torch.

PENSTOCK_CPU_LEVEL=portable, avx2, avx512 or amx forces a lower instruction level than the best there is.
"""

import ctypes
import os
from ctypes import POINTER, c_double, c_float, c_int32, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path

import penstock.kernels.cpu
from penstock.errors import InvalidRequestError
from penstock.validation import shown

ABI_VERSION = 5
LEVELS = ("portable", "avx2", "avx512", "amx")
LEVEL_VARIABLE = "PENSTOCK_CPU_LEVEL"
MAX_LEAVES = 8
NOT_BUILT = "the native library is not installed, because there was no C++ compiler"


class PenstockWeight(ctypes.Structure):
    """native/abi.h explains the fields."""

    _fields_ = (
        ("n", c_int64),
        ("k", c_int64),
        ("padded_k", c_int64),
        ("panels", c_int64),
        ("kind", c_int32),
        ("slices", c_int32),
        ("group_size", c_int32),
        ("gated", c_int32),
        ("leaves", c_int32),
        ("reserved", c_int32),
        ("leaf_ends", c_int64 * MAX_LEAVES),
        ("padded_leaf_ends", c_int64 * MAX_LEAVES),
        ("values", c_void_p),
        ("column_scales", c_void_p),
        ("group_scales", c_void_p),
        ("bias", c_void_p),
    )


class PenstockSampling(ctypes.Structure):
    """kernels/sampling.py explains the fields; a null pointer is None there."""

    _fields_ = (
        ("temperature", c_void_p),  # [M] float32
        ("top_k", c_void_p),  # [M] int64
        ("top_p", c_void_p),  # [M] float32
        ("min_p", c_void_p),  # [M] float32
        ("noise_key", c_void_p),  # [M, 3] int64
        ("masked", c_void_p),  # [num_masked, 2] int64
        ("num_masked", c_int64),
        ("bias_pairs", c_void_p),  # [num_bias, 2] int64
        ("bias_values", c_void_p),  # [num_bias] float32
        ("num_bias", c_int64),
        ("repetition", c_void_p),  # [M] float32
        ("repetition_pairs", c_void_p),  # [num_repetition, 2] int64
        ("num_repetition", c_int64),
        ("frequency", c_void_p),  # [M] float32
        ("presence", c_void_p),  # [M] float32
        ("count_pairs", c_void_p),  # [num_counts, 2] int64
        ("count_values", c_void_p),  # [num_counts] float32
        ("num_counts", c_int64),
    )


class PenstockCache(ctypes.Structure):
    """native/abi.h explains the fields."""

    _fields_ = (
        ("memory", c_void_p),
        ("blocks", c_int64),
        ("block_size", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("padded_dim", c_int64),
        ("kind", c_int32),
        ("slices", c_int32),
        ("key_scales", c_void_p),
        ("key_offsets", c_void_p),
        ("value_scales", c_void_p),
        ("value_offsets", c_void_p),
    )


class PenstockAttention(ctypes.Structure):
    """native/abi.h explains the fields."""

    _fields_ = (
        ("scale", c_float),
        ("softcap", c_float),
        ("slopes", c_void_p),
        ("sink_logits", c_void_p),
        ("bias_before_scale", c_int32),
        ("reserved", c_int32),
    )


class PenstockAttentionStep(ctypes.Structure):
    """native/abi.h explains the fields; kernels/attention/plan.py the plan in it."""

    _fields_ = (
        ("sequences", c_int64),
        ("tokens", c_int64),
        ("query_start_loc", c_void_p),
        ("seq_lens", c_void_p),
        ("block_table", c_void_p),
        ("max_blocks", c_int64),
        ("slot_mapping", c_void_p),
        ("positions", c_void_p),
        ("sliding_window", c_int64),
        ("num_sink_tokens", c_int64),
        ("items", c_int64),
        ("combines", c_int64),
        ("item", c_void_p),
        ("item_starts", c_void_p),
        ("combine", c_void_p),
        ("references", c_void_p),
        ("staged", c_void_p),
        ("partial_rows", c_int64),
    )


RECORDABLE = (  # functions of a recorded program, in the order of native/program.cpp
    "penstock_linear",
    "penstock_experts",
    "penstock_rms_norm",
    "penstock_add_rms_norm",
    "penstock_layer_norm",
    "penstock_add_layer_norm",
    "penstock_add",
    "penstock_round",
    "penstock_softcap",
    "penstock_rotary_qkv",
    "penstock_embedding",
    "penstock_route",
    "penstock_attend",
)


MAX_ARGUMENTS = 18  # native/functions.h


class PenstockCall(ctypes.Structure):
    """One call of a recorded program: an index of RECORDABLE, and the arguments after the context, a float as the bits
    of a double."""

    _fields_ = (("function", c_int64), ("arguments", c_int64 * MAX_ARGUMENTS))


# Addresses are passed as plain integers. A function returns a Status of native/abi.h, unless it says so.
_PTR, _I32, _I64, _F32 = c_void_p, c_int32, c_int64, c_float
_WEIGHT = POINTER(PenstockWeight)
SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "penstock_abi_version": (c_int32, []),
    "penstock_best_level": (c_int32, []),
    "penstock_context_new": (c_void_p, [_I32, _I32]),  # level, threads
    "penstock_context_free": (None, [_PTR]),
    "penstock_busy_seconds": (c_double, [_PTR]),  # that the functions of this context have taken so far
    # Products. context, weight*, x [rows, k], its type, rows, out [rows, n or n / 2], elements between its rows, its
    # type, activation (of the gate, where the weight is gated)
    "penstock_linear": (c_int32, [_PTR, _PTR, _PTR, _I32, _I64, _PTR, _I64, _I32, _I32]),
    # context, gate_up weights [experts], down weights [experts] (arrays of PenstockWeight), experts, x [rows, k], its
    # type (which the inner activations get too), rows, top_k, ids [rows, top_k] int64, weights [rows, top_k] float32,
    # activation, out [rows, n] float32
    "penstock_experts": (c_int32, [_PTR, _PTR, _PTR, _I64, _PTR, _I32, _I64, _I64, _PTR, _PTR, _I32, _PTR]),
    # context, out int64 [2]: experts that were read by the calls so far, once a call, and rows that went through one
    "penstock_expert_counts": (None, [_PTR, _PTR]),
    # Rows first_row .. first_row + num_rows - 1 of a weight, [num_rows, k] of a type, are quantised and packed.
    # context, weight* (its arrays are written), rows, their type, first_row, num_rows
    "penstock_pack_rows": (c_int32, [_PTR, _PTR, _PTR, _I32, _I64, _I64]),
    # Row operations. kernels/ops.py has their meaning; types are 0 float32, 1 bfloat16.
    # context, x, weight, eps, rows, n, out, its type
    "penstock_rms_norm": (c_int32, [_PTR, _PTR, _PTR, _F32, _I64, _I64, _PTR, _I32]),
    # context, x (written), h, weight, eps, rows, n, out, its type
    "penstock_add_rms_norm": (c_int32, [_PTR, _PTR, _PTR, _PTR, _F32, _I64, _I64, _PTR, _I32]),
    # context, x, weight, bias (or null), eps, rows, n, out, its type
    "penstock_layer_norm": (c_int32, [_PTR, _PTR, _PTR, _PTR, _F32, _I64, _I64, _PTR, _I32]),
    # context, x (written), h, weight, bias (or null), eps, rows, n, out, its type
    "penstock_add_layer_norm": (c_int32, [_PTR, _PTR, _PTR, _PTR, _PTR, _F32, _I64, _I64, _PTR, _I32]),
    # Element by element. context, x (written), h, elements
    "penstock_add": (c_int32, [_PTR, _PTR, _PTR, _I64]),
    # context, x, elements, out, its type
    "penstock_round": (c_int32, [_PTR, _PTR, _I64, _PTR, _I32]),
    # context, x (written), cap, elements
    "penstock_softcap": (c_int32, [_PTR, _PTR, _F32, _I64]),
    # context, qkv, positions, cos_sin (or null), its rows, rotary dim, rows, H, Hkv, D, q_norm (or null) and how many
    # elements it has, the same of k_norm, eps, q, k, v, their type
    "penstock_rotary_qkv": (
        c_int32,
        [_PTR, _PTR, _PTR, _PTR, *[_I64] * 6, _PTR, _I64, _PTR, _I64, _F32, _PTR, _PTR, _PTR, _I32],
    ),
    # context, ids, table, its type, its rows, rows, n, scale, out float32
    "penstock_embedding": (c_int32, [_PTR, _PTR, _PTR, _I32, _I64, _I64, _I64, _F32, _PTR]),
    # context, logits, rows, vocabulary, out
    "penstock_log_softmax": (c_int32, [_PTR, _PTR, _I64, _I64, _PTR]),
    # context, logits, rows, vocabulary, out uint8: 1 where no value is NaN or +inf and some value is above -inf
    "penstock_finite_rows": (c_int32, [_PTR, _PTR, _I64, _I64, _PTR]),
    # context, logits, rows, vocabulary, PenstockSampling*, out ids int64
    "penstock_sample": (c_int32, [_PTR, _PTR, _I64, _I64, _PTR, _PTR]),
    # context, router logits [rows, experts], rows, experts, top_k, renormalize, ids and weights [rows, top_k]
    "penstock_route": (c_int32, [_PTR, _PTR, _I64, _I64, _I64, _I32, _PTR, _PTR]),
    # Attention. context, PenstockAttentionStep*, PenstockCache*, PenstockAttention*, q, k_new, v_new, their type (and
    # out's), query heads, out [tokens, heads * D], lse [tokens, heads] float32 or null
    "penstock_attend": (c_int32, [_PTR, _PTR, _PTR, _PTR, _PTR, _PTR, _PTR, _I32, _I64, _PTR, _PTR]),
    # context, workspace bytes, scratch bytes of each thread: memory that later steps will not have to ask for
    "penstock_attention_reserve": (c_int32, [_PTR, _I64, _I64]),
    # PenstockAttentionStep*, PenstockCache*, out int64 [2]: workspace and scratch bytes that the step takes
    "penstock_attention_bytes": (c_int32, [_PTR, _PTR, _PTR]),
    # context, PenstockCache*, k, v [tokens, Hkv, D], their type, slots int64 [tokens], tokens
    "penstock_cache_store": (c_int32, [_PTR, _PTR, _PTR, _PTR, _I32, _PTR, _I64]),
    # context, PenstockCache*, slots int64 [tokens], tokens, k, v [tokens, Hkv, D] float32
    "penstock_cache_load": (c_int32, [_PTR, _PTR, _PTR, _I64, _PTR, _PTR]),
    # context, PenstockCall*, how many: carries them out in order
    "penstock_replay": (c_int32, [_PTR, _PTR, _I64]),
    # The machine's limits, with all threads of the context; each returns seconds.
    # context, memory, bytes: reads them once
    "penstock_limit_read": (c_double, [_PTR, _PTR, _I64]),
    # context, kind (0 f32, 1 bf16, 2 int8), iterations, operations* (out, int64): multiplies from registers
    "penstock_limit_multiply": (c_double, [_PTR, _I32, _I64, _PTR]),
}

NOT_QUANTISABLE, OUT_OF_RANGE = -2, -3  # native/abi.h, Status


def check_status(status: int) -> None:
    """Raise what a function's Status stands for.

    Raises:
        ValueError: a weight cannot be quantised, or an id or a position is beyond its table.
        MemoryError: there was no memory for the work.
    """
    if status == NOT_QUANTISABLE:
        raise ValueError("a weight that is not finite, or as great as 2^100, cannot be quantised")
    if status == OUT_OF_RANGE:
        raise ValueError("an id or a position is outside of its table")
    if status:
        raise MemoryError("no memory for a native operation")


def load_library() -> ctypes.CDLL | None:
    """The library, or None where there is none that can be used; `why_missing` says why."""
    found = _find_library()
    return None if isinstance(found, str) else found


def why_missing() -> str:
    """What to tell a user who has no native library."""
    found = _find_library()
    return found if isinstance(found, str) else NOT_BUILT


@lru_cache(maxsize=1)
def _find_library() -> ctypes.CDLL | str:
    """The library with its functions declared, or why there is none."""
    files = (Path(folder) / "penstock_cpu.so" for folder in penstock.kernels.cpu.__path__)
    path = next((file for file in files if file.exists()), None)
    return NOT_BUILT if path is None else _open_library(path)


def _open_library(path: Path) -> ctypes.CDLL | str:
    try:
        library = ctypes.CDLL(str(path))
        version = library.penstock_abi_version()
        if version != ABI_VERSION:
            return f"the native library is version {version}, and {ABI_VERSION} is needed; install the package again"
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:  # cut short, of another machine, or something else under its name
        return f"the native library cannot be used ({' '.join(str(error).split())}); install the package again"
    return library


def best_level() -> str | None:
    """The highest instruction level that the library and the processor have, or None without the library."""
    library = load_library()
    return None if library is None else LEVELS[library.penstock_best_level()]


def chosen_level() -> str | None:
    """The level that kernels run at: the best one, or the one that PENSTOCK_CPU_LEVEL forces.

    Raises:
        InvalidRequestError: the variable names no level, or one that this machine does not have.
    """
    best = best_level()
    forced = os.environ.get(LEVEL_VARIABLE, "")
    if best is None or not forced:
        return best
    allowed = LEVELS[: LEVELS.index(best) + 1]
    if forced not in allowed:
        raise InvalidRequestError(
            f"{LEVEL_VARIABLE}: {shown(forced)} is not allowed; this machine has {', '.join(allowed)}"
        )
    return forced
