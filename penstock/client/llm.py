"""LLM: the offline Python API, with an engine in this process or in a process of its own."""

import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from penstock.assembly import BuiltEngine, build_engine
from penstock.client.engine_handle import MAX_REPLICAS, EnginePlan
from penstock.client.input_processor import Prompt, PromptRequest, pair_request
from penstock.client.open_requests import OpenRequest
from penstock.client.process import ProcessClient
from penstock.client.prompts import check_text, progress
from penstock.client.results import (
    classification_output,
    embedding_output,
    embedding_request,
    is_matrix,
    pair_output,
    pooling_output,
    pooling_request,
    requests_for,
    score_output,
    search_output,
    search_params,
)
from penstock.client.step_client import ChildClient, HeldSignals, InProcessClient, StepClient
from penstock.client.text import choose_tokenizer
from penstock.config import EngineConfig
from penstock.errors import (
    EngineDeadError,
    InvalidRequestError,
    NotSupportedError,
    RequestFailedError,
    check_bool,
    check_ids,
    check_int,
    check_unicode,
    fail,
    invalid,
    list_of,
    shown,
    unsupported,
)
from penstock.interface.messages import LoRARequest
from penstock.interface.outputs import BeamSearchOutput, PrefixUse, RequestOutput
from penstock.interface.pooling import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from penstock.interface.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from penstock.runner.forward_pass import MAX_BYTES, ForwardOutput, Wanted
from penstock.tokenizer.answers import assistant_message
from penstock.tokenizer.tokenizer import Tokenizer, check_prompt_length, render_chat, turn_of

Message = Mapping[str, Any]


class LLM:
    """A model to call from Python. Threads may share it: their calls of `generate` and `chat` take turns.

    Ctrl-C, or any exception of a signal handler, ends a call and aborts its requests; the LLM works as before. With the
    engine in this process it comes once the current step is complete (client/step_client.py).

        with LLM(model="demo") as llm:
            outputs = llm.generate(["Once upon a time"], SamplingParams(temperature=0.0, max_tokens=32))
            print(outputs[0].outputs[0].text)

    Args:
        model: a Hugging Face directory, a hub name, "demo", or a Transformers model object, whose weights are copied
            once and not read again.
        tokenizer: replaces the tokenizer in the model's directory: another directory, or an object of Penstock or of
            Transformers. A model object has none: without this argument it takes token ids and gives no text.
        engine_in_process: False computes in a process of its own, which may crash or run out of memory without harm:
            another process goes on with the next token, as with AsyncLLM. Model objects cannot be used then, nor logits
            processors registered in this process: a file in `imports` registers them there.
        standby: keep a second process loaded, which takes over at once; only with engine_in_process=False.
        data_parallel_size: number of engines that share the requests, each in a process of its own, as with AsyncLLM;
            above 1 only with engine_in_process=False.
        options: for EngineConfig.from_options: dtype, max_model_len, max_num_seqs, max_num_batched_tokens, block_size,
            kv_cache_dtype, kv_cache_scales, kv_cache_memory_bytes, enable_prefix_caching, kernels, threads (default:
            all cores, or 1 for a small model), seed, ...

    Attributes:
        client: the lower level: add_request, step, abort. `engine` is the same object.
        config: the options. With the engine in this process, every automatic choice is made in it.

    Raises:
        InvalidRequestError: an option is unknown, wrong or does not fit the model.
        ModelLoadError: the model cannot be served.
    """

    def __init__(
        self,
        model: str | Any = "demo",
        *,
        tokenizer: Tokenizer | str | Any = None,
        engine_in_process: bool = True,
        standby: bool = False,
        data_parallel_size: int = 1,
        **options: Any,
    ) -> None:
        if model is None:
            raise fail("model", model, "a directory, a hub name, demo, or a model object of Transformers")
        check_bool("engine_in_process", engine_in_process)
        check_bool("standby", standby)
        name = model if isinstance(model, str) else type(model).__name__
        self.config = EngineConfig.from_options(model=name, **options)
        modules = [LoRARequest(*item) for item in self.config.lora.modules.items()]
        chosen = self.config.text.chat_template
        found = choose_tokenizer(tokenizer, model if isinstance(model, str) else None, chat_template=chosen)
        self._lock = threading.Lock()
        self._streaming = threading.Lock()
        self.client: StepClient
        self._built: BuiltEngine | None = None
        if engine_in_process:
            if standby:
                raise fail("standby", standby, "False: an engine in this process cannot be replaced")
            check_int("data_parallel_size", data_parallel_size, 1, MAX_REPLICAS)
            if data_parallel_size > 1:
                allowed = "1: several engines need processes of their own (engine_in_process=False)"
                raise fail("data_parallel_size", data_parallel_size, allowed)
            without = replace(self.config, lora=replace(self.config.lora, lora_modules=()))
            built = self._built = build_engine(without, None if isinstance(model, str) else model)
            self.config = built.config
            seed = built.config.numerics.seed
            if built.forms is not None:
                built.forms.use(found)
            self.client = InProcessClient(built.engine, built.info, found, seed=seed, forms=built.forms)
        elif isinstance(model, str):
            sent, own = {"model": model, **options}, tokenizer is None
            sent.pop("lora_modules", None)
            make = partial(ProcessClient, sent, found, standby=standby, follows_forms=own)
            self.client = ChildClient(partial(make, engine_plan=EnginePlan(num_engines=data_parallel_size)), found)
        else:
            raise NotSupportedError(
                "engine_in_process: a model object needs an engine in its own process", param="model"
            )
        for module in modules:
            self.client.load_adapter(module)

    @property
    def engine(self) -> StepClient:
        """The client, by the name that scripts use: llm.engine.add_request, .step and .abort."""
        return self.client

    def pin_prefix(self, prompt: Prompt, name: str | None = None) -> PrefixUse:
        """Compute a prefix, such as a system prompt, and keep it in the cache until `unpin_prefix`.

        Args:
            prompt: as for `generate`; its whole blocks are pinned; with a `cache_salt` only for requests with that one.
            name: name for `unpin_prefix`; None makes one.

        Raises:
            InvalidRequestError: prompt or name is wrong, another prefix has the name, prefix caching is off, pins would
                take more than half of the cache, or other requests are running.
            RequestFailedError: its computation failed.
        """
        with self._lock:
            return self.client.pin_prefix(prompt, name)

    def unpin_prefix(self, name: str) -> bool:
        """Let a pinned prefix be evicted like any other. Return False if no pin has this name."""
        with self._lock:
            return self.client.unpin_prefix(name)

    def pinned_prefixes(self) -> list[PrefixUse]:
        """List the pinned prefixes and their uses, oldest first."""
        return self.client.pinned_prefixes()

    @property
    def built(self) -> BuiltEngine:
        """The engine in this process, with its model and backend, for measurements.

        Raises:
            NotSupportedError: the engine is in a process of its own.
            EngineDeadError: the engine was shut down.
        """
        if self._built is None:
            if isinstance(self.client, InProcessClient):
                raise EngineDeadError("the engine was shut down")
            raise unsupported("engine_in_process", "the model is in another process")
        return self._built

    def get_default_sampling_params(self, **fields: Any) -> SamplingParams:
        """Make SamplingParams with the model's own defaults (its generation_config.json), changed by `fields`."""
        return SamplingParams(**{**self.client.model_info.default_sampling, **fields})

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate one RequestOutput per prompt, in the order given.

        Args:
            prompts: a string, a mapping with `prompt` or `prompt_token_ids` and perhaps a `cache_salt`, or a list of
                these.
            sampling_params: one for all, or one per prompt; None takes the model's defaults.
            use_tqdm: show a progress bar on standard error, if it is a terminal and there are several prompts.
            lora_request: the LoRA adapter of all prompts, or one per prompt; None: the base model. An adapter is loaded
                when it is asked for first, which needs enable_lora=True.
            priority: one per prompt; lower comes first, with scheduling_policy="priority".

        A request that another thread aborts ends with what it has, and with the finish_reason "abort".

        Raises:
            InvalidRequestError: a prompt or parameter is wrong; nothing is generated then.
        """
        listed = _listed(prompts)
        params = self._params(sampling_params, len(listed))
        final = [replace(item, output_kind=RequestOutputKind.FINAL_ONLY) for item in params]
        results: dict[int, RequestOutput] = {}
        total = len(listed) if use_tqdm else 0
        outputs = self.stream(listed, final, lora_request=lora_request, priority=priority)
        with self._lock, progress("prompts", total) as advance, closing(outputs):
            for index, output in outputs:
                results[index] = output
                advance(1)
        return [results[index] for index in range(len(listed))]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[BeamSearchOutput]:
        """Search for the beam_width best answers to each prompt, in the order given, like vLLM's method of this name.

        lora_request: as for `generate`.

        Raises:
            InvalidRequestError: a prompt or parameter is wrong.
            RequestFailedError: the computation failed.
        """
        outputs = self.generate(prompts, search_params(params), use_tqdm=use_tqdm, lora_request=lora_request)
        return [search_output(output, self.client.tokenizer) for output in outputs]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        pooling_task: str | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Compute the pooled hidden states of each prompt as an array, in the order given.

        lora_request: as for `generate`.
        pooling_task: "token_embed" gives the hidden state of every token, [T, hidden]; "embed" follows pooling_params;
            "classify" and "token_classify" give a classifier's scores, [labels] and [T, labels].

        Raises:
            InvalidRequestError: a prompt or parameter is wrong.
            RequestFailedError: the computation failed.
        """
        make = partial(pooling_request, pooling_task=pooling_task)
        outputs, params = self._pool(prompts, pooling_params, make, use_tqdm, lora_request)
        pooler, pairs = self.client.model_info.pooler, zip(outputs, params, strict=True)
        return [pooling_output(output, is_matrix=is_matrix(item, pooler)) for output, item in pairs]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Compute the embedding of each prompt, in the order given. Raise the errors of `encode`."""
        outputs, _ = self._pool(prompts, pooling_params, embedding_request, use_tqdm, lora_request)
        return [embedding_output(output) for output in outputs]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Compute a classifier's scores of each prompt, in the order given. Raise the errors of `encode`."""
        make = partial(pooling_request, pooling_task="classify")
        outputs, _ = self._pool(prompts, pooling_params, make, use_tqdm, lora_request)
        return [classification_output(output) for output in outputs]

    def score(
        self,
        text_1: Prompt | Sequence[Prompt],
        text_2: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """Score how similar texts are: one text to each of several, or each text to its counterpart. A cross-encoder
        reads the texts of a pair together; otherwise their embeddings are compared.

        Raises:
            InvalidRequestError: the numbers of texts do not match, or as for `encode`.
            RequestFailedError: the computation failed.
        """
        first, second = _listed(text_1), _listed(text_2)
        if len(first) not in (1, len(second)):
            raise fail("text_1", len(first), f"one text, or as many as text_2 has: {len(second)}")
        params, info = pooling_params or PoolingParams(), self.client.model_info
        if info.pooler.labels:
            firsts = first * len(second) if len(first) == 1 else first
            pairs = [
                pair_request(self.client.tokenizer, info, pair, params) for pair in zip(firsts, second, strict=True)
            ]
            prompts: list[Prompt] = [{"prompt_token_ids": ids} for ids, _ in pairs]
            outputs, _ = self._pool(prompts, [item for _, item in pairs], pooling_request, use_tqdm, lora_request)
            return [pair_output(output) for output in outputs]
        params = replace(params, normalize=True)
        found = self.embed([*first, *second], params, use_tqdm=use_tqdm, lora_request=lora_request)
        known, others = found[: len(first)], found[len(first) :]
        return [score_output(known[index % len(known)], other) for index, other in enumerate(others)]

    def _pool(
        self, prompts: Any, params: Any, make: Callable[[Any], SamplingParams], use_tqdm: bool, lora_request: Any
    ) -> tuple[list[RequestOutput], list[SamplingParams]]:
        listed = _listed(prompts)
        requests = requests_for(params, len(listed), make)
        given = {"use_tqdm": use_tqdm, "lora_request": lora_request}
        return (self.generate(listed, requests, **given) if listed else []), requests

    def stream(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
    ) -> Generator[tuple[int, RequestOutput], None, None]:
        """Yield (index of the prompt, output) as tokens arrive, by its output_kind. Leaving early aborts the rest.

        lora_request: as for `generate`.

        Raises:
            InvalidRequestError: a prompt or parameter is wrong, or other requests are running, whose outputs would be
                lost.
        """
        params = self._params(sampling_params, len(prompts))
        priorities = _one_each("priority", priority, 0, len(prompts))
        adapters = _adapters(lora_request, len(prompts))
        indices: dict[str, int] = {}
        requests: dict[str, OpenRequest] = {}
        is_alone = False
        try:
            with HeldSignals():
                is_alone = self._streaming.acquire(blocking=False)
            if not is_alone or self.client.has_unfinished_requests():
                raise InvalidRequestError(
                    "requests of llm.engine.add_request or of another stream are under way; finish or abort them first"
                )
            distinct, room = {item for item in adapters if item is not None}, self.client.model_info.max_loras
            if len(distinct) > room > 0:
                raise invalid("lora_request", f"{len(distinct)} adapters in one call, but max_loras = {room}")
            ids = {item: self.client.load_adapter(item) for item in dict.fromkeys(adapters) if item is not None}
            for index, (prompt, its_params, urgency, item) in enumerate(
                zip(prompts, params, priorities, adapters, strict=True)
            ):
                request_id = self.client.new_request_id()
                indices[request_id] = index  # before it is opened: a handler of a signal may raise in between
                adapter = None if item is None else ids[item]
                request = PromptRequest.of(prompt, its_params, request_id, priority=urgency, adapter=adapter)
                requests[request_id] = self.client.open(request)
            while indices:
                for output in self.client.step():
                    if output.request_id in indices:  # others are of llm.engine.add_request, called meanwhile
                        name = output.request_id
                        yield indices.pop(name) if output.finished else indices[name], output
                if self.client.num_open != len(indices):  # another thread has aborted some
                    for request_id in [name for name in indices if requests[name].is_closed]:
                        yield indices.pop(request_id), requests[request_id].aborted()
        finally:
            try:
                self.client.discard(indices)
            except BaseException:  # a handler may have raised just before signals were held
                self.client.discard(indices)
                raise
            finally:
                if is_alone:
                    self._streaming.release()

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of a list of them, through the model's chat template.

        Args:
            messages: mappings with a role and a content, which is a string or a list of text parts
                {"type": "text", "text": "..."}, as over HTTP; tool calls and their results too.
            use_tqdm, lora_request: as for `generate`.
            continue_final_message: let the model continue the last message; needs add_generation_prompt=False.
            tools: functions that the model may call: {"type": "function", "function": {"name": ..., "parameters":
                ...}}. The output's text contains the calls as the model writes them, as in vLLM; `read_answer` parses
                them.
            chat_template_kwargs: further variables of the template, such as {"enable_thinking": False} for Qwen 3.

        Raises:
            InvalidRequestError: the messages or parameters are wrong, or the model has no chat template.
        """
        several = isinstance(messages, list | tuple) and messages and isinstance(messages[0], list | tuple)
        conversations: Sequence[Any] = messages if several else [messages]
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "template_kwargs": chat_template_kwargs,
        }
        prompts = [self._chat_prompt(item, **options) for item in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def read_answer(self, text: str) -> dict[str, Any]:
        """Parse the text of an answer into the message to append to its conversation, in OpenAI's shape.

        Its `tool_calls` have JSON arguments, and the model's reasoning is its `reasoning_content`. If the markup of
        calls consists of special tokens (Mistral, Llama 3), the text needs skip_special_tokens=False.
        """
        template = None if self.client.tokenizer is None else self.client.tokenizer.chat_template
        return assistant_message(text, "" if template is None else template.text)

    def stream_chat(self, messages: Sequence[Message], params: SamplingParams) -> Iterator[str]:
        """Yield the answer to a conversation, piece by piece. Leaving early aborts it.

        Raises:
            InvalidRequestError: as for `chat`.
            RequestFailedError: the computation failed.
        """
        delta = replace(params, output_kind=RequestOutputKind.DELTA)
        for _, output in self.stream([self._chat_prompt(messages)], delta):
            if output.error is not None:
                raise RequestFailedError(output.error)
            yield output.outputs[0].text

    def forward(
        self,
        prompt: Prompt,
        *,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
        skip_lm_head: bool = False,
        max_bytes: int = MAX_BYTES,
    ) -> ForwardOutput:
        """Look into the model: one pass over a prompt, or over a prompt with its answer, as token ids.

        It generates nothing, and disturbs no request. With the native kernels, its bits are those of the steps of a
        request with these tokens.

        Args:
            output_hidden_states, output_attentions: as in Transformers, for every layer.
            skip_lm_head: compute no logits, only hidden states, for instance for embeddings.
            max_bytes: limit for all results together.

        Raises:
            InvalidRequestError: the prompt is wrong, or the results would be larger than max_bytes.
            NotSupportedError: the engine is in another process, or the model is not made of penstock.layers.
        """
        flags = {"output_hidden_states": output_hidden_states, "output_attentions": output_attentions}
        for name, value in (flags | {"skip_lm_head": skip_lm_head}).items():
            check_bool(name, value)
        check_int("max_bytes", max_bytes, 1, 2**50)
        wanted = Wanted(not skip_lm_head, output_hidden_states, output_attentions)
        forward_pass = self.built.forward_pass
        with self._lock:
            return forward_pass.run(self._known_ids(prompt), wanted, max_bytes=max_bytes)

    def _known_ids(self, prompt: Any) -> list[int]:
        """Check the ids of a prompt that may fill the whole context; a text is tokenised."""
        info = self.client.model_info
        if isinstance(prompt, Mapping):
            ids = prompt.get("prompt_token_ids")
            prompt = prompt.get("prompt") if ids is None else ids
        if isinstance(prompt, str) and self.client.tokenizer is not None:
            check_text(prompt)
            check_prompt_length(prompt, info.max_model_len)
            check_unicode(prompt, param="prompt")
            prompt = self.client.tokenizer.encode(prompt)
        if not isinstance(prompt, list | tuple) or not 1 <= len(prompt) <= info.max_model_len:
            raise fail("prompt", prompt, f"a text, or a list of 1 to {info.max_model_len} token ids")
        check_ids("prompt", prompt, info.vocab_size)
        return list(prompt)

    def _chat_prompt(self, messages: Any, **options: Any) -> Prompt:
        """Render a conversation as a prompt. options: those of `render_chat`."""
        conversation = _conversation(messages)
        tokenizer = self.client.tokenizer
        if tokenizer is None:
            raise invalid("messages", "the model has no tokenizer")
        chat = render_chat(tokenizer, conversation, **options)
        check_prompt_length(chat.text, self.client.model_info.max_model_len, param="messages")
        return {"prompt": chat.text, "prompt_token_ids": chat.token_ids(tokenizer)}

    def _params(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        given = self.get_default_sampling_params() if given is None else given
        listed = [given] * count if isinstance(given, SamplingParams) else given
        if not isinstance(listed, list | tuple) or not all(isinstance(item, SamplingParams) for item in listed):
            raise fail("sampling_params", given, "a SamplingParams, or a list of them")
        if len(listed) != count:
            raise invalid("sampling_params", f"{len(listed)} for {count} prompts; give one, or one per prompt")
        return list(listed)

    def get_tokenizer(self) -> Tokenizer | None:
        """Return the model's tokenizer; None if it has none."""
        return self.client.tokenizer

    def shutdown(self) -> None:
        """Free the model. A second call does nothing."""
        self.client.shutdown()
        self._built = None  # it refers to the model

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()


def _one_each(name: str, given: Any, default: Any, count: int) -> list[Any]:
    """Check that a list has an entry for each prompt. None: the default for all."""
    if given is None:
        return [default] * count
    listed = list_of(name, given, max_items=count)
    if len(listed) != count:
        raise invalid(name, f"{len(listed)} for {count} prompts; give one per prompt")
    return list(listed)


def _adapters(given: Any, count: int) -> list[LoRARequest | None]:
    listed = _one_each("lora_request", [given] * count if isinstance(given, LoRARequest) else given, None, count)
    if not all(item is None or isinstance(item, LoRARequest) for item in listed):
        raise fail("lora_request", given, "a LoRARequest, or a list of them")
    return listed


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Put one or several prompts into a list. A list of integers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise fail("prompts", prompts, "a prompt or a list of prompts")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [list(prompts)]
    return list(prompts)


def _conversation(messages: Any) -> list[Message]:
    """Join the parts of each message's content to one text. The template decides which roles exist."""
    if not isinstance(messages, list | tuple) or not messages:
        raise invalid("messages", "give a list of at least one message")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise invalid("messages", f"{shown(message)} is not a message; it must have a role and a content")
    return [turn_of(message) for message in messages]
