"""/completion and what goes with it: llama.cpp's own API, and ColossalAI's, which has a route of the same name.

A body of /completion is ColossalAI's if it has one of the fields of ONLY_COLOSSALAI, or a text as `stream`; any other
is llama.cpp's. The answer is in the format of the body. What a body leaves open has the model's own default, and the
answer may fill the context.

Hints that change no token: `cache_prompt`, `id_slot` and `n_keep`; prefixes are always cached, and no context is
shifted.
"""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, ClassVar
from uuid import uuid4

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from penstock import __version__
from penstock.client.input_processor import PromptRequest
from penstock.errors import InvalidRequestError, NotSupportedError, RequestFailedError, check_int, fail
from penstock.interface.outputs import CompletionOutput, FinishReason, RequestOutput
from penstock.interface.sampling_params import MAX_BEAM_WIDTH, MAX_LOGPROBS, MAX_TOKENS, SamplingParams, fields_of
from penstock.server.api_errors import unavailable, until_disconnect
from penstock.server.context import context_of, json_response, log_of, model_of, read_body, within_limits
from penstock.server.generation import DONE, EventStream, Generation, sse_data
from penstock.server.inputs import (
    between,
    chat_params,
    chat_prompts,
    check_form,
    completion_prompts,
    ending_before_suffix,
    room_for_prompt,
    salted,
    sampling_params,
)
from penstock.server.messages import renaming
from penstock.server.openai_requests import (
    ChatRequest,
    CompletionRequest,
    ComputingRequest,
    Message,
    Strict,
    to_request,
    with_sampling_fields,
)
from penstock.server.openai_responses import TokenNames, chat_logprobs

# --- the bodies -------------------------------------------------------------------------------------------------------


LLAMA_CPP = {"n": "n_cmpl", "max_tokens": "n_predict", "repetition_penalty": "repeat_penalty", "logprobs": "n_probs"}
COLOSSALAI = {"max_tokens": "max_new_tokens", "n": "num_beams"}
ONLY_COLOSSALAI = (*COLOSSALAI.values(), "do_sample")
ONLY_LLAMA_CPP = (
    *LLAMA_CPP.values(), "grammar", "json_schema", "repeat_last_n", "return_tokens", "timings_per_token",
)  # fmt: skip
INFILL = {**LLAMA_CPP, "suffix": "input_suffix", "prompt": "input_prefix"}
NEUTRAL = {  # field -> the only value that is accepted, which asks for what is done anyway
    "adaptive_target": -1.0, "dynatemp_range": 0.0, "lora": [], "min_keep": 0, "penalize_nl": True,
    "post_sampling_probs": False, "tfs_z": 1.0, "top_n_sigma": -1.0,
}  # fmt: skip
SAMPLERS: dict[str, dict[str, float]] = {  # name -> what a list of samplers without it sets
    "penalties": {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "dry": {"dry_multiplier": 0.0}, "top_k": {"top_k": 0}, "top_p": {"top_p": 1.0}, "min_p": {"min_p": 0.0},
    "typ_p": {"typical_p": 1.0}, "xtc": {"xtc_probability": 0.0}, "temperature": {"temperature": 1.0},
    "top_n_sigma": {}, "infill": {},
}  # fmt: skip
ENDLESS = (-1, -2)  # values of n_predict: to the end of the context
INDENTED = re.compile(r"\n([ \t]*)[^\s]")
LISTS = ("tokens", "completion_probabilities")  # of an answer: what its events have of each list is joined
ANY_SEED = (-1, 2**32 - 1)  # values of seed: another answer each time


class GeneratingRequest(ComputingRequest, kw_only=True, frozen=True):
    """The fields that /completion and /chat share: ColossalAI's, and those of SamplingParams under their own names."""

    place: ClassVar[str] = "completion"

    stream: bool | str | None = None
    max_new_tokens: int | None = None
    do_sample: bool | None = None
    num_beams: int | None = None

    def check(self) -> None:
        super().check()
        if isinstance(self.stream, str) and self.stream.lower() not in ("true", "false"):
            raise fail("stream", self.stream, "true or false")
        check_int("max_new_tokens", self.max_new_tokens, 1, MAX_TOKENS, optional=True)
        check_int("num_beams", self.num_beams, 1, MAX_BEAM_WIDTH, optional=True)

    @property
    def streams(self) -> bool:
        return str(self.stream).lower() == "true"

    def own_fields(self) -> dict[str, Any]:
        """List the fields of SamplingParams that the body has under another name."""
        found: dict[str, Any] = {"max_tokens": self.max_new_tokens}
        if self.do_sample is False:
            found["temperature"] = 0.0
        if self.num_beams is not None and self.num_beams > 1:
            found |= {"use_beam_search": True, "n": self.num_beams}
        return found


@with_sampling_fields
class NativeCompletionRequest(GeneratingRequest, kw_only=True, frozen=True):
    """POST /completion. `logit_bias` is a mapping of ids, or a list of pairs, in which false forbids a token."""

    prompt: str | list[Any]
    n_predict: int | None = None
    n_probs: int | None = None
    n_cmpl: int | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    logit_bias: dict[int, float] | list[tuple[int, float | bool]] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    return_tokens: bool | None = None
    timings_per_token: bool | None = None
    cache_prompt: bool | None = None
    id_slot: int | None = None
    n_keep: int | None = None
    adaptive_target: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    lora: list[Any] | None = None
    min_keep: int | None = None
    n_indent: int | None = None
    t_max_predict_ms: int | None = None
    penalize_nl: bool | None = None
    post_sampling_probs: bool | None = None
    response_fields: list[str] | None = None
    samplers: list[str] | None = None
    tfs_z: float | None = None
    top_n_sigma: float | None = None

    def check(self) -> None:
        super().check()
        for name, value in NEUTRAL.items():
            if getattr(self, name) not in (None, value):
                raise NotSupportedError(f"{name}: only {value} is supported", param=name)
        given = {name for name in self.__struct_fields__ if getattr(self, name) is not None}
        if self.is_colossalai and (mixed := given.intersection(ONLY_LLAMA_CPP)):
            message = "a field of llama.cpp's, in a body with fields of ColossalAI's or a text as stream"
            raise InvalidRequestError(f"{min(mixed)}: {message}", param=min(mixed))
        if self.n_predict not in ENDLESS:
            check_int("n_predict", self.n_predict, 0, MAX_TOKENS, optional=True)
        check_int("n_probs", self.n_probs, 0, MAX_LOGPROBS, optional=True)
        for name in ("n_indent", "t_max_predict_ms"):
            check_int(name, getattr(self, name), 0, MAX_TOKENS, optional=True)
        if wrong := set(self.samplers or ()) - SAMPLERS.keys():
            raise fail("samplers", min(wrong), f"a list of names of {', '.join(SAMPLERS)}")
        penalises = self.repeat_penalty not in (None, 1) or self.presence_penalty or self.frequency_penalty
        if penalises and self.repeat_last_n not in (None, -1):
            message = "repeat_last_n: only -1 is supported; the penalties look at the whole answer"
            raise NotSupportedError(message, param="repeat_last_n")

    @property
    def comes_in_pieces(self) -> bool:
        """Whether the answer is looked at as it comes: it is streamed, or may end at a line."""
        return self.streams or bool(self.n_indent or self.t_max_predict_ms)

    @property
    def is_colossalai(self) -> bool:
        return isinstance(self.stream, str) or any(getattr(self, name) is not None for name in ONLY_COLOSSALAI)

    def own_fields(self) -> dict[str, Any]:
        found = super().own_fields()
        if self.n_cmpl is not None:
            found["n"] = self.n_cmpl
        if self.n_predict is not None:
            found["max_tokens"] = None if self.n_predict in ENDLESS else max(1, self.n_predict)
        if self.seed in ANY_SEED:
            found["seed"] = None
        if self.repeat_penalty is not None:
            found["repetition_penalty"] = self.repeat_penalty
        if isinstance(self.logit_bias, list):
            found["logit_bias"] = {token_id: bias for token_id, bias in self.logit_bias if bias is not False}
            found["suppress_tokens"] = [token_id for token_id, bias in self.logit_bias if bias is False]
        if self.samplers is not None:
            for name in SAMPLERS.keys() - self.samplers:
                found |= SAMPLERS[name]
            if "infill" in self.samplers:  # it leaves little but the likeliest token
                found["temperature"] = 0.0
        return found | {"logprobs": self.n_probs or None}


class ExtraFile(Strict, kw_only=True, frozen=True):
    """A file, or a piece of one, beside the text to fill in."""

    text: str
    filename: str = ""


class InfillRequest(NativeCompletionRequest, kw_only=True, frozen=True):
    """POST /infill: the fields of /completion, of which `prompt` is a text that continues `input_prefix`."""

    input_prefix: str
    input_suffix: str
    input_extra: list[ExtraFile] | None = None
    prompt: str = ""

    def check(self) -> None:
        if self.is_colossalai:
            raise InvalidRequestError("stream: ColossalAI has no /infill; send true or false", param="stream")
        super().check()


@with_sampling_fields
class NativeChatRequest(GeneratingRequest, kw_only=True, frozen=True):
    """POST /chat, ColossalAI's. Without `add_generation_prompt` the model writes on after the last message."""

    messages: list[Message]
    add_generation_prompt: bool | None = None


# --- llama.cpp's answer -----------------------------------------------------------------------------------------------


class LlamaAnswer:
    """Shapes the outputs of one call as llama.cpp's object, several of them as a list, or as its events."""

    def __init__(self, body: NativeCompletionRequest, generation: Generation, model: str) -> None:
        self._body, self._generation = body, generation
        self._names = TokenNames(generation.context.tokenizer(), as_ids=False)
        self._counts: dict[int, int] = {}  # tokens of each choice so far
        self._blanks: dict[int, str] = {}  # the line break and the blanks that end the text of each choice so far
        self._cut: set[int] = set()  # choices that ended at a line
        self._num_choices = len(generation.prompts) * generation.params.n
        self._settings = {
            **shown_settings(generation.params),
            "n_ctx": generation.context.known_info().max_model_len,
            "model": model,
        }

    async def whole(self) -> Any:
        """Wait for all answers."""
        found: dict[int, list[dict[str, Any]]] = {}
        async with aclosing(self._parts()) as parts:
            async for part in parts:
                if part is not None:
                    found.setdefault(part["index"], []).append(part)
        if len(found) < self._num_choices:
            raise RequestFailedError("the engine ended a request without an answer")
        shown = [self._joined(found[number]) for number in sorted(found)]
        return shown[0] if len(shown) == 1 else shown

    def _joined(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        whole = {**parts[-1], "content": "".join(part["content"] for part in parts)}
        whole |= {name: [item for part in parts for item in part[name]] for name in LISTS if name in whole}
        return self._selected(whole if self._body.return_tokens else {**whole, "tokens": []})

    async def events(self) -> AsyncGenerator[bytes | None, None]:
        """Yield the events as they come: a piece of text each, and at the end of a choice what is known of it."""
        async with aclosing(self._parts()) as parts:
            async for part in parts:
                shown = self._selected(part) if part is not None and part["stop"] else part
                yield None if shown is None else sse_data(msgspec.json.encode(shown))

    def _selected(self, shown: dict[str, Any]) -> dict[str, Any]:
        """Take the values at the paths of response_fields, like timings/prompt_n, if there are any."""
        found: dict[str, Any] = {}
        for path in self._body.response_fields or ():
            value: Any = shown
            for key in path.split("/"):
                value = value.get(key, UNSET) if isinstance(value, dict) else UNSET
            if value is not UNSET:
                found[path] = value
        return found if self._body.response_fields else shown

    async def _parts(self) -> AsyncGenerator[dict[str, Any] | None, None]:
        async with aclosing(self._generation.outputs()) as outputs:
            async for item in outputs:
                parts = [None] if item is None else self._shown(*item)
                for part in parts if self._body.comes_in_pieces else await asyncio.to_thread(list, parts):
                    yield part
                if len(self._cut) == self._num_choices:
                    return

    def _shown(self, index: int, output: RequestOutput) -> Iterable[dict[str, Any]]:
        for choice in output.outputs:
            number = index * self._generation.params.n + choice.index
            if number in self._cut:
                continue
            self._counts[number] = self._counts.get(number, 0) + len(choice.token_ids)
            if self._body.n_indent or self._body.t_max_predict_ms:
                choice = self._within_lines(number, output, choice)
            part: dict[str, Any] = {
                "index": number,
                "content": choice.text,
                "tokens": choice.token_ids,
                "stop": False,
                "tokens_predicted": self._counts[number],
                "tokens_evaluated": len(output.prompt_token_ids),
            }
            if self._body.n_probs:
                probs = chat_logprobs(
                    self._names, choice.token_ids, choice.logprobs or [], self._body.n_probs, ids=True
                )
                part["completion_probabilities"] = probs["content"]
            if self._body.timings_per_token:
                part["timings"] = self._timings(number, output)
            if choice.text or choice.token_ids:
                yield part
                part = {**part, "content": "", **{name: [] for name in LISTS if name in part}}
            if choice.finish_reason is not None:
                yield {**part, **self._ending(number, output, choice)}

    def _within_lines(self, number: int, output: RequestOutput, choice: CompletionOutput) -> CompletionOutput:
        """End a choice before a line with less than n_indent blanks at its beginning, or with the line in which it has
        taken t_max_predict_ms."""
        before = self._blanks.get(number, "")
        text = before + choice.text
        ends = (at.end() - 1 for at in INDENTED.finditer(text) if len(at[1]) < (self._body.n_indent or 0))
        end, limit = next(ends, len(text)), self._body.t_max_predict_ms
        is_late = limit and "\n" in choice.text and self._timings(number, output)["predicted_ms"] > limit
        rest = text.rstrip(" \t")
        self._blanks[number] = text[len(rest) - 1 :] if rest.endswith("\n") else ""
        if not is_late and end == len(text):
            return choice
        self._cut.add(number)
        return replace(choice, text=text[len(before) : end], finish_reason=FinishReason.LENGTH)

    def _ending(self, number: int, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        word = choice.stop_reason if isinstance(choice.stop_reason, str) else ""
        cut, most = choice.finish_reason is FinishReason.LENGTH, self._generation.params.max_tokens
        is_full = cut and number not in self._cut and not self._generation.only_prompt
        return {
            "stop": True,
            "stop_type": "limit" if cut else "word" if word else "eos",
            "stopping_word": word,
            "truncated": is_full and (most is None or self._counts[number] < most),
            "model": self._settings["model"],
            "prompt": self._generation.prompts[number // self._generation.params.n].text or "",
            "generation_settings": {**self._settings, "seed": output.seed},
            "tokens_cached": output.num_cached_tokens,
            "timings": self._timings(number, output),
        }

    def _timings(self, number: int, output: RequestOutput) -> dict[str, Any]:
        """Time the prompt, up to the first token, and the tokens after it."""
        log, now = self._generation.log, time.monotonic()
        arrivals = output.arrivals[number % self._generation.params.n] if output.arrivals else None
        first, last = (now, now) if arrivals is None else (arrivals.first or now, arrivals.last or now)
        prompt = len(output.prompt_token_ids) - output.num_cached_tokens
        spans = (("prompt", prompt, first - log.started), ("predicted", self._counts[number], last - first))
        timings: dict[str, Any] = {"cache_n": output.num_cached_tokens}
        for name, count, seconds in spans:
            timings |= {
                f"{name}_n": count,
                f"{name}_ms": seconds * 1e3,
                f"{name}_per_token_ms": seconds * 1e3 / max(count, 1),
                f"{name}_per_second": count / seconds if seconds > 0 else 0.0,
            }
        return timings


def shown_settings(params: SamplingParams) -> dict[str, Any]:
    """List the parameters of a request by llama.cpp's names, where it has some."""
    shown = {name: getattr(params, name) for name in fields_of("completion")}
    own = {LLAMA_CPP[name]: getattr(params, name) for name in LLAMA_CPP}
    return {**shown, **own, "n_predict": params.max_tokens or -1, "n_probs": params.logprobs or 0}


# --- ColossalAI's answer ----------------------------------------------------------------------------------------------


class ColossalAnswer:
    """Shapes the outputs of one call as ColossalAI does. Of several beams, the best is shown.

    Args:
        role: of the chat message that is answered; None: the answer is a completion.
    """

    def __init__(self, generation: Generation, role: str | None = None) -> None:
        self._generation, self._role = generation, role

    async def whole(self) -> Any:
        """Wait for all answers."""
        outputs = await self._generation.collect()
        named = {"request_id": self._generation.id} if self._role is None else {"role": self._role}
        shown = [{**named, "text": output.outputs[0].text} for output in outputs]
        return shown[0] if len(shown) == 1 else shown

    async def events(self) -> AsyncGenerator[bytes | None, None]:
        """Yield the answer to a chat as events. A completion is one record at the end, closed by a null character."""
        if self._role is None:
            yield msgspec.json.encode(await self.whole()) + b"\0"
            return
        yield sse_data(msgspec.json.encode({"index": 0, "message": {"role": self._role}}))
        async with aclosing(self._generation.outputs()) as outputs:
            async for item in outputs:
                if item is None:
                    yield None
                elif text := item[1].outputs[0].text:
                    yield sse_data(msgspec.json.encode({"content": text}))
        yield DONE


# --- routes that compute ----------------------------------------------------------------------------------------------


async def create_native_completion(request: Request) -> Response:
    """Handle POST /completion: continue a prompt, in llama.cpp's format or in ColossalAI's."""
    return await _complete(request, await read_body(request, NativeCompletionRequest))


async def create_infill(request: Request) -> Response:
    """Handle POST /infill: write the text between two others, in llama.cpp's format."""
    return await _complete(request, await read_body(request, InfillRequest))


async def _complete(request: Request, body: NativeCompletionRequest) -> Response:
    body.check()
    context = await model_of(request, body.model, body.timeout)
    info, model = context.info(), context.shown_name(body.model)
    context.arrive(log_of(request))  # refuse it before spending time on the prompt
    is_infill = isinstance(body, InfillRequest)
    with renaming(COLOSSALAI if body.is_colossalai else INFILL if is_infill else LLAMA_CPP):
        check_int("n_cmpl", body.n_cmpl, 1, context.options.max_choices, optional=True)
        in_pieces = body.comes_in_pieces and not body.is_colossalai
        params = sampling_params(body, info, body.own_fields(), streams=in_pieces)
        await check_form(request, body, params)
        if isinstance(body, InfillRequest):
            files = [(file.filename, file.text) for file in body.input_extra or ()]
            room = room_for_prompt(info, params.max_tokens)
            text, how = body.input_prefix + body.prompt, {"add_special_tokens": True, "files": files}
            prompts = [await between(context, text, body.input_suffix, info, **how, room=room)]
            params = ending_before_suffix(context, params)
        else:
            prompts = await completion_prompts(context, CompletionRequest(prompt=body.prompt, n=params.n), info)
        generation = _generation(request, body, params, prompts)
    generation.only_prompt = body.n_predict == 0
    answer = ColossalAnswer(generation) if body.is_colossalai else LlamaAnswer(body, generation, model)
    return await _answered(request, body, answer)


async def create_native_chat(request: Request) -> Response:
    """Handle POST /chat: answer a conversation in ColossalAI's format."""
    body = await read_body(request, NativeChatRequest)
    body.check()
    context = await model_of(request, body.model, body.timeout)
    info = context.info()
    context.arrive(log_of(request))
    given = {name: value for name in fields_of(body.place) if (value := getattr(body, name)) is not None}
    given |= {"messages": msgspec.to_builtins(body.messages), "add_generation_prompt": bool(body.add_generation_prompt)}
    with renaming(COLOSSALAI):
        chat = to_request({**given, **body.own_fields(), "stream": body.streams}, ChatRequest)
        chat.check()
        generation = _generation(request, body, chat_params(chat, info), await chat_prompts(context, chat, info))
    role = "assistant" if body.add_generation_prompt else body.messages[-1].role
    return await _answered(request, body, ColossalAnswer(generation, role))


def _generation(
    request: Request, body: GeneratingRequest, params: SamplingParams, prompts: list[PromptRequest]
) -> Generation:
    prompts = salted(request, body.cache_salt, prompts)
    params = within_limits(request, params, prompts, priority=body.priority, timeout_s=body.timeout)
    return Generation(context_of(request), f"cmpl-{uuid4().hex}", prompts, params, log_of(request))


async def _answered(request: Request, body: GeneratingRequest, answer: LlamaAnswer | ColossalAnswer) -> Response:
    if body.streams:
        stall_timeout_s = context_of(request).options.stall_timeout_s
        return EventStream(answer.events(), stall_timeout_s=stall_timeout_s, done=b"")
    return json_response(await until_disconnect(request.receive, answer.whole()))


# --- routes about the server ------------------------------------------------------------------------------------------


async def show_properties(request: Request) -> Response:
    """Handle GET /props: describe the server as llama.cpp does."""
    context = context_of(request).named(request.query_params.get("model"))
    info, tokenizer = context.known_info(), context.tokenizer()
    params = SamplingParams(**{"max_tokens": None, **info.default_sampling})
    ends = {"bos_token": tokenizer.bos_token_id, "eos_token": tokenizer.eos_token_id}
    return json_response({
        "default_generation_settings": {"n_ctx": info.max_model_len, "params": shown_settings(params)},
        "total_slots": info.max_num_seqs,
        "model_path": context.model_names()[0],
        "chat_template": "" if tokenizer.chat_template is None else tokenizer.chat_template.text,
        "modalities": {"vision": False, "audio": False},
        **{name: "" if token_id is None else tokenizer.token_to_text(token_id) for name, token_id in ends.items()},
        "build_info": f"penstock-{__version__}",
    })  # fmt: skip


async def list_slots(request: Request) -> Response:
    """Handle GET /slots: list the requests that can run at once, and say which do. They have no texts."""
    context = context_of(request).named(request.query_params.get("model"))
    info, running = context.known_info(), context.client.status().stats.num_running
    if request.query_params.get("fail_on_no_slot") == "1" and running >= info.max_num_seqs:
        raise unavailable("no slot is free", status="no slot available")
    slot = {"n_ctx": info.max_model_len, "speculative": False}
    return json_response([{"id": at, **slot, "is_processing": at < running} for at in range(info.max_num_seqs)])
