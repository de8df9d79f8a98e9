"""A worker is a process that may fail, hang, or print what it likes; and the checkpoint is one that Penstock reads."""

import json
import sys
from pathlib import Path

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from benchmarks.checkpoint import SHAPES, make_checkpoint, read_shape
from benchmarks.environments import Workshop
from benchmarks.machine import Machine
from benchmarks.peers import find
from benchmarks.process import OverTimeError, Worker, WorkerError
from benchmarks.workloads import Workload

TINY = SHAPES["1b"] | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}


def worker(tmp_path: Path, program: str) -> Worker:
    return Worker([sys.executable, "-c", program], {}, tmp_path / "log")


def test_a_process_that_dies_or_hangs_is_an_error_with_its_reason(tmp_path):
    """Guards against a run that waits for ever, or ends with the engine."""
    with pytest.raises(WorkerError, match="signal SIGKILL"):
        worker(tmp_path, "import os; os.kill(os.getpid(), 9)").receive(60)
    with pytest.raises(OverTimeError, match="within 0 s"):
        worker(tmp_path, "import time; time.sleep(600)").receive(0.1)
    with pytest.raises(WorkerError, match="no kernel"):
        worker(tmp_path, """print('{"error": "no kernel"}')""").receive(60)


def test_penstock_is_converted_and_measured_in_a_process(tmp_path):
    """The whole way of one engine: checkpoint, conversion, start, requests with a shared prefix, and its memory."""
    shop = Workshop(TINY, tmp_path / "logs", tmp_path / "cache")
    shop.make_source()
    peer = find("penstock")
    shop.install(peer)
    shop.convert(peer, "int8")
    sizes = {"threads": 1, "max_length": 128, "max_streams": 4, "cache_tokens": 512}
    engine = shop.start(peer, "int8", sizes)
    try:
        facts = engine.receive(120)["ready"]
        assert (facts["weights"], facts["head"]) == ("int8 per channel", "int8 per channel")
        assert engine.ask({"warm_up": True}, 120) == {"warm": True}
        work = Workload("W5", 3, 4, 5, shared=32)
        request = {"prompts": work.prompts(512, 0), "output": 5, "shared": 32}
        answer = engine.ask(request, 120)
        assert answer["later_tokens"] <= 12
        assert answer["peak_rss_bytes"] > 2**20
        assert engine.ask(request, 120)["ids"] == answer["ids"]
        assert engine.seconds() > 0
    finally:
        engine.stop()


def test_the_checkpoint_is_whole_and_its_tokenizer_real(tmp_path):
    make_checkpoint(TINY, tmp_path / "source")
    with safe_open(tmp_path / "source" / "model.safetensors", "pt") as file:
        assert file.get_slice("model.layers.1.mlp.down_proj.weight").get_shape() == [64, 128]
    tokenizer = Tokenizer.from_file(str(tmp_path / "source" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 512
    assert tokenizer.decode(tokenizer.encode("Hello, Welt: ü").ids) == "Hello, Welt: ü"


def test_only_a_llama_has_a_shape(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma"}), encoding="utf-8")
    with pytest.raises(ValueError, match="gemma"):
        read_shape(str(tmp_path))
    with pytest.raises(ValueError, match="none of 1b, 3b"):
        read_shape("7b")


def test_limits_of_this_machine_are_positive():
    limits = Machine(threads=1).limits()
    assert min(limits.read, limits.bf16, limits.int8) > 0
