"""The server's application over the real engine with a model that is a formula, all in this process.

Everything is as in production except the sockets, the process boundary and the arithmetic (penstock_lab/mock.py):
routes, decoding, tokenizer, scheduler, blocks, stop strings, answers. A request costs milliseconds, so a million can be
tried.
"""

import asyncio
import itertools
import os
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import cast

from starlette.types import Message

from penstock import (
    InvalidRequestError,
    ModelLoadError,
    PrefixUse,
    RequestFailedError,
    RequestOutput,
    StructuredOutputsParams,
)
from penstock.client.adapters import Adapter
from penstock.client.engine_client import EngineState, EngineStatus
from penstock.client.input_processor import PromptRequest
from penstock.client.open_requests import Mailbox
from penstock.client.records import SavedRecord
from penstock.client.step_client import InProcessClient
from penstock.client.text import FORMS_AT_ONCE, IsolatedTokenizer, choose_tokenizer
from penstock.client.turns import Turns
from penstock.engine.engine import Engine
from penstock.engine.kv_cache_manager import KVCacheManager
from penstock.engine.policies import Scheduling
from penstock.interface.messages import LoRARequest, ModelInfo
from penstock.interface.step import CacheGroup
from penstock.server.app import create_app
from penstock.server.options import ServerOptions
from penstock.tokenizer.tokenizer import Tokenizer
from penstock_lab.mock import MockExecutor
from penstock_lab.prove.attacks.attack import ADAPTERS

MAX_MODEL_LEN = 96
NUM_BLOCKS, BLOCK_SIZE = 256, 16
MAX_NUM_SEQS, MAX_STEP_TOKENS = 64, 512
HOST = b"localhost"


class ScriptedClient:
    """An EngineClient over an engine in this process, which is stepped while a request is open.

    forms: compiles the forms of answers, which no answer follows, because tokens are made up here; None: each form is
        refused.
    """

    def __init__(self, tokenizer: Tokenizer, forms: IsolatedTokenizer | None = None) -> None:
        self.tokenizer = tokenizer
        self._forms = forms
        self._checking = Turns(FORMS_AT_ONCE)
        ends = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        size = tokenizer.vocab_size
        self.model_info = ModelInfo("demo", MAX_MODEL_LEN, size, ends, "float32", "scripted")
        groups = [CacheGroup((0,), None, NUM_BLOCKS, BLOCK_SIZE)]
        self.executor = MockExecutor(groups, size)
        self.engine = Engine(
            self.executor,
            KVCacheManager(groups),
            scheduling=Scheduling(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_STEP_TOKENS),
            max_model_len=MAX_MODEL_LEN,
            vocab_size=size,
            eos_token_ids=ends,
        )
        self._client = InProcessClient(self.engine, self.model_info, tokenizer)
        self._mailboxes: dict[str, Mailbox] = {}
        self._seeds = itertools.count()
        self._pump: asyncio.Task[None] | None = None

    async def attach(self) -> None:
        """Do nothing, because there is nothing to watch."""

    def status(self) -> EngineStatus:
        stats, running = self.engine.stats(), len(self._mailboxes)
        return EngineStatus(EngineState.READY, os.getpid(), 0, 0.0, True, stats, journal_requests=running)

    def check_admission(self, flow: str | None = None, *, num_arriving: int = 0) -> None:
        """Admit everything, because the proofs that use this are not about overload."""

    async def check_form(self, form: StructuredOutputsParams, flow: str | None = None) -> None:
        """Compile a form. The server's own checks of the form come before this."""
        if self._forms is None:
            raise InvalidRequestError("structured_outputs: not followed here", param="structured_outputs")
        info = self.model_info
        async with self._checking.turn(flow):
            await asyncio.to_thread(self._forms.check_form, form, info.vocab_size, info.eos_token_ids)

    def assign_seed(self) -> int:
        return next(self._seeds)

    async def generate(self, request: PromptRequest) -> AsyncGenerator[RequestOutput, None]:
        if any(request.output_token_ids or ()) or request.timeout is not None:
            raise NotImplementedError("no engine dies here, so nothing is resumed, and nothing is due")
        if request.params is not None and self._forms is not None:
            request = replace(request, params=request.params.settled(structured_outputs=None))
        opened = self._client.open(request)
        request_id = opened.request_id
        mailbox = self._mailboxes[request_id] = Mailbox(opened.params.output_kind)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._step_until_idle())
        finished = False
        try:
            while not finished:
                output = await mailbox.get()
                finished = output.finished
                yield output
        finally:
            del self._mailboxes[request_id]
            self._client.abort(request_id)

    def adapters(self) -> list[Adapter]:
        return []

    async def load_adapter(self, source: LoRARequest, *, load_inplace: bool = False) -> Adapter:
        """Read the files, and refuse them: the model is a formula."""
        await asyncio.to_thread(Adapter.read, source)
        raise InvalidRequestError("enable_lora: this engine takes no adapters", param="enable_lora")

    async def unload_adapter(self, name: str) -> bool:
        return False

    async def pin_prefix(self, prompt: PromptRequest, name: str | None = None) -> PrefixUse:
        return self._client.pin_prefix({"prompt_token_ids": prompt.token_ids, "cache_salt": prompt.cache_salt}, name)

    def unpin_prefix(self, name: str) -> bool:
        return self._client.unpin_prefix(name)

    def pinned_prefixes(self) -> list[PrefixUse]:
        return self._client.pinned_prefixes()

    def most_used_prefixes(self, count: int) -> list[PrefixUse]:
        return self._client.most_used_prefixes(count)

    @property
    def kv_blocks(self) -> None:
        return None

    async def record(self, engine: int = 0) -> SavedRecord:
        raise InvalidRequestError("the flight recorder is off", code="recorder_off")

    async def drain(self, timeout_s: float) -> None:
        """End nothing, because the proofs wait for their own requests."""

    async def shutdown(self) -> None:
        self._client.shutdown()
        if self._forms is not None:
            self._forms.close()

    def leftovers(self) -> str | None:
        """Describe what is still held without a reader; None if nothing is held.

        Raises:
            PenstockError: a block is not accounted for.
        """
        self.engine.check_integrity()
        stats = self.engine.stats()
        held = {
            "open requests": len(self._mailboxes),
            "requests in the engine": stats.num_running + stats.num_waiting,
            "blocks in use": stats.kv_blocks_total - stats.kv_blocks_free - stats.kv_blocks_pinned,
            "rows beyond the batch": max(0, len(self.executor.rows) - MAX_NUM_SEQS),  # it learns of an end a step late
        }
        return ", ".join(f"{count} {name}" for name, count in held.items() if count) or None

    async def _step_until_idle(self) -> None:
        try:
            while self._client.has_unfinished_requests():
                for output in self._client.step():
                    if output.request_id in self._mailboxes:
                        self._mailboxes[output.request_id].put(output)
                await asyncio.sleep(0)
        except Exception as error:  # the readers must learn of it
            for mailbox in self._mailboxes.values():
                mailbox.put(RequestFailedError(f"{type(error).__name__}: {error}"))


@dataclass(slots=True)
class Response:
    """The application's answer. `status` is 0 if the client left before."""

    status: int = 0
    body: bytes = b""


OPTIONS = ServerOptions(port=0, access_log=False, allowed_lora_path=ADAPTERS)


class ScriptedServer:
    """The application, called without sockets.

    Args:
        model: its tokenizer is used.
        compiles_forms: whether forms of answers are compiled, in a text process, which `client.shutdown` ends.

    Raises:
        ModelLoadError: the model has no tokenizer.
    """

    def __init__(self, model: str, options: ServerOptions = OPTIONS, *, compiles_forms: bool = False) -> None:
        tokenizer = choose_tokenizer(None, model)
        if tokenizer is None:
            raise ModelLoadError(f"{model} has no tokenizer, and the texts of answers need one")
        forms = choose_tokenizer(None, model, isolated=True) if compiles_forms else None
        if isinstance(forms, IsolatedTokenizer):
            forms.load()
        self.client = ScriptedClient(tokenizer, cast(IsolatedTokenizer | None, forms))
        self.app = create_app(self.client, options)

    async def call(
        self, method: str, path: str, body: bytes = b"", headers: Sequence[tuple[bytes, bytes]] = (),
        *, leave_after: int | None = None,
    ) -> Response:  # fmt: skip
        """Make one request.

        Args:
            leave_after: number of pieces of the answer after which the client disconnects.
        """
        answer, pieces, left = Response(), [body], asyncio.Event()
        num_sent = 0

        async def receive() -> Message:
            if pieces:
                return {"type": "http.request", "body": pieces.pop(), "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal num_sent
            if message["type"] == "http.response.start":
                answer.status = message["status"]
            else:
                answer.body += message.get("body", b"")
            num_sent += 1
            if leave_after is not None and num_sent > leave_after:
                left.set()
                await asyncio.sleep(0)

        if leave_after == 0:
            left.set()
        target, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": target,
            "raw_path": target.encode(errors="replace"),
            "query_string": query.encode(errors="replace"),
            "root_path": "",
            "headers": [(b"host", HOST), *headers],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "state": {},
        }
        try:
            await self.app(scope, receive, send)
        except asyncio.CancelledError:  # of a call whose client has left
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
        return answer
