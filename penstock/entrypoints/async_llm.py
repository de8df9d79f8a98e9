"""AsyncLLM: streams of tokens for asyncio programs, from an engine in a child process. Imports no torch."""

from collections.abc import AsyncGenerator
from typing import Any

from penstock.client.engine_client import EngineStatus, Prompt
from penstock.client.process import ProcessClient
from penstock.client.tokenizers import choose_tokenizer
from penstock.config import EngineConfig
from penstock.errors import NotSupportedError
from penstock.interface.messages import ModelInfo
from penstock.interface.outputs import RequestOutput
from penstock.interface.sampling_params import SamplingParams
from penstock.tokenizer.tokenizer import Tokenizer


class AsyncLLM:
    """A model for asyncio programs. Options are EngineConfig.from_options' own, as for `LLM`.

        async with AsyncLLM(model="demo") as llm:
            async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=32)):
                print(output.outputs[0].text)

    The engine process starts at once; the first `generate` waits for it. If it dies, open requests end with
    EngineDeadError and a new one starts. Implements client.engine_client.EngineClient.

    Raises:
        InvalidRequestError: an option is unknown or wrong.
        NotSupportedError: `model` is an object.
        ModelLoadError: there is no such model, or its tokenizer is broken.
    """

    def __init__(self, model: str = "demo", *, tokenizer: Tokenizer | str | Any = None, **options: Any) -> None:
        if not isinstance(model, str):
            raise NotSupportedError(
                "model: the engine is another process, into which a model object cannot go; give LLM the object, or "
                "save it (save_pretrained) and give the directory",
                param="model",
            )
        config = EngineConfig.from_options(model=model, **options)
        found = choose_tokenizer(tokenizer, model)
        self._client = ProcessClient({"model": model, **options}, found, seed=config.numerics.seed)

    async def start(self) -> ModelInfo:
        """Wait until the engine is ready; optional. Raises as the constructor does, for what only the engine sees."""
        return await self._client.wait_until_ready()

    async def attach(self) -> None:
        """Watch the engine from this event loop without waiting for it. `generate` does it by itself."""
        await self._client.attach()

    @property
    def model_info(self) -> ModelInfo:
        return self._client.model_info

    @property
    def tokenizer(self) -> Tokenizer:
        return self._client.tokenizer

    def status(self) -> EngineStatus:
        return self._client.status()

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream a request's outputs. See EngineClient.generate for what it raises.

        Leaving the loop aborts the request as soon as nobody holds the stream any more; a program that keeps it in a
        variable closes it itself (`contextlib.aclosing`).
        """
        return self._client.generate(prompt, params, request_id)

    async def drain(self, timeout_s: float) -> None:
        await self._client.drain(timeout_s)

    async def shutdown(self) -> None:
        await self._client.shutdown()

    async def __aenter__(self) -> "AsyncLLM":
        try:
            await self.start()
        except BaseException:
            await self.shutdown()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.shutdown()
