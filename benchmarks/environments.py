"""Keep engines and converted models in the cache directory: the first run makes them, later runs reuse them.

CACHE/PEER/                       the peer's own environment
CACHE/models/SHAPE/source/        the checkpoint
CACHE/models/SHAPE/PEER-TYPE/     the checkpoint as converted for the peer, and for others that read the same files
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import SEED, make_checkpoint
from benchmarks.peers import find
from benchmarks.peers.base import LoadOptions, Peer
from benchmarks.process import Worker, WorkerError

CONVERT_CAP = 1800.0  # seconds


def cache_directory() -> Path:
    """Return the directory for everything that is installed or converted."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / "compare"


class Workshop:
    """Installs peers and converts the checkpoint for them.

    Attributes:
        config: the config.json of the checkpoint.
    """

    def __init__(self, config: dict[str, Any], logs: Path, cache: Path | None = None) -> None:
        self.config, self._logs, self._cache = config, logs, cache or cache_directory()
        shape = hashlib.sha256(json.dumps([config, SEED], sort_keys=True).encode()).hexdigest()[:12]
        self._models = self._cache / "models" / shape
        self._failed: dict[str, WorkerError] = {}  # so that a build that fails is not tried for every precision

    def make_source(self) -> None:
        make_checkpoint(self.config, self._models / "source")

    def source_bytes(self) -> int:
        """Return the size of the checkpoint."""
        return (self._models / "source" / "model.safetensors").stat().st_size

    def install(self, peer: Peer) -> None:
        """Install the pinned versions, unless they are installed, or that has failed before.

        Raises:
            WorkerError: pip failed; its last line says why.
        """
        wanted = "\n".join((*peer.requirements, *peer.pip_options, *peer.unwanted))
        stamp = self._cache / peer.name / "installed.txt"
        if not peer.requirements or (stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted):
            return
        if peer.name in self._failed:
            raise self._failed[peer.name]
        venv.create(stamp.parent, clear=True, with_pip=True)
        log = self._logs / f"install-{peer.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [self._python(peer), "-m", "pip", "install", *peer.pip_options, *peer.requirements]
        with log.open("w", encoding="utf-8") as file:
            environment = {**os.environ, **peer.build_environment()}
            status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment).returncode
        if status:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"]
            self._failed[peer.name] = WorkerError(f"pip install: {lines[-1][:300]}")
            raise self._failed[peer.name]
        peer.finish_install(stamp.parent)
        stamp.write_text(wanted, encoding="utf-8")

    def convert(self, peer: Peer, precision: str) -> None:
        """Convert the checkpoint, unless it was already converted with these versions. If the peer reads the files of
        another one, that one is installed and converts.

        Raises:
            WorkerError, OverTimeError: the conversion failed.
        """
        target = self._converted(peer, precision)
        name, precision = peer.files(precision)
        if name != peer.name:
            peer = find(name)
            self.install(peer)
        stamp = target.with_name(f"{target.name}.versions")
        wanted = "\n".join(peer.requirements)
        if target.exists() and stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
            return
        if target.is_symlink():
            target.unlink()
        shutil.rmtree(target, ignore_errors=True)
        arguments = ["convert", str(self._models / "source"), str(target), precision]
        worker = Worker(self._command(peer, *arguments), {}, self._logs / f"convert-{peer.name}-{precision}.log")
        try:
            worker.receive(CONVERT_CAP)
        finally:
            worker.stop()
        stamp.write_text(wanted, encoding="utf-8")

    def start(self, peer: Peer, precision: str, sizes: Mapping[str, int]) -> Worker:
        """Start a worker. Its first answer comes when it has loaded the model. `sizes`: the rest of LoadOptions."""
        return self.open(
            peer, LoadOptions(directory=str(self._converted(peer, precision)), precision=precision, **sizes)
        )

    def open(self, peer: Peer, options: LoadOptions) -> Worker:
        """Start a worker with files from anywhere."""
        environment = peer.environment(self._cache / peer.name, options)
        command = self._command(peer, "serve", json.dumps(asdict(options)))
        return Worker(command, environment, self._logs / f"{peer.name}-{options.precision}.log")

    def _command(self, peer: Peer, *arguments: str) -> list[str]:
        return [self._python(peer), "-m", "benchmarks.worker", peer.name, *arguments]

    def _python(self, peer: Peer) -> str:
        return str(self._cache / peer.name / "bin" / "python") if peer.requirements else sys.executable

    def _converted(self, peer: Peer, precision: str) -> Path:
        return self._models / "-".join(peer.files(precision))
