"""The proof that the death of a rank is the death of its engine, and nothing more: nothing hangs, no process is left
behind, and every stream goes on with its next token.

Clients have engines whose model several processes share: in parts, in stages, or both. A random one of these processes
is ended or stopped under sixteen streams (engine_deaths.py).
"""

from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from penstock_lab.prove.engine_deaths import Crowd, EngineDeaths
from penstock_lab.prove.proof import Trials

SPLITS: tuple[dict[str, Any], ...] = (
    {"tensor_parallel_size": 2},
    {"tensor_parallel_size": 4},
    {"pipeline_parallel_size": 2},
    {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
)
ENDED = ("", "Z", "X")  # states of a process that is gone, or dead and not yet reaped


class RankDeaths(EngineDeaths):
    """Ends ranks of engines under streams."""

    name: ClassVar[str] = "rank-deaths"
    promise: ClassVar[str] = "The death of one process of a model ends its group, but no stream"
    goal: ClassVar[int] = 50
    weight: ClassVar[float] = 1.0

    def _options(self, trials: Trials) -> dict[str, Any]:
        return {"threads": 1, **trials.random.choice(SPLITS)}

    def _crowd(self) -> type[Crowd]:
        return RankCrowd


class RankCrowd(Crowd):
    """A crowd that ends any process of an engine, and checks that the whole engine has ended when its streams go on."""

    _group: tuple[int, ...] = ()  # the processes of the engine that died last

    def _victim(self, engines: list[int]) -> int:
        self._find_left()
        engine = self.trials.random.choice(engines)
        self._group = (engine, *children_of(engine))
        return self.trials.random.choice(self._group)

    async def run(self) -> None:
        await super().run()
        self._find_left()

    def _find_left(self) -> None:
        """Report each process of the last group that is still there although another engine has taken over."""
        for pid in self._group if self.recovered() else ():
            if _state(pid) not in ENDED:
                self.trials.wrong(f"process {pid} of {self._group} was left after {self._way}")


def children_of(pid: int) -> list[int]:
    """List the processes that a process has started."""
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def _state(pid: int) -> str:
    """Read the state of a process, as in /proc; "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
