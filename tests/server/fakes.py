"""A small honest EngineClient without an engine: bytes for tokens, letters drawn by seed for a model.

The same seed, choice and prompt give the same tokens. Nothing here is a mock: it validates, streams, aborts and fails
as the protocol says.
"""

import asyncio
import codecs
import hashlib
import itertools
import random
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.client.adapters import Adapter
from penstock.client.engine_client import EngineState, EngineStatus
from penstock.client.input_processor import PromptRequest
from penstock.client.records import SavedRecord
from penstock.errors import EngineDeadError, EngineOverloadedError, InvalidRequestError
from penstock.interface.kv_transfer import RemotePrefillStatus
from penstock.interface.messages import AdapterInfo, EngineStats, LoRARequest, ModelInfo
from penstock.interface.outputs import CompletionOutput, FinishReason, Logprob, LogprobsAt, PrefixUse, RequestOutput
from penstock.interface.sampling_params import RequestOutputKind, SamplingParams
from penstock.interface.structured_outputs import StructuredOutputsParams
from penstock.interface.timeline import Arrivals
from penstock.tokenizer.chat_template import ChatTemplate

BOS, EOS = 256, 257
VOCAB_SIZE = 300
NEVER_CLOSES = 10**6
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'forbidden' %}{{ raise_exception('no') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


class FakeTokenizer:
    """One token per byte; BOS and EOS are special, and so are `marks`, each a token if it is all of the text."""

    vocab_size = VOCAB_SIZE
    bos_token_id: int | None = BOS
    eos_token_id: int | None = EOS
    joins_bytes = True
    byte_fallback_ids: frozenset[int] = frozenset()

    def __init__(self, chat_template: str | None = CHAT_TEMPLATE, marks: Sequence[str] = ()) -> None:
        self.chat_template = None if chat_template is None else ChatTemplate(chat_template)
        self.special_ids = frozenset(range(BOS, EOS + 1 + len(marks)))
        self._marks = {mark: EOS + 1 + index for index, mark in enumerate(marks)}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = [self._marks[text]] if text in self._marks else list(text.encode())
        return [BOS] * add_special_tokens + ids

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        shown = [i for i in ids if not (skip_special_tokens and i in self.special_ids)]
        return b"".join(self.token_to_bytes(i) for i in shown).decode(errors="replace")

    def token_to_text(self, token_id: int) -> str:
        return self.token_to_bytes(token_id).decode(errors="replace")

    def token_to_bytes(self, token_id: int) -> bytes:
        named = {BOS: b"<s>", EOS: b"</s>", **{at: mark.encode() for mark, at in self._marks.items()}}
        return bytes([token_id]) if token_id < 256 else named.get(token_id, b"")


@dataclass
class Behaviour:
    """How the fake answers.

    Attributes:
        text: what every choice says before it ends; None: letters drawn by seed up to max_tokens.
        delay_s: between tokens, and before the first.
        fail_at, failure: raise `failure` before that token (0: before the first output).
        hang_at: stop there until closed.
    """

    text: str | None = None
    delay_s: float = 0.0
    fail_at: int = 0
    failure: Exception | None = None
    hang_at: int | None = None


class FakeEngineClient:
    """An EngineClient whose model is made of seeded letters."""

    def __init__(
        self, behaviour: Behaviour | None = None, *, max_model_len: int = 512, **tokenizer_options: Any
    ) -> None:
        self.behaviour = behaviour or Behaviour()
        self.tokenizer: Any = FakeTokenizer(**tokenizer_options)
        self.state = EngineState.READY
        self.making_progress = True
        self.remote_prefill: RemotePrefillStatus | None = None
        self.info = ModelInfo("fake", max_model_len, VOCAB_SIZE, (EOS,), "float32", "fp-fake", {})
        self.start_failure: Exception | None = None
        self.attached = False
        self.overload: EngineOverloadedError | None = None
        self.num_arriving: list[int] = []  # as each check of admission was told
        self.record_failure: Exception | None = None
        self.open: set[str] = set()
        self.aborted: list[str] = []
        self.seen: list[tuple[list[int], SamplingParams, str]] = []
        self.turns: list[tuple[int, float | None]] = []  # priority and timeout of each
        self.resumed: dict[str, list[list[int]]] = {}  # by request id, the tokens that it came with
        self.num_tokens = 0
        self.salts: list[str | None] = []  # of the prompts, in order
        self.pins: dict[str, PrefixUse] = {}
        self.pinned: list[list[int]] = []  # the token ids of each
        self.kv_blocks = None
        self.loras: dict[str, Adapter] = {}
        self.used: list[str | None] = []  # the adapters of the prompts, in order
        self._arrivals = itertools.count()
        self._was_ready = False

    @property
    def model_info(self) -> ModelInfo:
        if self.start_failure is not None:
            raise self.start_failure
        self._was_ready |= self.state is EngineState.READY
        if not self._was_ready:
            raise EngineDeadError(f"the engine is {self.state.value}")
        return self.info

    def status(self) -> EngineStatus:
        stats = EngineStats(len(self.open), 0, 8, 7, 3, num_generated_tokens_total=self.num_tokens)
        return EngineStatus(
            self.state, 4321, 2, 0.01, self.making_progress, stats, len(self.open), 5,
            remote_prefill=self.remote_prefill,
        )  # fmt: skip

    def check_admission(self, flow: str | None = None, *, num_arriving: int = 0) -> None:
        self.num_arriving.append(num_arriving)
        if self.overload is not None:
            raise self.overload

    async def check_form(self, form: StructuredOutputsParams, flow: str | None = None) -> None:
        """Refuse a regular expression that is called wrong."""
        if form.regex == "wrong":
            raise InvalidRequestError("structured_outputs.regex: wrong", param="structured_outputs")

    def assign_seed(self) -> int:
        return next(self._arrivals) + 1000

    async def generate(self, request: PromptRequest) -> AsyncIterator[RequestOutput]:
        params = request.params or SamplingParams()
        params = params if request.seed is None else params.settled(seed=request.seed)
        request_id = request.request_id or f"request-{next(self._arrivals)}"
        ids = request.token_ids
        self.salts.append(request.cache_salt)
        self.used.append(request.adapter)
        self.turns.append((request.priority, request.timeout))
        self.seen.append((ids, params, request_id))
        self.resumed[request_id] = [list(known) for known in request.output_token_ids or ()]
        if self.state is not EngineState.READY:
            raise EngineDeadError("there is no engine")
        self.open.add(request_id)
        try:
            async for output in self._run(ids, params, request_id):
                yield output
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(request_id)
            raise
        finally:
            self.open.discard(request_id)

    async def _run(self, ids: list[int], params: SamplingParams, request_id: str) -> AsyncIterator[RequestOutput]:
        if params.pooling is not None:
            ended = CompletionOutput(0, "", [], finish_reason=FinishReason.STOP)
            of_each = self.model_info.pooler.settle(params.pooling, 1).pooling_type == "ALL"
            vectors = array("f", [1.0, 0.0] * (len(ids) if of_each else 1)).tobytes()
            yield RequestOutput(request_id, None, ids, [ended], finished=True, pooled=vectors)
            return
        seed = next(self._arrivals) + 1000 if params.seed is None else params.seed
        choices = [self._choice(ids, params, seed, index) for index in range(params.n)]
        base = RequestOutput(request_id, None, ids, num_cached_tokens=len(ids) // 16 * 16, seed=seed)
        base.arrivals = [Arrivals() for _ in choices]
        if params.prompt_logprobs is not None:
            rest = [self._logprobs_at(i, params.prompt_logprobs) for i in ids[1:]]
            base = replace(base, prompt_logprobs=[None, *rest])
        for step in range(max(len(choice.token_ids) for choice in choices)):
            await self._wait(step)
            self.num_tokens += 1
            for choice, arrivals in zip(choices, base.arrivals, strict=True):
                arrivals.note(step < len(choice.token_ids), time.monotonic())
            if params.output_kind is RequestOutputKind.DELTA:
                moved = [self._delta(choice, step) for choice in choices if step < len(choice.token_ids)]
                yield replace(base, outputs=moved, finished=all(choice.finished for choice in moved))
                base = replace(base, prompt_logprobs=None)
        if params.output_kind is RequestOutputKind.FINAL_ONLY:
            yield replace(base, outputs=choices, finished=True)

    async def _wait(self, step: int) -> None:
        behaviour = self.behaviour
        if behaviour.failure is not None and step == behaviour.fail_at:
            raise behaviour.failure
        if step == behaviour.hang_at:
            await asyncio.sleep(NEVER_CLOSES)
        await asyncio.sleep(behaviour.delay_s)

    def _choice(self, ids: list[int], params: SamplingParams, seed: int, index: int) -> CompletionOutput:
        """The whole answer of one choice."""
        room = self.info.max_model_len - len(ids)
        limit = room if params.max_tokens is None else min(room, params.max_tokens)
        tokens, reason = self._tokens(ids, params, seed, index, limit)
        text, stop = self.tokenizer.decode(tokens, skip_special_tokens=params.skip_special_tokens), None
        for string in params.stop or ():
            if string in text:
                cut = text.index(string)
                tokens, text, reason, stop = tokens[: cut + len(string)], text[:cut], FinishReason.STOP, string
        places = None if params.logprobs is None else [self._logprobs_at(i, params.logprobs) for i in tokens]
        return CompletionOutput(index, text, tokens, None, places, reason, stop)

    def _tokens(
        self, ids: list[int], params: SamplingParams, seed: int, index: int, limit: int
    ) -> tuple[list[int], FinishReason]:
        if self.behaviour.text is not None:
            tokens = [*self.behaviour.text.encode(), EOS]
            return tokens[:limit], FinishReason.STOP if len(tokens) <= limit else FinishReason.LENGTH
        draw = random.Random(f"{seed}:{index}:{ids}:{params.temperature}")
        return [draw.randrange(97, 123) for _ in range(limit)], FinishReason.LENGTH

    def _logprobs_at(self, token_id: int, top: int) -> LogprobsAt:
        """The chosen token is the second most likely; a third has a probability of zero."""
        others = [(token_id + 1) % 256, (token_id + 2) % 256]
        ranked = {others[0]: Logprob(-0.1, 1), token_id: Logprob(-0.5, 2), others[1]: Logprob(float("-inf"), 3)}
        best = dict(list(ranked.items())[:top])
        return {token_id: ranked[token_id], **best}

    def _delta(self, choice: CompletionOutput, step: int) -> CompletionOutput:
        """The part of a choice that token `step` brings; bytes that complete no character come later."""
        last = step == len(choice.token_ids) - 1
        before, now = self._shown(choice, step), len(choice.text) if last else self._shown(choice, step + 1)
        return CompletionOutput(
            choice.index,
            choice.text[before:now],
            choice.token_ids[step : step + 1],
            None,
            None if choice.logprobs is None else choice.logprobs[step : step + 1],
            choice.finish_reason if last else None,
            choice.stop_reason if last else None,
        )

    def _shown(self, choice: CompletionOutput, num_tokens: int) -> int:
        data = b"".join(self.tokenizer.token_to_bytes(i) for i in choice.token_ids[:num_tokens] if i < 256)
        return min(len(codecs.getincrementaldecoder("utf-8")().decode(data)), len(choice.text))

    async def pin_prefix(self, prompt: PromptRequest, name: str | None = None) -> PrefixUse:
        if name in self.pins:
            raise InvalidRequestError(f"name: {name!r} is the name of another pin", param="name", code="name_in_use")
        name = name or f"pin-{len(self.pins)}"
        self.pins[name] = PrefixUse(len(prompt.token_ids) // 16 * 16, name=name)
        self.pinned.append(prompt.token_ids)
        self.salts.append(prompt.cache_salt)
        return self.pins[name]

    def unpin_prefix(self, name: str) -> bool:
        return self.pins.pop(name, None) is not None

    def pinned_prefixes(self) -> list[PrefixUse]:
        return list(self.pins.values())

    def most_used_prefixes(self, count: int) -> list[PrefixUse]:
        return self.pinned_prefixes()[:count]

    def adapters(self) -> list[Adapter]:
        return list(self.loras.values())

    async def load_adapter(self, source: LoRARequest, *, load_inplace: bool = False) -> Adapter:
        """Take the path for the content; refuse a directory that is called wrong."""
        if source.lora_path.endswith("wrong"):
            raise InvalidRequestError("lora_path: no adapter", param="lora_path")
        sha256 = hashlib.sha256(source.lora_path.encode()).hexdigest()
        info = AdapterInfo(source.lora_name, source.lora_path, 8, ("q",), sha256, 64)
        self.loras[source.lora_name] = Adapter(source, sha256, info)
        return self.loras[source.lora_name]

    async def unload_adapter(self, name: str) -> bool:
        return self.loras.pop(name, None) is not None

    async def attach(self) -> None:
        self.attached = True

    async def record(self, engine: int = 0) -> SavedRecord:
        if self.record_failure is not None:
            raise self.record_failure
        return SavedRecord(b"a record", "/records/penstock-1.record")

    async def drain(self, timeout_s: float) -> None:
        self.state = EngineState.DRAINING if self.state is EngineState.READY else self.state
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self.open and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)

    async def shutdown(self) -> None:
        self.state = EngineState.FAILED
