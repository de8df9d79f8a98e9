"""What is recorded of an engine is what it did: on the scripted executor, whose cache is honest about every block."""

import copy
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import InvalidRequestError, SamplingParams, StructuredOutputsParams
from penstock.client.recorder import Recorder
from penstock.client.records import (
    MAGIC,
    Begun,
    Bundle,
    Computed,
    EngineDescription,
    Introduced,
    Planned,
    Ring,
    decode,
    make_bundle,
    pack,
    unpack_ids,
    without_text,
)
from penstock.interface.messages import EngineRequest
from penstock.interface.step import CacheGroup, NewRequest, ScheduledRequest, SchedulerOutput
from penstock_lab.bench.record_audit import Audit
from penstock_lab.bench.record_history import EngineStart, RecordedStep, history, unpack
from penstock_lab.prove.recompute import ReplayReport, compute, num_scratch
from penstock_lab.prove.replay import check_bundle
from tests.fakes_engine import VOCAB, ScriptedExecutor, make_engine, request

SHAPES = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(11, 24),
        "max_num_seqs": st.integers(1, 4),
        "max_num_batched_tokens": st.integers(5, 70),
        "windows": st.sampled_from([(None,), (20,), (None, 9), (33, 1)]),
        "sinks": st.sampled_from([0, 20]),
        "enable_prefix_caching": st.booleans(),
        "user_rows": st.booleans(),
    }
)
ARRIVALS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 90), st.integers(1, 25), st.integers(0, 5), st.booleans()),
    min_size=1,
    max_size=14,
)


def recorded(shape: dict, num_bytes: int = 2**20, fail=lambda step: set()):
    """An engine whose steps are recorded, its executor and its ring."""
    shape = {**shape, "max_num_batched_tokens": max(shape["max_num_batched_tokens"], shape["max_num_seqs"])}
    engine, ring = make_engine(max_model_len=128, **shape), Ring.create(num_bytes)
    executor = engine.executor
    executor.fail = fail
    description = EngineDescription(
        system_fingerprint="penstock-0-scripted",
        options={"model": "demo"},
        groups=executor.groups,
        vocab_size=VOCAB,
        max_model_len=128,
        max_num_seqs=shape["max_num_seqs"],
        max_num_batched_tokens=shape["max_num_batched_tokens"],
    )
    engine.observe(Recorder(ring, description))
    return engine, executor, ring


def drive(engine, arrivals, num_steps: int = 60) -> None:
    """Requests arrive before the step that they name; some are aborted two steps later."""
    for step in range(num_steps):
        for index, (when, length, count, prefix, leaves) in enumerate(arrivals):
            if when == step:
                prompt = [prefix] * min(40, length) + [(7 * index + i) % VOCAB for i in range(max(0, length - 40))]
                engine.add_request(request(f"r{index}", prompt, count))
            if when == step - 2 and leaves:
                engine.abort(f"r{index}")
        engine.step()


def simple(num_bytes: int = 2**20, num_later: int = 0, **shape):
    """A recorded run: two requests that share a prefix, a third that is preempted, and others that come later."""
    base = {"num_blocks": 12, "max_num_seqs": 3, "max_num_batched_tokens": 64, "windows": (None,)}
    engine, executor, ring = recorded({**base, "enable_prefix_caching": True, "user_rows": False, **shape}, num_bytes)
    later = [(5 + 5 * index, 50, 20, index % 3, False) for index in range(num_later)]
    drive(engine, [(0, 60, 50, 1, False), (3, 60, 50, 1, False), (4, 30, 50, 2, False), *later], 60 + 10 * num_later)
    return make_bundle(ring.read(), "a test").decoded(), executor


def replayed(bundle: Bundle) -> ReplayReport:
    report = ReplayReport("")
    engine, num_blocks = check_bundle(bundle, report)
    pairs = zip(engine.groups, num_blocks, strict=True)
    groups = [replace(group, num_blocks=used + num_scratch(group, engine)) for group, used in pairs]
    compute(bundle, ScriptedExecutor(groups), report, num_blocks)
    return report


@settings(max_examples=60)
@given(shape=SHAPES, arrivals=ARRIVALS)
def test_the_record_is_what_was_planned_and_computed(shape, arrivals):
    """Guards against a field that is lost or wrong on its way through the columns of a record."""
    engine, executor, ring = recorded(shape)
    drive(engine, arrivals)
    events = list(history(make_bundle(ring.read(), "").decoded().records)) if ring.read() else []
    assert [event.plan for event in events if isinstance(event, RecordedStep)] == executor.steps


@settings(max_examples=80)
@given(shape=SHAPES, arrivals=ARRIVALS, num_bytes=st.integers(5_000, 35_000))
def test_a_ring_that_turned_over_replays_from_its_middle(shape, arrivals, num_bytes):
    """Guards against a segment whose start misses a request, a token or a block, and against cached blocks, windows and
    rings that are restored wrongly: the scripted cache checks every position that a token can see."""
    engine, _, ring = recorded(shape, num_bytes)
    drive(engine, arrivals)
    if not ring.read():
        return
    report = replayed(make_bundle(ring.read(), "").decoded())
    assert report.passed, (report.differences, report.findings)


def test_a_turned_over_ring_restores_tokens():
    """Guards against the property above holding because nothing ever turned over."""
    bundle, executor = simple(num_bytes=20_000, num_later=10)
    report = replayed(bundle)
    assert report.passed
    assert 0 < report.steps < len(executor.steps)
    assert report.restored > 20


def test_too_small_a_ring_leaves_a_gap_and_no_error():
    engine, executor, ring = recorded(
        {"num_blocks": 12, "max_num_seqs": 3, "max_num_batched_tokens": 64, "windows": (None,)}, 2400
    )
    drive(engine, [(0, 90, 20, 1, False), (30, 5, 20, 1, False)], num_steps=320)
    assert len(executor.steps) > 40
    for segment in ring.read():
        assert replayed(make_bundle([segment], "").decoded()).passed


def test_failed_steps_and_requests_are_recorded():
    """Guards against a replay that calls a failure the same as a result."""
    shape = {"num_blocks": 12, "max_num_seqs": 3, "max_num_batched_tokens": 64, "windows": (None,)}

    def fail(step):
        if step.step_id == 5:
            raise RuntimeError("the whole step")
        return {"r1"} if step.step_id == 3 else set()

    engine, _, ring = recorded(shape, fail=fail)
    drive(engine, [(0, 10, 20, 1, False), (0, 12, 20, 2, False), (8, 12, 20, 2, False)])
    bundle = make_bundle(ring.read(), "").decoded()
    steps = [event for event in history(bundle.records) if isinstance(event, RecordedStep)]
    assert steps[5].error == "RuntimeError: the whole step"
    assert steps[3].results.errors == {1: "scripted"}
    (difference,) = replayed(bundle).differences  # the replaying executor fails nothing
    assert (difference.step_id, difference.request_id, difference.what) == (3, "r1", "error")


def test_the_step_that_an_engine_dies_in_is_in_the_record():
    engine, executor, ring = recorded(
        {"num_blocks": 12, "max_num_seqs": 3, "max_num_batched_tokens": 64, "windows": (None,)}
    )

    def die(step):
        if step.step_id == 4:
            raise SystemExit
        return set()

    executor.fail = die
    with pytest.raises(SystemExit):
        drive(engine, [(0, 10, 20, 1, False)])
    bundle = make_bundle(ring.read(), "").decoded()
    last = list(history(bundle.records))[-1]
    assert isinstance(last, RecordedStep)
    assert (last.plan.step_id, last.unfinished) == (4, True)
    assert "step 4, in which the engine ended, was computed here" in replayed(bundle).remarks[-1]


def test_a_changed_token_is_named():
    """Guards against a comparison that always agrees."""
    bundle, _ = simple()
    at = next(i for i, item in enumerate(bundle.records) if isinstance(item, Computed) and item.step_id == 9)
    changed = copy.deepcopy(bundle.records[at])
    changed.token_ids[0][0] ^= 1
    records = [*bundle.records[:at], changed, *bundle.records[at + 1 :]]
    report = replayed(msgspec.structs.replace(bundle, records=records))
    assert [(item.step_id, item.request_id, item.what) for item in report.differences] == [(9, "r0", "token ids")]
    assert report.steps == 10


def test_a_block_that_two_requests_write_is_found():
    """Guards against an audit that finds nothing: the block of another request is given out again."""
    bundle, _ = simple()
    records = list(bundle.records)
    at = next(i for i, item in enumerate(records) if isinstance(item, Planned) and item.new and item.step_id > 3)
    other = next(item for item in records if isinstance(item, Planned) and item.new).new[0]
    new = records[at].new[0]
    stolen = msgspec.structs.replace(new, block_tables=[[other.block_tables[0][-1], *new.block_tables[0][1:]]])
    records[at] = msgspec.structs.replace(records[at], new=[stolen])
    report = ReplayReport("")
    check_bundle(msgspec.structs.replace(bundle, records=records), report)
    assert "holds too" in report.findings[0]


@pytest.mark.parametrize("wrong", [None, 0, 1])
def test_a_block_with_another_prefix_is_found_in_every_cache_group(wrong: int | None) -> None:
    """Guards against checking the prefix in the first cache group only: here the second has a window."""
    groups = [CacheGroup((0,), None, 64, 16), CacheGroup((1,), 32, 64, 16)]
    audit = Audit(has_text=True)
    audit.start(EngineStart(EngineDescription("f", {}, groups, 1000, 256, 8, 256), 0, []))
    params, shared, other = SamplingParams(temperature=0.0, max_tokens=5), list(range(32)), list(range(100, 132))

    def step(number: int, new: list[NewRequest], num_cached: int) -> None:
        scheduled = [
            ScheduledRequest(item.request_id, num_cached, 33 - num_cached, [[], []], [0, 0], 1) for item in new
        ]
        results = Computed(number, 1, [[1] for _ in new], [None] * len(new), {}, {})
        audit.step(RecordedStep(SchedulerOutput(number, new, scheduled, []), 0.0, results))

    def request(name: str, prefix: list[int], *tables: list[int]) -> NewRequest:
        return NewRequest(name, [*prefix, 7], 33, params, 0, list(tables), None)

    step(1, [request("a", shared, [0, 1, 4], [0, 1, 4]), request("b", other, [2, 3, 5], [2, 3, 5])], 0)
    step(2, [request("c", shared, *([2, 3, 6] if group == wrong else [0, 1, 6] for group in range(2)))], 32)
    found = [] if wrong is None else [f"block {block} of cache group {wrong} holds another prefix" for block in (2, 3)]
    assert len(audit.findings) == len(found)
    assert all(expected in finding for expected, finding in zip(found, audit.findings, strict=True))


# --- without the text -------------------------------------------------------------------------------------------------


def all_ids(bundle: Bundle) -> dict[str, list[int]]:
    """Every token id in a bundle, by request."""
    found: dict[str, list[int]] = {}
    for record in bundle.records:
        new = record.new if isinstance(record, Planned) else record.requests if isinstance(record, Begun) else []
        for item in new:
            found[item.request_id] = unpack_ids(item.token_ids)
    for event in history(bundle.records):
        if isinstance(event, RecordedStep) and event.results is not None:
            for item, ids in zip(event.plan.scheduled, event.results.token_ids, strict=True):
                found[item.request_id] = [*found[item.request_id], *ids]
    return found


def test_without_text_no_token_can_be_read_and_prefixes_are_still_shared():
    bundle, _ = simple()
    hidden, again = without_text(bundle), without_text(bundle)
    ids, names, others = all_ids(bundle), all_ids(hidden), all_ids(again)
    assert {key: len(value) for key, value in ids.items()} == {key: len(value) for key, value in names.items()}
    assert names["r0"][:40] == names["r1"][:40]  # as in the text
    assert len(set(names["r0"][:40])) == 40  # though it repeats one token
    assert names["r0"] != others["r0"]  # the key is kept nowhere
    assert all(item.checksums == [None] * len(item.token_ids) for item in hidden.records if isinstance(item, Computed))
    report = ReplayReport("")
    check_bundle(hidden, report)
    assert report.passed
    assert report.steps == sum(isinstance(item, Planned) for item in bundle.records)


def test_without_text_parameters_and_errors_say_nothing():
    secret = SamplingParams(
        temperature=0.0, max_tokens=9, stop="secret", bad_words=["secret"], stop_token_ids=[77], logit_bias={77: 1.0}
    )

    def fail(step):
        if step.step_id == 3:
            raise RuntimeError("secret")
        return set()

    shape = {"num_blocks": 12, "max_num_seqs": 3, "max_num_batched_tokens": 64, "windows": (None,)}
    engine, _, ring = recorded(shape, fail=fail)
    engine.add_request(EngineRequest("a", [4, 5, 6], secret))
    while engine.has_work:
        engine.step()
    bundle = make_bundle(ring.read(), "").decoded()
    assert b"secret" in msgspec.msgpack.encode(bundle)
    hidden = without_text(bundle)
    assert b"secret" not in msgspec.msgpack.encode(hidden)
    params = next(item.new[0].params for item in hidden.records if isinstance(item, Planned))
    assert params == SamplingParams(temperature=0.0, max_tokens=9)


# --- hostile files ----------------------------------------------------------------------------------------------------

GOOD, _ = simple(num_bytes=30_000)
DATA = pack(GOOD)


def test_a_bundle_survives_its_file():
    assert unpack(DATA) == GOOD


@settings(max_examples=200)
@given(data=st.data())
def test_damaged_files_are_refused(data):
    at = data.draw(st.integers(0, len(DATA) - 1))
    cut = data.draw(st.booleans())
    damaged = DATA[:at] if cut else DATA[:at] + bytes([DATA[at] ^ data.draw(st.integers(1, 255))]) + DATA[at + 1 :]
    with pytest.raises(InvalidRequestError, match="bundle"):
        unpack(damaged)


NUMBERS = st.one_of(st.integers(-2, 40), st.sampled_from([-(2**63), 2**31, 2**32, 2**63, 2**64 - 1]), st.none())
VALUES = st.one_of(NUMBERS, st.text(max_size=3), st.binary(max_size=9), st.lists(NUMBERS, max_size=3))


@settings(max_examples=400)
@given(data=st.data())
def test_hostile_records_are_refused_or_replayed(data):
    """Guards against a crash, or an access beyond the cache, by a file whose checksum is right and content is not."""
    value = msgspec.msgpack.decode(msgspec.msgpack.encode(GOOD))
    for _ in range(data.draw(st.integers(1, 3))):
        place, key = value, "records"
        while isinstance(place[key], list | dict) and place[key] and data.draw(st.integers(0, 9)):
            place = place[key]
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = data.draw(st.sampled_from(keys))
        place[key] = data.draw(VALUES)
    try:
        bundle = msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=Bundle)
    except msgspec.MsgspecError:
        return
    if not bundle.records or not isinstance(bundle.records[0], Begun):
        return
    try:
        replayed(bundle)
    except InvalidRequestError:
        return


def test_a_bundle_of_another_format_says_so():
    other = pack(msgspec.structs.replace(GOOD, format=99))
    with pytest.raises(InvalidRequestError, match="format 99"):
        unpack(other)
    with pytest.raises(InvalidRequestError, match="not a record"):
        unpack(b"PK" + MAGIC)


def test_starts_carry_the_open_requests():
    bundle, _ = simple(num_bytes=20_000, num_later=10)
    start = next(iter(history(bundle.records)))
    assert isinstance(start, EngineStart)
    assert start.requests
    assert all(isinstance(item, Introduced) for item in bundle.records[0].requests)


def test_a_request_takes_little_room_and_keeps_its_parameters():
    """Guards against a record filled by default values, as 1,200 bytes of each request once were, and against a
    changed parameter that is not recorded."""
    params = SamplingParams(
        temperature=0.5, max_tokens=9, seed=3, stop=("a", "b"), logit_bias={7: -1.5}, logprobs=0, detokenize=True,
        repetition_penalty=1.2, output_kind="delta", structured_outputs=StructuredOutputsParams(regex="[ab]+"),
    )  # fmt: skip
    engine, _, ring = recorded({"num_blocks": 12, "max_num_seqs": 3, "max_num_batched_tokens": 64, "windows": (None,)})
    engine.add_request(EngineRequest("a", [4, 5, 6], params))
    engine.step()
    bundle = make_bundle(ring.read(), "").decoded()
    (step,) = [item for item in bundle.records if isinstance(item, Planned)]
    assert step.new[0].params == params
    (data,) = [data for segment in ring.read() for data in segment.records if isinstance(decode(data), Planned)]
    assert len(data) < 400


def test_a_recorder_that_fails_is_off_and_nobody_notices(monkeypatch):
    """Guards against a full or broken memory that costs a request its answer, and checksums that nobody reads."""
    engine, executor, _ = recorded({"num_blocks": 12, "max_num_seqs": 3, "max_num_batched_tokens": 64})
    engine.add_request(request("a", [1] * 20, 6))
    engine.step()
    monkeypatch.setattr(Ring, "append", lambda ring, record: {}["broken"])
    outputs = [output for _ in range(8) for output in engine.step()]
    assert [len(output.new_token_ids) for output in outputs] == [1] * 5
    assert engine.stats().num_failed_steps_total == 0
    assert [step.checksum_logits for step in executor.steps] == [True, True, False, False, False, False]
