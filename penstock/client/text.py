"""The tokenizer of a client: chosen by choose_tokenizer, and isolated for servers, so that no text can stop them.

Model files may contain a regular expression that backtracks for ever, a normalizer that turns a letter into gigabytes,
or a template that loops. So IsolatedTokenizer handles the texts of requests in text processes, which also compile
answer forms. `main` is such a process. It runs one call after another, and before each call limits its own processor
time and memory. Beyond the time, the kernel ends it with SIGPROF; beyond the memory, the call fails or the process
ends. It holds no state, so another process can take its place. A TextWorker is the server's side of it. A call beyond
the limits ends only its own request; the next call waits until a new process has loaded the same files.

Tokens of streams become text in this process: streams outlive a text process, and the cost of a tokenizer.json's
decoders is bounded when it is loaded. The text process loads the files first, so files that cannot be loaded within its
limits never reach the server.
"""

import logging
import math
import os
import resource
import select
import signal
import socket
import subprocess
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from hashlib import blake2b
from pathlib import Path
from queue import LifoQueue
from typing import Any, cast

import msgspec

from penstock.client import frames
from penstock.errors import (
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    ModelLoadError,
    PenstockError,
    RequestFailedError,
    check_unicode,
    invalid,
)
from penstock.interface.structured_outputs import FIELD, StructuredOutputsParams
from penstock.ranks.children import spawn_connected
from penstock.spec.gguf import is_gguf, read_file
from penstock.tokenizer.chat_template import ChatTemplate
from penstock.tokenizer.hf import HFTokenizer, adopt_tokenizer, find_tokenizer_file, has_tokenizer, load_tokenizer
from penstock.tokenizer.tokenizer import Tokenizer
from penstock.weights.hub import resolve_model

LOGGER = logging.getLogger("penstock")
LONG_TEXT = 4096  # characters; longer texts have a process of their own, so that short texts do not wait for them
FORMS_AT_ONCE = 2  # each in a process of its own
MAX_CHECKED = 1024
REFUSED_S = 60.0  # how long a refused form is not compiled again; a busy machine may have been the reason
MANY_IDS = 64  # more ids than this are decoded in the text process, because the text is long
CALL_CPU_S, CPU_S_PER_CHAR = 1.0, 1e-5  # processor time; a million letters take 0.5 to 1.7 s
CALL_MEMORY, MEMORY_PER_CHAR = 2**29, 2**11  # bytes; a million letters take 700 MB
# The wall-clock limit of a call is PATIENCE times its limit of processor time, because the machine may be busy, plus
# PATIENCE_S if the process is asked.
PATIENCE, PATIENCE_S = 10.0, 30.0
# By function: the field of the request that it works on, and what runs.
SUBJECTS = {
    "encode_all": ("prompt", "the model's tokenizer"),
    "encode_pair": ("prompt", "the model's tokenizer"),
    "decode": ("tokens", "the model's tokenizer"),
    "forges_token": ("messages", "the model's tokenizer"),
    "render": ("messages", "the model's chat template"),
    "check_form": (FIELD, "the form"),
}
ATTEMPTS = 3  # at a call whose process is killed or stopped from outside, as by the system for lack of memory
POLL_S = 0.5  # between two checks of whether a text process was stopped
LOAD_CPU_S = 120.0
FORM_CPU_S, FORM_MEMORY = 0.4, 2**29  # to compile a form of answers
MAX_REPLY = 2**26  # bytes; no prompt that fits a context needs as many
LOAD_MEMORY = 2**30  # bytes, plus LOAD_MEMORY_PER_BYTE for each byte of the file
LOAD_MEMORY_PER_BYTE = 32
MAX_TOKEN_CHARS = 2**16  # the serving process turns tokens into text itself


def choose_tokenizer(
    given: Any, model: str | None, *, isolated: bool = False, chat_template: str | None = None
) -> Tokenizer | None:
    """Choose the tokenizer that a user gave, or the model's own; None without one: prompts must then be ids.

    Args:
        given: an object (of Penstock or Transformers), a directory, a hub name, "demo", or None for the model's own.
        model: a directory, a hub name or "demo"; None for a model object, which has no tokenizer.
        chat_template: a file with the chat template to use, or the name of one of the model's.
        isolated: whether a tokenizer from files handles texts in processes of its own; it must
            be loaded before it is used.

    Raises:
        ModelLoadError, InvalidRequestError: the tokenizer does not exist or cannot be used.
    """
    if given is not None and not isinstance(given, str):
        return adopt_tokenizer(given, chat_template)
    source = given or model
    if source is None:
        return None
    directory = resolve_model(source)
    if not has_tokenizer(directory):
        return None
    make = IsolatedTokenizer if isolated else load_tokenizer
    return make(directory, chat_template=chat_template)


class IsolatedTokenizer:
    """The tokenizer of a model directory: a thread-safe `Tokenizer` whose calls may block, each for a limited time.

    The constructor starts the first process; nothing else may be called before `load`.
    """

    def __init__(self, folder: Path, *, chat_template: str | None = None) -> None:
        self._folder, self._chosen = folder, chat_template
        self._short = TextWorker(folder, chat_template)
        self._long = TextWorker(folder, chat_template, at_once=False)
        # Forms that take long must hold up neither tokenising nor each other: the worker used last is the next.
        self._workers = [TextWorker(folder, at_once=False) for _ in range(FORMS_AT_ONCE)]
        self._forms: LifoQueue[TextWorker] = LifoQueue()
        for worker in self._workers:
            self._forms.put(worker)
        # By the digest of a form: until when its result holds, and why it is refused, if it is.
        self._checked: OrderedDict[bytes, tuple[float, InvalidRequestError | None]] = OrderedDict()

    def load(self) -> None:
        """Load the files in the text process, then in this process, which only decodes.

        Raises:
            ModelLoadError: a file is missing or damaged, or takes too much time or memory.
        """
        self._short.load()
        local = self._local = load_tokenizer(self._folder, only_decodes=True, chat_template=self._chosen)
        self.bos_token_id, self.eos_token_id = local.bos_token_id, local.eos_token_id
        self.special_ids = local.special_ids
        self.token_to_text, self.token_to_bytes = local.token_to_text, local.token_to_bytes
        self.joins_bytes = local.joins_bytes
        self.byte_fallback_ids = local.byte_fallback_ids
        if local.may_forge:
            self.forges_token = self._forges_token
        template = None if local.chat_template is None else _IsolatedTemplate(self, local.chat_template.text)
        self.chat_template = cast(ChatTemplate | None, template)

    @property
    def vocab_size(self) -> int:
        return self._local.vocab_size

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self.encode_all([text], add_special_tokens=add_special_tokens)[0]

    def encode_all(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Encode all texts with one call, because each call crosses to another process."""
        for text in texts:
            check_unicode(text)
        options = {"add_special_tokens": add_special_tokens}
        found: list[list[int]] = self.call("encode_all", [list(texts)], options, num_chars=sum(map(len, texts)))
        return found

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int | None]:
        for text in (first, second):
            check_unicode(text)
        ids, start = self.call("encode_pair", [first, second], {}, num_chars=len(first) + len(second))
        return ids, start

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        options = {
            "skip_special_tokens": skip_special_tokens,
            "spaces_between_special_tokens": spaces_between_special_tokens,
        }
        if len(ids) <= MANY_IDS:
            return self._local.decode(ids, **options)
        return str(self.call("decode", [list(ids)], options, num_chars=8 * len(ids)))

    def _forges_token(self, text: str) -> bool:
        return bool(self.call("forges_token", [text], {}, num_chars=len(text)))

    def check_form(self, form: StructuredOutputsParams, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Raise InvalidRequestError for a form of answers that cannot be followed, or takes too long to compile."""
        digest = blake2b(repr(form.key).encode("utf-8", "surrogatepass"), digest_size=16).digest()
        until, refusal = self._checked.get(digest, (0.0, None))
        if time.monotonic() >= until:
            until, refusal = math.inf, None
            worker = self._forms.get()
            try:
                worker.call("check_form", [asdict(form), vocab_size, list(eos_token_ids)], {}, num_chars=0)
            except InvalidRequestError as error:
                until, refusal = time.monotonic() + REFUSED_S, error.with_traceback(None)
            finally:
                self._forms.put(worker)
            self._checked[digest] = until, refusal
            if len(self._checked) > MAX_CHECKED:
                self._checked.popitem(last=False)
        if refusal is not None:
            raise InvalidRequestError(refusal.message, param=refusal.param, code=refusal.code)

    def call(self, function: str, args: list[Any], options: dict[str, Any], *, num_chars: int) -> Any:
        """Call a function in the process for texts of this length; see TextWorker.call."""
        worker = self._short if num_chars <= LONG_TEXT else self._long
        return worker.call(function, args, options, num_chars=num_chars)

    def sleep(self) -> None:
        """End the text processes until `wake_up` or the next call."""
        for worker in (self._short, self._long, *self._workers):
            worker.sleep()

    def wake_up(self) -> None:
        """Start a text process, and wait until it has loaded the files. Raise what `load` raises."""
        self._short.load()

    def close(self) -> None:
        """End the text processes. A second call does nothing."""
        for worker in (self._short, self._long, *self._workers):
            worker.close()


class _IsolatedTemplate:
    """Renders as ChatTemplate does, in a text process."""

    def __init__(self, tokenizer: IsolatedTokenizer, text: str) -> None:
        self._tokenizer = tokenizer
        self.text = text

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        num_chars = len(repr(messages)) + len(repr(options))
        return str(self._tokenizer.call("render", [list(messages)], options, num_chars=num_chars))


class TextWorker:
    """One text process at a time for the model in `folder`. Thread-safe; calls take turns.

    at_once: whether the first process starts now, instead of with the first call.
    """

    def __init__(self, folder: Path, chat_template: str | None = None, *, at_once: bool = True) -> None:
        self._folder, self._chosen = folder, chat_template
        self._lock = threading.Lock()
        self._closed = False
        self._files: Any = None  # files_state() of the first process
        self._child: _Child | None = _Child(folder, chat_template) if at_once else None

    def load(self) -> None:
        """Wait until the files are loaded.

        Raises:
            ModelLoadError: the files cannot be loaded, or take too much time or memory.
        """
        with self._lock:
            self._loaded()

    def call(self, function: str, args: list[Any], options: dict[str, Any], *, num_chars: int) -> Any:
        """Call one of FUNCTIONS.

        Args:
            num_chars: length of the texts, which determines the limits.

        Raises:
            InvalidRequestError: the function refuses its arguments, or took too long or too much memory.
            RequestFailedError: there is no text process any more.
            EngineDeadError: this worker was closed.
        """
        cpu_s = CALL_CPU_S + CPU_S_PER_CHAR * num_chars
        if function == "check_form":  # it limits itself, after loading what it needs
            cpu_s = LOAD_CPU_S
        memory = CALL_MEMORY + MEMORY_PER_CHAR * num_chars
        try:
            body = msgspec.msgpack.encode(Call(function, args, options, cpu_s, memory))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            param = SUBJECTS[function][0]
            raise invalid(param, f"holds a value that is not plain JSON: {error}") from None
        with self._lock:
            reply = self._ask(function, body, cpu_s)
        if reply.code == "out_of_memory":
            raise _cut_off(function, str(reply.error))
        if reply.error is not None:
            raise InvalidRequestError(reply.error, param=reply.param, code=reply.code)
        return reply.value

    def _ask(self, function: str, body: bytes, cpu_s: float) -> "Reply":
        """Send a call to the process, and again to a new one if the process is killed or stopped from outside."""
        attempts = 0
        while True:
            attempts += 1
            child = self._ready()
            reply = child.ask(body, cpu_s)
            if reply is not None:
                return reply
            self._check_open()
            self._child = None
            with suppress(OSError):  # otherwise the next call tries again
                self._child = _Child(self._folder, self._chosen)  # loads before the next call needs it
            if not child.was_killed or attempts == ATTEMPTS:
                raise _cut_off(function, child.reason(cpu_s))

    def sleep(self) -> None:
        """End the process after the call under way. The next call starts another one."""
        with self._lock:
            if self._child is not None:
                self._child.end()
            self._child = None

    def close(self) -> None:
        """End the process, even in the middle of a call. A second `close` does nothing."""
        self._closed = True
        if self._child is not None:
            self._child.end()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDeadError("the server is shutting down")

    def _ready(self) -> "_Child":
        self._check_open()
        try:
            return self._loaded()
        except (ModelLoadError, OSError) as error:
            LOGGER.error("the tokenizer process cannot be restarted: %s", error)
            text = "the tokenizer process cannot be restarted; the server's log says why"
            raise RequestFailedError(text) from None

    def _loaded(self) -> "_Child":
        if self._closed:
            raise ModelLoadError("the server is shutting down")
        if self._child is not None and self._child.loaded and self._child.ended:  # by the system, not by a call
            LOGGER.warning("the tokenizer process has ended; starting another one")
            self._child.end()
            self._child = None
        child = self._child = self._child or _Child(self._folder, self._chosen)
        if child.loaded:
            return child
        reply = child.receive(LOAD_CPU_S)
        if reply is None or reply.error is not None:
            self._child = None
            reason = f"the tokenizer {child.reason(LOAD_CPU_S)} to load" if reply is None else str(reply.error)
            child.end()
            raise ModelLoadError(reason if str(self._folder) in reason else f"{self._folder}: {reason}")
        if self._files not in (None, reply.value):
            self._child = None
            child.end()
            raise ModelLoadError(f"{self._folder}: the tokenizer's files have changed since the server started")
        child.loaded, self._files = True, reply.value
        return child


class _Child:
    """A text process and our end of its connection. It ends when this end is closed, by us or with our process."""

    def __init__(self, folder: Path, chat_template: str | None) -> None:
        self.loaded = False
        self._is_late = False
        words = [str(folder.absolute()), *([] if chat_template is None else [chat_template])]
        module = "penstock.client.text"
        self._sock, self._process = spawn_connected(module, words, stdout=subprocess.DEVNULL)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def ask(self, call: bytes, cpu_s: float) -> "Reply | None":
        """Send a call and return its reply; None if the process has ended, or was stuck and is ended here."""
        with suppress(OSError):
            self._sock.settimeout(PATIENCE_S + PATIENCE * cpu_s)
            self._sock.sendall(frames.with_header(call))
            return self.receive(cpu_s)
        self._kill()
        return None

    def receive(self, cpu_s: float) -> "Reply | None":
        """Wait for a reply; return None as `ask` does."""
        try:
            self._sock.settimeout(PATIENCE_S + PATIENCE * cpu_s)
            self._await_reply(PATIENCE_S + PATIENCE * cpu_s)
            body = frames.receive(self._sock)
            if body is not None:
                return unpack_reply(body)
        except (OSError, EngineError, msgspec.DecodeError):
            pass
        self._kill()
        return None

    @property
    def was_killed(self) -> bool:
        """Tell whether it was killed or stopped from outside; a call beyond its limits ends in other ways."""
        return self._process.wait() == -signal.SIGKILL and not self._is_late

    def _await_reply(self, seconds: float) -> None:
        """Wait for a reply, or the end of the process. Raise TimeoutError if it takes too long or was stopped."""
        poll, end = select.poll(), time.monotonic() + seconds
        poll.register(self._sock, select.POLLIN)
        while not poll.poll(POLL_S * 1000):
            self._is_late = time.monotonic() > end
            if self._is_late or _is_stopped(self._process.pid):
                raise TimeoutError

    def reason(self, cpu_s: float) -> str:
        """Explain why the process has ended, as a phrase to follow the name of what it ran."""
        code = self._process.wait()
        if code == -signal.SIGPROF:
            return f"needs more than {cpu_s:.1f} s"
        if code == -signal.SIGKILL:
            return "was stuck, or the system killed it for lack of memory"
        return f"needs more memory than it may take, or crashed (exit code {code})"

    def end(self) -> None:
        """End the process; a thread that waits for its reply gets None."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._kill()

    def _kill(self) -> None:
        """End the process, unless it is just ending on its own: its exit code then still tells the reason."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0.2)
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._sock.close()


def _is_stopped(pid: int) -> bool:
    with suppress(OSError, IndexError):  # no /proc
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


def _cut_off(function: str, reason: str) -> InvalidRequestError:
    param, subject = SUBJECTS[function]
    code = subject.removeprefix("the ").removeprefix("model's ").replace(" ", "_")
    return invalid(param, f"{subject} {reason} for this; it was cut off", f"{code}_limit")


# --- the text process ------------------------------------------------------------------------------------------------


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
        with suppress(BaseException), limited(cpu_s, memory):
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
    "forges_token": HFTokenizer.forges_token, "encode_pair": HFTokenizer.encode_pair,
}  # fmt: skip


def files_state(folder: Path, chat_template: str | None = None) -> list[list[Any]]:
    """List name, size and modification time of the tokenizer files, because changed files would give other tokens."""
    patterns = ("*.json", "tokenizer.model*", "*.jinja", "*/*.jinja")
    files = [folder] if is_gguf(folder) else sorted(file for pattern in patterns for file in folder.glob(pattern))
    files += [] if chat_template is None or not Path(chat_template).is_file() else [Path(chat_template)]
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]


@contextmanager
def limited(cpu_s: float, memory: int) -> Iterator[None]:
    """Limit the processor time of this process, and the memory that it takes in addition to what it has."""
    with suppress(OSError, ValueError):  # no /proc: a system without this limit
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory, hard))
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _load(folder: Path, chat_template: str | None) -> HFTokenizer:
    file = find_tokenizer_file(folder)
    size = 0 if file is None else read_file(file).num_bytes if is_gguf(file) else file.stat().st_size
    with limited(LOAD_CPU_S, LOAD_MEMORY + LOAD_MEMORY_PER_BYTE * size):
        tokenizer = load_tokenizer(folder, chat_template=chat_template)
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
    with suppress(MemoryError):
        body = msgspec.msgpack.encode(reply)
        if len(body) <= MAX_REPLY:
            return body
    return msgspec.msgpack.encode(TOO_LARGE)


def main(argv: list[str]) -> int:
    """Load the tokenizer of the directory argv[1], with the chat template argv[2] if there is one, then answer calls on
    the inherited socket of descriptor argv[0]."""
    sock, folder = socket.socket(fileno=int(argv[0])), Path(argv[1])
    chat_template = argv[2] if len(argv) > 2 else None
    loaded: list[HFTokenizer] = []

    def load() -> list[list[Any]]:
        loaded.append(_load(folder, chat_template))
        return files_state(folder, chat_template)

    sock.sendall(frames.with_header(msgspec.msgpack.encode(_answer(load))))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the library prints each panic, which the reply already reports
    while loaded and (body := frames.receive(sock)) is not None:
        call = unpack_call(body)
        with limited(call.cpu_s, call.memory):
            reply = _answer(partial(FUNCTIONS[call.function], loaded[0], *call.args, **call.options))
            body = _encoded(reply)
        sock.sendall(frames.with_header(body))
    return 0
