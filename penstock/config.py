"""EngineConfig: everything a user can set about an engine, as frozen values.

Users write one flat list of options (`EngineConfig.from_options(model="demo", max_num_seqs=8)`, the same names on the
command line); inside, each part of the engine gets its own small config. `resolve()` fills what was left open and
returns a new config together with the reason of every automatic choice. This file knows no torch and reads no file.
"""

import os
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from penstock import validation as check
from penstock.errors import InvalidRequestError, NotSupportedError
from penstock.kernels.cpu.library import chosen_level, why_missing
from penstock.quant.scheme import GROUP_SIZES, SLICES, Scheme

if TYPE_CHECKING:
    from penstock.spec.model_config import ModelConfig

DTYPES = ("auto", "bfloat16", "float32")
QUANTIZATIONS = (None, *SLICES)
KV_CACHE_DTYPES = ("auto", "bfloat16", "float32", "int8")
LOAD_FORMATS = ("auto", "dummy")
KERNELS = ("auto", "reference", "cpu", "triton")
BLOCK_SIZE_UNIT = 16  # kernels read whole groups of 16 cached tokens
KV_CACHE_SLICES = {"bfloat16": 2, "float32": 3}  # by dtype: int8 rows that stand for a query over an int8 cache
DEFAULT_BLOCK_SIZE = 16
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
MAX_CONTEXT = 2**24
MAX_IMPORTS = 64
MAX_HEAD_PIECES = 1024
MAX_VOCAB_MULTIPLE = 2**16
SMALL_MATRIX = 2**19  # elements of an MLP matrix, of which one thread reads and multiplies a megabyte in 30 us


def _not_built(name: str, value: Any) -> NotSupportedError:
    return NotSupportedError(f"{name}: {check.shown(value)} is planned but not built yet", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The key/value cache.

    Attributes:
        block_size: tokens a block holds, a multiple of 16. As many as max_model_len or more: one block a request,
            and for layers with a window a ring of that many tokens; prefixes are not reused then.
        kv_cache_dtype: type of the cached keys and values; "auto" takes the model's. "int8" takes half the memory of
            bfloat16.
        kv_cache_scales: a safetensors file with the scales of an int8 cache by channel (weights/kv_scales.py); None:
            every token has its own, made from that token.
        kv_cache_memory_bytes: bytes for all layers together; None computes them (see `planner.memory`).
        enable_prefix_caching: whole blocks are found again by content.
    """

    block_size: int | None = None
    kv_cache_dtype: str = "auto"
    kv_cache_scales: str | None = None
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        size = self.block_size
        whole = isinstance(size, int) and not isinstance(size, bool)
        if size is not None and not (whole and size in range(BLOCK_SIZE_UNIT, MAX_CONTEXT + 1, BLOCK_SIZE_UNIT)):
            raise check.fail("block_size", size, f"a multiple of {BLOCK_SIZE_UNIT} up to {MAX_CONTEXT}")
        check.check_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        check.check_str("kv_cache_scales", self.kv_cache_scales, optional=True)
        if self.kv_cache_scales is not None and self.kv_cache_dtype != "int8":
            raise check.fail("kv_cache_scales", self.kv_cache_scales, "null: only kv_cache_dtype = int8 has scales")
        check.check_int("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1, 2**50, optional=True)
        check.check_bool("enable_prefix_caching", self.enable_prefix_caching)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Who computes when.

    Attributes:
        max_num_seqs: most requests that run at once.
        max_num_batched_tokens: most tokens computed in one step; a longer prompt is cut into chunks.
        max_model_len: longest prompt plus output, in tokens; None takes the model's context.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        check.check_int("max_num_seqs", self.max_num_seqs, 1, 2**16)
        check.check_int("max_num_batched_tokens", self.max_num_batched_tokens, 1, MAX_CONTEXT, optional=True)
        check.check_int("max_model_len", self.max_model_len, 2, MAX_CONTEXT, optional=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How the model is cut up. More than one process is planned, not built. Nothing here changes a bit of an answer.

    Attributes:
        lm_head_pieces: products that the LM head is computed in, each with its share of the vocabulary.
        pad_vocab_multiple: the LM head is padded to a multiple of this many tokens; padding is never sampled. Falcon's
            65024 tokens are a multiple of 512 already; 1024 makes them 65536.
        sharding_config: a file of weights and the axis of each that is split (spec/sharding_map.py); None takes those
            of the parameter table. It is held against the model also where nothing is split.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    lm_head_pieces: int = 1
    pad_vocab_multiple: int = 1
    sharding_config: str | None = None

    def __post_init__(self) -> None:
        check.check_int("lm_head_pieces", self.lm_head_pieces, 1, MAX_HEAD_PIECES)
        check.check_int("pad_vocab_multiple", self.pad_vocab_multiple, 1, MAX_VOCAB_MULTIPLE)
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            value = getattr(self, name)
            check.check_int(name, value, 1, 4096)
            if value > 1:
                raise _not_built(name, value)
        check.check_str("sharding_config", self.sharding_config, optional=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsConfig:
    """Everything that can change a bit of the answer.

    Attributes:
        dtype: type of weights and of what products read; "auto" takes the checkpoint's, float16 as bfloat16.
        quantization: how the weights are stored and multiplied (quant/scheme.py); None keeps dtype.
        quantization_group_size: of int4 weights; None takes the default, where there are groups. Without a
            quantization it is for packed weights, which know theirs.
        model_impl: which of the registered versions of an architecture computes it; "auto" is the default one.
        load_format: "dummy" makes random weights, so that a directory holding only config.json is enough.
        kernels: which backend carries out the arithmetic.
        threads: cores that compute; None takes those the process may use, or 1 for a small model.
        seed: of the engine; a request without a seed gets one made from it and its arrival number.
    """

    dtype: str = "auto"
    quantization: str | None = None
    quantization_group_size: int | None = None
    model_impl: str = "auto"
    load_format: str = "auto"
    kernels: str = "auto"
    threads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check.check_choice("dtype", self.dtype, DTYPES)
        check.check_choice("quantization", self.quantization, QUANTIZATIONS)
        check.check_choice("quantization_group_size", self.quantization_group_size, (None, *GROUP_SIZES))
        check.check_str("model_impl", self.model_impl, max_length=64)
        check.check_choice("load_format", self.load_format, LOAD_FORMATS)
        check.check_choice("kernels", self.kernels, KERNELS)
        check.check_int("threads", self.threads, 1, 1024, optional=True)
        check.check_int("seed", self.seed, -(2**63), 2**63 - 1)
        if self.quantization is not None and not self.quantization.startswith("int4"):
            self.check_no_groups()
        if self.kernels == "triton":
            raise _not_built("kernels", self.kernels)

    def check_no_groups(self) -> None:
        """For weights without groups.

        Raises:
            InvalidRequestError: a group size is given, which nothing would use.
        """
        if self.quantization_group_size is not None:
            allowed = "null: only int4 weights have groups"
            raise check.fail("quantization_group_size", self.quantization_group_size, allowed)

    @property
    def scheme(self) -> Scheme | None:
        """What `quantization` and `quantization_group_size` say together; both are known then."""
        return Scheme.parse(self.quantization, self.quantization_group_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All options of an engine.

    Attributes:
        model: a Hugging Face directory, a hub name, or "demo".
        imports: Python files of the user, imported before the model is looked for; they register models and logits
            processors.
        reasons: option -> why `resolve` chose its value; empty before.
    """

    model: str = "demo"
    imports: tuple[str, ...] = ()
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    numerics: NumericsConfig = field(default_factory=NumericsConfig)
    reasons: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check.check_str("model", self.model)
        files = check.string_tuple("imports", self.imports, max_items=MAX_IMPORTS, max_length=4096)
        object.__setattr__(self, "imports", files)
        for name, part in PARTS.items():
            if not isinstance(getattr(self, name), part):
                raise check.fail(name, getattr(self, name), f"a {part.__name__}")

    @property
    def kv_cache_slices(self) -> int:
        """Of a resolved config: int8 rows that stand for a row of queries or probabilities; 0 unless the cache is
        int8. Two come closer than a bfloat16 query, three close to float32."""
        return KV_CACHE_SLICES[self.numerics.dtype] if self.cache.kv_cache_dtype == "int8" else 0

    @classmethod
    def from_options(cls, **options: Any) -> "EngineConfig":
        """The config for one flat list of options.

        Raises:
            InvalidRequestError: an option is unknown, has the wrong type or is out of range; `param` names it.
        """
        parts: dict[str, Any] = {}
        model, imports = options.pop("model", "demo"), options.pop("imports", ())
        for part, part_class in PARTS.items():
            names = [item.name for item in fields(part_class) if item.name in options]
            parts[part] = part_class(**{name: options.pop(name) for name in names})
        if options:
            name = next(iter(options))
            raise InvalidRequestError(f"{name}: unknown option; known are {', '.join(option_names())}", param=name)
        return cls(model=model, imports=imports, **parts)

    def resolve(self, model_config: "ModelConfig") -> "EngineConfig":
        """A new config without "auto" and None (but for the cache's bytes), and why each was chosen.

        Raises:
            InvalidRequestError: an option fits neither the others, nor the model or the machine.
        """
        reasons: dict[str, str] = {}
        check.check_int(
            "lm_head_pieces", self.parallel.lm_head_pieces, 1, min(MAX_HEAD_PIECES, model_config.vocab_size)
        )
        numerics = _resolve_numerics(self.numerics, model_config, reasons)
        scheduler = _resolve_scheduler(self.scheduler, model_config, reasons)
        cache = _resolve_cache(self.cache, scheduler, numerics.dtype, reasons)
        return replace(self, numerics=numerics, scheduler=scheduler, cache=cache, reasons=reasons)


PARTS: dict[str, type] = {
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
    "numerics": NumericsConfig,
}


def option_names() -> list[str]:
    """Every flat option, as `from_options` and the command line spell it."""
    return ["model", "imports", *(item.name for part in PARTS.values() for item in fields(part))]


def available_threads() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _resolve_numerics(config: NumericsConfig, model: "ModelConfig", reasons: dict[str, str]) -> NumericsConfig:
    dtype, kernels, threads = config.dtype, config.kernels, config.threads
    if dtype == "auto":
        dtype = "float32" if model.dtype == "float32" else "bfloat16"
        reasons["dtype"] = f"{dtype}: the checkpoint is {model.dtype}"
        if model.dtype == "float16":
            reasons["dtype"] += ", which is served as bfloat16"
    kernels, reason = _choose_kernels(kernels)
    if reason:
        reasons["kernels"] = reason
    if config.quantization is None:
        config.check_no_groups()
    scheme = config.scheme
    if scheme is not None and scheme.group_size != config.quantization_group_size:
        reasons["quantization_group_size"] = f"{scheme.group_size}: the default"
    if threads is None:
        small = model.hidden_size * model.intermediate_size < SMALL_MATRIX
        threads = 1 if small else available_threads()
        why = (
            "the matrices are so small that sharing them costs more than it brings" if small else "the cores there are"
        )
        reasons["threads"] = f"{threads}: {why}"
    return replace(config, dtype=dtype, kernels=kernels, threads=threads)


def _choose_kernels(asked: str) -> tuple[str, str]:
    """The backend, and the reason of an automatic choice.

    Raises:
        InvalidRequestError: the native kernels are asked for and not there, or the environment forces a wrong level.
    """
    if asked == "reference":
        return asked, ""
    level = chosen_level()
    if level is not None:
        return "cpu", "" if asked == "cpu" else f"cpu: native kernels, level {level}"
    if asked == "cpu":
        raise check.fail("kernels", asked, f"reference: {why_missing()}")
    return "reference", f"reference (plain torch; slow): {why_missing()}"


def _resolve_scheduler(config: SchedulerConfig, model: "ModelConfig", reasons: dict[str, str]) -> SchedulerConfig:
    max_model_len, max_num_batched_tokens = config.max_model_len, config.max_num_batched_tokens
    context, of = model.context, "the model's max_position_embeddings"
    if context > model.max_position_embeddings:
        of += ", stretched by its rotary scaling"
    if max_model_len is None:
        max_model_len = context
        reasons["max_model_len"] = f"{context}: {of}"
    elif max_model_len > context:
        raise check.fail("max_model_len", max_model_len, f"at most {of} = {context}")
    if max_num_batched_tokens is None:
        max_num_batched_tokens = max(DEFAULT_MAX_NUM_BATCHED_TOKENS, config.max_num_seqs)
        reasons["max_num_batched_tokens"] = f"{max_num_batched_tokens}: the default, at least one token a sequence"
    max_num_seqs = min(config.max_num_seqs, max_num_batched_tokens)
    if max_num_seqs < config.max_num_seqs:
        reasons["max_num_seqs"] = f"{max_num_seqs}: no more run than max_num_batched_tokens gives a token each"
    return SchedulerConfig(
        max_num_seqs=max_num_seqs, max_model_len=max_model_len, max_num_batched_tokens=max_num_batched_tokens
    )


def _resolve_cache(config: CacheConfig, scheduler: SchedulerConfig, dtype: str, reasons: dict[str, str]) -> CacheConfig:
    block_size, kv_cache_dtype = config.block_size, config.kv_cache_dtype
    prefix_caching, longest = config.enable_prefix_caching, scheduler.max_model_len or 0
    if block_size is None:
        block_size = DEFAULT_BLOCK_SIZE
        reasons["block_size"] = f"{block_size}: the default"
    elif block_size >= longest:
        block_size = -(-longest // BLOCK_SIZE_UNIT) * BLOCK_SIZE_UNIT
        reasons["block_size"] = f"{block_size}: max_model_len, one block a request"
        if prefix_caching:
            prefix_caching = False
            reasons["enable_prefix_caching"] = "off: a block is a whole request, and none is like another"
    if kv_cache_dtype == "auto":
        kv_cache_dtype = dtype
        reasons["kv_cache_dtype"] = f"{dtype}: the model's dtype"
    elif kv_cache_dtype == "int8":
        slices = KV_CACHE_SLICES[dtype]
        reasons["kv_cache_dtype"] = f"int8: queries and probabilities as {slices} int8 rows each, for a {dtype} model"
    return replace(config, block_size=block_size, kv_cache_dtype=kv_cache_dtype, enable_prefix_caching=prefix_caching)
