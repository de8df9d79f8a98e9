"""Define the interface of a compared engine: how it is installed, converts the checkpoint, loads and generates.

A peer's file is imported in two places: by the runner, where only the standard library may be used, and in the peer's
own environment, where `convert` and `load` run. So these methods import the peer's packages.
"""

import shutil
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Files that llama.cpp quantises. "-int8": Penstock computes with int8 activations too, as the others always do.
GGUF_PRECISIONS = ("Q8_0", "Q8_0-int8", "Q4_0", "Q4_0-int8", "Q4_K_M", "Q4_K_M-int8")


@dataclass(frozen=True)
class LoadOptions:
    """The options that every engine is loaded with.

    Attributes:
        directory: the directory that `convert` wrote.
        precision: one of the peer's precisions.
        threads: number of computing threads.
        max_length: tokens of the longest stream at its end.
        max_streams: number of streams that run at once.
        cache_tokens: positions that the cache must hold.
    """

    directory: str
    precision: str
    threads: int
    max_length: int
    max_streams: int
    cache_tokens: int


@dataclass
class Record:
    """The tokens of one run and their times. The engine calls `start` before its work, and `token` for each token."""

    streams: int
    output: int
    ids: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.ids = [[] for _ in range(self.streams)]
        self.started = self.last = time.perf_counter()
        self.first = 0.0  # time when the last stream got its first token
        self._waiting, self._at_first, self._count = self.streams, 0, 0

    def start(self) -> None:
        self.started = time.perf_counter()

    def token(self, stream: int, token_id: int) -> None:
        self.last = time.perf_counter()
        self._count += 1
        self.ids[stream].append(token_id)
        if len(self.ids[stream]) == 1:
            self._waiting -= 1
            if self._waiting == 0:
                self.first, self._at_first = self.last, self._count

    def figures(self) -> dict[str, Any]:
        """Return the times of the run.

        Raises:
            RuntimeError: a stream has fewer or more tokens than asked for, so the run is invalid.
        """
        if lengths := {len(ids) for ids in self.ids} - {self.output}:
            raise RuntimeError(f"streams of {sorted(lengths)} tokens instead of {self.output}")
        return {
            "seconds": self.last - self.started,
            "first_s": self.first - self.started,
            "later_s": self.last - self.first,
            "later_tokens": self._count - self._at_first,
        }


class Engine(ABC):
    """A loaded model that decodes greedily and never stops at an end-of-sequence token."""

    @abstractmethod
    def generate(self, prompts: list[list[int]], output: int, shared: int, record: Record) -> None:
        """Generate `output` tokens for each prompt. The prompts' first `shared` ids are the same."""

    @abstractmethod
    def facts(self) -> dict[str, str]:
        """Return the types that the engine really computes with (weights, activations, cache, head), and notes."""


class RankingEngine(Engine):
    """An engine that also shows how it reads a text and how likely it finds tokens, for benchmarks/real.py."""

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text, with those that the model expects around it. Names of control tokens are text."""

    @abstractmethod
    def rank(self, prompt: list[int], output: int, top: int) -> list[list[tuple[int, float]]]:
        """Decode greedily. Return the `top` tokens of each step with their log-probabilities, the most likely first."""


class Peer(ABC):
    """An engine that can be installed and measured.

    Attributes:
        name: the engine's name in PEERS, tables and file names.
        distribution: the package whose version the table gives.
        requirements: pinned packages that pip installs into its environment; (): it runs in this environment.
        pip_options: options for that installation.
        unwanted: packages installed with it that are deleted, because they break others.
        precisions: the types of weights that it supports.
    """

    name: str
    distribution: str
    requirements: tuple[str, ...] = ()
    pip_options: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ("bf16", "int8", "int4")

    def build_environment(self) -> dict[str, str]:
        """Return environment variables for the installation."""
        return {}

    def finish_install(self, venv: Path) -> None:
        """Finish an environment after pip: delete the `unwanted` packages."""
        for packages in venv.glob("lib/python*/site-packages"):
            for place in (found for name in self.unwanted for found in packages.glob(f"{name}*")):
                shutil.rmtree(place)

    def files(self, precision: str) -> tuple[str, str]:
        """Return the name of the peer that converts the checkpoint for this one, and the precision in which it does."""
        return self.name, precision

    def environment(self, venv: Path, options: LoadOptions) -> dict[str, str]:
        """Return environment variables for the process that loads the model."""
        return {}

    @abstractmethod
    def convert(self, source: Path, target: Path, precision: str) -> None:
        """Write the Llama checkpoint `source` (config.json, model.safetensors) in the form that this engine reads."""

    @abstractmethod
    def load(self, options: LoadOptions) -> Engine:
        """Load the model that `convert` wrote."""
