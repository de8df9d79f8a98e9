"""AsyncLLM: streams of tokens for asyncio programs, from an engine in a child process. It imports no torch."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from penstock.client.adapters import Adapter
from penstock.client.admission import AdmissionLimits
from penstock.client.engine_client import EngineStatus
from penstock.client.engine_handle import MAX_REPLICAS, EnginePlan
from penstock.client.input_processor import Prompt, PromptRequest
from penstock.client.process import ProcessClient
from penstock.client.records import RecordOptions, SavedRecord
from penstock.client.results import (
    classification_output,
    embedding_output,
    embedding_request,
    is_matrix,
    pooling_output,
    pooling_request,
    search_output,
    search_params,
)
from penstock.client.text import IsolatedTokenizer, choose_tokenizer
from penstock.config import EngineConfig
from penstock.errors import check_bool, check_int, pop_options, unsupported
from penstock.interface.kv_transfer import KVTransferOptions
from penstock.interface.messages import LoRARequest, ModelInfo
from penstock.interface.outputs import BeamSearchOutput, PrefixUse, RequestOutput
from penstock.interface.pooling import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
)
from penstock.interface.sampling_params import BeamSearchParams, SamplingParams
from penstock.tokenizer.tokenizer import Tokenizer


class AsyncLLM:
    """A model for asyncio programs.

        async with AsyncLLM(model="demo") as llm:
            async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=32)):
                print(output.outputs[0].text)

    The engine process starts at once; the first `generate` waits for it. If it dies, a new one starts and continues the
    open requests where they were.

    Args:
        standby: keep a second process of each engine loaded, which takes over at once. Mapped weights (of a converted
            or packed model) are shared; other weights are in memory twice.
        data_parallel_size: number of engines, each with the whole model in a process of its own, among which requests
            are divided (client/fleet.py). threads, memory and kv_cache_memory_bytes are per engine; if left out, the
            engines share the machine.
        engine_plan: starts engines elsewhere (ray_app/engines.py); data_parallel_size is then not used.
        options: for EngineConfig.from_options; for AdmissionLimits (client/admission.py), which limits the queue and
            refuses further requests with EngineOverloadedError; for RecordOptions (client/records.py); and for
            KVTransferOptions (client/kv_transfer.py), which puts prefill and decoding on different engines.

    Raises:
        InvalidRequestError: an option is unknown or wrong.
        NotSupportedError: `model` is a model object.
        ModelLoadError: there is no such model, or its tokenizer is broken.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        tokenizer: Tokenizer | str | Any = None,
        standby: bool = False,
        data_parallel_size: int = 1,
        engine_plan: EnginePlan | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(model, str):
            raise unsupported(
                "model",
                "the engine runs in another process, which a model object cannot be sent to; pass the object "
                "to LLM, or save it (save_pretrained) and pass the directory",
            )
        check_bool("standby", standby)
        check_int("data_parallel_size", data_parallel_size, 1, MAX_REPLICAS)  # before anything is started
        limits, record = pop_options(AdmissionLimits, options), pop_options(RecordOptions, options)
        transfer = pop_options(KVTransferOptions, options)
        config = EngineConfig.from_options(model=model, **options)
        transfer.check_directory(config.cache.kv_offload_dir)
        found = self._tokenizer = choose_tokenizer(
            tokenizer, model, isolated=True, chat_template=config.text.chat_template
        )
        options.pop("lora_modules", None)  # the client loads them, in every engine that it ever has
        engine_plan = replace(
            engine_plan or EnginePlan(num_engines=data_parallel_size),
            lora_modules=tuple(LoRARequest(name, path) for name, path in config.lora.modules.items()),
        )
        self.client = ProcessClient(
            {"model": model, **options},
            found,
            limits=limits,
            record=record,
            standby=standby,
            follows_forms=tokenizer is None,
            engine_plan=engine_plan,
            transfer=transfer,
        )
        if isinstance(found, IsolatedTokenizer):
            try:
                found.load()  # while the engine starts
            except BaseException:
                self.client.end()
                raise

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        flow: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        output_token_ids: Sequence[list[int]] = (),
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the request's outputs as SamplingParams.output_kind says; leaving the loop aborts the request.

        It does so as soon as nothing refers to the stream any more. A program that keeps the stream in a variable must
        close it (`contextlib.aclosing`). See PromptRequest for the arguments. lora_request: the adapter that computes
        it, which is loaded if it is not there yet.

        Raises (inside the iteration):
            InvalidRequestError: the prompt or a parameter is wrong.
            EngineDeadError: there is no engine any more, or it takes no requests.
            EngineOverloadedError: the queue is full.
            RequestFailedError: the computation of this request failed.
        """
        more = {"flow": flow, "priority": priority, "timeout": timeout, "output_token_ids": [*output_token_ids]}
        adapter = None if lora_request is None else (await self.client.load_adapter(lora_request)).id
        request = PromptRequest.of(prompt, sampling_params, request_id, adapter=adapter, **more)
        async with aclosing(self.client.generate(request)) as outputs:
            async for output in outputs:
                yield output

    async def beam_search(
        self, prompt: Prompt, params: BeamSearchParams, request_id: str | None = None
    ) -> BeamSearchOutput:
        """Search for the beam_width best answers to a prompt. Cancelling the call ends the search.

        Raises:
            InvalidRequestError, EngineDeadError, EngineOverloadedError, RequestFailedError: as `generate`.
        """
        output = await self._only(prompt, search_params(params), request_id)
        return await asyncio.to_thread(search_output, output, self._tokenizer)

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> PoolingRequestOutput[PoolingOutput]:
        """Compute the pooled hidden states of a prompt as an array. Cancelling the call ends the request.

        Raises:
            InvalidRequestError, EngineDeadError, EngineOverloadedError, RequestFailedError: as `generate`.
        """
        request = pooling_request(pooling_params)
        output = await self._only(prompt, request, request_id, lora_request)
        return pooling_output(output, is_matrix=is_matrix(request, self.model_info.pooler))

    async def classify(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> ClassificationRequestOutput:
        """Compute a classifier's scores of a prompt. Raise the errors of `encode`."""
        params = pooling_request(pooling_params, "classify")
        return classification_output(await self._only(prompt, params, request_id, lora_request))

    async def embed(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> EmbeddingRequestOutput:
        """Compute the embedding of a prompt. Raise the errors of `encode`."""
        params = embedding_request(pooling_params)
        return embedding_output(await self._only(prompt, params, request_id, lora_request))

    async def _only(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None, lora_request: LoRARequest | None = None
    ) -> RequestOutput:
        async with aclosing(self.generate(prompt, params, request_id, lora_request=lora_request)) as outputs:
            return await anext(outputs)

    @property
    def model_info(self) -> ModelInfo:
        """The model. Until an engine is ready, EngineDeadError is raised, or the error why none can be built."""
        return self.client.model_info

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that this process has loaded. ModelLoadError is raised if the model has none."""
        return self.client.tokenizer

    def status(self) -> EngineStatus:
        """Take a snapshot at once, without raising."""
        return self.client.status()

    async def pin_prefix(self, prompt: Prompt, name: str | None = None) -> PrefixUse:
        """Compute the whole blocks of a prompt and keep them in the cache; see EngineClient.pin_prefix."""
        return await self.client.pin_prefix(PromptRequest.of(prompt), name)

    def unpin_prefix(self, name: str) -> bool:
        """Let a pinned prefix be evicted like any other. Return False if no pin has this name."""
        return self.client.unpin_prefix(name)

    def pinned_prefixes(self) -> list[PrefixUse]:
        """List the pinned prefixes, oldest first."""
        return self.client.pinned_prefixes()

    def adapters(self) -> Sequence[Adapter]:
        """List the LoRA adapters that new requests may use, oldest first."""
        return self.client.adapters()

    async def load_adapter(self, lora_request: LoRARequest, *, load_inplace: bool = False) -> Adapter:
        """Load a LoRA adapter into every engine, or into none; see EngineClient.load_adapter."""
        return await self.client.load_adapter(lora_request, load_inplace=load_inplace)

    async def unload_adapter(self, name: str) -> bool:
        """Refuse new requests with an adapter; open ones go on. Return False if no adapter has this name."""
        return await self.client.unload_adapter(name)

    async def record(self, engine: int = 0) -> SavedRecord:
        """Make a bundle of the flight recorder; see EngineClient.record."""
        return await self.client.record(engine)

    async def start(self) -> ModelInfo:
        """Wait until every engine is ready. This is optional: `generate` does it too.

        Raises:
            ModelLoadError, InvalidRequestError: the engine cannot be built.
            EngineError: the engine died too often, was shut down, or belongs to another event loop.
        """
        return await self.client.start()

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests and wait until the open ones have ended, at most timeout_s seconds."""
        await self.client.drain(timeout_s)

    async def shutdown(self) -> None:
        """End the engine and everything that it has started. A second call only waits for the process."""
        await self.client.shutdown()

    async def __aenter__(self) -> "AsyncLLM":
        try:
            await self.start()
        except BaseException:
            await self.shutdown()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.shutdown()
