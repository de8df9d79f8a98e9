"""`penstock convert`: what it writes is the model, and whatever stops it, nobody takes the rest for one."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.config import EngineConfig
from penstock.errors import InvalidRequestError, ModelLoadError
from penstock.weights.safetensors import PACKED
from penstock_lab.convert import pack as converting
from penstock_lab.convert.pack import convert_model
from penstock_lab.convert.rewrite import UNFINISHED, Destination
from tests.hf_models import make_llama
from tests.kernels import packed
from tests.test_cli import called, penstock

pytestmark = pytest.mark.skipif(not packed.levels(), reason="no native library")
SLOW = """
import sys, time
from penstock_lab.convert import pack
from penstock.cli.main import main
fill = pack.fill_layer
def slow(*args):
    fill(*args)
    time.sleep(600)  # until the signal
pack.fill_layer = slow
sys.exit(main(sys.argv[1:]))
"""


FULL = """
import sys
from penstock.cli.main import main
from penstock.kernels.cpu import host
host.free_memory_bytes = lambda: 1000
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("source"))[1]


def convert(source: Path, destination: Path, **options: Any) -> int:
    free_memory = options.pop("free_memory", None)
    return convert_model(EngineConfig.from_options(model=str(source), **options), destination, free_memory=free_memory)


def names(directory: Path) -> set[str]:
    return {file.name for file in directory.iterdir()}


def test_the_command_writes_a_model(tmp_path: Path) -> None:
    """Guards against a command that converts something else than it was asked to, or says nothing."""
    target = tmp_path / "packed"
    done = penstock("convert", "demo", str(target), "--quantization", "int4", "--quantization-group-size", "32")
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    size = (target / PACKED).stat().st_size / 2**20
    assert f"{target}: {size:,.1f} MiB of weights" in done.stderr
    words = ["-p", "Once upon a time", "--max-tokens", "8", "--temperature", "0", "--json"]
    asked = ["--quantization", "int4", "--quantization-group-size", "32", "--dtype", "bfloat16"]
    found, expected = penstock("generate", str(target), *words), penstock("generate", "demo", *words, *asked)
    assert found.returncode == 0, found.stderr
    assert found.stdout == expected.stdout
    alone = penstock("generate", str(target), *words, "--quantization-group-size", "32")
    assert alone.stdout == expected.stdout


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_a_packed_model_answers_as_its_checkpoint_does(quantization: str | None, source: Path, tmp_path: Path) -> None:
    """Guards against packed weights in another place or type than those of the same scheme made while loading."""
    options = {"dtype": "bfloat16", "quantization": quantization}
    convert(source, tmp_path / "packed", **options)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=2)
    answers = []
    for model, chosen in ((source, options), (tmp_path / "packed", {})):
        with LLM(model=str(model), threads=1, **chosen) as llm:
            output = llm.generate([{"prompt_token_ids": [5, 9, 77, 140, 3]}], params)[0]
        answers.append((output.prompt_logprobs, output.outputs[0].token_ids, output.outputs[0].logprobs))
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_leaves_nothing_and_what_a_kill_leaves_is_no_obstacle(
    number: int, code: int, source: Path, tmp_path: Path
) -> None:
    """Guards against gigabytes of half a model after Ctrl-C, and a second run that refuses them."""
    target = tmp_path / "packed"
    for signal_number, expected in ((number, code), (signal.SIGKILL, -signal.SIGKILL)):
        process = subprocess.Popen(
            [sys.executable, "-c", SLOW, "convert", str(source), str(target)], stderr=subprocess.PIPE, text=True
        )
        while not (target / (PACKED + UNFINISHED)).exists():
            assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.02)
        process.send_signal(signal_number)
        _, said = process.communicate()
        assert process.returncode == expected, said
        assert "Traceback" not in said
        assert target.exists() == (signal_number == signal.SIGKILL)
    assert names(target) == {PACKED + UNFINISHED}
    (target / f"tokenizer.json{UNFINISHED}").write_text("of another model")
    convert(source, target)
    assert not any(name.endswith(UNFINISHED) for name in names(target))
    assert {PACKED, "config.json"} <= names(target)


def test_a_destination_with_something_in_it_is_left_alone(source: Path, tmp_path: Path) -> None:
    """Guards against overwriting somebody's files; an empty directory is fine, and stays where a conversion fails."""
    target = tmp_path / "target"
    target.mkdir()
    (target / "mine").write_text("mine")
    with pytest.raises(InvalidRequestError, match="not empty"):
        convert(source, target)
    assert names(target) == {"mine"}
    (target / "mine").unlink()
    with pytest.raises(ModelLoadError), Destination(target) as directory, directory.file("a"):
        raise OSError("full")
    assert names(target) == set()
    convert(source, target)
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequestError, match="cannot be made"):
        convert(source, tmp_path / "file")


def test_only_what_was_written_is_removed(tmp_path: Path) -> None:
    """Guards against files of somebody else that came in the meantime, and go with ours."""
    target = tmp_path / "target"

    def interrupted() -> None:
        with Destination(target) as directory:
            with directory.file("ours") as stream:
                stream.write(b"ours")
            (target / "theirs").write_text("theirs")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert names(target) == {"theirs"}


def test_an_interrupt_just_as_a_file_is_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a file that is on the disk before the list of what to remove knows it."""
    target = tmp_path / "target"
    really_open = Path.open

    def interrupted(path: Path, mode: str) -> None:
        really_open(path, mode).close()
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "open", interrupted)
    with pytest.raises(KeyboardInterrupt), Destination(target) as directory, directory.file("a"):
        pass
    assert not target.exists()


def test_a_file_of_somebody_else_under_a_temporary_name_is_kept(tmp_path: Path) -> None:
    """Guards against removing, after a failure, the file that caused it."""
    theirs = tmp_path / "target" / f"a{UNFINISHED}"

    def hindered() -> None:
        with Destination(theirs.parent) as directory:
            theirs.write_text("theirs")
            directory.file("a").__enter__()

    with pytest.raises(ModelLoadError):
        hindered()
    assert theirs.read_text() == "theirs"


def test_a_directory_is_filled_by_one_at_a_time(tmp_path: Path) -> None:
    """Guards against a second conversion that takes the files of a running one for leftovers."""
    with Destination(tmp_path / "target") as directory, directory.file("a"):
        second = Destination(tmp_path / "target")
        with pytest.raises(InvalidRequestError, match="another process"):
            second.__enter__()
    assert names(tmp_path / "target") == {"a"}


def test_the_directory_is_no_model_before_everything_is_there(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against config.json before the weights: a loader would take what is there for a model."""
    full, target, order = tmp_path / "full", tmp_path / "target", []
    shutil.copytree(source, full)
    for name in ("tokenizer.json", "generation_config.json"):
        (full / name).write_text("{}")
    rename = Path.rename

    def noting(self: Path, new: Path) -> Path:
        assert all((target / f"{name}{UNFINISHED}").exists() or name in order for name in (PACKED, "tokenizer.json"))
        order.append(Path(new).name)
        return rename(self, new)

    monkeypatch.setattr(Path, "rename", noting)
    convert(full, target)
    assert order[0] == PACKED
    assert set(order[1:-1]) == {"generation_config.json", "tokenizer.json"}
    assert order[-1] == "config.json"


@pytest.mark.parametrize("place", ["fill_layer", "copy"])
def test_an_interrupted_conversion_leaves_no_model(
    place: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against half a model under a whole one's name, whenever the interrupt comes."""
    target, seen = tmp_path / "target", []

    def interrupt(*_: Any) -> None:
        seen.append(names(target))
        raise KeyboardInterrupt

    monkeypatch.setattr(Destination if place == "copy" else converting, place, interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert(source, target)
    assert seen == [{PACKED + UNFINISHED}]
    assert not target.exists()


def test_a_checkpoint_that_cannot_be_packed_leaves_nothing(source: Path, tmp_path: Path) -> None:
    """Guards against an empty directory after an error, which would look like a result."""
    shutil.copytree(source, tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelLoadError, match="cut short"):
        convert(tmp_path / "broken", tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_what_does_not_fit_is_refused_before_it_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against an hour of packing that ends with a full disk or a killed process."""
    target = tmp_path / "target"
    with pytest.raises(ModelLoadError, match=r"largest layer need .*only 0\.0 MiB are free"):
        convert(source, target, free_memory=lambda: 1000)
    with pytest.raises(InvalidRequestError, match=r"MiB free; the weights need") as caught, Destination(target) as made:
        made.require(2**60)
    assert caught.value.param == "dst"
    command = [sys.executable, "-c", FULL, "convert", str(source), str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "largest layer need" in done.stderr
    assert not target.exists()
    asked = []
    monkeypatch.setattr(Destination, "require", lambda self, num_bytes: asked.append(num_bytes))
    size = convert(source, target, free_memory=lambda: 2**40)
    assert 0.3 * size < asked[0] < size  # panels of so small a model are mostly padding


def test_who_is_to_blame_is_named(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a destination blamed for a source that cannot be read, and against the name of another option."""
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InvalidRequestError, match="dangling link"):
        convert(source, tmp_path / "link")
    for words, message in ((["", "x"], "SRC: '' is not"), (["demo", ""], "DST: '' is not")):
        done = called("convert", *words)
        assert done.returncode == 2
        assert message in done.stderr
    read = Path.read_bytes

    def refuse(self: Path) -> bytes:
        if self.name == "tokenizer.json":
            raise PermissionError(13, "Permission denied")
        return read(self)

    shutil.copytree(source, tmp_path / "full")
    (tmp_path / "full" / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ModelLoadError, match=r"full/tokenizer\.json: cannot be read: Permission denied"):
        convert(tmp_path / "full", tmp_path / "target")
    assert not os.path.lexists(tmp_path / "target")
