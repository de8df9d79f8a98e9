"""Runs inside an engine's environment: converts the checkpoint, or loads it and answers each request with a JSON line.

python -m benchmarks.worker NAME convert SOURCE TARGET PRECISION
python -m benchmarks.worker NAME serve OPTIONS

OPTIONS is LoadOptions as JSON. Engines' own output goes to standard error; standard output has only the answers.
"""

import contextlib
import ctypes
import importlib.metadata
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import IO, Any

from benchmarks.peers import find
from benchmarks.peers.base import Engine, LoadOptions, RankingEngine, Record

PR_SET_PDEATHSIG = 1
WARM_UP = ((1, 64, 4), (32, 8, 2))  # streams, prompt, output


def main(name: str, action: str, *arguments: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a frozen process would outlive the runner
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    peer = find(name)
    try:
        if action == "convert":
            peer.convert(Path(arguments[0]), Path(arguments[1]), arguments[2])
            return _answer(answers, {"converted": True})
        options = LoadOptions(**json.loads(arguments[0]))
        engine = peer.load(options)
        facts = {"version": importlib.metadata.version(peer.distribution), **engine.facts()}
        _answer(answers, {"ready": facts})
        for line in sys.stdin:
            _answer(answers, _serve(engine, options, json.loads(line)))
    except Exception as error:
        traceback.print_exc()
        text = " ".join(str(error).split()) or "no message"
        _answer(answers, {"error": f"{type(error).__name__}: {text[:300]}"})
        raise SystemExit(1) from None


def _serve(engine: Engine, options: LoadOptions, request: dict[str, Any]) -> dict[str, Any]:
    if request.get("warm_up"):
        for streams, prompt, output in WARM_UP:
            prompts = [[7 + stream + place for place in range(prompt)] for stream in range(streams)]
            engine.generate(prompts[: options.max_streams], output, 0, Record(streams, output))
        return {"warm": True}
    if "rank" in request or "tokenize" in request:
        assert isinstance(engine, RankingEngine), type(engine)
        if "rank" in request:
            return {"steps": engine.rank(request["rank"], request["output"], request["top"])}
        return {"ids": engine.tokenize(request["tokenize"])}
    _forget_peak()
    record = Record(len(request["prompts"]), request["output"])
    engine.generate(request["prompts"], request["output"], request["shared"], record)
    return {**record.figures(), "peak_rss_bytes": _peak_rss(), "ids": [ids[:8] for ids in record.ids[:2]]}


def _answer(answers: IO[str], answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _forget_peak() -> None:
    """Reset the peak memory of this process, if the kernel allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _peak_rss() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
