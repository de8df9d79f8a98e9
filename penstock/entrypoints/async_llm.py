"""AsyncLLM: streams of tokens for asyncio programs, from an engine in a child process. It imports no torch."""

import asyncio
from contextlib import aclosing
from typing import Any

from penstock.client.admission import AdmissionLimits
from penstock.client.engine_client import Prompt
from penstock.client.engine_connection import Launcher
from penstock.client.fleet import MAX_REPLICAS
from penstock.client.isolation import IsolatedTokenizer
from penstock.client.process import ProcessClient, when_dropped
from penstock.client.records import RecordOptions
from penstock.client.tokenizers import choose_tokenizer
from penstock.config import EngineConfig
from penstock.entrypoints.beam_search import search_output, search_params
from penstock.entrypoints.pooling import embedding_output, embedding_request, pooling_output, pooling_request
from penstock.errors import NotSupportedError, check_bool, check_int, take_options
from penstock.interface.kv_transfer import KVTransferOptions
from penstock.interface.outputs import BeamSearchOutput, RequestOutput
from penstock.interface.pooling import EmbeddingRequestOutput, PoolingParams, PoolingRequestOutput
from penstock.interface.sampling_params import BeamSearchParams, SamplingParams
from penstock.tokenizer.tokenizer import Tokenizer


class AsyncLLM(ProcessClient):
    """A model for asyncio programs.

        async with AsyncLLM(model="demo") as llm:
            async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=32)):
                print(output.outputs[0].text)

    The engine process starts at once; the first `generate` waits for it. If it dies, a new one starts and continues the
    open requests where they were. Implements client.engine_client.EngineClient.

    Args:
        standby: keep a second process of each engine loaded, which takes over at once. Mapped weights (of a converted
            or packed model) are shared; other weights are in memory twice.
        data_parallel_size: number of engines, each with the whole model in a process of its own, among which requests
            are divided (client/fleet.py). threads, memory and kv_cache_memory_bytes are per engine; if left out, the
            engines share the machine.
        launcher: starts engines elsewhere (ray_app/engines.py); data_parallel_size is then not used.
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
        launcher: Launcher | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(model, str):
            raise NotSupportedError(
                "model: the engine runs in another process, which a model object cannot be sent to; pass the object "
                "to LLM, or save it (save_pretrained) and pass the directory",
                param="model",
            )
        check_bool("standby", standby)
        check_int("data_parallel_size", data_parallel_size, 1, MAX_REPLICAS)  # before anything is started
        limits, record = take_options(AdmissionLimits, options), take_options(RecordOptions, options)
        transfer = take_options(KVTransferOptions, options)
        config = EngineConfig.from_options(model=model, **options)
        transfer.check_directory(config.cache.kv_offload_dir)
        found = choose_tokenizer(tokenizer, model, isolated=True)
        own = tokenizer is None
        super().__init__(
            {"model": model, **options},
            found,
            limits=limits,
            record=record,
            standby=standby,
            follows_forms=own,
            launcher=launcher or Launcher(num_engines=data_parallel_size),
            transfer=transfer,
        )
        if isinstance(found, IsolatedTokenizer):
            when_dropped(self, found.close)  # without a call of shutdown()
            try:
                found.load()  # while the engine starts
            except BaseException:
                self._fleet.end()
                found.close()
                raise

    async def beam_search(
        self, prompt: Prompt, params: BeamSearchParams, request_id: str | None = None
    ) -> BeamSearchOutput:
        """Return the beam_width best answers to a prompt. Cancelling the call ends the search.

        Raises:
            InvalidRequestError, EngineDeadError, EngineOverloadedError, RequestFailedError: as `generate`.
        """
        output = await self._only(prompt, search_params(params), request_id)
        return await asyncio.to_thread(search_output, output, self._tokenizer)

    async def encode(
        self, prompt: Prompt, pooling_params: PoolingParams | None = None, request_id: str | None = None
    ) -> PoolingRequestOutput:
        """Return the pooled hidden states of a prompt as an array. Cancelling the call ends the request.

        Raises:
            InvalidRequestError, EngineDeadError, EngineOverloadedError, RequestFailedError: as `generate`.
        """
        request = pooling_request(pooling_params)
        is_matrix = request.pooling is not None and request.pooling.pooling_type == "ALL"
        return pooling_output(await self._only(prompt, request, request_id), is_matrix=is_matrix)

    async def embed(
        self, prompt: Prompt, pooling_params: PoolingParams | None = None, request_id: str | None = None
    ) -> EmbeddingRequestOutput:
        """Return the embedding of a prompt. Raise the errors of `encode`."""
        return embedding_output(await self._only(prompt, embedding_request(pooling_params), request_id))

    async def _only(self, prompt: Prompt, params: SamplingParams, request_id: str | None) -> RequestOutput:
        """Return the only output of a request."""
        async with aclosing(self.generate(prompt, params, request_id)) as outputs:
            return await anext(outputs)

    async def __aenter__(self) -> "AsyncLLM":
        try:
            await self.start()
        except BaseException:
            await self.shutdown()
            raise
        return self

    async def shutdown(self) -> None:
        """End the engine and everything that it has started. A second call only waits for the process."""
        await super().shutdown()
        if isinstance(self._tokenizer, IsolatedTokenizer):
            self._tokenizer.close()

    async def __aexit__(self, *exc_info: object) -> None:
        await self.shutdown()
