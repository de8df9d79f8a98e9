"""Request bodies as OpenAI and vLLM spell them, decoded strictly. Knows no engine.

Every field may be null, which means "not given". A field that is not listed here is an error that names it; so is one
that is listed under "planned" with anything but a value that changes nothing. Ranges are checked by SamplingParams.
"""

import reprlib
from itertools import islice
from typing import Any, Literal, get_args

import msgspec

from penstock.errors import InvalidRequestError, NotSupportedError
from penstock.validation import shown

MAX_LABEL = 64  # characters of a label that the log shows


class Strict(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Base of all request bodies."""


class Labels(Strict, kw_only=True, frozen=True):
    """Names for the request that only the log keeps; they change nothing."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    session_id: str | None = None
    request_id: str | None = None
    prompt_cache_key: str | None = None


class Planned(Labels, kw_only=True, frozen=True):
    """Known to clients and not built yet. Null, or a value in NEUTRAL, is accepted because it changes nothing."""

    allowed_token_ids: Any = None
    best_of: Any = None
    cache_salt: Any = None
    documents: Any = None
    guided_choice: Any = None
    guided_decoding_backend: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_whitespace_pattern: Any = None
    kv_transfer_params: Any = None
    length_penalty: Any = None
    logprob_token_ids: Any = None
    priority: Any = None
    response_format: Any = None
    service_tier: Any = None
    store: Any = None
    structured_outputs: Any = None
    thinking_token_budget: Any = None
    truncate_prompt_tokens: Any = None
    truncation_side: Any = None
    use_beam_search: Any = None
    vllm_xargs: Any = None
    # never taken from a request: a template is a program, and these reach into the model's own processing
    chat_template: Any = None
    chat_template_kwargs: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None


PLANNED = tuple(name for name in Planned.__struct_fields__ if name not in Labels.__struct_fields__)

# Values of planned fields that mean the same as leaving them out.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "length_penalty": (1.0, 1),
    "priority": (0,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "use_beam_search": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "tool_calls": ([],),
    "annotations": ([],),
}
REFUSED = frozenset({"chat_template", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs"})


class StreamOptions(Strict, kw_only=True, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(Planned, kw_only=True, frozen=True):
    """What completions and chat completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[int, float] | None = None
    bad_words: str | list[str] | None = None
    logits_processors: list[str] | dict[str, Any] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    def check(self) -> None:
        """Raise InvalidRequestError for what types alone cannot say."""
        refuse_planned(self)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options: only allowed with stream: true", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequestError("prompt_logprobs: not available with stream: true", param="prompt_logprobs")

    @property
    def usage_at_end(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_always(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(GenerationRequest, kw_only=True, frozen=True):
    """POST /v1/completions. The prompt's kinds are told apart in `prompts`."""

    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Any = None
    prompt_embeds: Any = None

    def check(self) -> None:
        super().check()
        refuse_planned(self, "suffix", "prompt_embeds")


class ContentPart(Strict, kw_only=True, frozen=True):
    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    video_url: Any = None
    refusal: Any = None


Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
ROLES = get_args(Role)


class Message(Strict, kw_only=True, frozen=True):
    """One turn. The fields after `name` are what the openai client sends back of an answer."""

    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: Any = None
    tool_calls: Any = None
    tool_call_id: Any = None
    function_call: Any = None
    audio: Any = None
    annotations: Any = None


class ChatRequest(GenerationRequest, kw_only=True, frozen=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: Any = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None

    def check(self) -> None:
        super().check()
        refuse_planned(self, *CHAT_PLANNED)
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs: only allowed with logprobs: true", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            message = "max_completion_tokens: differs from max_tokens, its older name; give one of them"
            raise InvalidRequestError(message, param="max_completion_tokens")


CHAT_PLANNED = (
    "echo",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "functions",
    "function_call",
    "reasoning_effort",
    "verbosity",
    "modalities",
    "audio",
    "prediction",
    "web_search_options",
)


class TokenizeRequest(Strict, kw_only=True, frozen=True):
    """POST /tokenize: a prompt, or messages to render first."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    chat_template: Any = None
    chat_template_kwargs: Any = None


class DetokenizeRequest(Strict, kw_only=True, frozen=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


def refuse_planned(body: Strict, *names: str) -> None:
    """Raise NotSupportedError for the first planned field that asks for something."""
    for name in names or PLANNED:
        value = getattr(body, name)
        if value is not None and not _is_neutral(name, value):
            raise refusal(name, value)


def _is_neutral(name: str, value: Any) -> bool:
    return any(value == neutral and type(value) is type(neutral) for neutral in NEUTRAL.get(name, ()))


def refusal(name: str, value: Any) -> InvalidRequestError:
    """The error for a field that clients know and this server does not take."""
    if name in REFUSED:
        message = f"{name}: not accepted from a request; the model's own template and processing are used"
        return InvalidRequestError(message, param=name, code="not_allowed")
    return NotSupportedError(f"{name}: {shown(value)} is not supported; this is not built yet", param=name)


def label_text(body: Labels) -> str:
    """The labels as a piece of a log line: printable, short, on one line."""
    pairs = [(name, getattr(body, name)) for name in Labels.__struct_fields__]
    return " ".join(f"{name}={_label(value)}" for name, value in pairs if value is not None)


class _Glance(reprlib.Repr):
    """repr() of the first few items only, unsorted: megabytes of labels must not cost the others their time."""

    maxlevel = 2
    maxlist = maxdict = 4
    maxstring = maxother = MAX_LABEL

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        if level <= 0:
            return "{...}"
        shown = (f"{self.repr1(key, level - 1)}: {self.repr1(value, level - 1)}" for key, value in x.items())
        return "{" + ", ".join(islice(shown, self.maxdict)) + ("}" if len(x) <= self.maxdict else ", ...}")

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= MAX_LABEL else "..."


def _label(value: Any) -> str:
    return _Glance().repr(value).encode("ascii", "backslashreplace").decode()[:MAX_LABEL]
