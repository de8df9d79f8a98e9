"""Recorded passes: the bits of the pass itself, whatever changes between steps. recorded.py does the same with a model,
on a GPU."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="an extra")

from penstock.kernels.metadata import AttentionMetadata, AttentionParams
from penstock.kernels.ops import RecordingOps
from penstock.kernels.triton import programs, work
from tests.kernels.triton.compare import DEVICE, bits
from tests.kernels.triton.test_attention import HEADS, Layer

F32 = torch.float32
RULES = AttentionParams(0.3)
Span = dict[int, tuple[int, int]]
STEPS: list[tuple[Span, int]] = [  # by sequence: from where to where; and how many rows of padding
    ({0: (600, 601), 1: (130, 131)}, 0),
    ({0: (601, 602), 1: (131, 132)}, 0),
    ({1: (132, 133), 0: (602, 603)}, 0),
    ({0: (603, 604)}, 1),
    ({1: (133, 135)}, 0),
]


class Fixed:
    """A pass over two tokens that attends, with its inputs and its result in memory that stays."""

    def __init__(self) -> None:
        self.layer = Layer([640, 140], HEADS, F32, F32)
        self.layer.fill(0, 600)
        self.layer.fill(1, 130)
        shapes = (2, 4, 24), (2, 1, 24), (2, 1, 24), (2, 96)
        self.q, self.k, self.v, self.out = (torch.zeros(shape) for shape in shapes)
        self.metadata: list[Any] = []

    def forward(self, given: Sequence[Any]) -> Tensor:
        self.metadata.append(given[0])
        return self.layer.ops.attend(self.q, self.k, self.v, self.layer.cache, given[0], RULES, out=self.out)

    def plan(self, new: Span, padding: int) -> AttentionMetadata:
        step, inputs = self.layer.step(new)
        if padding:
            more = torch.ones(padding, dtype=torch.int32)
            table = torch.cat([step.block_table, -more[:, None].expand(-1, step.block_table.shape[1])])
            starts = torch.cat([step.query_start_loc, step.query_start_loc[-1:] + more])
            lengths, slots = torch.cat([step.seq_lens, more]), torch.cat([step.slot_mapping, -more.long()])
            step = replace(step, query_start_loc=starts, seq_lens=lengths, block_table=table, slot_mapping=slots)
        for own, given in zip((self.q, self.k, self.v), (inputs[0][0], *inputs[1:]), strict=True):
            own.zero_()[: len(given)] = given
        return self.layer.ops.plan(step, HEADS, self.layer.cache)


def test_programs_have_the_bits_of_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a table, a length or an item that a program keeps from the step in which it was recorded, rows of
    padding that change others, and a form that hides what differs. The states of spans do not all fit at once."""
    recorded, plain = Fixed(), Fixed()
    assert isinstance(recorded.layer.ops, RecordingOps)
    program: Any = None
    for number, (new, padding) in enumerate(STEPS):
        meta = recorded.plan(new, padding)
        if program is None:
            found, program = recorded.layer.ops.record(recorded.forward, [meta])
        else:
            found = program.run([meta])
        with monkeypatch.context() as patch:
            patch.setattr(programs, "PROGRAM_ROWS", ())  # no step is recorded: no form is shared
            patch.setattr(work, "STATES_BYTES", 1)
            expected = plain.forward([plain.plan(new, padding)])
        assert torch.equal(bits(found[: 2 - padding]), bits(expected[: 2 - padding])), number
    assert program.num_graphs == 1
    first, captured, *replayed, last = recorded.metadata
    assert first.work.form == captured.work.form != last.work.form
    if DEVICE == "cpu":
        assert [meta is captured for meta in replayed] == [True, True]
    else:
        assert not replayed, "a graph runs without Python"


def test_old_graphs_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against graphs that fill the memory of the device, one for each form that ever came."""
    monkeypatch.setattr(programs, "GRAPHS", 2)
    recorder, runs = programs.Recorder(torch.device("cpu")), list[str]()
    forms = {name: [SimpleNamespace(work=SimpleNamespace(form=name, memory=torch.zeros(1)))] for name in "abc"}

    def forward(given: Sequence[Any]) -> Tensor:
        runs.append(given[0].work.form)
        return given[0].work.memory

    program = programs.TritonProgram(forward, recorder)
    for name in "aabbaacc":
        program.run(forms[name])
    assert program.num_graphs == 2
    del runs[:]
    for name in "cba":  # "b" was used longest ago
        program.run(forms[name])
    assert program.num_graphs == 2
    assert program._recordings["b",] is None


@pytest.mark.parametrize("is_own", [True, False])
def test_a_model_that_computes_by_itself_is_never_recorded(is_own: bool) -> None:
    """Guards against numbers of a pass that a model of a user's own computes on the host, which a graph would keep."""
    fixed = Fixed()
    meta = fixed.plan(*STEPS[0])

    def own(given: Sequence[Any]) -> Tensor:
        return fixed.forward(given) * float(given[0].seq_lens[0])

    _, program = fixed.layer.ops.record(fixed.forward if is_own else own, [meta])
    assert (program is not None) == is_own


def test_rows_of_programs() -> None:
    """Guards against a program that is not its own, too few rows, and steps that are padded to many more tokens."""
    for tokens in range(1, 257):
        rows = programs.rows(tokens)
        assert tokens <= rows == programs.rows(rows) <= max(16, tokens * 3 // 2)
    assert programs.rows(257) == 0
