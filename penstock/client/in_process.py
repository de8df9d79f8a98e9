"""InProcessClient: text in, text out, on an engine in this very process. What `LLM` uses, and tests.

add_request -> InputProcessor -> Engine.step -> OutputProcessor -> RequestOutputs
"""

from penstock.client.engine_client import Prompt
from penstock.client.input_processor import InputProcessor
from penstock.client.output_processor import OutputProcessor
from penstock.engine.engine import Engine
from penstock.errors import EngineDeadError
from penstock.interface.messages import ModelInfo
from penstock.interface.outputs import RequestOutput
from penstock.interface.sampling_params import SamplingParams
from penstock.tokenizer.tokenizer import Tokenizer


class InProcessClient:
    """An engine that understands text.

    Attributes:
        engine: token ids only.
        model_info: what the engine says of its model.
        tokenizer: None takes prompts as ids and gives no text.
    """

    def __init__(self, engine: Engine, model_info: ModelInfo, tokenizer: Tokenizer | None, *, seed: int = 0) -> None:
        self.engine = engine
        self.model_info = model_info
        self.tokenizer = tokenizer
        self._inputs = InputProcessor(
            tokenizer, max_model_len=model_info.max_model_len, vocab_size=model_info.vocab_size, seed=seed
        )
        self._outputs = OutputProcessor(tokenizer)
        self._closed = False

    def add_request(self, request_id: str | None, prompt: Prompt, params: SamplingParams | None = None) -> str:
        """Queue a request and return its id (a new one for None). Without params the model's own defaults apply.

        Raises:
            InvalidRequestError: prompt or parameters are wrong, or the id is in use.
            EngineDeadError: it was shut down.
        """
        if self._closed:
            raise EngineDeadError("the engine was shut down")
        params = params or SamplingParams(**self.model_info.default_sampling)
        prepared = self._inputs.process(prompt, params, request_id)
        self._outputs.add(prepared)
        try:
            for engine_request in prepared.engine_requests:
                self.engine.add_request(engine_request)
        except BaseException:
            self.abort(prepared.request_id)
            raise
        return prepared.request_id

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        return self.engine.has_work

    def step(self) -> list[RequestOutput]:
        """Compute one step; every request that moved, the ended ones with finished=True."""
        processed = self._outputs.process(self.engine.step())
        for engine_request_id in processed.abort_ids:
            self.engine.abort(engine_request_id)
        return processed.outputs

    def abort(self, request_id: str) -> bool:
        """End a request without another output. False if it is not open."""
        engine_request_ids = self._outputs.abort(request_id)
        for engine_request_id in engine_request_ids:
            self.engine.abort(engine_request_id)
        return bool(engine_request_ids)

    def shutdown(self) -> None:
        """Free the model. A second call does nothing."""
        self._closed = True
        self.engine.shutdown()
