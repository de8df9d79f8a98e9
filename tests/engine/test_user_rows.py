"""A fixed number of rows, each with one user at a time: the loop of Falcon's decode backend, on a scripted executor."""

import queue
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.client import frames
from penstock.client.engine_process import EngineServer, Outbox
from penstock.client.step_client import InProcessClient
from penstock.engine.engine import Engine
from penstock.interface.sampling_params import SamplingParams
from penstock.interface.step import Executor
from tests.engine.test_engine import prompt_of, scripted
from tests.fakes_engine import VOCAB, expected_outputs, make_engine, model_info, request, run, token_ids

ROWS = 4


def rows_engine(**options: Any) -> Engine:
    """An engine with a block for each of its rows, which holds a whole request."""
    defaults = {"num_blocks": ROWS, "max_num_seqs": ROWS, "max_model_len": 128, "user_rows": True}
    return make_engine(**defaults | options)


class Socket:
    """Keeps what an engine process sends."""

    def __init__(self, trace: list[str]) -> None:
        self.trace = trace
        self.sent: list[Any] = []

    def sendall(self, data: bytes) -> None:
        self.trace.append("push")
        self.sent.append(frames.unpack_from_engine(data[frames.HEADER_BYTES :]))


class EndOfTrace(Exception):
    """Fifty ticks are over."""


@pytest.mark.covers("F1")
def test_fifty_ticks_have_their_stages_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a stage that is left out, or done before the one whose results it needs: new requests are taken,
    the step is planned and computed, tokens are committed, rows freed, and outputs sent together with the status."""
    trace: list[str] = []
    engine, inbox = rows_engine(), queue.SimpleQueue[bytes]()
    for index in range(12):
        add = frames.AddRequest(request(str(index), prompt_of(5, index), 12))
        inbox.put(frames.pack(add)[frames.HEADER_BYTES :])
    sock = Socket(trace)
    server = EngineServer(engine, Outbox(sock, 0), inbox)  # type: ignore[arg-type]
    ticks = 0

    def watched(owner: Any, name: str, stage: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any) -> Any:
            nonlocal ticks
            if stage == "pick":
                ticks += 1
                if ticks > 50:
                    raise EndOfTrace
                engine.add_request(request(f"more {ticks}", prompt_of(3, ticks), 2))
            trace.append(stage)
            return original(*args)

        monkeypatch.setattr(owner, name, call)

    watched(server, "_take_frames", "pick")
    watched(engine.scheduler, "schedule", "plan")
    for name, stage in (("submit", "prepare"), ("collect", "decode")):
        watched(engine.executor, name, stage)
    watched(engine, "_commit_all", "commit")
    watched(engine, "stats", "status")
    with pytest.raises(EndOfTrace):
        server.run()
    tick = ["pick", "plan", "prepare", "decode", "commit", "status", "push"]
    first = ["pick", "status", "push", *tick[1:]]  # a word to the client before the first step
    assert trace == first + tick * 49
    assert sock.sent[-1].stats.num_steps_total == 50


@pytest.mark.covers("F2")
@settings(max_examples=40)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=20)
)
def test_rows_are_filled_first_in_first_out(arrivals: list[tuple[int, int, int]]) -> None:
    """Guards against requests that are lost, overtaken, or let in beyond the rows."""
    engine = rows_engine()
    waiting = [(at, str(index), length, count) for index, (at, length, count) in enumerate(sorted(arrivals))]
    given_, step, outputs = list(waiting), 0, dict[str, list[int]]()
    while waiting or engine.has_work:
        while waiting and waiting[0][0] <= step:
            _, name, length, count = waiting.pop(0)
            engine.add_request(request(name, prompt_of(length, int(name)), count))
        for output in engine.step():
            outputs.setdefault(output.request_id, []).extend(output.new_token_ids)
        assert engine.stats().num_running <= ROWS
        step += 1
    begun = [new.request_id for item in scripted(engine).steps for new in item.new_requests]
    assert begun == [name for _, name, _, _ in given_]
    for _, name, length, count in given_:
        assert outputs[name] == expected_outputs(prompt_of(length, int(name)), count)


@pytest.mark.covers("F7")
@pytest.mark.parametrize("tick", range(12))
def test_a_cancelled_row_ends_as_one_that_has_had_its_last_token(tick: int) -> None:
    """Guards against a cancellation with a path of its own: in its prompt, at any token and while it waits, the request
    goes the way of one that ends, and its row and its block are free for the next one at once."""
    engine = rows_engine(max_num_batched_tokens=20)
    ended: list[str] = []
    finish = engine._finish
    engine._finish = lambda item: (ended.append(item.request_id), finish(item))[1]  # type: ignore[method-assign]
    for index in range(5):
        engine.add_request(request(str(index), prompt_of(30, index), 10))
    outputs: dict[str, list[Any]] = {}
    for _ in range(tick):
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    free = engine.kv_cache.num_free
    held = any(item.request_id == "1" for item in engine.scheduler.running)
    assert engine.abort("1")
    assert ended[-1] == "1"
    assert engine.kv_cache.num_free == free + held
    for name, more in run(engine).items():
        outputs.setdefault(name, []).extend(more)
    if held:
        (freed,) = [item.removed_request_ids for item in scripted(engine).steps[tick : tick + 1]]
        assert "1" in freed
    assert sorted(set(ended)) == [str(index) for index in range(5)]
    for name in "0234":
        assert token_ids(outputs[name]) == expected_outputs(prompt_of(30, int(name)), 10)


@pytest.mark.covers("F10")
def test_the_status_is_what_the_load_generator_knows() -> None:
    """Guards against counters that drift: after every step they are compared with what was sent and received."""
    engine, random = rows_engine(max_num_batched_tokens=128), Random(5)
    open_: dict[str, int] = {}  # request -> tokens received
    sent = generated = prompts = 0
    for _ in range(300):
        for _ in range(random.choice((0, 0, 1, 2))):
            length = random.randint(1, 20)
            engine.add_request(request(str(sent), prompt_of(length, sent), random.randint(1, 9)))
            open_[str(sent)] = 0
            sent += 1
        if open_ and random.random() < 0.1:
            name = random.choice(sorted(open_))
            assert engine.abort(name)
            del open_[name]
        for output in engine.step():
            generated += len(output.new_token_ids)
            open_[output.request_id] += len(output.new_token_ids)
            if output.finish_reason is not None:
                del open_[output.request_id]
        steps = list(scripted(engine).steps)
        scripted(engine).steps.clear()
        started = [new for item in steps for new in item.new_requests]
        prompts += sum(new.num_prompt_tokens for new in started)
        stats = engine.stats()
        assert stats.num_running + stats.num_waiting == len(open_)
        assert stats.num_running <= ROWS
        assert all(open_[item.request_id] == 0 for item in engine.scheduler.waiting)
        assert (stats.num_generated_tokens_total, stats.num_prompt_tokens_total) == (generated, prompts)
        assert stats.kv_blocks_free == ROWS - stats.num_running
        assert stats.num_waiting == 0 or len(steps[0].scheduled) == ROWS


# --- several tokens a call ------------------------------------------------------------------------------------------


def client(**options: Any) -> InProcessClient:
    engine = rows_engine(**options)
    return InProcessClient(engine, model_info(128, VOCAB), None)


def ask(asked: InProcessClient) -> None:
    for index, length in enumerate((1, 30, 5, 12, 7)):
        params = SamplingParams(temperature=0.0, max_tokens=4 + 3 * index, ignore_eos=True, output_kind="delta")
        asked.add_request(str(index), prompt_of(length, index), params)


@pytest.mark.covers("F35")
@pytest.mark.parametrize("num_steps", [1, 2, 3, 7, 1000])
def test_several_steps_a_call_are_the_same_as_several_calls(num_steps: int) -> None:
    """Guards against an inner loop that computes something else, or goes on with a request that has ended."""
    singly, together = client(), client()
    for asked in (singly, together):
        ask(asked)
    found: list[list[Any]] = [[], []]
    for outputs, asked, count in zip(found, (singly, together), (1, num_steps), strict=True):
        while asked.has_unfinished_requests():
            outputs += [
                (output.request_id, output.outputs[0].token_ids, output.finished) for output in asked.step(count)
            ]
    assert found[0] == found[1]
    assert scripted(singly.engine).steps == scripted(together.engine).steps


@pytest.mark.covers("F35")
def test_a_cancellation_within_a_call_of_several_steps_is_heeded() -> None:
    """Guards against a request that is computed to its end, though it was cancelled at the call's third step: from the
    fourth on it has no row; and an error after some outputs must not lose them."""
    asked = client()
    ask(asked)
    steps = scripted(asked.engine).steps

    def cancel(_: Any) -> set[str]:
        if len(steps) == 3:
            assert asked.abort("3")
        if len(steps) == 6:
            raise MemoryError
        return set()

    scripted(asked.engine).fail = cancel
    outputs = asked.step(100)
    assert outputs
    with pytest.raises(MemoryError):
        asked.step()
    outputs += asked.step(100)
    computed = [{item.request_id[0] for item in step.scheduled} for step in steps]
    assert "3" in computed[2]
    assert not any("3" in ids for ids in computed[3:])
    for name, length in (("0", 1), ("1", 30), ("2", 5), ("4", 7)):
        ids = [token for output in outputs if output.request_id == name for token in output.outputs[0].token_ids]
        assert ids == expected_outputs(prompt_of(length, int(name)), 4 + 3 * int(name))


# --- what the original got wrong ------------------------------------------------------------------------------------


@pytest.mark.covers("C24")
@settings(max_examples=30)
@given(rows=st.integers(1, 6), lengths=st.lists(st.integers(1, 60), min_size=1, max_size=20), policy=st.sampled_from(
    ["fcfs", "length_classes"]
))  # fmt: skip
def test_a_batch_never_has_more_than_its_rows(rows: int, lengths: list[int], policy: str) -> None:
    """Guards against a batch above max_num_seqs, which prompts and decodes that were counted apart made there."""
    engine = make_engine(max_num_seqs=rows, policy=policy)
    for index, length in enumerate(lengths):
        engine.add_request(request(str(index), prompt_of(length, index), 3))
    run(engine)
    assert max(len(step.scheduled) for step in scripted(engine).steps) <= rows
    assert scripted(engine).max_rows <= rows


@pytest.mark.covers("C24")
def test_blocks_come_back_whatever_ends_a_request() -> None:
    """Guards against blocks that are lost, or given to two: a hundred times as many requests as there is memory for
    end by length, by a stop token, by a cancellation and by an error."""
    engine = make_engine(num_blocks=12, max_num_seqs=3, max_model_len=96)
    for index in range(300):
        stop = expected_outputs(prompt_of(20, index), 4)[3:] if index % 4 == 1 else []
        engine.add_request(request(str(index), prompt_of(20, index), 6, stop_token_ids=stop))
        failing = {str(index)} if str(index).endswith("3") else set()
        scripted(engine).fail = lambda step, failing=failing: failing  # type: ignore[misc]
        engine.step()
        if index % 4 == 2:
            engine.abort(str(index))
        engine.check_integrity()
    run(engine)
    assert engine.kv_cache.num_free == engine.kv_cache.num_blocks == 12


@pytest.mark.covers("C24")
@pytest.mark.parametrize("temperature", [1.0001, 2.0, 100.0])
def test_temperatures_above_one_are_allowed(temperature: float) -> None:
    """Guards against the original's range, which ended at 1."""
    engine = rows_engine()
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=3)
    asked = InProcessClient(engine, model_info(128, VOCAB), None)
    asked.add_request(None, [1, 2], params)
    assert asked.step(9)[-1].finished


@pytest.mark.covers("C7")
def test_the_executor_sees_tables_and_nothing_of_the_cache_manager() -> None:
    """Guards against a second hand in the bookkeeping: what crosses the interface are copies of block tables."""
    assert {name for name in vars(Executor) if not name.startswith("_")} == {"submit", "collect", "shutdown"}
    engine = make_engine()
    engine.add_request(request("a", prompt_of(40), 20))
    engine.step()
    (new,) = scripted(engine).steps[0].new_requests
    new.block_tables[0].clear()
    scripted(engine).rows["a"].tables[0][0] = 0
    assert len(engine.kv_cache.tables(engine._requests["a"])[0]) == 3
    engine.check_integrity()
