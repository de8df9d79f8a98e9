"""The workloads, the figures that they give, and the prompts, which have the same token ids for every engine."""

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Sample = Mapping[str, Any]  # a line of samples.jsonl; its keys are listed in README.md

LONG_PROMPTS, COLD_START, MEMORY = "W4", "W6", "W7"
SPEC = re.compile(r"(W\d)(?:=(\d+)x(?:(\d+)\+)?(\d+)\+(\d+))?")  # W3, W3=8x64+32, or W5=8x512+16+16


@dataclass(frozen=True)
class Workload:
    """`streams` requests sent at once, each with `shared` common and `prompt` own token ids, for `output` tokens."""

    name: str
    streams: int
    prompt: int
    output: int
    shared: int = 0

    @property
    def length(self) -> int:
        """Return the number of tokens in one stream at its end."""
        return self.shared + self.prompt + self.output

    @property
    def cache_tokens(self) -> int:
        """Return the number of positions that a cache needs if it keeps a shared prefix once."""
        return self.shared + self.streams * (self.prompt + self.output)

    @property
    def size(self) -> str:
        """Return the sizes in the form that WORKLOADS accepts and tables print."""
        shared = f"{self.shared}+" if self.shared else ""
        return f"{self.streams}x{shared}{self.prompt}+{self.output}"

    def prompts(self, vocab_size: int, turn: int, attempt: int = 0) -> list[list[int]]:
        """Return the token ids of one round. They differ between rounds and between repetitions of a disturbed sample,
        so that no cache helps an engine."""
        rng = random.Random(f"{self.name} {self.size} {turn} {attempt}")
        shared = rng.choices(range(vocab_size), k=self.shared)
        return [shared + rng.choices(range(vocab_size), k=self.prompt) for _ in range(self.streams)]


@dataclass(frozen=True)
class Figure:
    """A number computed from the samples of a workload; it has one row in the table for each type of weights.

    Attributes:
        name: name of the row.
        workload: name of the workload with the samples.
        unit: unit for the table.
        better: whether higher or lower values are better.
        read: returns the value of one sample.
    """

    name: str
    workload: str
    unit: str
    better: Literal["higher", "lower"]
    read: Callable[[Workload, Sample], float]


WORKLOADS = {
    work.name: work
    for work in (
        Workload("W1", 1, 128, 128),
        Workload("W2", 1, 1024, 1),
        Workload("W3", 32, 128, 128),
        Workload("W4", 8, 3072, 64),
        Workload("W5", 32, 32, 32, shared=1024),
        Workload("W6", 1, 16, 1),  # a new process, from its start to the first token
    )
}


def tokens_per_gigabyte(_work: Workload, one: Sample) -> float:
    """Return the tokens decoded in the time in which memory could have delivered a gigabyte."""
    read = sum(float(limits["read"]) for limits in one["limits"]) / len(one["limits"])
    return float(one["later_tokens"]) / float(one["later_s"]) / read


FIGURES = (
    Figure("W1 one stream", "W1", "tokens/s", "higher", lambda work, one: work.output / one["seconds"]),
    Figure("W1 decode at equal memory speed", "W1", "tokens/GB", "higher", tokens_per_gigabyte),
    Figure("W2 prefill", "W2", "tokens/s", "higher", lambda work, one: work.prompt / one["first_s"]),
    Figure(
        "W3 many streams", "W3", "tokens/s", "higher", lambda work, one: work.streams * work.output / one["seconds"]
    ),
    Figure("W4 long prompts, all first tokens", "W4", "s", "lower", lambda work, one: one["first_s"]),
    Figure(
        "W4 long prompts, decode", "W4", "tokens/s", "higher", lambda work, one: one["later_tokens"] / one["later_s"]
    ),
    Figure("W5 shared prefix, all done", "W5", "s", "lower", lambda work, one: one["seconds"]),
    Figure("W6 cold start to first token", "W6", "s", "lower", lambda work, one: one["seconds"]),
    Figure("W7 peak memory at W3", "W3", "MiB", "lower", lambda work, one: one["peak_rss_bytes"] / 2**20),
)


def parse_workloads(text: str) -> list[Workload]:
    """Return the workloads named in `text`, such as "W1,W3=8x64+32"; "" means all.

    Raises:
        ValueError: a name or a size is invalid.
    """
    chosen: dict[str, Workload] = {}
    for spec in text.replace(",", " ").split() or WORKLOADS:
        found = SPEC.fullmatch(spec)
        name = "W3" if found and found[1] == MEMORY else found[1] if found else ""
        if found is None or name not in WORKLOADS:
            raise ValueError(f"workloads: {spec!r} is none of W1 to W7, nor one with sizes, like W3=8x64+32")
        chosen.setdefault(name, WORKLOADS[name])
        if found[2]:
            streams, shared, prompt, output = (int(number or 0) for number in found.groups()[1:])
            if min(streams, prompt, output) < 1:
                raise ValueError(f"workloads: {spec!r} has a size of 0")
            chosen[name] = replace(chosen[name], streams=streams, shared=shared, prompt=prompt, output=output)
    return sorted(chosen.values(), key=lambda work: work.name)
