"""Tokenizers and templates that hang, grow or crash, in text processes: they cost their own request alone."""

import asyncio
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, AsyncLLM, InvalidRequestError, ModelLoadError, SamplingParams
from penstock.client import text
from penstock.client.text import IsolatedTokenizer
from penstock.errors import EngineDeadError, RequestFailedError
from penstock.interface.structured_outputs import StructuredOutputsParams
from penstock.tokenizer.hf import load_tokenizer
from penstock.weights.hub import MODEL_DIR
from tests.server.harness import send

BACKTRACKS = "a" * 40 + "b"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
GROWS = "{% set t = namespace(x='aaaaaaaa') %}{% for a in range(60) %}{% set t.x = t.x ~ t.x %}{% endfor %}{{ t.x }}"
USER = [{"role": "user", "content": "hello"}]


def model(folder: Path, change: Callable[[dict[str, Any]], None], template: str | None = None) -> Path:
    """The demo model with another tokenizer."""
    shutil.copytree(MODEL_DIR, folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def backtracking(content: dict[str, Any]) -> None:
    before = content["pre_tokenizer"]
    split = {"type": "Split", "pattern": {"Regex": "^(a+)+$"}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, before] if before else [split]}


def growing(content: dict[str, Any], what: str = "normalizer", key: str = "normalizers") -> None:
    steps = [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}] * 8
    content[what] = {"type": "Sequence", key: steps}


@pytest.fixture
def isolated() -> Iterator[Callable[[Path], IsolatedTokenizer]]:
    made: list[IsolatedTokenizer] = []

    def load(folder: Path) -> IsolatedTokenizer:
        made.append(IsolatedTokenizer(folder))
        made[-1].load()
        return made[-1]

    yield load
    for tokenizer in made:
        tokenizer.close()


def test_the_same_as_the_plain_tokenizer(isolated) -> None:
    """Guards against a tokenizer that gives other ids or texts in the server than in a script."""
    tokenizer, plain = isolated(MODEL_DIR), load_tokenizer(MODEL_DIR)
    texts = ["Once upon a time", "x" * 5000, "\u00e9\U0001f642\ufdd0", " "]
    for special in (True, False):
        expected = [plain.encode(text, add_special_tokens=special) for text in texts]
        assert tokenizer.encode_all(texts, add_special_tokens=special) == expected
        assert [tokenizer.encode(text, add_special_tokens=special) for text in texts] == expected
    ids = plain.encode("a story " * 100)
    assert tokenizer.decode(ids) == plain.decode(ids)
    assert tokenizer.vocab_size == plain.vocab_size
    assert tokenizer.chat_template.render(USER) == plain.chat_template.render(USER)
    with pytest.raises(InvalidRequestError, match="surrogate"):
        tokenizer.encode("\ud800")
    with pytest.raises(InvalidRequestError, match="continue_final_message"):
        tokenizer.chat_template.render(USER, continue_final_message=True)


@pytest.mark.parametrize("template", [LOOPS, GROWS, "{{ 'a' * 10**11 }}", "{{ '%999999999999d' % 1 }}"])
def test_a_template_is_cut_off(template, isolated, tmp_path) -> None:
    """Guards against a template that holds up the server or takes its memory; the next one has a new process."""
    tokenizer = isolated(
        model(tmp_path / "m", lambda content: None, "{% if messages|length > 1 %}" + template + "{% endif %}ok")
    )
    with pytest.raises(InvalidRequestError, match=r"messages: .*chat template|messages: too deep or too large"):
        tokenizer.chat_template.render(USER * 2)
    assert tokenizer.chat_template.render(USER) == "ok"


def test_a_regular_expression_is_cut_off(isolated, tmp_path) -> None:
    """Guards against exponential backtracking: the library's panic, or hours of it."""
    tokenizer = isolated(model(tmp_path / "m", backtracking))
    with pytest.raises(InvalidRequestError, match="prompt"):
        tokenizer.encode(BACKTRACKS)
    assert tokenizer.encode("aab")


def test_short_texts_do_not_wait_for_long_ones(isolated) -> None:
    """Guards against one queue for all texts: the process for long ones is stopped here, and short ones pass."""
    tokenizer = isolated(MODEL_DIR)
    tokenizer.encode("x" * 10_000)
    stuck = tokenizer._long._child._process.pid
    os.kill(stuck, signal.SIGSTOP)
    long = threading.Thread(target=tokenizer.encode, args=("x" * 10_000,))
    long.start()
    assert tokenizer.encode("short")
    assert long.is_alive()
    os.kill(stuck, signal.SIGCONT)
    long.join()


def test_a_stuck_process_is_replaced(isolated, monkeypatch) -> None:
    """Guards against a call that waits for ever for a process that does nothing."""
    tokenizer = isolated(MODEL_DIR)
    monkeypatch.setattr(text, "PATIENCE_S", 0.2)
    monkeypatch.setattr(text, "PATIENCE", 0.0)
    os.kill(tokenizer._short._child._process.pid, signal.SIGSTOP)
    with pytest.raises(InvalidRequestError, match="stuck"):
        tokenizer.encode("text")
    monkeypatch.setattr(text, "PATIENCE_S", 30.0)
    assert tokenizer.encode("text")


def test_a_process_that_cannot_be_started_costs_no_further_request(isolated, monkeypatch) -> None:
    """Guards against an OSError in place of the reason why a call was cut off, when the system has no process for the
    next one."""
    tokenizer = isolated(MODEL_DIR)

    def refuse(*args: Any, **options: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with monkeypatch.context() as short_of_processes:
        short_of_processes.setattr(text, "PATIENCE_S", 0.2)
        short_of_processes.setattr(text, "PATIENCE", 0.0)
        short_of_processes.setattr(text, "spawn_connected", refuse)
        os.kill(tokenizer._short._child._process.pid, signal.SIGSTOP)
        with pytest.raises(InvalidRequestError, match="stuck"):
            tokenizer.encode("text")
        with pytest.raises(RequestFailedError, match="cannot be restarted"):
            tokenizer.encode("text")
    assert tokenizer.encode("text")


def end(tokenizer: IsolatedTokenizer) -> None:
    tokenizer._short._child._process.kill()
    tokenizer._short._child._process.wait()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_call_is_repeated_if_its_process_is_killed_or_stopped(number, isolated, tmp_path, monkeypatch) -> None:
    """Guards against valid requests that fail because somebody, or the system, ends the process or holds it up."""
    monkeypatch.setattr(text, "POLL_S", 0.02)
    tokenizer = isolated(MODEL_DIR)
    asks, spawned = text._Child.ask, []

    def ask(child: Any, call: bytes, cpu_s: float) -> Any:
        spawned.append(child)
        if len(spawned) < 3:
            os.kill(child._process.pid, number)
        return asks(child, call, cpu_s)

    monkeypatch.setattr(text._Child, "ask", ask)
    assert tokenizer.encode("hello") == load_tokenizer(MODEL_DIR).encode("hello")
    assert len(spawned) == 3


def test_a_template_is_compiled_in_the_text_process_alone(isolated, tmp_path) -> None:
    """Guards against constants of a template that the server computes at load: Jinja does, and they may be huge."""
    folder = model(tmp_path / "m", lambda content: None, "{{ (1, 2) * 10**9 }}")
    limit = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**31, limit[1]))
    try:
        tokenizer = isolated(folder)
        assert "_templates" not in vars(tokenizer._local.chat_template)
        with pytest.raises(InvalidRequestError):
            tokenizer.chat_template.render(USER)
        assert tokenizer.encode("hello")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)


def test_refused_forms_are_remembered(isolated, monkeypatch) -> None:
    """Guards against a hostile form that costs its time again with each request."""
    tokenizer = isolated(MODEL_DIR)
    form = StructuredOutputsParams(regex="(a{1000}){1000}")
    with pytest.raises(InvalidRequestError) as first:
        tokenizer.check_form(form, 4096, [2, 6])
    monkeypatch.setattr(tokenizer._forms, "get", None)
    with pytest.raises(InvalidRequestError) as second:
        tokenizer.check_form(form, 4096, [2, 6])
    assert (str(first.value), first.value.code) == (str(second.value), second.value.code)


def test_a_slow_form_holds_up_no_other(isolated, monkeypatch) -> None:
    """Guards against a form that waits for the end of another key's, which may take all of its 0.4 s."""
    tokenizer, began, end = isolated(MODEL_DIR), threading.Event(), threading.Event()

    def call(_worker, _function, args, *_, **__) -> None:
        if args[0]["regex"] == "slow":
            began.set()
            assert end.wait(20)

    monkeypatch.setattr(text.TextWorker, "call", call)
    slow = threading.Thread(target=tokenizer.check_form, args=(StructuredOutputsParams(regex="slow"), 4096, [2]))
    slow.start()
    assert began.wait(20)
    quick = threading.Thread(target=tokenizer.check_form, args=(StructuredOutputsParams(regex="a"), 4096, [2]))
    quick.start()
    quick.join(10)
    is_done = not quick.is_alive()
    end.set()
    slow.join()
    quick.join()
    assert is_done


def test_a_process_that_the_system_ended_is_replaced(isolated) -> None:
    """Guards against a request that is refused because the process was killed before it, for want of memory perhaps."""
    tokenizer = isolated(MODEL_DIR)
    end(tokenizer)
    assert tokenizer.encode("text") == load_tokenizer(MODEL_DIR).encode("text")


def test_a_call_that_is_under_way_when_the_server_ends(isolated) -> None:
    """Guards against a call that is blamed on its text, or answered with 500, because the server shuts down."""
    tokenizer, failures = isolated(MODEL_DIR), []

    def encode() -> None:
        try:
            tokenizer.encode("a")
        except EngineDeadError as error:
            failures.append(str(error))

    os.kill(tokenizer._short._child._process.pid, signal.SIGSTOP)  # so that the call lasts until then
    caller = threading.Thread(target=encode)
    caller.start()
    while not tokenizer._short._lock.locked():
        pass
    tokenizer.close()
    caller.join()
    encode()
    assert failures == ["the server is shutting down"] * 2


def test_changed_files_are_noticed(isolated, tmp_path, caplog) -> None:
    """Guards against a new process that makes other tokens than the one before it, and paths in answers."""
    folder = model(tmp_path / "m", lambda content: None)
    tokenizer = isolated(folder)
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + " ")
    end(tokenizer)
    with pytest.raises(RequestFailedError, match="cannot be restarted; the server's log says why"):
        tokenizer.encode("text")
    assert "have changed" in caplog.text


@pytest.mark.parametrize("load", [load_tokenizer, "isolated"], ids=["plain", "isolated"])
@pytest.mark.parametrize("what", ["normalizer", "decoder"])
def test_a_bomb_is_refused(load, what, isolated, tmp_path) -> None:
    """Guards against files whose normalizers or decoders make gigabytes of a letter: over 40 s and growing, once."""
    folder = model(
        tmp_path / "m", lambda content: growing(content, what, "normalizers" if what == "normalizer" else "decoders")
    )
    with pytest.raises(ModelLoadError, match=f"{what}: its replacements make a text up to 1e\\+08 times as long"):
        (isolated if load == "isolated" else load)(folder)


def test_loading_has_limits(isolated, tmp_path) -> None:
    """Guards against files that load for ever; the limit of time is tried in a process."""
    folder = model(tmp_path / "m", lambda content: None)
    (folder / "chat_template.jinja").write_text("(" * 6000 + ")" * 6000)
    assert isolated(folder)  # text, not an expression
    (folder / "chat_template.jinja").write_text("{{ " + "(" * 6000 + "1" + ")" * 6000 + " }}")
    with pytest.raises(ModelLoadError, match="chat_template 'default': cannot be compiled"):
        isolated(folder)
    script = "from penstock.client.text import limited\nwith limited(0.05, 2**30):\n    while True: pass"
    assert subprocess.run([sys.executable, "-c", script]).returncode == -signal.SIGPROF


def test_a_panic_is_an_error_of_one_line(tmp_path, capfd) -> None:
    """Guards against PanicException, which is no Exception, in a script that uses LLM."""
    with LLM(model=str(model(tmp_path / "m", backtracking)), max_model_len=128) as llm:
        with pytest.raises(InvalidRequestError, match="prompt: this text cannot be tokenised") as caught:
            llm.generate(BACKTRACKS, SamplingParams(max_tokens=1))
        assert "\n" not in str(caught.value)
        assert llm.generate("aab", SamplingParams(max_tokens=1))[0].finished


def test_the_server_goes_on(tmp_path) -> None:
    """Guards against a prompt that ends or holds up the server: finding 4, a plain-text 500 and a traceback."""
    folder = model(tmp_path / "m", backtracking, LOOPS)
    command = [sys.executable, "-m", "penstock", "serve", str(folder), "--port", "0", "--max-model-len", "256"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            url = next(word for word in server.stdout.readline().split() if word.startswith("http://"))
            attacks = [
                ("/v1/completions", {"prompt": BACKTRACKS}, "prompt"),
                ("/v1/completions", {"prompt": "hi", "bad_words": [BACKTRACKS]}, "prompt"),
                ("/v1/chat/completions", {"messages": USER}, "messages"),
                ("/tokenize", {"prompt": BACKTRACKS}, "prompt"),
            ]
            for route, body, param in attacks:
                answer = send(url + route, json=body)
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
                answer = send(url + "/v1/completions", json={"prompt": "hi", "max_tokens": 2})
                assert answer.status_code == 200
        finally:
            server.terminate()
            log = server.stderr.read()
    assert "Traceback" not in log
    assert "panicked" not in log


def test_async_llm_ends_its_processes(tmp_path) -> None:
    """Guards against text processes that outlive their client, or a broken tokenizer that leaves an engine behind."""

    async def run() -> list[subprocess.Popen[bytes]]:
        async with AsyncLLM(model="demo", max_model_len=128) as llm:
            async for output in llm.generate("Once", SamplingParams(max_tokens=2)):
                assert output
            return [llm.tokenizer._short._child._process]

    assert all(process.poll() is not None for process in asyncio.run(run()))
    with pytest.raises(ModelLoadError, match="replacements"):
        AsyncLLM(model=str(model(tmp_path / "m", growing)))
