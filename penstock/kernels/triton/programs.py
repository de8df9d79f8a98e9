"""Recorded forward passes: CUDA graphs, each of which is launched as one, without the model's Python.

A step of an 8B model is some 230 launches, which take 6 to 10 ms of Python, longer than the kernels of a decode step.
A graph repeats them with the same arguments, so whatever changes from step to step is in memory that stays: token ids,
positions, and the work of attention (work.Work), which one copy brings to the device. What the work's form decides
(grids, the number of items) is part of the graph: a program has a graph for each form.

A pass with a new form is computed as usual, which compiles its kernels and lets its buffers grow. When the form comes
again, the pass is captured, and from then on launched as a graph. So forms that never come again cost nothing, and a
server needs no capturing before it is ready. Without CUDA (in the interpreter), the pass itself is what is kept, with
the metadata of that time: everything but the capture is tested so.

What a pass does on the host, between two operations, cuts it into several graphs (TritonOps.run_host).
"""

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.kernels.sampling import SamplingTensors
from penstock.kernels.tensors import Array, as_array
from penstock.kernels.triton.sampling import choose
from penstock.kernels.triton.sizes import PROGRAM_ROWS

GRAPHS = (
    64  # of all programs of a backend; the one that was used longest ago makes room. Each takes memory of the device
)
SEEN = 256  # forms that a program remembers
OWN = "penstock.", "triton."  # modules whose use of torch is the same in every pass

Forward = Callable[[Sequence[Any]], Tensor]
Part = Callable[[], object]
Key = tuple[Any, ...]  # the form of each cache group's work


def rows(tokens: int) -> int:
    """Find the tokens of the program for a step; 0 if it has too many for one."""
    return next((size for size in PROGRAM_ROWS if size >= tokens), 0)


class Capture:
    """Captures a pass as graphs, and what the host does between them.

    Args:
        side: the stream on which it captures, because the default one cannot be captured.
        pool: the memory that all captures of a backend share: their graphs run one at a time.
    """

    def __init__(self, side: torch.cuda.Stream, pool: Any) -> None:
        self.parts: list[Part] = []
        self._pool, self._side = pool, side
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, forward: Callable[[], Tensor]) -> Tensor:
        """Capture a pass without computing it, and return its result, which is in memory that stays."""
        current = torch.cuda.current_stream(self._side.device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            try:
                self._begin()
                result = forward()
                self._end()
            finally:
                self._abandon()
        current.wait_stream(self._side)
        return result

    def host(self, work: Part) -> None:
        """Note what the host does at this point of the pass."""
        self._end()
        self.parts.append(work)
        self._begin()

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def _end(self) -> None:
        graph, self._graph = self._graph, None
        assert graph is not None
        graph.capture_end()
        self.parts.append(graph.replay)

    def _abandon(self) -> None:
        """End a capture whose pass has failed, so that the stream can be used again."""
        if self._graph is not None:
            try:
                self._graph.capture_end()
            except RuntimeError:  # says that the capture is invalid; what the pass raised says why
                self._graph.reset()
            self._graph = None


class Recording:
    """Runs the parts of a captured pass in order, and returns the tensor that they write."""

    def __init__(self, parts: Sequence[Part], result: Tensor) -> None:
        self._parts, self._result = parts, result

    def __call__(self) -> Tensor:
        for part in self._parts:
            part()
        return self._result


@dataclass(frozen=True, slots=True, eq=False)
class _Recorded:
    """A pass for one form. works: the memory of attention's work in each cache group, which the pass reads."""

    works: Sequence[Tensor]
    run: Callable[[], Tensor]


class TritonProgram:
    """A forward pass over a fixed number of tokens (kernels/ops.Program).

    Attributes:
        num_graphs: recordings that it has.
    """

    def __init__(self, forward: Forward, recorder: "Recorder") -> None:
        self._forward, self._recorder = forward, recorder
        self._recordings: OrderedDict[Key, _Recorded | None] = OrderedDict()  # None: the form was seen once

    @property
    def num_graphs(self) -> int:
        return sum(recording is not None for recording in self._recordings.values())

    def run(self, attention: Sequence[Any]) -> Tensor:
        key = tuple(meta.work.form for meta in attention)
        if key not in self._recordings:
            self._recordings[key] = None
            if len(self._recordings) > SEEN:
                self._recordings.popitem(last=False)
            return self._forward(attention)
        self._recordings.move_to_end(key)
        recorded = self._recordings[key]
        if recorded is None:
            run = self._recorder.capture(lambda: self._forward(attention))
            recorded = self._recordings[key] = _Recorded([meta.work.memory for meta in attention], run)
        for own, meta in zip(recorded.works, attention, strict=True):
            if own is not meta.work.memory:
                own.copy_(meta.work.memory)
        self._recorder.note(self, key)
        return recorded.run()

    def forget(self, key: "Key") -> None:
        """Drop the recording for a form, if there is one; it is made again when the form has come twice more."""
        self._recordings.pop(key, None)

    def decode(
        self, attention: Sequence[Any], input_ids: Tensor, positions: Tensor, tokens: Array, vocab_size: int
    ) -> bool:
        rows, given = len(tokens), torch.from_numpy(tokens[:, :-1].copy()).to(positions.device)
        greedy = SamplingTensors(torch.zeros(rows, device=positions.device))
        found = torch.empty_like(given)  # the token after each step
        for step, column in enumerate(given.T):
            input_ids.copy_(torch.where(column < 0, found[:, step - 1], column) if step else column)
            logits = self.run(attention)
            ids, _ = choose(logits[:, :vocab_size].contiguous(), greedy)
            found[:, step] = ids.clamp(min=0)  # of logits that are not finite
            positions += 1
            for meta in attention:
                meta.work.lengths[:rows] += 1
                meta.work.slots[:rows] += 1
        np.copyto(tokens[:, 1:], as_array(found), where=tokens[:, 1:] < 0)
        return True


class TorchGuard(TorchDispatchMode):
    """Notes functions of torch that are called by a model of a user's own, not by the backend or the layers.

    Attributes:
        foreign: the name of such a function, or None.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing here is compiled, and True would import the compiler, which takes a second."""
        return False

    def __init__(self) -> None:
        super().__init__()
        self.foreign: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _caller().startswith(OWN):
            self.foreign = func.name()
        return func(*args, **(kwargs or {}))


def _caller() -> str:
    """Find the module, outside of torch, whose call came here."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "torch":
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


class Recorder:
    """Records the passes of one backend. One pass runs at a time.

    Attributes:
        place: the stream and the memory of captures; None until the first one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.place: tuple[torch.cuda.Stream, Any] | None = None
        self._capture: Capture | None = None
        self._used: OrderedDict[tuple[int, Key], weakref.ref[TritonProgram]] = OrderedDict()

    def record(
        self, forward: Forward, attention: Sequence[Any], torch_too: bool
    ) -> tuple[Tensor, TritonProgram | None]:
        """Compute a pass, and make its program; None if a model of a user's own computes by itself."""
        program = TritonProgram(forward, self)
        guard: AbstractContextManager[Any] = nullcontext() if torch_too else TorchGuard()
        with guard as watched:
            result = program.run(attention)
        return result, program if watched is None or watched.foreign is None else None

    def capture(self, forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Record a pass; without CUDA, the pass itself is its recording."""
        if self._device.type != "cuda":
            return forward
        self.place = self.place or (torch.cuda.Stream(self._device), torch.cuda.graph_pool_handle())
        capture = Capture(*self.place)
        with self._capturing(capture):
            return Recording(capture.parts, capture.run(forward))

    def note(self, program: TritonProgram, key: Key) -> None:
        """Note that a recording is used. If there are more than GRAPHS, drop the one that was used longest ago."""
        place = id(program), key
        self._used[place] = weakref.ref(program)
        self._used.move_to_end(place)
        while len(self._used) > GRAPHS:
            (_, oldest), found = self._used.popitem(last=False)
            if (owner := found()) is not None:
                owner.forget(oldest)

    @contextmanager
    def _capturing(self, capture: Capture) -> Iterator[None]:
        self._capture = capture
        try:
            yield
        finally:
            self._capture = None

    def run_host(self, work: Part) -> None:
        """Run what the host does between two operations, or note it in the pass that is being captured."""
        if self._capture is None:
            work()
        else:
            self._capture.host(work)
