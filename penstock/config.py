"""EngineConfig: everything that a user can set about an engine, as frozen values.

Users write one flat list of options (`EngineConfig.from_options(model="demo", max_num_seqs=8)`); inside, each part of
the engine gets its own small config. A field states its default, the values it allows and its help text once: the
checks here and the command-line flags follow from them. `resolve()` fills in open values and records the reason of
every automatic choice. This file imports no torch. Advice about options of other engines is in option_hints.toml,
which is read only after such a mistake.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.errors import (
    POSITIVE,
    InvalidRequestError,
    check_choice,
    check_int,
    check_options,
    check_str,
    fail,
    invalid,
    option,
    pop_options,
    shown,
    string_tuple,
)
from penstock.interface.lora import LoRAConfig
from penstock.interface.pooling import PoolerConfig
from penstock.kernels.cpu.host import AFFINITIES, AUTO, NONE, Machine, parse_cpus, pinned_cores
from penstock.kernels.cpu.library import chosen_level, why_missing
from penstock.kernels.scheme import GROUP_SIZES, SLICES, Scheme
from penstock.kernels.triton import device as gpu

if TYPE_CHECKING:
    from penstock.kernels.coding import Coding
    from penstock.spec.model_config import ModelConfig

NGRAM, DRAFT_MODEL = "ngram", "draft_model"
SPECULATIVE_CONFIG = "speculative_config"
DEFAULT_LOOKUP_MAX = 4
MAX_DRAFTS, MAX_NGRAM = 32, 64  # drafts of a request in a step; tokens that are looked up
DTYPES = ("auto", "bfloat16", "float32")
ACTIVATION_DTYPES = ("auto", "int8", "int8-x2", "int8-x3")
CODED_ACTIVATIONS = "int8-x2"  # closer to exact activations than bfloat16
HALF_GROUPS = 16  # ranks that share 8 key/value heads: two of them have a head, each with half of its query heads
DEGREES = (1, 2, 4, 8)  # numbers of parts into which ranks split a model: the divisors of the leaves of a sum
KV_CACHE_DTYPES = ("auto", "bfloat16", "float32", "int8")
SCHEDULING_POLICIES = ("fcfs", "priority", "length_classes", "fair", "deadline")
KERNELS = ("auto", "reference", "cpu", "triton")
TRITON = gpu.NAME
BLOCK_SIZE_UNIT = 16  # kernels read whole groups of 16 cached tokens
BLOCK_SIZE_UNITS = {TRITON: gpu.TILE}  # where they read larger ones
KV_CACHE_SLICES = {"bfloat16": 2, "float32": 3}  # int8 slices per query over an int8 cache, by the model's dtype
DEFAULT_BLOCK_SIZE = 16
LIMITS, LIMITS_ON_GPU = (32, 2048), (256, 8192)  # max_num_seqs and max_num_batched_tokens
DEFAULT_OFFLOAD_DIR_BYTES = 16 * 2**30
MAX_CONTEXT = 2**24
BLOCK_SIZES = range(BLOCK_SIZE_UNIT, MAX_CONTEXT + 1, BLOCK_SIZE_UNIT)
ONE_BLOCK = "max-model-len"  # in place of a block size: one block per request
MAX_HEAD_PIECES, MAX_IMPORTS = 1024, 64
HINTS = Path(__file__).with_name("option_hints.toml")
SMALL_MATRIX = 2**19  # elements of an MLP matrix; one thread reads and multiplies a megabyte in 30 us

Choices = dict[str, tuple[Any, str]]  # option -> the chosen value, and why
Part = TypeVar("Part", "CacheConfig", "SchedulerConfig", "NumericsConfig")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The key/value cache.

    A block_size of max_model_len or more gives every request one block, which is a ring in layers with a window; prefix
    caching is then off. An int8 cache takes half the memory of a bfloat16 cache; kv_cache_scales is a safetensors file
    or a checkpoint's directory (weights/kv_scales.py). If kv_cache_memory_bytes is None, assembly.memory computes it,
    from what `memory` leaves if that is given.
    """

    block_size: int | None = option(
        None,
        BLOCK_SIZES,
        f"tokens per cache block, a multiple of 16; {ONE_BLOCK}: one block per request (default: 16, or 128 on a GPU)",
        words=(ONE_BLOCK,),
    )
    kv_cache_dtype: str = option("auto", KV_CACHE_DTYPES, "type of the cached keys and values")
    kv_cache_scales: str | None = option(
        None, str, "scales of an int8 cache: a file, or the directory of a checkpoint (default: scales per token)"
    )
    kv_cache_memory_bytes: int | None = option(None, range(1, 2**50 + 1), "memory for the cache, like 2GiB")
    memory: int | None = option(None, range(1, 2**50 + 1), "memory for the whole engine, weights included, like 8GiB")
    enable_prefix_caching: bool = option(True, bool, "reuse the cached blocks of equal prefixes (default: on)")
    kv_offload_memory_bytes: int | None = option(
        None, range(1, 2**50 + 1), "main memory for blocks that are evicted from the cache, like 4GiB (default: none)"
    )
    kv_offload_dir: str | None = option(
        None, str, "directory for evicted blocks, which are found again after a restart (default: none)"
    )
    kv_offload_dir_bytes: int | None = option(
        None, range(1, 2**60 + 1), "maximum size of the blocks in kv-offload-dir (default: 16GiB)"
    )

    def __post_init__(self) -> None:
        size: Any = self.block_size
        object.__setattr__(self, "block_size", BLOCK_SIZES[-1] if size == ONE_BLOCK else size)
        check_options(self)
        if self.kv_cache_scales is not None and self.kv_cache_dtype != "int8":
            raise fail("kv_cache_scales", self.kv_cache_scales, "null: only kv_cache_dtype = int8 has scales")
        if self.kv_offload_dir_bytes is not None and self.kv_offload_dir is None:
            raise fail("kv_offload_dir_bytes", self.kv_offload_dir_bytes, "left out: there is no kv_offload_dir")
        if self.offload_option is not None and not self.enable_prefix_caching:
            raise fail("enable_prefix_caching", False, f"true: {self.offload_option} keeps prefixes")

    @property
    def offload_option(self) -> str | None:
        """The option that asks for a store beyond the cache, if any."""
        names = ("kv_offload_dir", "kv_offload_memory_bytes")
        return next((name for name in names if getattr(self, name) is not None), None)

    def resolve(self, max_model_len: int, dtype: str, kernels: str) -> tuple["CacheConfig", dict[str, str]]:
        """Replace open values by chosen ones, and give the reason of each choice.

        Raises:
            InvalidRequestError: block_size does not fit the kernels, or a request that is one block the offloading.
        """
        choices: Choices = {}
        unit = BLOCK_SIZE_UNITS.get(kernels, BLOCK_SIZE_UNIT)
        if self.block_size is None:
            why = "the default" if unit <= DEFAULT_BLOCK_SIZE else f"what kernels = {kernels} read at a time"
            choices["block_size"] = max(DEFAULT_BLOCK_SIZE, unit), why
        elif self.block_size >= max_model_len:
            block_size = -(-max_model_len // unit) * unit
            choices["block_size"] = block_size, "max_model_len, one block per request"
            if self.enable_prefix_caching:
                if self.offload_option is not None:
                    allowed = f"less than max_model_len: {self.offload_option} is given"
                    raise fail("block_size", self.block_size, allowed)
                choices["enable_prefix_caching"] = False, "a block is a whole request, so no prefix can be shared"
        elif self.block_size % unit:
            allowed = f"a multiple of {unit}, the tokens that kernels = {kernels} read at a time"
            raise fail("block_size", self.block_size, allowed)
        if self.kv_offload_dir is not None and self.kv_offload_dir_bytes is None:
            choices["kv_offload_dir_bytes"] = DEFAULT_OFFLOAD_DIR_BYTES, "the default, 16 GiB"
        if self.kv_cache_dtype == "auto":
            choices["kv_cache_dtype"] = dtype, "the model's dtype"
        elif self.kv_cache_dtype == "int8":
            slices = KV_CACHE_SLICES[dtype]
            why = f"queries and probabilities in {slices} int8 slices, for a {dtype} model"
            choices["kv_cache_dtype"] = "int8", why
        return _apply(self, choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits on what runs at once, and its order. Prompts longer than max_num_batched_tokens are computed in chunks."""

    max_model_len: int | None = option(
        None, range(2, MAX_CONTEXT + 1), "maximum length of prompt plus output, in tokens"
    )
    max_num_seqs: int = option(
        None, range(1, 2**16 + 1), "maximum number of requests that run at once (default: 32, or 256 on a GPU)"
    )
    max_num_batched_tokens: int | None = option(
        None, range(1, MAX_CONTEXT + 1), "maximum number of tokens per step (default: 2048, or 8192 on a GPU)"
    )
    scheduling_policy: str = option("fcfs", SCHEDULING_POLICIES, "which waiting request comes next")
    max_stall_ms: int | None = option(
        None, range(1, 3_600_001), "maximum milliseconds per step that streams wait for new prompts (default: no limit)"
    )
    prefill_ratio: float | None = option(
        None, POSITIVE, "length_classes: requests start when this many wait for each running one (default: 1.2)"
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.prefill_ratio is not None and self.scheduling_policy != "length_classes":
            raise fail("prefill_ratio", self.prefill_ratio, "left out unless scheduling_policy = length_classes")

    def resolve(self, model: "ModelConfig", kernels: str = "cpu") -> tuple["SchedulerConfig", dict[str, str]]:
        """Replace open values by chosen ones, and give the reason of each choice.

        Raises:
            InvalidRequestError: max_model_len exceeds the model's context.
        """
        choices: Choices = {}
        source = "the model's max_position_embeddings"
        if model.context > model.max_position_embeddings:
            source += ", extended by its rotary scaling"
        if self.max_model_len is None:
            choices["max_model_len"] = model.context, source
        elif self.max_model_len > model.longest_context:
            raise fail("max_model_len", self.max_model_len, _longest(model, source, self.max_model_len))
        given: tuple[int | None, int | None] = self.max_num_seqs, self.max_num_batched_tokens
        num_seqs, num_tokens = given
        usual_seqs, usual_tokens = LIMITS_ON_GPU if kernels == TRITON else LIMITS
        if num_seqs is None:
            num_seqs = usual_seqs
            choices["max_num_seqs"] = num_seqs, "the default"
        if num_tokens is None:
            num_tokens = max(usual_tokens, num_seqs)
            choices["max_num_batched_tokens"] = num_tokens, "the default, at least max_num_seqs"
        if num_seqs > num_tokens:
            choices["max_num_seqs"] = num_tokens, "max_num_batched_tokens, as each request needs a token per step"
        return _apply(self, choices)


def _longest(model: "ModelConfig", source: str, wanted: int) -> str:
    """Say how long a context may be, and what makes it longer."""
    if model.longest_context > model.context:
        return f"at most the rotary factor times the original context = {model.longest_context}"
    allowed = f"at most {source} = {model.context}"
    if model.rope is None or model.rope.rope_type != "default" or model.local_rope is not None:
        return allowed
    factor = -(-wanted // model.context)
    scaling = {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": model.context}
    return f"{allowed}; if the model's card allows it, --rope-scaling '{json.dumps(scaling)}' extends it"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Degrees to which the model is split over processes (ranks); none of them changes a bit of an answer.

    A degree is a number of parts (ranks/sharding.py). Attention and feed-forward are split into tensor_parallel_size
    parts unless they have a degree of their own, or a sharding_config (ranks/sharding_map.py) says what is split. The
    tokens that pad_vocab_multiple adds are never sampled; the last part of the LM head has them.
    """

    tensor_parallel_size: int = option(1, DEGREES, "processes that share each layer")
    attention_parallel_size: int | None = option(
        None,
        (None, *DEGREES, HALF_GROUPS),
        "parts of attention (default: tensor-parallel-size, or fewer if there are fewer key/value heads)",
    )
    mlp_parallel_size: int | None = option(
        None, (None, *DEGREES), "parts of the feed-forward branch (default: tensor-parallel-size)"
    )
    expert_parallel_size: int = option(1, DEGREES, "groups of processes, each with its own experts")
    pipeline_parallel_size: int = option(1, range(1, 4097), "processes that share the layers")
    distributed_executor_backend: str = option(
        "mp", ("mp", "ray"), "where these processes run; mp: on this machine; ray: on the Ray cluster at RAY_ADDRESS"
    )
    lm_head_pieces: int = option(
        1, range(1, MAX_HEAD_PIECES + 1), "matrix products in which each process computes its part of the LM head"
    )
    pad_vocab_multiple: int = option(
        1, range(1, 2**16 + 1), "pad the LM head to a multiple of N tokens (Falcon's 65024 become 65536 with 1024)"
    )
    sharding_config: str | None = option(
        None, str, "YAML file of the axis that each weight is split along (default: the parameter table)"
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.num_ranks > 1:
            self._check_split()
        if self.is_on_ray and self.num_ranks * self.pipeline_parallel_size == 1:
            raise fail("distributed_executor_backend", "ray", "mp unless several processes share the model")

    def _check_split(self) -> None:
        if self.sharding_config is None:
            return
        for name in ("attention_parallel_size", "mlp_parallel_size"):
            if getattr(self, name) is not None:
                raise fail(name, getattr(self, name), "left out: sharding_config says what is split")
        if self.expert_parallel_size > 1:
            raise fail("expert_parallel_size", self.expert_parallel_size, "1: sharding_config says what is split")

    @property
    def num_ranks(self) -> int:
        """The number of processes that share each layer."""
        sizes = self.tensor_parallel_size, self.attention_parallel_size or 1, self.mlp_parallel_size or 1
        return max(*sizes, self.expert_parallel_size)

    @property
    def is_on_ray(self) -> bool:
        return self.distributed_executor_backend == "ray"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Options of speculative decoding, in vLLM's names.

    Attributes:
        method: "ngram" looks up the last tokens in the request's own text; "draft_model" asks a smaller model. If it
            is not given, a `model` implies "draft_model".
        model: for "draft_model": a directory, a hub name or "demo-draft". Its vocabulary is that of the main model.
        num_speculative_tokens: maximum number of drafts of a request in a step. Only as many as pay are computed.
        prompt_lookup_max, prompt_lookup_min: for "ngram": most and fewest tokens that are looked up.

    Raises:
        InvalidRequestError: a value is out of range, or belongs to the other method.
    """

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: int = 5
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None

    def __post_init__(self) -> None:
        if self.method is None and self.model is not None:
            object.__setattr__(self, "method", DRAFT_MODEL)
        check_choice(_speculative("method"), self.method, (NGRAM, DRAFT_MODEL))
        check_int(_speculative("num_speculative_tokens"), self.num_speculative_tokens, 1, MAX_DRAFTS)
        if self.method == DRAFT_MODEL:
            check_str(_speculative("model"), self.model)
            for name in ("prompt_lookup_max", "prompt_lookup_min"):
                if getattr(self, name) is not None:
                    raise fail(_speculative(name), getattr(self, name), "left out: only method = ngram uses it")
            return
        if self.model is not None:
            raise fail(_speculative("model"), self.model, "left out: method = ngram has no model")
        self._settle_lengths()

    def _settle_lengths(self) -> None:
        longest, shortest = self.prompt_lookup_max, self.prompt_lookup_min
        longest = max(DEFAULT_LOOKUP_MAX, shortest or 1) if longest is None else longest
        check_int(_speculative("prompt_lookup_max"), longest, 1, MAX_NGRAM)
        shortest = 1 if shortest is None else shortest
        check_int(_speculative("prompt_lookup_min"), shortest, 1, longest)
        object.__setattr__(self, "prompt_lookup_max", longest)
        object.__setattr__(self, "prompt_lookup_min", shortest)

    @classmethod
    def of(cls, value: Any) -> "SpeculativeConfig":
        """Parse a dictionary, as users write it.

        Raises:
            InvalidRequestError: it has unknown keys or wrong values.
        """
        if not isinstance(value, dict):
            raise fail(SPECULATIVE_CONFIG, value, 'an object like {"method": "ngram"}')
        names = [item.name for item in fields(cls)]
        if (unknown := next((str(key) for key in value if key not in names), None)) is not None:
            message = f"{_speculative(shown(unknown))}: unknown key; known are {', '.join(names)}"
            raise InvalidRequestError(message, param=SPECULATIVE_CONFIG)
        try:
            return cls(**value)
        except InvalidRequestError as error:  # to a user, it is one option
            raise InvalidRequestError(str(error), param=SPECULATIVE_CONFIG) from None


def _speculative(key: str) -> str:
    return f"{SPECULATIVE_CONFIG}.{key}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Speculative decoding, which changes no bit: a SpeculativeConfig as a dictionary."""

    speculative_config: dict[str, Any] | None = option(
        None, dict, 'speculative decoding, like {"method": "ngram"} or {"model": "demo-draft"}'
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.speculative_config is not None:
            SpeculativeConfig.of(self.speculative_config)

    @property
    def drafts(self) -> SpeculativeConfig | None:
        """The checked config; None without speculation."""
        return None if self.speculative_config is None else SpeculativeConfig.of(self.speculative_config)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingConfig:
    """Options that override how the model's files make embeddings of hidden states (interface/pooling.py)."""

    pooler_config: dict[str, Any] | None = option(
        None, dict, 'how hidden states become embeddings, like {"pooling_type": "MEAN", "normalize": true}'
    )

    def __post_init__(self) -> None:
        check_options(self)
        PoolerConfig().with_options(self.pooler_config)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig:
    """Options of the text around the engine, in which conversations become prompts."""

    chat_template: str | None = option(
        None, str, "file with the chat template to use, or the name of one of the model's, like tool_use or rag"
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsConfig:
    """Everything that can change a bit of the answer.

    dtype "auto" takes the checkpoint's type, or bfloat16 for float16. quantization is described in kernels/scheme.py;
    quantization_group_size alone is allowed only for packed weights, which know their quantization. activation_dtype is
    for checkpoints whose weights are quantised already (kernels/coding.py), which are not quantised a second time.
    """

    dtype: str = option("auto", DTYPES, "type of weights and matrix products")
    quantization: str | None = option(None, (None, *SLICES), "how weights are stored and multiplied")
    quantization_group_size: int | None = option(None, (None, *GROUP_SIZES), "weights per scale of int4 (default: 128)")
    activation_dtype: str = option(
        "auto", ACTIVATION_DTYPES, "what the weights of a quantised checkpoint are multiplied with (default: int8-x2)"
    )
    hf_overrides: dict[str, Any] | None = option(
        None, dict, 'values that replace those of config.json, like {"rope_theta": 1e6}; null removes a key'
    )
    rope_scaling: dict[str, Any] | None = option(
        None, dict, 'rotary scaling instead of that of config.json, like {"rope_type": "yarn", "factor": 4.0}'
    )
    attention_sinks: int | None = option(
        None, range(1, MAX_CONTEXT), "StreamingLLM: number of first tokens that stay visible beside a sliding-window"
    )
    sliding_window: int | None = option(
        None, range(1, MAX_CONTEXT), "StreamingLLM: number of last tokens that a token sees, itself included"
    )
    model_impl: str = option("auto", str, "which registered implementation of the architecture computes")
    load_format: str = option(
        "auto", ("auto", "dummy", "mock"), "dummy: random weights, so only config.json is needed; mock: no model at all"
    )
    verify_files: bool = option(False, bool, "compare packed weights with their checksums before they are used")
    kernels: str = option("auto", KERNELS, "backend that computes")
    device: str = option(AUTO, str, "where it computes: auto, cpu, or a GPU: cuda, or cuda:1 for the second")
    threads: int | None = option(None, range(1, 1025), "cores that compute (default: all, or 1 for a small model)")
    cpu_affinity: str = option(AUTO, str, "where threads run: auto, none, nodes, or one per core of a list like 0-3,8")
    seed: int = option(0, range(-(2**63), 2**63), "the engine's seed, from which requests without a seed derive theirs")

    def __post_init__(self) -> None:
        check_options(self)
        check_str("model_impl", self.model_impl, max_length=64)
        if self.quantization is not None and not self.quantization.startswith("int4"):
            self._check_no_group_size()
        if self.quantization is not None and self.activation_dtype != "auto":
            allowed = f"auto: quantization = {self.quantization} says what the weights are multiplied with"
            raise fail("activation_dtype", self.activation_dtype, allowed)
        for name, other in (("attention_sinks", "sliding_window"), ("sliding_window", "attention_sinks")):
            if getattr(self, name) is not None and getattr(self, other) is None:
                raise fail(name, getattr(self, name), f"left out, or joined by {other}")
        if self.verify_files and self.load_format != "auto":
            raise fail("verify_files", True, f"false: load_format = {self.load_format} reads no weights")
        if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", self.device):
            raise fail("device", self.device, "auto, cpu, cuda, or cuda:N for the GPU with the number N")
        if self.device.startswith("cuda") and self.kernels not in (AUTO, TRITON):
            raise fail("device", self.device, f"auto or cpu: kernels = {self.kernels} compute on the CPU")
        if self.cpu_affinity not in AFFINITIES:
            try:
                parse_cpus(self.cpu_affinity)
            except ValueError as error:
                allowed = f"auto, none, nodes, or CPUs like 0-3,8: {error}"
                raise fail("cpu_affinity", self.cpu_affinity, allowed) from error

    def _check_no_group_size(self) -> None:
        if self.quantization_group_size is not None:
            allowed = "null: only int4 weights have groups"
            raise fail("quantization_group_size", self.quantization_group_size, allowed)

    @property
    def scheme(self) -> Scheme | None:
        """The quantization and its group size; None for weights that are not quantised."""
        return Scheme.parse(self.quantization, self.quantization_group_size)

    @property
    def activation_slices(self) -> int:
        """The number of int8 rows that represent a row of activations for a coded weight."""
        return SLICES[CODED_ACTIVATIONS if self.activation_dtype == "auto" else self.activation_dtype]

    def with_codings(self, codings: "tuple[Coding, ...]") -> tuple["NumericsConfig", dict[str, str]]:
        """Choose what fits the codings of a checkpoint's weights, and give the reason of each choice.

        Raises:
            InvalidRequestError: coded weights would be quantised again, or an option is for coded weights only.
        """
        names = ", ".join(dict.fromkeys(coding.name for coding in codings))
        if names and self.quantization is not None:
            allowed = f"null: the checkpoint's weights are quantised already ({names})"
            raise fail("quantization", self.quantization, allowed)
        if self.kernels != TRITON and any(coding.is_integer for coding in codings):
            activations = CODED_ACTIVATIONS if self.activation_dtype == "auto" else self.activation_dtype
            why = f"the checkpoint's weights are quantised ({names})"
            return _apply(self, {"activation_dtype": (activations, why)})
        if self.activation_dtype != "auto":
            unquantised = f"with kernels = {self.kernels}, products with {names} weights take unquantised activations"
            why = unquantised if names else "the weights are not quantised"
            raise fail("activation_dtype", self.activation_dtype, f"auto: {why}")
        return self, {}

    def resolve(
        self,
        model: "ModelConfig",
        num_ranks: int = 1,
        num_engines: int = 1,
        *,
        number: int = 0,
        elsewhere: bool = False,
        why_no_gpu: str = "",
        planned_on: str = "",
    ) -> tuple["NumericsConfig", dict[str, str]]:
        """Replace open values by chosen ones, and give the reason of each choice.

        Args:
            num_ranks: processes that share the model.
            elsewhere: whether each of them may have a machine of its own.
            num_engines: engines that share the machine, each with num_ranks processes.
            number: of this engine among them.
            why_no_gpu: why the model cannot be served on a GPU; "" if it can.
            planned_on: the name of a GPU for which an engine is only planned; this machine may lack it.

        Raises:
            InvalidRequestError: a group size is given without groups, the kernels that are requested cannot be used
                here, the environment forces an invalid level, or cpu_affinity does not fit the machine or the threads.
        """
        choices: Choices = {}
        if self.dtype == "auto":
            dtype = "float32" if model.dtype == "float32" else "bfloat16"
            served = ", which is served as bfloat16" if model.dtype == "float16" else ""
            choices["dtype"] = dtype, f"the checkpoint is {model.dtype}{served}"
        if self.quantization is None:
            self._check_no_group_size()
        scheme = self.scheme
        if scheme is not None and scheme.group_size != self.quantization_group_size:
            choices["quantization_group_size"] = scheme.group_size, "the default"
        asked = self.kernels, self.device, number, num_engines
        device = "cuda" if planned_on else gpu.choose(*asked, why_no_gpu, num_ranks)
        if device is not None:
            choices |= {"kernels": (TRITON, "for GPUs"), "device": (device, planned_on or gpu.describe(device))}
            idle: Choices = {"threads": (1, "the GPU computes"), "cpu_affinity": (NONE, "the GPU computes")}
            return _apply(self, choices | {name: idle[name] for name in idle if getattr(self, name) in (None, AUTO)})
        level = None if self.kernels == "reference" else chosen_level()
        if self.kernels == "auto":
            native = "cpu", f"native kernels, level {level}"
            choices["kernels"] = native if level else ("reference", f"plain torch, slow; {why_missing()}")
        if self.device == AUTO:
            choices["device"] = "cpu", "the kernels compute on the CPU"
        if num_ranks > 1 and level is None:
            why = "" if self.kernels == "reference" else f": {why_missing()}"
            raise fail("kernels", self.kernels, f"cpu if several processes share the model{why}")
        if self.kernels == "cpu" and level is None:
            raise fail("kernels", self.kernels, f"reference: {why_missing()}")
        small = model.hidden_size * model.intermediate_size < SMALL_MATRIX
        if level is None and self.cpu_affinity not in (AUTO, NONE):
            raise fail("cpu_affinity", self.cpu_affinity, "auto or none: only the native kernels place their threads")
        if num_ranks * num_engines > 1:
            num_here = num_engines if elsewhere else num_ranks * num_engines
            shared = self._share_cores(Machine.read(), num_here, small_model=small)
            return _apply(self, choices | shared)
        return _apply(self, choices | self._resolve_cores(Machine.read(), small_model=small))

    def _share_cores(self, machine: Machine, count: int, *, small_model: bool) -> Choices:
        """Choose threads and cpu_affinity for each of several processes, if they were left open."""
        if self.cpu_affinity not in (AUTO, NONE):
            raise fail("cpu_affinity", self.cpu_affinity, "auto or none if several processes share the cores")
        choices: Choices = {}
        if self.threads is None:
            threads = 1 if small_model else max(1, machine.default_threads()[0] // count)
            why = f"the cores shared by {count} processes" if count > 1 else "all cores of a machine"
            choices["threads"] = threads, why
        if self.cpu_affinity == AUTO:
            choices["cpu_affinity"] = NONE, "several processes share the cores"
        return choices

    def _resolve_cores(self, machine: Machine, *, small_model: bool) -> Choices:
        """Choose threads and cpu_affinity, if they were left open."""
        choices: Choices = {}
        threads = self.threads
        if self.cpu_affinity not in AFFINITIES:
            machine = machine.only(parse_cpus(self.cpu_affinity))
        if threads is None:
            threads, why = machine.default_threads()
            if small_model:
                threads, why = 1, "the matrices are too small to gain from more"
            choices["threads"] = threads, why
        if self.cpu_affinity == AUTO:
            choices["cpu_affinity"] = machine.affinity(threads)
            return choices
        try:
            pinned_cores(self.cpu_affinity, threads)
        except ValueError as error:
            raise fail("cpu_affinity", self.cpu_affinity, str(error)) from error
        return choices


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All options of an engine.

    Attributes:
        model: a Hugging Face directory, a hub name, or "demo".
        imports: Python files of the user that register models and logits processors, imported before the model loads.
        reasons: option -> why `resolve` chose its value; empty before that.
    """

    model: str = "demo"
    imports: tuple[str, ...] = ()
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    numerics: NumericsConfig = field(default_factory=NumericsConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    pooling: PoolingConfig = field(default_factory=PoolingConfig)
    text: TextConfig = field(default_factory=TextConfig)
    reasons: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_str("model", self.model)
        files = string_tuple("imports", self.imports, max_items=MAX_IMPORTS, max_length=4096)
        object.__setattr__(self, "imports", files)
        for name, part in PARTS.items():
            if not isinstance(getattr(self, name), part):
                raise fail(name, getattr(self, name), f"a {part.__name__}")

    @property
    def kv_cache_slices(self) -> int:
        """Number of int8 slices per query and probability over an int8 cache, 0 for other caches; when resolved."""
        return KV_CACHE_SLICES[self.numerics.dtype] if self.cache.kv_cache_dtype == "int8" else 0

    @classmethod
    def from_options(cls, **options: Any) -> "EngineConfig":
        """Build the config from one flat list of options.

        Raises:
            InvalidRequestError: an option is unknown, has the wrong type or is out of range; `param` names it.
        """
        model, imports = options.pop("model", "demo"), options.pop("imports", ())
        parts: dict[str, Any] = {part: pop_options(part_class, options) for part, part_class in PARTS.items()}
        if options:
            name, known = next(iter(options)), option_names()
            advice = hint(name, known) or f"known are {', '.join(known)}"
            raise invalid(name, f"unknown option; {advice}")
        return cls(model=model, imports=imports, **parts)

    def resolve(self, model: "ModelConfig", num_engines: int = 1, **gpu: Any) -> "EngineConfig":
        """Replace "auto" and None (except kv_cache_memory_bytes, see assembly.memory) by chosen values, with reasons.

        num_engines, gpu (number, why_no_gpu, planned_on): as in NumericsConfig.resolve.

        Raises:
            InvalidRequestError: an option does not fit the others, the model or the machine.
        """
        parallel, stages = self.parallel, self.parallel.pipeline_parallel_size
        columns = model.vocab_size // parallel.tensor_parallel_size  # of the process that has the fewest
        check_int("lm_head_pieces", parallel.lm_head_pieces, 1, min(MAX_HEAD_PIECES, columns))
        if stages > model.num_hidden_layers:
            raise fail("pipeline_parallel_size", stages, f"at most {model.num_hidden_layers}, one layer per process")
        num_ranks, elsewhere = self.parallel.num_ranks * stages, self.parallel.is_on_ray
        numerics, why_numerics = self.numerics.resolve(model, num_ranks, num_engines, elsewhere=elsewhere, **gpu)
        scheduler, why_scheduler = self.scheduler.resolve(model, numerics.kernels)
        cache, why_cache = self.cache.resolve(scheduler.max_model_len or 0, numerics.dtype, numerics.kernels)
        reasons = why_numerics | why_scheduler | why_cache
        return replace(self, numerics=numerics, scheduler=scheduler, cache=cache, reasons=reasons)


PARTS: dict[str, type] = {
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
    "numerics": NumericsConfig,
    "speculation": SpeculationConfig,
    "lora": LoRAConfig,
    "pooling": PoolingConfig,
    "text": TextConfig,
}


def option_names() -> list[str]:
    """List all flat options, as `from_options` takes them."""
    return ["model", "imports", *(item.name for part in PARTS.values() for item in fields(part))]


def _apply(config: Part, choices: Choices) -> tuple[Part, dict[str, str]]:
    """Set the chosen values, and join each with its reason as "value: why"."""
    reasons = {name: f"{'off' if value is False else value}: {why}" for name, (value, why) in choices.items()}
    return replace(config, **{name: value for name, (value, _) in choices.items()}), reasons


@cache
def read_hints() -> dict[str, str]:
    """Read the advice on each known option of another engine, by its name."""
    groups = tomllib.loads(HINTS.read_text(encoding="utf-8"))
    return {name: advice for advice, names in groups.items() for name in names}


def hint(name: str, known: Iterable[str], spell: Callable[[str], str] = str) -> str:
    """Advise on an unknown option, in a few words for an error message; "" if nothing is known.

    Args:
        name: with underscores, and without the dashes of a flag.
        known: the options that there are.
        spell: returns an option as the user writes it.
    """
    if name in read_hints():
        return re.sub(r"\{(\w+)\}", lambda match: spell(match[1]), read_hints()[name])
    similar = difflib.get_close_matches(name, list(known), 1, cutoff=0.75)
    return f"did you mean {spell(similar[0])}?" if similar else ""
