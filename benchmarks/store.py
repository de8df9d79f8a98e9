"""samples.jsonl: one line per sample, appended when it is taken, so an interrupted run continues where it stopped."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.workloads import Sample, Workload


class Store:
    """The samples of one build of Penstock on one machine.

    Attributes:
        samples: the samples in the order in which they were taken.
        facts: what each engine reported about itself, by engine and precision.
    """

    def __init__(self, directory: Path, run: Mapping[str, Any]) -> None:
        """Open the directory's samples, or start a new file.

        Args:
            run: what must be the same for samples to be comparable: build, machine, model, threads.

        Raises:
            ValueError: the directory holds the samples of another run.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._file = directory / "samples.jsonl"
        self.samples: list[Sample] = []
        self.facts: dict[tuple[str, str], dict[str, str]] = {}
        self.run = dict(run)
        written = self._file.read_text(encoding="utf-8") if self._file.is_file() else ""
        whole, _, cut = written.rpartition("\n")
        if cut:  # a run was interrupted while writing this line
            self._file.write_text(f"{whole}\n" if whole else "", encoding="utf-8")
        complete = [json.loads(line) for line in whole.splitlines()]
        if not complete:
            self._append({"run": self.run})
        for line in complete:
            if line.get("run", self.run) != self.run:
                raise ValueError(f"out: {directory} holds samples of another build, machine or model: {line['run']}")
            self._remember(line)

    def add_sample(self, sample: Sample) -> None:
        self._append({"sample": sample})

    def add_facts(self, engine: str, precision: str, facts: Mapping[str, str]) -> None:
        """Keep what an engine reports about itself, if it is new."""
        if self.facts.get((engine, precision)) != facts:
            self._append({"facts": {"engine": engine, "precision": precision, **facts}})

    def of(self, engine: str, precision: str, work: Workload) -> list[Sample]:
        """Return the samples of an engine in one workload. Failures count only if no sample succeeded."""
        found = [
            sample
            for sample in self.samples
            if (sample["engine"], sample["precision"], sample["workload"], sample["size"])
            == (engine, precision, work.name, work.size)
        ]
        return [sample for sample in found if "error" not in sample] or found[-1:]

    def _append(self, line: dict[str, Any]) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._remember(line)

    def _remember(self, line: dict[str, Any]) -> None:
        if "sample" in line:
            self.samples.append(line["sample"])
        elif "facts" in line:
            facts = dict(line["facts"])
            self.facts[facts.pop("engine"), facts.pop("precision")] = facts
