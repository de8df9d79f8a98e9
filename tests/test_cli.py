"""The command line as a user meets it: real processes, their output, their exit codes."""

import contextlib
import io
import json
import math
import os
import pty
import select
import signal
import subprocess
import sys
import time
import urllib.request
from argparse import ArgumentParser
from dataclasses import fields
from pathlib import Path

import pytest

from penstock.cli import options
from penstock.cli.main import main
from penstock.cli.options import parse_size
from penstock.config import MAX_CONTEXT, EngineConfig
from penstock.interface.sampling_params import SamplingParams
from penstock.kernels.cpu.library import load_library
from tests.hf_models import make_llama
from tests.server.harness import WAIT_S, free_port

needs_library = pytest.mark.skipif(load_library() is None, reason="no native library was built")


def penstock(*words: str, stdin: str | None = None) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "penstock", *words]
    return subprocess.run(command, capture_output=True, text=True, input=stdin)


def called(*words: str) -> subprocess.CompletedProcess:
    """The same in this process, for lines that are refused: an exception would not be caught."""
    handler, stdin, streams = signal.getsignal(signal.SIGINT), sys.stdin, (io.StringIO(), io.StringIO())
    sys.stdin = io.TextIOWrapper(io.BytesIO())  # empty, as a process of a test has it
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        try:
            code = main(list(words))
        except SystemExit as end:
            code = end.code
        finally:
            signal.signal(signal.SIGINT, handler)
            sys.stdin = stdin
    return subprocess.CompletedProcess(words, code, *(stream.getvalue() for stream in streams))


def test_version_and_help_import_no_torch():
    script = (
        "import sys\nsys.modules['torch'] = None\nfrom penstock.cli.main import main\n"
        "for words in (['--version'], ['--help'], ['generate', '--help'], ['serve', '--help']):\n"
        "    try:\n        main(words)\n    except SystemExit as end:\n        assert not end.code\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "examples:" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "-p", "x", "--max-tokens", "0"], "--max-tokens: 0 is not allowed; it must be an integer from 1"),
        (["generate", "-p", "x", "--temperature", "nan"], "--temperature: nan is not allowed"),
        (["generate", "-p", "x", "--block-size", "17"], "--block-size: 17 is not allowed; it must be a multiple of 16"),
        (["generate", "-p", "x", "--dtype", "fp8"], "--dtype: 'fp8' is not allowed; it must be one of auto"),
        (["generate", "-p", "x", "--quantization", "int5"], "--quantization: 'int5' is not allowed; it must be one of"),
        (["generate", "-p", "x", "--quantization-group-size", "64"], "--quantization-group-size: 64 is not allowed"),
        (
            ["generate", "-p", "x", "--kernels", "triton"],
            "--kernels: 'triton' cannot be used: this machine has no NVIDIA driver",
        ),
        (["generate", "-p", "x", "--max-model-len", "2k"], "--max-model-len: 2000 is not allowed"),
        (["generate", "-p", "x", "--kv-cache-memory-bytes", "lots"], "'lots' is not a number"),
        (["generate", "-p", ""], "prompt: '' is not allowed"),
        (["generate"], "give a prompt with -p TEXT, --prompts FILE (which must hold one) or standard input"),
        (["generate", "--prompts", "/nowhere.jsonl"], "--prompts: cannot read '/nowhere.jsonl'"),
        (["generate", "/nowhere", "-p", "x"], "model: there is no directory '/nowhere'"),
        (["generate", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["serve", "--max-model-length", "9"], "--max-model-length: did you mean --max-model-len?"),
        (["serve", "--gpu-memory-utilization=0.9"], "use --memory, which limits the size"),
        (["serve", "-tp", "2"], "-tp: it is --tensor-parallel-size here"),
        (["serve", "--max-model", "9"], "--max-model: did you mean --max-model-len?"),
        (["serve", "--port", "99999"], "--port: 99999 is not allowed"),
        (["serve", "--models", "{}"], "--models: {} is not allowed; it must be an object with at least one name"),
        (["serve", "x", "--models", '{"a": "demo"}'], "model: x is not among models"),
        (["serve", "--models", '{"a": {"model": "demo", "idle_s": -1}}'], "models.a.idle_s: -1.0 is not allowed"),
        (["generate", "--model", "/nowhere", "-p", "x"], "model: there is no directory '/nowhere'"),
        (["generate", "demo", "--model", "/nowhere", "-p", "x"], "model: there is no directory '/nowhere'"),
        (["generate", "--model", "/nowhere", "/else", "-p", "x"], "--model: /nowhere and /else are two models"),
        (["bench", "offline", "--json", "/nowhere/x.json"], "--json: cannot write '/nowhere/x.json'"),
        (["generate", "-p", "x", "--logprobs", "2"], "--logprobs: log-probabilities are shown with --json only"),
        (["generate", "-p", "x", "--logit-bias", "5:1"], "'5:1' is not ID=BIAS"),
        (["serve", "--drain-timeout", "-1"], "--drain-timeout: -1.0 is not allowed"),
        (["generate", "-p", "x", "--block-size", "16.7"], "'16.7' is not a whole number"),
        (["generate", "-p", "x", "--kv-cache-memory-bytes", "900T"], "at most the free memory"),
        (
            ["bench", "offline", "--input-len", "4k"],
            "--input-len: prefix_len + input_len + output_len exceed max_model_len = 1024",
        ),
        (["tell"], "'tell' is not a command; there are run, chat, serve"),
        (["serv"], "'serv' is not a command (is serve meant?)"),
        (["serv", "--port", "1"], "'serv' is not a command (is serve meant?)"),
        (["model.gguf"], "'model.gguf' is a model; a command comes before it: penstock run model.gguf, or"),
        (["-m", "owner/model"], "'owner/model' is a model; a command comes before it"),
        (["serve", "-hf", "owner/model"], "-hf: the model is an argument without a flag"),
        (["generate", "-pp", "2", "-p", "x"], "-pp: it is --pipeline-parallel-size here"),
        (["serve", "--max-log-len", "9"], "--max-log-len: prompts are not logged"),
        (["generate", "-p", "x", "--json-schema-file", "/dev/zero"], "it has more than 8 MiB"),
        (["simulate", "--trace", "/dev/zero"], "--trace: '/dev/zero' is not a file"),
        (["simulate", "--costs", "/dev/zero"], "--costs: '/dev/zero' is not a file"),
        (["simulate", "--dataset-name", "sharegpt", "--dataset-path", "/dev/zero"], "/dev/zero is not a file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, message):
    done = called(*words)
    assert done.returncode == 2
    assert done.stdout == ""
    last = done.stderr.strip().splitlines()[-1]
    assert message in last
    assert "Traceback" not in done.stderr


def test_generate_streams_text():
    done = penstock("generate", "-p", "Once upon a time", "-p", "One day", "--max-tokens", "12", "--temperature", "0")
    assert done.returncode == 0
    first, second = done.stdout.strip().split("\n\n")
    assert first.startswith("Once upon a time")
    assert second.startswith("One day")
    assert "tokens/s" in done.stderr


def test_generate_json_and_prompt_files(tmp_path: Path):
    """Standard output holds the JSON and nothing else, one object a prompt, in the order given."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('"Once upon a time"\n\n{"prompt": "One day"}\n{"prompt_token_ids": [1, 445, 426]}\n')
    done = penstock("generate", "demo", "--prompts", str(file), "--json", "--max-tokens", "6", "--seed", "3")
    assert done.returncode == 0
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [item["prompt"] for item in found] == ["Once upon a time", "One day", None]
    for item in found:
        assert set(item) >= {"prompt_token_ids", "token_ids", "text", "finish_reason", "num_cached_tokens"}
        assert item["seed"] == 3
    again = penstock("generate", "demo", "--prompts", str(file), "--json", "--max-tokens", "6", "--seed", "3")
    assert again.stdout == done.stdout


def test_a_bad_line_of_a_prompt_file_is_named(tmp_path: Path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('"fine"\n{broken\n')
    done = penstock("generate", "--prompts", str(file))
    assert done.returncode == 2
    assert "line 2 is not JSON" in done.stderr


def test_a_reader_that_goes_away_is_no_traceback():
    script = f"{sys.executable} -m penstock generate -p Once --max-tokens 100 --ignore-eos | head -c 1"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "is_unbuffered"),
    [(["--version"], False), (["--version"], True), (["serve", "--help"], False), (["table", "demo"], True)],
)
def test_output_that_nobody_takes_is_no_traceback(words, is_unbuffered):
    """Guards against Python's own report, and its exit code 120, for what is still in the buffer at the exit."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1" if is_unbuffered else ""}
    command = [sys.executable, "-m", "penstock", *words]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=-1, text=True, env=environment)
    allowed = [(1, "penstock: No space left on device\n")]
    if "--help" in words:
        allowed.append((0, ""))  # argparse ignores the error of a write
    assert (done.returncode, done.stderr) in allowed
    ours, theirs = os.pipe()
    os.close(ours)
    with open(theirs, "w") as broken:
        done = subprocess.run(command, stdout=broken, stderr=-1, text=True, env=environment)
    assert done.stderr == ""


def test_chat_keeps_the_conversation():
    """Guards against commands that are sent to the model, and a full conversation that can only be forgotten."""
    lines = ["/retry", "What is 2 + 3?", "/retry", "/help", "/what", "/reset", "Hello", "What is 2 + 3?", "/system"]
    lines += ["Hello", *["What is 2 + 3? " * 12] * 14, "x" * 9000, "//x", "/exit", "Hello"]
    done = penstock("chat", "--temperature", "0", "--max-tokens", "20", stdin="\n".join(lines))
    assert done.returncode == 0
    first, again, hello, _, hello_again, *others = done.stdout.splitlines()
    assert (first, hello) == (again, hello_again)  # after /reset and /system the same question gets the same answer
    assert len(others) == 14 + 1
    for text in ("no message to answer yet", "there is no command /what", "/retry    ", "are left out", "not sent:"):
        assert text in done.stderr


def read_terminal(terminal: int, until: bytes | None) -> bytes:
    """Return what a terminal shows up to a text; None: until nobody has it open any more."""
    seen = b""
    while until is None or until not in seen:
        assert select.select([terminal], [], [], WAIT_S)[0], seen
        try:
            seen += os.read(terminal, 1)
        except OSError:  # the end of a terminal
            assert until is None, seen
            break
    return seen


def wait_until_asleep(child: subprocess.Popen) -> None:
    """Wait until a process waits for keys: an interrupt just before would be noticed with the next key only."""
    deadline = time.monotonic() + WAIT_S
    while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_chat_refuses_a_line_without_end():
    """Guards against reading a device (`penstock chat </dev/zero`) until memory is full."""
    with open("/dev/zero") as zeros:
        done = subprocess.run([sys.executable, "-m", "penstock", "chat"], stdin=zeros, capture_output=True, text=True)
    assert done.returncode == 2
    assert "a line has more than" in done.stderr
    assert "Traceback" not in done.stderr


def test_chat_in_a_terminal_edits_lines_and_remembers_them(tmp_path: Path):
    """Guards against Ctrl-C at an empty prompt that ends the program, arrows that print codes, and a history lost."""
    history = tmp_path / "penstock" / "chat_history"
    history.parent.mkdir()
    history.write_text("Helo\n")
    terminal, inside = pty.openpty()
    words = ["setsid", "--ctty", sys.executable, "-m", "penstock", "chat", "--temperature", "0", "--max-tokens", "20"]
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path), "TERM": "xterm"}
    child = subprocess.Popen(words, stdin=inside, stdout=inside, stderr=inside, env=environment)
    os.close(inside)
    up_left_left = b"\x1b[A\x1b[D\x1b[D"
    seen = b""
    try:
        for keys, *awaited in ((b"\x03", b"> "), (up_left_left + b"l\r", b"> "), (b"\x04", b"Hello!", b"\n> ")):
            for text in awaited:
                seen += read_terminal(terminal, until=text)
            wait_until_asleep(child)
            os.write(terminal, keys)
        seen += read_terminal(terminal, until=None)
        assert child.wait(WAIT_S) == 0
    finally:
        child.kill()
        child.wait()
        os.close(terminal)
    assert b"Ctrl-D or /bye leaves" in seen
    assert history.read_text() == "Helo\nHello\n"


@pytest.mark.parametrize("kernels", ["reference", pytest.param("cpu", marks=needs_library)])
def test_bench_offline_needs_only_a_config(tmp_path: Path, kernels: str):
    _, directory = make_llama(tmp_path)
    (directory / "model.safetensors").unlink()
    words = ["--load-format", "dummy", "--num-prompts", "2", "--input-len", "8", "--output-len", "4", "--json", "-"]
    done = penstock("bench", "offline", str(directory), *words, "--kernels", kernels)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name in ("bandwidth_fraction", "compute_fraction", "python_overhead_fraction"):
        for part in (found, found["prefill"], found["decode"]):
            if kernels == "reference":  # it has no limits of its own
                assert part[name] is None
                assert found["reason"][name]
            else:
                assert 0 < part[name] < 1
    assert found["output_tokens_per_s"] > 0
    assert found["prefill"]["input_tokens"] == 16
    assert found["decode"]["output_tokens"] == 6
    assert found["peak_rss_bytes"] > 10**7
    assert {"p50", "p99"} == set(found["ttft_ms"]) == set(found["itl_ms"])


@pytest.fixture
def server():
    command = [sys.executable, "-m", "penstock", "serve", "--port", "0", "--max-num-seqs", "4"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        line = process.stdout.readline()
        yield process, next(word for word in line.split() if word.startswith("http://"))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def get(url: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def is_healthy(url: str) -> bool:
    with contextlib.suppress(urllib.error.URLError):  # it does not listen yet
        return get(f"{url}/health")[0] == 200
    return False


def wait_healthy(url: str, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_healthy(url):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_closed_standard_streams():
    """Guards against a traceback for `>&-`, and against a server started with closed streams, as some service managers
    do: the sockets to its processes got their descriptors, and its tokenizer could not be started; and in its engine,
    what was written to standard error went into the flight record."""
    command = [sys.executable, "-m", "penstock"]
    words = ["generate", "-p", "x", "--max-tokens", "2", "--json"]
    done = subprocess.run(["sh", "-c", 'exec "$@" <&- >&-', "sh", *command, *words], stderr=-1, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    port = free_port()
    words = ["serve", "--port", str(port), "--max-num-seqs", "4"]
    with subprocess.Popen(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command, *words]) as process:
        try:
            wait_healthy(f"http://127.0.0.1:{port}", process)
            engine = json.loads(get(f"http://127.0.0.1:{port}/status")[1])["engine"]["pid"]
            assert [os.readlink(f"/proc/{engine}/fd/{number}") for number in range(3)] == ["/dev/null"] * 3
            process.terminate()
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()


def test_serve_survives_its_engine_and_drains(server):
    """kill -9 of the engine: /health says 503, then 200 again; SIGTERM: exit code 0, and no process is left."""
    process, url = server
    wait_healthy(url, process)
    status = json.loads(get(f"{url}/status")[1])
    os.kill(status["engine"]["pid"], signal.SIGKILL)
    while get(f"{url}/health")[0] != 503:  # the test's own time limit ends this
        if json.loads(get(f"{url}/status")[1])["engine"]["restarts"]:
            break  # the new engine was ready before anybody looked
    wait_healthy(url, process)
    after = json.loads(get(f"{url}/status")[1])["engine"]
    assert after["restarts"] == 1
    assert after["pid"] != status["engine"]["pid"]
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    assert "libtorch" not in maps
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_S) == 0
    assert not Path(f"/proc/{after['pid']}").exists()


def wakings(pids: list[int]) -> int:
    """How often the threads of these processes have gone to sleep so far, and were woken again."""
    lines: list[str] = []
    for task in [task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()]:
        with contextlib.suppress(OSError):  # it has just ended
            lines += (task / "status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))


def test_an_idle_server_sleeps(server):
    """Guards against timers that add up: an idle server and its engine woke 25 times a second, for 0.6 % of a core."""
    process, url = server
    wait_healthy(url, process)
    pids = [process.pid, json.loads(get(f"{url}/status")[1])["engine"]["pid"]]
    least = math.inf
    for _ in range(3):  # what the start has left to do is over then
        before, began = wakings(pids), time.monotonic()
        time.sleep(3)
        least = min(least, (wakings(pids) - before) / (time.monotonic() - began))
    assert least < 10


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("4k", 4000),
        ("4K", 4096),
        ("2GiB", 2**31),
        ("1.5GB", 1_500_000_000),
        ("2g", 2 * 10**9),
        ("7", 7),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.covers("F3", "F4")
def test_a_block_for_each_request_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a help text that names a value which its flag refuses: `--block-size max-model-len`."""
    words = ["generate", "demo", "--prompt", "Hi", "--max-tokens", "1", "--max-model-len", "40", "--threads", "1"]
    assert main([*words, "--block-size", "max-model-len"]) == 0
    assert "block_size = 48: max_model_len, one block per request" in capsys.readouterr().err
    assert EngineConfig.from_options(block_size="max-model-len") == EngineConfig.from_options(block_size=MAX_CONTEXT)
    with pytest.raises(SystemExit):
        main([*words, "--block-size", "max"])
    assert "--block-size: 'max' is not a number" in capsys.readouterr().err


def test_every_sampling_field_is_a_flag():
    """Guards against a field that only HTTP and Python know, beside what the client sets and how text is given."""
    without = {"detokenize", "output_kind", "bad_words_token_ids", "dry_sequence_breaker_ids"}
    without |= {"guided_decoding", "pooling", "thinking_token_ids"}
    flags = {item.name for item in options.sampling_fields()}
    assert flags == {field.name for field in fields(SamplingParams)} - without
    parser = ArgumentParser()
    options.add_generation_options(parser)
    words = "--use-beam-search --early-stopping never --forced-eos-token-id 5 --exponential-decay-length-penalty 3 1.2"
    words += " --bad-words-ids [[5,6]] --sequence-bias [[[5],2.0]] --no-skip-special-tokens --early-stopping true"
    found = vars(parser.parse_args(words.split()))
    assert found["early_stopping"] is True
    assert found["bad_words_ids"] == [[5, 6]]
    assert found["exponential_decay_length_penalty"] == [3.0, 1.2]


def test_quantization_file_names_one_gguf_file_of_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The option, wherever it stands, chooses the file; without it, both are listed."""
    for name in ("model-Q4_0.gguf", "model-Q8_0.gguf"):
        (tmp_path / name).write_bytes(b"no GGUF file")
    assert main(["generate", str(tmp_path), "-p", "x"]) == 2
    assert "model-Q4_0.gguf, model-Q8_0.gguf" in capsys.readouterr().err
    assert main(["generate", "--quantization-file", "Q8_0", str(tmp_path), "-p", "x"]) == 2
    error = capsys.readouterr().err
    assert "model-Q8_0.gguf" in error
    assert "Q4_0" not in error


INTERRUPTED = """
import signal, sys
from penstock.__main__ import main

class Finder:
    def find_spec(self, name, path, target=None):
        if name == "penstock.cli.main":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder())
main()
"""


def test_ctrl_c_while_python_imports_leaves_no_traceback() -> None:
    """Guards against a traceback of whatever is being imported when a user changes their mind at once."""
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")
