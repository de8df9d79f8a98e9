"""What a built engine says of itself."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock import SamplingParams
from penstock.assembly import build_engine
from penstock.config import EngineConfig
from penstock.errors import InvalidRequestError
from penstock.interface.messages import EngineRequest
from penstock.kernels.cpu.library import LEVEL_VARIABLE, level_of_bits
from penstock_lab.convert.pack import convert_model
from tests.hf_models import make_llama
from tests.kernels.packed import levels
from tests.runner.test_with_engine import LLAMA


def fingerprint(directory: Path, **options: Any) -> str:
    config = EngineConfig.from_options(model=str(directory), load_format="dummy", threads=1, **options)
    return build_engine(config).info.system_fingerprint


@pytest.mark.skipif(not levels(), reason="no native library")
def test_the_fingerprint_names_what_can_change_a_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against answers of different bits under one fingerprint: backend, level, type, scheme and group size."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    words = {
        fingerprint(tmp_path, kernels=kernels, dtype=dtype, quantization=quantization)
        for kernels in ("reference", "cpu")
        for dtype in ("bfloat16", "float32")
        for quantization in (None, "int8", "int4")
    }
    words.add(fingerprint(tmp_path, kernels="cpu", dtype="bfloat16", quantization="int4", quantization_group_size=32))
    assert len(words) == 13
    best = fingerprint(tmp_path, kernels="cpu", dtype="bfloat16")
    assert best in words
    assert f"-cpu.{level_of_bits()}-" in best
    monkeypatch.setenv(LEVEL_VARIABLE, "portable")
    assert "portable" in fingerprint(tmp_path, kernels="cpu", dtype="bfloat16")


@pytest.mark.skipif(not levels(), reason="no native library")
def test_a_packed_directory_decides_what_was_left_open(tmp_path: Path) -> None:
    """Guards against packed weights served in another scheme than theirs, and against a choice made without a word."""
    _, source = make_llama(tmp_path)
    options = {"dtype": "bfloat16", "quantization": "int4", "quantization_group_size": 32}
    convert_model(EngineConfig.from_options(model=str(source), **options), tmp_path / "packed")
    built = build_engine(EngineConfig.from_options(model=str(tmp_path / "packed"), threads=1))
    for name, value in options.items():
        assert getattr(built.config.numerics, name) == value
        assert built.info.choices_made[name] == f"{value}: the directory holds packed weights " + (
            "(bfloat16, int4 in groups of 32)"
        )
    with pytest.raises(InvalidRequestError, match=r"^quantization: 'int8' does not match"):
        build_engine(EngineConfig.from_options(model=str(tmp_path / "packed"), quantization="int8"))


@pytest.mark.covers("F34")
@pytest.mark.skipif(not levels(), reason="no native library")
def test_what_was_prepared_is_counted() -> None:
    """Guards against a counter that stands still, or that counts a program again each time that it is run."""
    engine = build_engine(EngineConfig.from_options(model="demo", threads=1)).engine
    found = []
    for name in ("first", "second"):
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        engine.add_request(EngineRequest(name, [5, 6, 7], params))
        while engine.has_work:
            engine.step()
        stats = engine.stats()
        found.append((stats.num_compiled_total, stats.num_recorded_total))
    assert found == [(0, 2), (0, 2)]  # of the prompt's three tokens, and of a step of one


@pytest.mark.covers("F34")
@pytest.mark.skipif(not levels(), reason="no native library")
def test_a_start_compiles_nothing() -> None:
    """Guards against kernels that are compiled at the first request, for seconds, and against a cache of such kernels
    that can be damaged: the library is built at installation, and programs are recorded in memory."""
    script = (
        "import sys\nfound = []\n"
        "def note(event, args):\n"
        "    writes = event == 'open' and isinstance(args[1], str) and set(args[1]) & set('wax+')\n"
        "    if writes or event in ('subprocess.Popen', 'os.system', 'os.posix_spawn', 'os.exec', 'os.fork'):\n"
        "        found.append((event, args[0]))\n"
        "sys.addaudithook(note)\n"
        "from penstock import LLM, SamplingParams\n"
        "with LLM('demo') as llm:\n    llm.generate('Once', SamplingParams(max_tokens=4))\n"
        "assert not found, found\n"
    )
    done = subprocess.run([sys.executable, "-B", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
