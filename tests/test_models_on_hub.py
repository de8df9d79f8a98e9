"""From a name to a conversation: pull, list, show, run and rm, against a hub on this machine."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from penstock.weights.downloads import BROKEN
from penstock.weights.hub import MODEL_DIR, choose_gguf, find_local, full_name, gguf_labels, short_names
from tests.fake_hub import FakeHub, fake_hub
from tests.test_cli import called
from tests.weights.gguf_files import write_gguf

QUESTION, ANSWER = "What is 3 + 4?", "3 + 4 = 7."
GIB = 2**30


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo model as safetensors with files that must not be fetched, and as GGUF files."""
    plain, coded, large = (tmp_path_factory.mktemp(name) for name in ("plain", "coded", "large"))
    for file in MODEL_DIR.iterdir():
        shutil.copy(file, plain)
    (plain / "modeling.py").write_text("raise SystemExit('code of a checkpoint was run')")
    (plain / "pytorch_model.bin").write_bytes(b"x" * 100)
    backend = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    template = json.loads((MODEL_DIR / "tokenizer_config.json").read_text())["chat_template"]
    for kind in ("Q8_0", "Q4_0", "F32"):
        model = AutoModelForCausalLM.from_pretrained(MODEL_DIR)
        model.config.eos_token_id = model.config.eos_token_id[-1]  # a GGUF file has one, here that of an answer
        folder = large if kind == "F32" else coded
        write_gguf(model, folder / f"demo-{kind}.gguf", kind, tokenizer=backend, template=template)
    return {"tiny/demo": plain, "tiny/demo-GGUF": coded, "tiny/large": large}


@pytest.fixture
def hub(repositories: dict[str, Path]) -> Iterator[FakeHub]:
    with fake_hub(repositories) as found:
        yield found


class Machine:
    """A machine with a cache of its own, whose hub is the one of the test."""

    def __init__(self, hub: FakeHub, home: Path) -> None:
        self.home = home
        variables = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        self.variables = variables | {"HF_ENDPOINT": hub.url, "HF_HOME": str(home)}

    def __call__(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "penstock", *words]
        environment = self.variables | variables
        return subprocess.run(command, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL)

    @property
    def partial(self) -> list[Path]:
        return list(self.home.rglob(f"*{BROKEN}"))


@pytest.fixture
def machine(hub: FakeHub, tmp_path: Path) -> Machine:
    return Machine(hub, tmp_path)


def refused(done: subprocess.CompletedProcess[str], *texts: str) -> None:
    """Check for one line that says what is wrong, and exit code 2."""
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2, done.stderr
    assert lines[-1].startswith("penstock: ")
    assert "Traceback" not in done.stderr
    for text in texts:
        assert text in lines[-1]


def test_from_a_name_to_an_answer_and_back(machine: Machine, hub: FakeHub) -> None:
    """Guards against code or pickles that are fetched, a model that is fetched twice or asked for online although it is
    here, and a size or format on the list that is not the cache's."""
    done = machine("run", "tiny/demo", QUESTION, "--temperature", "0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ANSWER
    assert {name for name, _ in hub.served} == {path.name for path in MODEL_DIR.glob("*.json")} | {"model.safetensors"}
    hub.served.clear()
    offline = machine(
        "run", "tiny/demo", QUESTION, "--temperature", "0", HF_HUB_OFFLINE="1", HF_ENDPOINT="http://nowhere"
    )
    assert offline.stdout.strip() == ANSWER
    (row,) = json.loads(machine("list", "--json").stdout)
    assert (row["name"], row["format"], row["fits"]) == ("tiny/demo", "safetensors, bfloat16", True)
    assert row["precision"] == "bfloat16"
    names = ["model.safetensors", *(path.name for path in MODEL_DIR.glob("*.json"))]
    assert row["size"] == sum((MODEL_DIR / name).stat().st_size for name in names)
    shown = machine("show", "tiny/demo")
    for text in ("LlamaForCausalLM", "context       1024", "has a chat template", "int4"):
        assert text in shown.stdout
    assert hub.served == []
    gone = machine("rm", "tiny/demo")
    assert gone.returncode == 0, gone.stderr
    assert "5.5 MiB are free again" in gone.stdout
    assert "no models yet" in machine("list").stdout
    refused(machine("rm", "tiny/demo"), "the cache has no 'tiny/demo'")


def test_a_gguf_file_is_chosen_or_named(machine: Machine, hub: FakeHub) -> None:
    """Guards against all files being fetched, and a name on the list that no command takes."""
    done = machine("run", "tiny/demo-GGUF", QUESTION, "--temperature", "0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ANSWER
    assert [name for name, _ in hub.served] == ["demo-Q8_0.gguf"]  # the largest: there is no Q4_K_M
    assert machine("pull", "tiny/demo-GGUF:Q4_0").returncode == 0
    table = machine("list").stdout
    assert "tiny/demo-GGUF:Q4_0 " in table
    assert "GGUF, Q8_0" in table
    freed = machine("rm", "tiny/demo-GGUF:Q8_0")
    assert freed.returncode == 0, freed.stderr
    (row,) = json.loads(machine("list", "--json").stdout)
    assert row["name"] == "tiny/demo-GGUF:Q4_0"
    hub.served.clear()
    again = machine("run", row["name"], QUESTION, "--temperature", "0", HF_HUB_OFFLINE="1")
    assert again.returncode == 0, again.stderr
    assert hub.served == []


def test_a_broken_connection_goes_on(machine: Machine, hub: FakeHub) -> None:
    """Guards against a download that begins again from its first byte. huggingface_hub keeps pieces of 10 MiB."""
    hub.break_after, hub.breaks = 10_800_000, 1
    done = machine("pull", "tiny/large")
    assert done.returncode == 0, done.stderr
    assert [first for name, first in hub.served] == [0, 10 * 2**20]


def test_a_download_that_was_given_up_goes_on(machine: Machine, hub: FakeHub, repositories: dict[str, Path]) -> None:
    """Guards against a second `pull` that begins again, or that keeps what was damaged meanwhile."""
    whole = (repositories["tiny/demo"] / "model.safetensors").read_bytes()
    hub.break_after, hub.breaks = 0, 100
    first = machine("pull", "tiny/demo")
    refused(first, "the hub download failed")
    (partial,) = machine.partial
    assert partial.stat().st_size == 0
    partial.write_bytes(whole[:3_000_000])
    hub.breaks = 0
    hub.served.clear()
    assert machine("pull", "tiny/demo").returncode == 0
    assert ("model.safetensors", 3_000_000) in hub.served
    assert machine.partial == []
    (blob,) = machine.home.rglob("model.safetensors")
    assert blob.read_bytes() == whole
    assert machine("rm", "tiny/demo").returncode == 0
    hub.breaks = 100
    machine("pull", "tiny/demo")
    (partial,) = machine.partial
    partial.write_bytes(b"?" * 3_000_000)
    hub.breaks = 0
    refused(machine("pull", "tiny/demo"), "model.safetensors arrived damaged")
    assert machine("pull", "tiny/demo").returncode == 0


def test_what_the_hub_refuses_is_one_line(
    machine: Machine, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a traceback, or advice that does not help."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    refused(called("pull", "tiny/nothing"), "has no model tiny/nothing", "if it is private, set HF_TOKEN")
    refused(called("run", "no such name", "x"), "there is no directory 'no such name'")
    refused(called("run", "qwen3:4bb", "x"), "is qwen3:4b meant?")
    hub.token = "right"
    refused(called("pull", "tiny/demo"), "has no model tiny/demo")
    monkeypatch.setenv("HF_TOKEN", "wrong")
    refused(called("pull", "tiny/demo"), "refuses the token: check HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", "right")
    hub.gated = ("tiny/demo",)
    refused(called("pull", "tiny/demo"), "is gated: accept its conditions", "/tiny/demo, and set HF_TOKEN")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    refused(called("pull", "tiny/demo"), "the hub download failed")
    refused(called("run", "tiny/demo", "x"), "the hub download failed")
    assert machine("pull", "tiny/demo-GGUF:q4_0", HF_TOKEN="right").returncode == 0
    refused(machine("pull", "tiny/demo-GGUF:Q2_K", HF_TOKEN="right"), "no GGUF file", "Q2_K")
    refused(machine("pull", "tiny/demo", HF_HUB_OFFLINE="1"), "HF_HUB_OFFLINE is set")
    refused(machine("run", "tiny/demo", "x", HF_HUB_OFFLINE="1"), "HF_HUB_OFFLINE forbids fetching")


def test_the_gguf_file_for_a_machine() -> None:
    """Guards against a file that does not fit, one in a coding that is not read, and a label that names two."""
    sizes = {"m-BF16.gguf": 16 * GIB, "m-Q8_0.gguf": 8 * GIB, "m-Q4_K_M.gguf": 5 * GIB, "m-IQ2_XS.gguf": 2 * GIB}
    assert choose_gguf(sizes, 64 * GIB) == "Q4_K_M"
    assert choose_gguf(sizes, 4 * GIB) == "Q4_K_M"  # none fits: the smallest that can be read
    del sizes["m-Q4_K_M.gguf"]
    sizes["m-Q3_K_M.gguf"] = 4 * GIB
    assert choose_gguf(sizes, 64 * GIB) == "Q8_0"
    assert choose_gguf(sizes, 6 * GIB) == "Q3_K_M"
    assert choose_gguf({"m-BF16.gguf": GIB, "m-F32.gguf": 2 * GIB}, 64 * GIB) == "F32"
    names = ["a-Q8_0-00001-of-00002.gguf", "b-Q4_0.gguf", "c-Q4_0.gguf", "plain.gguf"]
    assert list(gguf_labels(names).values()) == ["Q8_0", "b-Q4_0", "c-Q4_0", "plain"]


def test_short_names() -> None:
    """Guards against a short name that is a path, or that names no repository."""
    for short, name in short_names().items():
        assert short == short.lower()
        assert "/" not in short
        assert name.count("/") == 1
        assert ":" not in name
        assert full_name(short.upper()) == name
        assert find_local(short) is None
