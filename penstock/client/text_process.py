"""The text process: runs a model's tokenizer and chat template, and compiles answer forms, within time and memory
limits.

Model files may contain a regular expression that backtracks for ever, a normalizer that turns a letter into gigabytes,
or a template that loops. This process loads and runs them, one call after another; TextWorker (client/text.py) starts
it and sends the calls. Before each call it limits its own processor time and memory. Beyond the time, the kernel ends
it with SIGPROF; beyond the memory, the call fails or the process ends. It holds no state, so another process can take
its place.
"""

import contextlib
import os
import resource
import select
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from penstock.client import frames
from penstock.errors import InvalidRequestError, PenstockError, invalid
from penstock.interface.structured_outputs import FIELD, StructuredOutputsParams
from penstock.tokenizer.hf import HFTokenizer, load_tokenizer

LOAD_CPU_S = 120.0
FORM_CPU_S, FORM_MEMORY = 0.4, 2**29  # to compile a form of answers
PATIENCE = 10.0  # times its processor time that a form may take by the clock: the machine may be busy
MAX_REPLY = 2**26  # bytes; no prompt that fits a context needs as many
LOAD_MEMORY = 2**30  # bytes, plus LOAD_MEMORY_PER_BYTE for each byte of the file
LOAD_MEMORY_PER_BYTE = 32
MAX_TOKEN_CHARS = 2**16  # the serving process turns tokens into text itself


class Call(msgspec.Struct, frozen=True):
    """A call of one of FUNCTIONS, with its limits: cpu_s in seconds and memory in bytes."""

    function: str
    args: list[Any]
    options: dict[str, Any]
    cpu_s: float
    memory: int


class Reply(msgspec.Struct, frozen=True):
    """The result of a call, or its error. The first reply, after loading, has files_state() as its `value`."""

    value: Any = None
    error: str | None = None
    param: str | None = None
    code: str | None = None
    from_request: bool = True  # whether the request is wrong, rather than the model's files


TOO_LARGE = Reply(None, "needs more memory than it may take", code="out_of_memory")
unpack_call: Callable[[bytes], Call] = msgspec.msgpack.Decoder(Call).decode
unpack_reply: Callable[[bytes], Reply] = msgspec.msgpack.Decoder(Reply).decode


def encode_all(tokenizer: HFTokenizer, texts: list[str], **options: Any) -> list[list[int]]:
    return [tokenizer.encode(text, **options) for text in texts]


def render(tokenizer: HFTokenizer, messages: list[dict[str, Any]], **options: Any) -> str:
    """Return the conversation as rendered by the model's template."""
    if tokenizer.chat_template is None:
        raise invalid("messages", "the model has no chat template")
    return tokenizer.chat_template.render(messages, **options)


def check_form(tokenizer: HFTokenizer, form: dict[str, Any], vocab_size: int, eos_token_ids: list[int]) -> None:
    """Raise InvalidRequestError for an answer form that cannot be followed, or not compiled within its limits.

    Forms that exceed the limits are easily made, so a copy of this process compiles the form, and this one survives.
    """
    tokenizer.grammars(vocab_size, eos_token_ids).tokenizer()  # this takes longer, but only once
    params = StructuredOutputsParams.of(form)
    reply = _in_a_copy(partial(tokenizer.check_form, params, vocab_size, eos_token_ids), FORM_CPU_S, FORM_MEMORY)
    if reply is None or reply.code == TOO_LARGE.code:
        limits = f"{FORM_CPU_S:g} s or {FORM_MEMORY >> 20} MiB"
        raise invalid(FIELD, f"the form takes more than {limits} to compile", "form_limit")
    if reply.error is not None:
        raise InvalidRequestError(reply.error, param=reply.param, code=reply.code)


def _in_a_copy(work: Callable[[], Any], cpu_s: float, memory: int) -> "Reply | None":
    """Do the work in a fork of this process, within limits. Return None if the fork gave no reply."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException), limited(cpu_s, memory):
            os.write(theirs, _encoded(_answer(work)))
        os._exit(0)
    os.close(theirs)
    try:
        is_ready = select.select([ours], [], [], PATIENCE * cpu_s)[0]
        data = os.read(ours, select.PIPE_BUF) if is_ready else b""
        return unpack_reply(data) if data else None
    finally:
        os.close(ours)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "encode_all": encode_all, "decode": HFTokenizer.decode, "render": render, "check_form": check_form,
}  # fmt: skip


def files_state(folder: Path) -> list[list[Any]]:
    """Return name, size and modification time of the tokenizer files, because changed files would give other tokens."""
    files = sorted(file for pattern in ("*.json", "*.jinja", "*/*.jinja") for file in folder.glob(pattern))
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]


@contextlib.contextmanager
def limited(cpu_s: float, memory: int) -> Iterator[None]:
    """Limit the processor time of this process, and the memory that it takes in addition to what it has."""
    with contextlib.suppress(OSError, ValueError):  # no /proc: a system without this limit
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory, hard))
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _load(folder: Path) -> HFTokenizer:
    file = folder / "tokenizer.json"
    size = file.stat().st_size if file.is_file() else 0
    with limited(LOAD_CPU_S, LOAD_MEMORY + LOAD_MEMORY_PER_BYTE * size):
        tokenizer = load_tokenizer(folder)
        tokenizer.check_token_lengths(MAX_TOKEN_CHARS)
    return tokenizer


def _answer(work: Callable[[], Any]) -> Reply:
    try:
        return Reply(work())
    except PenstockError as error:
        from_request = isinstance(error, InvalidRequestError)
        param, code = getattr(error, "param", None), getattr(error, "code", None)
        return Reply(None, str(error), param, code, from_request)
    except MemoryError:
        return TOO_LARGE


def _encoded(reply: Reply) -> bytes:
    with contextlib.suppress(MemoryError):
        body = msgspec.msgpack.encode(reply)
        if len(body) <= MAX_REPLY:
            return body
    return msgspec.msgpack.encode(TOO_LARGE)


def main(argv: list[str]) -> int:
    """Load the tokenizer of the directory argv[1], then answer calls on the inherited socket of descriptor argv[0]."""
    sock, folder = socket.socket(fileno=int(argv[0])), Path(argv[1])
    loaded: list[HFTokenizer] = []

    def load() -> list[list[Any]]:
        loaded.append(_load(folder))
        return files_state(folder)

    sock.sendall(frames.with_header(msgspec.msgpack.encode(_answer(load))))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the library prints each panic, which the reply already reports
    while loaded and (body := frames.receive(sock)) is not None:
        call = unpack_call(body)
        with limited(call.cpu_s, call.memory):
            reply = _answer(partial(FUNCTIONS[call.function], loaded[0], *call.args, **call.options))
            body = _encoded(reply)
        sock.sendall(frames.with_header(body))
    return 0
