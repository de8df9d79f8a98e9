"""ColossalAI's InferenceConfig: its fields, the values that mean something here, and why the others do not.

Every field is checked; a value that would change nothing is refused with the reason, unless it is the default.
"""

from dataclasses import dataclass, fields
from typing import Any

from penstock import validation as check
from penstock.config import BLOCK_SIZE_UNIT, KV_CACHE_DTYPES, MAX_CONTEXT
from penstock.errors import InvalidRequestError, NotSupportedError
from penstock.interface.sampling_params import SamplingParams

# torch's types print as torch.float16; the config knows no torch. There is no float16 arithmetic: it becomes bfloat16.
TYPES = {"fp16": "bfloat16", "bf16": "bfloat16", "fp32": "float32"}
TYPES |= {"torch.float16": "bfloat16", "torch.bfloat16": "bfloat16", "torch.float32": "float32"}
TEMPLATE_FIELD = "{input_text}"

# Fields that have one value here, the default, and why.
ONE_DEVICE = "the model is on one device; more are planned"
NO_BEAMS = "beam search is not built"
NO_DRAFTS = "speculative decoding is not built yet"
NO_CUDA = "there is no CUDA here; the kernels are chosen by themselves"
FIXED = {
    "beam_width": NO_BEAMS,
    "early_stopping": NO_BEAMS,
    "prefill_ratio": "prompts and decoding share every step, so there is nothing to balance",
    "pad_input": "sequences are packed without padding",
    "no_repeat_ngram_size": "it is not built; register_logit_processor can do it",
    "forced_eos_token_id": "it is not built; register_logit_processor can do it",
    "use_spec_dec": NO_DRAFTS,
    "max_n_spec_tokens": NO_DRAFTS,
    "glimpse_large_kv": NO_DRAFTS,
    "tp_size": ONE_DEVICE,
    "pp_size": ONE_DEVICE,
    "micro_batch_size": ONE_DEVICE,
    "micro_batch_buffer_size": ONE_DEVICE,
    "use_cuda_kernel": NO_CUDA,
    "use_cuda_graph": NO_CUDA,
    "max_context_len_to_capture": NO_CUDA,
    "high_precision": "products always accumulate in float32",
    "enable_streamingllm": "a window with sinks is the model's own choice here",
    "start_token_size": "a window with sinks is the model's own choice here",
    "generated_token_size": "a window with sinks is the model's own choice here",
    "patched_parallelism_size": "it is for diffusion models, which are not served",
}


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """The fields and defaults of ColossalAI's.

    Attributes:
        max_batch_size: most requests that run at once.
        max_input_len, max_output_len: longest prompt and longest answer, in tokens; together the context.
        dtype: "fp16" (served as bfloat16), "bf16", "fp32", or torch's types.
        kv_cache_dtype: None is dtype; or one of ours, "int8" for instance.
        prompt_template: a text with {input_text} in it, which is replaced by the prompt.
        do_sample: False takes the most likely token; then top_k, top_p, min_p and temperature do not count.
        ignore_eos: go on after the model's end tokens.
        block_size: tokens a block of the cache holds.

    Raises:
        InvalidRequestError: a value is not allowed; `param` names the field.
        NotSupportedError: it asks for something that is not here, and why.
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
        check.check_int("max_batch_size", self.max_batch_size, 1, 2**16)
        for name in ("max_input_len", "max_output_len"):
            check.check_int(name, getattr(self, name), 1, MAX_CONTEXT // 2)
        if str(self.dtype) not in TYPES:
            raise check.fail("dtype", self.dtype, "one of " + ", ".join(TYPES))
        for name in ("do_sample", "ignore_eos"):
            check.check_bool(name, getattr(self, name))
        self._check_cache()
        self._check_template()
        self._check_fixed()
        self.sampling()

    def _check_cache(self) -> None:
        check.check_int("block_size", self.block_size, BLOCK_SIZE_UNIT, MAX_CONTEXT)
        if self.block_size % BLOCK_SIZE_UNIT:
            raise check.fail("block_size", self.block_size, f"a multiple of {BLOCK_SIZE_UNIT}")
        if self.kv_cache_dtype == "fp8":
            raise NotSupportedError("kv_cache_dtype: fp8 is not built; int8 takes as little", param="kv_cache_dtype")
        check.check_choice("kv_cache_dtype", self.kv_cache_dtype, (None, *KV_CACHE_DTYPES))

    def _check_template(self) -> None:
        template = self.prompt_template
        if template is not None and (not isinstance(template, str) or TEMPLATE_FIELD not in template):
            raise check.fail("prompt_template", template, f"a text with {TEMPLATE_FIELD} in it, written out in full")

    def _check_fixed(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            same = value == field.default and isinstance(value, bool) == isinstance(field.default, bool)
            if field.name in FIXED and not same and value is not None:
                raise NotSupportedError(
                    f"{field.name}: {check.shown(value)} is not allowed; it must be {field.default}: "
                    f"{FIXED[field.name]}",
                    param=field.name,
                )

    @property
    def max_model_len(self) -> int:
        return self.max_input_len + self.max_output_len

    def engine_options(self) -> dict[str, Any]:
        """As EngineConfig.from_options spells them."""
        return {
            "dtype": TYPES[str(self.dtype)],
            "max_num_seqs": self.max_batch_size,
            "max_model_len": self.max_model_len,
            "block_size": self.block_size,
            "kv_cache_dtype": self.kv_cache_dtype or "auto",
        }

    def sampling(self) -> dict[str, Any]:
        """As SamplingParams spells it; checked there.

        Raises:
            InvalidRequestError: a value is out of range.
        """
        asked = {name: getattr(self, name) for name in ("top_k", "top_p", "min_p", "temperature")}
        drawn: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
        penalty: dict[str, Any] = (
            {} if self.repetition_penalty is None else {"repetition_penalty": self.repetition_penalty}
        )
        SamplingParams(**drawn, **penalty)  # what does not count is checked, too
        common = penalty | {"max_tokens": self.max_output_len, "ignore_eos": self.ignore_eos}
        return common | (drawn if self.do_sample else {"temperature": 0.0})

    def formatted(self, prompt: str) -> str:
        """The prompt in its template."""
        return prompt if self.prompt_template is None else self.prompt_template.replace(TEMPLATE_FIELD, prompt)


def check_config(given: Any) -> InferenceConfig:
    """None is the defaults.

    Raises:
        InvalidRequestError: it is something else than an InferenceConfig.
    """
    if given is None:
        return InferenceConfig()
    if not isinstance(given, InferenceConfig):
        raise InvalidRequestError(
            f"inference_config: {check.shown(given)} is not allowed; it must be an InferenceConfig",
            param="inference_config",
        )
    return given
