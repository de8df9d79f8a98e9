"""The server's side of the text process: calls with limits, and a new process after a call that exceeds them.

A call that takes too long or too much memory ends the text process, and thus only its own request. The next call waits
until a new process has loaded the same files. The functions block: call them in a thread.
"""

import logging
import signal
import socket
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from penstock.client import frames
from penstock.client.text_process import LOAD_CPU_S, Call, Reply, unpack_reply
from penstock.errors import EngineDeadError, EngineError, InvalidRequestError, ModelLoadError, RequestFailedError
from penstock.interface.structured_outputs import FIELD
from penstock.ranks.children import spawn

LOGGER = logging.getLogger("penstock")
CALL_CPU_S, CPU_S_PER_CHAR = 1.0, 1e-5  # processor time; a million letters take 0.5 to 1.7 s
CALL_MEMORY, MEMORY_PER_CHAR = 2**29, 2**11  # bytes; a million letters take 700 MB
# The wall-clock limit of a call is PATIENCE times its limit of processor time, plus PATIENCE_S.
PATIENCE, PATIENCE_S = 10.0, 30.0
# By function: the field of the request that it works on, and what runs.
SUBJECTS = {
    "encode_all": ("prompt", "the model's tokenizer"),
    "decode": ("tokens", "the model's tokenizer"),
    "render": ("messages", "the model's chat template"),
    "check_form": (FIELD, "the form"),
}


class TextWorker:
    """One text process at a time for the model in `folder`. Thread-safe; calls take turns.

    at_once: whether the first process starts now, instead of with the first call.
    """

    def __init__(self, folder: Path, *, at_once: bool = True) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._closed = False
        self._files: Any = None  # files_state() of the first process
        self._child: _Child | None = _Child(folder) if at_once else None

    def load(self) -> None:
        """Wait until the files are loaded.

        Raises:
            ModelLoadError: the files cannot be loaded, or take too much time or memory.
        """
        with self._lock:
            self._loaded()

    def call(self, function: str, args: list[Any], options: dict[str, Any], *, num_chars: int) -> Any:
        """Call one of text_process.FUNCTIONS.

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
            raise InvalidRequestError(f"{param}: holds a value that is not plain JSON: {error}", param=param) from None
        with self._lock:
            child = self._ready()
            reply = child.ask(body, cpu_s)
            if reply is None:
                self._check_open()
                reason = child.reason(cpu_s)
                self._child = None
                with suppress(OSError):  # otherwise the next call tries again
                    self._child = _Child(self._folder)  # loads before the next call needs it
                raise _cut_off(function, reason)
        if reply.code == "out_of_memory":
            raise _cut_off(function, str(reply.error))
        if reply.error is not None:
            raise InvalidRequestError(reply.error, param=reply.param, code=reply.code)
        return reply.value

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
        child = self._child = self._child or _Child(self._folder)
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

    def __init__(self, folder: Path) -> None:
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.loaded = False
        words, inherited = [str(theirs.fileno()), str(folder.absolute())], [theirs.fileno()]
        try:
            self._process = spawn("penstock.client.text_process", words, inherited=inherited, stdout=subprocess.DEVNULL)
        except OSError:
            self._sock.close()
            raise
        finally:
            theirs.close()

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def ask(self, call: bytes, cpu_s: float) -> Reply | None:
        """Send a call and return its reply; None if the process has ended, or was stuck and is ended here."""
        with suppress(OSError):
            self._sock.settimeout(PATIENCE_S + PATIENCE * cpu_s)
            self._sock.sendall(frames.with_header(call))
            return self.receive(cpu_s)
        self._kill()
        return None

    def receive(self, cpu_s: float) -> Reply | None:
        """Wait for a reply; return None as `ask` does."""
        try:
            self._sock.settimeout(PATIENCE_S + PATIENCE * cpu_s)
            body = frames.receive(self._sock)
            if body is not None:
                return unpack_reply(body)
        except (OSError, EngineError, msgspec.DecodeError):
            pass
        self._kill()
        return None

    def reason(self, cpu_s: float) -> str:
        """Return why the process has ended, as a phrase to follow the name of what it ran."""
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


def _cut_off(function: str, reason: str) -> InvalidRequestError:
    param, subject = SUBJECTS[function]
    code = subject.removeprefix("the ").removeprefix("model's ").replace(" ", "_")
    return InvalidRequestError(
        f"{param}: {subject} {reason} for this; it was cut off", param=param, code=f"{code}_limit"
    )
