"""ColossalAI's InferenceConfig and Transformers' GenerationConfig: fields that are supported, and why others are not.

Every field is checked. A field that has no effect here must have its default; other values are refused with a reason.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from penstock import InvalidRequestError, ModelLoadError, NotSupportedError, SamplingParams
from penstock.config import BLOCK_SIZES, KV_CACHE_DTYPES, MAX_CONTEXT, SchedulerConfig
from penstock.errors import check_bool, check_choice, check_int, fail, shown, unsupported
from penstock.interface.plugins import PROCESSORS as REGISTERED
from penstock.spec.config_reader import ConfigReader, same
from penstock.spec.generation_config import HARMLESS, OF_A_CALL, REFUSED, not_neutral, read_sampling

# torch's types are compared as text, so that torch is not imported. float16 is served as bfloat16.
TYPES = {"fp16": "bfloat16", "bf16": "bfloat16", "fp32": "float32"}
TYPES |= {"torch.float16": "bfloat16", "torch.bfloat16": "bfloat16", "torch.float32": "float32"}
PROCESSORS = ("repetition_penalty", "no_repeat_ngram_size", "forced_eos_token_id")  # these apply without sampling, too
MAX_BEAMS = 64
BEAMS = ("use_beam_search", "n", "early_stopping")
TEMPLATE_FIELD = "{input_text}"

# Fields that must keep their default, and why.
REASONS = {
    "sequences are packed without padding": "pad_input",
    "it is for drafts of a GLIDE model, which are not built": "glimpse_large_kv",
    "a pipeline chooses its micro-batches itself": "micro_batch_size micro_batch_buffer_size",
    "kernels are chosen automatically, and there is no CUDA graph": (
        "use_cuda_kernel use_cuda_graph max_context_len_to_capture"
    ),
    "products always accumulate in float32": "high_precision",
    "it is for diffusion models, which are not supported": "patched_parallelism_size",
}
OF_SWITCHES = (  # field, default, and the field without which it does nothing
    ("start_token_size", 4, "enable_streamingllm"), ("generated_token_size", 512, "enable_streamingllm"),
    ("max_n_spec_tokens", 5, "use_spec_dec"),
)  # fmt: skip
FIXED = {name: reason for reason, names in REASONS.items() for name in names.split()}


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """ColossalAI's InferenceConfig, with its fields and defaults.

    Attributes:
        max_batch_size: maximum number of requests that run at once.
        max_input_len, max_output_len: longest prompt and longest answer in tokens; their sum is the context.
        dtype: "fp16" (served as bfloat16), "bf16", "fp32", or torch's types.
        kv_cache_dtype: one of Penstock's types, such as "int8"; None means dtype.
        prompt_template: a text that contains {input_text}, which is replaced by the prompt.
        do_sample: False takes the most likely token and ignores top_k, top_p, min_p and temperature.
        ignore_eos: continue after the model's end tokens.
        block_size: tokens per block of the cache.
        prefill_ratio: requests begin when this many wait for each one that decodes; None means 1.2.
        beam_width: more than 1 searches with so many beams, whose best answer is returned.
        early_stopping: when a search ends, as in Transformers.
        use_spec_dec: decode with up to max_n_spec_tokens drafts per step, which change no token; they come from the
            request's own text, or from the draft model that `enable_spec_dec` is given.
        tp_size, pp_size: ranks that share each layer, and stages of layers; the model is then a directory or a name.
        enable_streamingllm: every token sees the first start_token_size tokens and the last generated_token_size ones.

    Raises:
        InvalidRequestError: a value is not allowed; `param` names the field.
        NotSupportedError: a value asks for something that is not supported; the message says why.
    """

    max_batch_size: int = 8
    max_output_len: int = 256
    max_input_len: int = 256
    dtype: Any = "fp16"
    kv_cache_dtype: str | None = None
    prompt_template: str | None = None
    do_sample: bool = False
    beam_width: int = 1
    prefill_ratio: float | None = 1.2
    pad_input: bool = False
    early_stopping: bool | None = False
    top_k: int | None = 50
    top_p: float | None = 1.0
    min_p: float | None = None
    temperature: float | None = 1.0
    no_repeat_ngram_size: int | None = 0
    repetition_penalty: float | None = 1.0
    forced_eos_token_id: int | None = None
    ignore_eos: bool = False
    use_spec_dec: bool = False
    max_n_spec_tokens: int = 5
    glimpse_large_kv: bool = False
    block_size: int = 16
    tp_size: int = 1
    pp_size: int = 1
    micro_batch_size: int = 1
    micro_batch_buffer_size: int | None = None
    use_cuda_kernel: bool = False
    high_precision: bool | None = False
    use_cuda_graph: bool = False
    max_context_len_to_capture: int = 512
    enable_streamingllm: bool = False
    start_token_size: int = 4
    generated_token_size: int = 512
    patched_parallelism_size: int = 1

    def __post_init__(self) -> None:
        check_int("max_batch_size", self.max_batch_size, 1, 2**16)
        for name in ("max_input_len", "max_output_len"):
            check_int(name, getattr(self, name), 1, MAX_CONTEXT // 2)
        if str(self.dtype) not in TYPES:
            raise fail("dtype", self.dtype, "one of " + ", ".join(TYPES))
        SchedulerConfig(scheduling_policy="length_classes", prefill_ratio=self.prefill_ratio)
        for name in ("do_sample", "ignore_eos", "enable_streamingllm", "use_spec_dec"):
            check_bool(name, getattr(self, name))
        for name, default, switch in OF_SWITCHES:
            check_int(name, value := getattr(self, name), 1, MAX_CONTEXT - 1)
            if value != default and not getattr(self, switch):
                raise fail(name, value, f"{default} without {switch}, which it is for")
        check_int("beam_width", self.beam_width, 1, MAX_BEAMS)
        if self.early_stopping and self.beam_width == 1:
            raise fail(
                "early_stopping", self.early_stopping, "false with a beam_width of 1, with which nothing is searched"
            )
        if type(self.block_size) is not int or self.block_size not in BLOCK_SIZES:
            raise fail("block_size", self.block_size, f"a multiple of {BLOCK_SIZES.step} up to {BLOCK_SIZES[-1]}")
        if self.kv_cache_dtype == "fp8":
            raise unsupported("kv_cache_dtype", "fp8 is not built; int8 is as small")
        check_choice("kv_cache_dtype", self.kv_cache_dtype, (None, *KV_CACHE_DTYPES))
        template = self.prompt_template
        if template is not None and (not isinstance(template, str) or TEMPLATE_FIELD not in template):
            raise fail("prompt_template", template, f"a text that contains {TEMPLATE_FIELD}, or None")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in FIXED and value is not None and not same(value, field.default):
                allowed = f"it must be {field.default}: {FIXED[field.name]}"
                raise NotSupportedError(f"{field.name}: {shown(value)} is not allowed; {allowed}", param=field.name)
        self.sampling()

    def engine_options(self) -> dict[str, Any]:
        """Spell the options as EngineConfig.from_options does."""
        return {
            "dtype": TYPES[str(self.dtype)],
            "max_num_seqs": self.max_batch_size,
            "max_model_len": self.max_input_len + self.max_output_len,
            "block_size": self.block_size,
            "scheduling_policy": "length_classes",
            "prefill_ratio": self.prefill_ratio,
            "kv_cache_dtype": self.kv_cache_dtype or "auto",
            "attention_sinks": self.start_token_size if self.enable_streamingllm else None,
            "sliding_window": self.generated_token_size if self.enable_streamingllm else None,
            "tensor_parallel_size": self.tp_size,
            "pipeline_parallel_size": self.pp_size,
            "speculative_config": self.drafts(method="ngram") if self.use_spec_dec else None,
        }

    def drafts(self, **source: str) -> dict[str, Any]:
        """Spell the config of drafts from a source: a method, or a model."""
        return {**source, "num_speculative_tokens": self.max_n_spec_tokens}

    def sampling(self) -> dict[str, Any]:
        """Collect the fields of SamplingParams.

        Raises:
            InvalidRequestError: a value is out of range.
        """
        names = ("top_k", "top_p", "min_p", "temperature", *PROCESSORS)
        given: dict[str, Any] = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        SamplingParams(**given)  # also checks what do_sample=False ignores
        if not self.do_sample:
            given = {"temperature": 0.0} | {name: given[name] for name in PROCESSORS if name in given}
        if self.beam_width > 1:
            given |= {"use_beam_search": True, "n": self.beam_width, "early_stopping": bool(self.early_stopping)}
        return given | {"max_tokens": self.max_output_len, "ignore_eos": self.ignore_eos}

    def formatted(self, prompt: str) -> str:
        return prompt if self.prompt_template is None else self.prompt_template.replace(TEMPLATE_FIELD, prompt)


def sampling_of(fields: Mapping[str, Any], num_prompt_tokens: int) -> dict[str, Any]:
    """Translate fields of a GenerationConfig to fields of SamplingParams.

    Raises:
        InvalidRequestError: a field would change the answer and is not supported.
    """
    read = ConfigReader(fields, "generation_config")
    try:
        sampling = _read(read, fields, num_prompt_tokens)
        refused = read_refused(read)
    except ModelLoadError as error:
        raise InvalidRequestError(str(error), param="generation_config") from None
    if refused:
        reasons = "; ".join(f"{name}: not supported ({reason})" for name, reason in refused.items())
        raise InvalidRequestError(f"generation_config: {reasons}", param=next(iter(refused)))
    return sampling


def _read(read: ConfigReader, fields: Mapping[str, Any], num_prompt_tokens: int) -> dict[str, Any]:
    sampling = read_sampling(read)
    if sampling.get("temperature") is None and read.boolean("do_sample", False):
        sampling["temperature"] = 1.0
    if read.has("max_length") and "max_tokens" not in sampling:
        longest = read.integer("max_length", 1, 2**31 - 1)
        if longest <= num_prompt_tokens:
            raise fail("max_length", longest, f"more than the {num_prompt_tokens} tokens of the prompt")
        sampling["max_tokens"] = longest - num_prompt_tokens
    ends = read.raw("eos_token_id")
    if ends is not None:  # these ids replace the model's own end tokens
        sampling |= {"stop_token_ids": ends if isinstance(ends, list) else [ends], "ignore_eos": True}
    read.raw("bos_token_id")
    if read.has("num_beams") and (num_beams := read.integer("num_beams", 1, MAX_BEAMS)) > 1:
        sampling |= {"use_beam_search": True, "n": num_beams}
        sampling |= {name: read.raw(name) for name in ("early_stopping", "length_penalty") if read.has(name)}
    processors = {name: fields[name] for name in fields if name in REGISTERED and read.has(name)}
    if processors:
        sampling["logits_processors"] = processors
    return sampling


def read_refused(read: ConfigReader) -> dict[str, str]:
    """Collect each unread key of a call's config that asks for something, and why it is refused. Call it last."""
    found = {key: REFUSED.get(key, {"why": "unknown parameter"})["why"] for key in not_neutral(read, HARMLESS)}
    for key, neutral in OF_A_CALL.items():
        value = read.raw(key)
        if value is not None and not any(same(value, item) for item in neutral):
            found[key] = "it would have no effect here"
    return found


def fields_of(generation_config: Any) -> dict[str, Any]:
    """Read the fields of Transformers' GenerationConfig, or of a mapping."""
    to_dict = getattr(generation_config, "to_dict", None)
    values = to_dict() if callable(to_dict) else generation_config
    if not isinstance(values, Mapping):
        raise fail("generation_config", generation_config, "a GenerationConfig of Transformers, or a mapping")
    return dict(values)
