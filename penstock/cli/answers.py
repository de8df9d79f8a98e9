"""Answer a conversation in the terminal, by a model in this process or by a server with OpenAI's API."""

import json
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from penstock.errors import EngineError, InvalidRequestError, RequestFailedError, invalid, one_line
from penstock.interface.sampling_params import RequestOutputKind, SamplingParams
from penstock.tokenizer.tokenizer import check_prompt_length, render_chat

if TYPE_CHECKING:
    from penstock.client.llm import LLM

Message = Mapping[str, str]
TOO_LONG = "context_length_exceeded"
SHARE_FOR_ANSWER = 4  # 1 / SHARE_FOR_ANSWER of the context is kept free for the answer
SILENCE_S = 600.0  # longest wait for a server's next piece
MAX_EVENT = 2**24  # bytes of an event of a stream, or of another answer


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an answer, and the number of its tokens; the last one may say why the answer ends.

    is_thought: reasoning that a server separates from its answer. It is shown, and not sent back.
    """

    text: str
    num_tokens: int = 0
    finish_reason: str | None = None
    is_thought: bool = False


Pieces = Generator[Piece, None, None]


class Answerer(Protocol):
    """Answers conversations."""

    @property
    def name(self) -> str:
        """The model's name, for the first line."""

    @property
    def about(self) -> str:
        """Describe the model and how it computes, in a few words."""

    def answer(self, messages: Sequence[Message], options: Mapping[str, Any]) -> Pieces:
        """Yield the answer as it comes. Leaving early ends its computation.

        options: fields of SamplingParams that the user has set.

        Raises:
            InvalidRequestError: the conversation is too long (code TOO_LONG), or something else is wrong with it.
            EngineError: it could not be computed.
        """


class LocalModel:
    """A model in this process. A conversation of several turns leaves a part of the context free for the answer."""

    def __init__(self, llm: "LLM", name: str) -> None:
        self._llm = llm
        self.name = name

    @property
    def about(self) -> str:
        info = self._llm.engine.model_info
        return f"{info.dtype}, a context of {info.max_model_len} tokens"

    @property
    def can_chat(self) -> bool:
        """Tell whether the model has a chat template; a base model has none."""
        tokenizer = self._llm.get_tokenizer()
        return tokenizer is not None and tokenizer.chat_template is not None

    def params(self, options: Mapping[str, Any]) -> SamplingParams:
        """Complete the user's options by the model's own defaults. Raise InvalidRequestError for a wrong one."""
        fields = {"max_tokens": None, **self._llm.engine.model_info.default_sampling, **options}
        params = SamplingParams(**fields, output_kind=RequestOutputKind.DELTA)
        if params.n != 1:
            raise invalid("n", "a conversation has one answer at a time")
        return params

    def answer(self, messages: Sequence[Message], options: Mapping[str, Any]) -> Pieces:
        tokenizer, context = self._llm.get_tokenizer(), self._llm.engine.model_info.max_model_len
        if tokenizer is None:
            raise invalid("messages", "the model has no tokenizer")
        params = self.params(options)
        chat = render_chat(tokenizer, messages, add_generation_prompt=True)
        check_prompt_length(chat.text, context, param="messages")
        ids = chat.token_ids(tokenizer)
        room = context - min(params.max_tokens or context, context // SHARE_FOR_ANSWER)
        if len(ids) > room and sum(message["role"] == "user" for message in messages) > 1:
            raise invalid("messages", f"{len(ids)} tokens leave no room for an answer", TOO_LONG)
        return self._pieces({"prompt": chat.text, "prompt_token_ids": ids}, params)

    def complete(self, prompt: str, options: Mapping[str, Any]) -> Pieces:
        """Yield the continuation of a text, as `answer` does."""
        return self._pieces({"prompt": prompt}, self.params(options))

    def _pieces(self, prompt: dict[str, Any], params: SamplingParams) -> Pieces:
        with closing(self._llm.stream([prompt], params)) as outputs:
            for _, output in outputs:
                if output.error is not None:
                    raise RequestFailedError(output.error)
                choice = output.outputs[0]
                yield Piece(choice.text, len(choice.token_ids), choice.finish_reason)


class Server:
    """A server with OpenAI's API: Penstock, vLLM, llama.cpp, Ollama or any other.

    Args:
        url: for instance http://127.0.0.1:8000 or https://host/v1.
        model: the name to ask for; None takes the first that the server lists.

    Raises:
        InvalidRequestError: the URL is wrong.
        EngineError: the server cannot be reached, or has no model.
    """

    def __init__(self, url: str, model: str | None, api_key: str | None) -> None:
        if not url.startswith(("http://", "https://")):
            raise invalid("url", f"{url!r} must begin with http:// or https://")
        url = url.rstrip("/")
        self._base = url if url.endswith("/v1") else f"{url}/v1"
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.name = model or self._first_model()

    @property
    def about(self) -> str:
        return self._base

    def answer(self, messages: Sequence[Message], options: Mapping[str, Any]) -> Pieces:
        body = {
            "model": self.name,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **options,
        }
        return self._stream(self._open("/chat/completions", body))

    def _first_model(self) -> str:
        with self._open("/models") as answer:
            try:
                return str(json.loads(answer.read(MAX_EVENT))["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise EngineError(f"{self._base}/models names no model; give one as MODEL") from None

    def _stream(self, answer: Any) -> Pieces:
        """Yield the pieces of a stream of server-sent events. The last one has the number of tokens, if it is known."""
        reason = None
        with answer:
            try:
                while line := answer.readline(MAX_EVENT):
                    data = line.strip().removeprefix(b"data:").strip()
                    if not line.startswith(b"data:") or data == b"[DONE]":
                        continue
                    event = json.loads(data)
                    if event.get("error"):
                        raise RequestFailedError(_message(event))
                    for choice in event.get("choices") or ():
                        reason = choice.get("finish_reason") or reason
                        delta = choice.get("delta") or {}
                        thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
                        yield Piece(thought, is_thought=True) if thought else Piece(delta.get("content") or "")
                    if event.get("usage"):
                        yield Piece("", int(event["usage"].get("completion_tokens") or 0))
            except (OSError, ValueError) as error:
                raise EngineError(f"{self._base}: the stream broke: {one_line(error)}") from None
        yield Piece("", 0, reason)

    def _open(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, self._headers)
        try:
            return urllib.request.urlopen(request, timeout=SILENCE_S)
        except urllib.error.HTTPError as error:
            with error:
                try:
                    found = json.loads(error.read(MAX_EVENT))
                except ValueError:
                    found = {}
            message, code = _message(found) or f"{error.code} {error.reason}", _code(found)
            if error.code == 400:
                is_long = code == TOO_LONG or "context length" in message or "context size" in message
                raise InvalidRequestError(message, code=TOO_LONG if is_long else code) from None
            raise EngineError(f"{self._base}: {message}") from None
        except OSError as error:  # URLError is one
            raise EngineError(f"{self._base} cannot be reached: {one_line(getattr(error, 'reason', error))}") from None


def _message(body: Any) -> str:
    """Read the message of OpenAI's error object, or of what others send."""
    found = body.get("error", body) if isinstance(body, dict) else body
    return one_line(found.get("message") or found if isinstance(found, dict) else found or "")


def _code(body: Any) -> str | None:
    found = body.get("error") if isinstance(body, dict) else None
    return str(found["code"]) if isinstance(found, dict) and found.get("code") else None
