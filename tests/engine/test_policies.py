"""Who comes next, and who gives way: the policies on a virtual clock, without a model."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import SCHEDULING_POLICIES
from penstock.engine import policies
from penstock.engine.policies import CLASS_AGING_S, PATIENCE_S, POLICIES, PRIORITY_AGING_S, Fair
from penstock.errors import InvalidRequestError
from tests.engine.test_engine import prompt_of
from tests.engine.timed import Timed
from tests.fakes_engine import expected_outputs, make_engine, request, run, token_ids

NAMES = list(POLICIES)


def order_of(timed: Timed, times: dict[str, float]) -> list[str]:
    timed.run()
    return sorted(times, key=lambda name: times[name])


def test_the_option_has_every_policy() -> None:
    """Guards against a policy that no user can choose, or an option that the engine does not know."""
    assert set(SCHEDULING_POLICIES) == set(POLICIES)
    with pytest.raises(InvalidRequestError, match="scheduling_policy"):
        make_engine(policy="fastest")


# --- every policy ---------------------------------------------------------------------------------------------------

REQUESTS = st.lists(
    st.tuples(st.integers(1, 120), st.integers(1, 30), st.integers(0, 12), st.integers(-2, 2), st.sampled_from("ab ")),
    min_size=1,
    max_size=12,
)


@settings(max_examples=30)
@given(
    requests=REQUESTS,
    policy=st.sampled_from(NAMES),
    chunk=st.integers(5, 70),
    rows=st.integers(1, 5),
    blocks=st.integers(11, 40),
    stall=st.sampled_from([None, 0.005, 0.05]),
    aborted=st.integers(0, 11),
)
def test_any_order_gives_every_request_its_solo_tokens(
    requests: list[Any], policy: str, chunk: int, rows: int, blocks: int, stall: float | None, aborted: int
) -> None:
    """Guards against a policy that changes a token, loses a request, or starts what there is no row for."""
    timed = Timed.make(
        policy=policy, num_blocks=blocks, max_num_seqs=rows, max_num_batched_tokens=max(chunk, rows),
        max_model_len=160, max_stall_s=stall,
    )  # fmt: skip
    outputs: dict[str, list[Any]] = {}
    pending = sorted(enumerate(requests), key=lambda item: item[1][2])
    num_steps = 0
    while pending or timed.engine.has_work:
        while pending and (pending[0][1][2] <= num_steps or not timed.engine.has_work):
            index, (length, count, _, priority, flow) = pending.pop(0)
            due = timed.clock.now + 3 * priority if index % 2 else None
            timed.add(
                request(str(index), prompt_of(length, index), count, flow=flow.strip(), priority=priority, deadline=due)
            )
        for output in timed.step():
            outputs.setdefault(output.request_id, []).append(output)
        if num_steps == 3:
            timed.engine.abort(str(aborted))
        timed.engine.check_integrity()
        assert len(timed.engine.scheduler.running) <= rows
        num_steps += 1
        assert num_steps < 3000, "it does not come to an end"
    for index, (length, count, *_) in enumerate(requests):
        found = token_ids(outputs.get(str(index), []))
        expected = expected_outputs(prompt_of(length, index), count)[: 160 - length]
        assert found == expected or (index == aborted and found == expected[: len(found)])
    assert timed.engine.kv_cache.num_free == timed.engine.kv_cache.num_blocks


@pytest.mark.parametrize("policy", NAMES)
def test_nothing_starves(policy: str) -> None:
    """Guards against a request that never runs because others that suit the policy better keep coming, more of them
    than the machine can do. The victims have the last place in each order: the shortest prompt and the longest one, the
    highest priority, a late deadline, and a flow with the most rows."""
    timed = Timed.make(lambda step: 0.5, policy=policy, num_blocks=60, max_num_seqs=2, max_model_len=300)
    timed.add(request("victim", [1, 2], 3, flow="victim", priority=3, deadline=timed.clock.now + 100))
    timed.add(request("victim of its own", [1, 3], 3, flow="crowd", priority=3))
    timed.add(request("long victim", prompt_of(280), 3, flow="long", priority=3))
    count, victims = 0, {"victim", "victim of its own", "long victim"}
    while not victims <= timed.ended.keys():
        while timed.engine.stats().num_waiting < 6:
            options = {
                "flow": ("crowd", f"lone {count}", "")[count % 3],
                "priority": 0,
                "deadline": timed.clock.now + 5,
            }
            timed.add(request(str(count), prompt_of(210, count), 4, **options))
            count += 1
        timed.step()
        assert timed.clock.now < 1300, "it starves"
    longest = max(timed.wait_of(name) for name in victims)
    assert longest < {"priority": 70, "deadline": 110}.get(policy, 30)


@pytest.mark.parametrize("policy", NAMES)
def test_a_flood_costs_another_key_at_most_half_of_the_machine(policy: str) -> None:
    """Guards against a key that gets more of the machine by asking more: beside one that sends 50 times as much, the
    first token of another comes within twice the time that it takes alone with half the rows and half of each step."""
    calm = [(0.4 * index, prompt_of(20, index), 5) for index in range(12)]
    alone = first_tokens(calm, [], policy=policy, max_num_seqs=4, max_num_batched_tokens=32)
    flood = [(0.008 * index, prompt_of(20, 500 + index), 5) for index in range(600)]
    found = first_tokens(calm, flood, policy=policy, max_num_seqs=8, max_num_batched_tokens=64)
    assert sum(found) <= 2 * sum(alone)
    assert sorted(found)[len(found) * 9 // 10] <= 2 * max(alone)


def first_tokens(calm: list[Any], flood: list[Any], **options: Any) -> list[float]:
    """The times to the first token of the calm key's requests: (time of arrival, prompt, outputs) each."""
    timed = Timed.make(num_blocks=200, enable_prefix_caching=False, **options)
    start = timed.clock.now
    arrivals = sorted([(at, "calm", *rest) for at, *rest in calm] + [(at, "flood", *rest) for at, *rest in flood])
    names: list[str] = []
    while arrivals or timed.engine.has_work:
        while arrivals and (start + arrivals[0][0] <= timed.clock.now or not timed.engine.has_work):
            at, key, prompt, count = arrivals.pop(0)
            timed.clock.now = max(timed.clock.now, start + at)
            timed.add(request(f"{key} {len(timed.came)}", prompt, count, flow=key))
            names += [f"{key} {len(timed.came) - 1}"] * (key == "calm")
        timed.step()
        if len(timed.first.keys() & set(names)) == len(calm):
            break
    return [timed.wait_of(name) for name in names]


@pytest.mark.parametrize("policy", NAMES)
def test_a_failed_step_keeps_the_policys_books(policy: str) -> None:
    """Guards against a policy that counts requests which are gone, after bookkeeping that broke off half-way."""
    engine = make_engine(policy=policy, max_num_seqs=2, num_blocks=30)
    for index in range(6):
        engine.add_request(request(str(index), prompt_of(30, index), 5, flow=f"flow {index % 2}"))
    engine.step()
    engine.scheduler.reset(engine._requests.values())
    assert {name for name, found in run(engine).items() if found[-1].finish_reason} == {str(i) for i in range(6)}
    books = vars(engine.scheduler.policy)
    assert not any(books.get(name) for name in ("rows", "_queues", "_left"))


# --- priority -------------------------------------------------------------------------------------------------------


def test_the_lowest_number_comes_first_and_takes_a_row() -> None:
    """Guards against an urgent request that waits for those that are not: it takes the row of the least urgent one."""
    timed = Timed.make(policy="priority", max_num_seqs=2)
    for index, priority in enumerate([5, 1, 0, 5, -3]):
        timed.add(request(str(index), prompt_of(10, index), 40, priority=priority))
    assert order_of(timed, timed.first) == ["4", "2", "1", "0", "3"]
    timed = Timed.make(policy="priority", max_num_seqs=2)
    for name, priority in (("a", 1), ("b", 2)):
        timed.add(request(name, prompt_of(10, ord(name)), 40, priority=priority))
    for _ in range(4):
        timed.step()
    timed.add(request("urgent", prompt_of(10), 5, priority=0))
    assert order_of(timed, timed.ended)[0] == "urgent"
    assert timed.wait_of("urgent") < 0.1
    assert timed.engine.stats().num_preemptions_total == 1
    assert timed.first["b"] < timed.first["urgent"] < timed.ended["a"] < timed.ended["b"]


def test_equal_priorities_take_no_row_from_each_other() -> None:
    """Guards against rows that change hands for ever: waiting alone does not make anybody more urgent than a peer."""
    timed = Timed.make(policy="priority", max_num_seqs=2)
    timed.cost = lambda step: 0.1
    for index in range(6):
        timed.add(request(str(index), prompt_of(10, index), 80, flow=str(index), priority=7))
    timed.run()
    assert timed.clock.now > 1000 + 2 * PRIORITY_AGING_S
    assert timed.engine.stats().num_preemptions_total == 0


def test_waiting_outweighs_priority() -> None:
    """Guards against aging that does nothing: a request waits for one that is a level more urgent only while that one
    came less than PRIORITY_AGING_S later."""
    timed = Timed.make(lambda step: 0.2, policy="priority", max_num_seqs=1)
    timed.add(request("runs", [1], 80, priority=-9))
    timed.add(request("old", [2], 2, priority=1))
    timed.step()
    for name, after in (("soon", PRIORITY_AGING_S - 1), ("late", PRIORITY_AGING_S + 1)):
        while timed.clock.now < 1000 + after:
            timed.step()
        timed.add(request(name, [ord(name[0])], 2, priority=0))
    assert order_of(timed, timed.first)[1:] == ["soon", "old", "late"]


# --- length classes -------------------------------------------------------------------------------------------------


@pytest.mark.covers("C3")
def test_the_longest_class_comes_first() -> None:
    """Guards against classes that are not three, or are taken in another order."""
    timed = Timed.make(policy="length_classes", max_num_seqs=1, max_model_len=300, num_blocks=100)
    for length in (10, 110, 205, 99, 290, 100):
        timed.add(request(str(length), prompt_of(length, length), 2))
    assert order_of(timed, timed.first) == ["205", "290", "110", "100", "10", "99"]


@pytest.mark.covers("C3")
def test_a_short_prompt_is_overtaken_for_a_bounded_time() -> None:
    """Guards against the starvation of the original: each CLASS_AGING_S of waiting is worth a class."""
    timed = Timed.make(policy="length_classes", max_num_seqs=1, max_model_len=300, num_blocks=100)
    timed.add(request("short", [1, 2, 3], 2))
    count = 0
    while "short" not in timed.first:
        if timed.engine.stats().num_waiting < 3:
            timed.add(request(f"long {count}", prompt_of(250, count), 2))
            count += 1
        timed.step()
    assert 2 * CLASS_AGING_S <= timed.wait_of("short") <= 2 * CLASS_AGING_S + 2


@pytest.mark.covers("C4")
def test_prompts_are_begun_together() -> None:
    """Guards against a ratio that decides nothing, or is another one than 1.2: while 10 decode, the twelfth waiting
    request starts all of them, and the eleventh does not; one alone waits for its time, or until nothing decodes."""
    timed = Timed.make(lambda step: 0.1, policy="length_classes", max_num_seqs=24, num_blocks=400)
    for index in range(10):
        timed.add(request(f"first {index}", [index, 1], 80))
    timed.step()
    for index in range(12):
        timed.add(request(f"second {index}", [index, 2], 80))
        timed.step()
        assert timed.engine.stats().num_running == (10 if index < 11 else 22)
    timed.add(request("alone", [9, 3], 5))
    timed.run()
    assert CLASS_AGING_S <= timed.wait_of("alone") < CLASS_AGING_S + 0.3


def test_the_ratio_is_an_option() -> None:
    """Guards against prefill_ratio that is accepted and ignored: of the two that wait beside five, half are enough."""
    started = {}
    for ratio in (None, 0.4):
        options = {"policy": "length_classes", "prefill_ratio": ratio, "max_num_seqs": 12, "num_blocks": 200}
        timed = Timed.make(lambda step: 0.1, **options)
        for index in range(5):
            timed.add(request(f"first {index}", [index, 1], 80))
        timed.step()
        for index in range(2):
            timed.add(request(f"second {index}", [index, 2], 80))
        timed.step()
        started[ratio] = timed.engine.stats().num_running
    assert started == {None: 5, 0.4: 7}


# --- fair -----------------------------------------------------------------------------------------------------------


def test_keys_get_equal_amounts_of_work_not_of_requests() -> None:
    """Guards against turns that count requests: a key of long ones gets as many tokens as one of short ones."""
    timed = Timed.make(policy="fair", max_num_seqs=4, num_blocks=200, enable_prefix_caching=False)
    given_: dict[str, int] = {"long": 0, "short": 0}
    count = 0
    while timed.clock.now < 1030:
        for key in given_:
            while sum(item.flow == key for item in timed.engine.scheduler.waiting) < 5:
                length, outputs = (120, 40) if key == "long" else (30, 10)
                timed.add(request(f"{key} {count}", prompt_of(length, count), outputs, flow=key))
                count += 1
        for output in timed.step():
            key = output.request_id.split()[0]
            given_[key] += 2 * len(output.new_token_ids) + (120 if key == "long" else 30) * (output.start_index == 0)
    assert min(given_.values()) > 2000
    assert 0.9 < given_["long"] / given_["short"] < 1.1


def test_a_fork_is_no_new_turn() -> None:
    """Guards against a search that pays, with each token of its beams, for what others have had."""
    timed = Timed.make(policy="fair", max_num_seqs=12, num_blocks=300)
    timed.add(request("search", [1, 2, 3], 30, n=4, use_beam_search=True, ignore_eos=True, flow="a"))
    timed.add(request("stream", [5], 200, ignore_eos=True, flow="b"))
    timed.engine.scheduler.policy.counters["b"] = 10_000  # type: ignore[attr-defined]
    timed.add(request("waits", [6] * 500, 1, flow="b"))
    while "search" not in timed.ended:
        timed.step()
        assert timed.engine.scheduler.policy.counters.get("a", 0) < 10_000  # type: ignore[attr-defined]


def test_idle_time_saves_up_no_turns() -> None:
    """Guards against a key that keeps all others out after an hour of silence, to make up for it."""
    timed = Timed.make(policy="fair", max_num_seqs=2, num_blocks=100)
    for index in range(40):
        timed.add(request(f"busy {index}", prompt_of(30, index), 20, flow="busy"))
    for _ in range(100):
        timed.step()
    for index in range(20):
        timed.add(request(f"new {index}", prompt_of(30, 500 + index), 20, flow="new"))
    firsts = [name for name in order_of(timed, timed.first) if timed.first[name] > timed.came["new 0"]]
    for count in range(8, 30, 2):
        assert 0.3 <= sum(name.startswith("busy") for name in firsts[:count]) / count <= 0.7


def test_counters_of_flows_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against memory that grows with every call: each is a flow of its own."""
    monkeypatch.setattr(policies, "MAX_FLOWS_REMEMBERED", 5)
    engine = make_engine(policy="fair")
    for index in range(30):
        engine.add_request(request(str(index), [1, 2], 2, flow=str(index)))
        run(engine)
    assert isinstance(engine.scheduler.policy, Fair)
    assert len(engine.scheduler.policy.counters) <= 7


def test_counters_of_open_flows_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an engine that dies when all requests have to wait again after a failed step, or when one is
    forked: the counter of a flow was dropped in the moment in which nothing of it ran or waited."""
    monkeypatch.setattr(policies, "MAX_FLOWS_REMEMBERED", 0)
    engine = make_engine(policy="fair", max_num_seqs=8)
    for index in range(4):
        engine.add_request(request(str(index), [index, 2], 9, n=2, use_beam_search=True, flow=f"key {index}"))
    engine.step()
    engine.scheduler.reset(list(engine.scheduler.running))
    assert len(run(engine)) == 4


# --- deadline -------------------------------------------------------------------------------------------------------


def test_what_is_due_first_comes_first() -> None:
    """Guards against deadlines that change nothing; without one, an answer counts as due after PATIENCE_S."""
    timed = Timed.make(policy="deadline", max_num_seqs=1)
    for name, due in (("late", 3 * PATIENCE_S), ("none", None), ("soon", 5.0), ("before none", PATIENCE_S - 1)):
        deadline = None if due is None else timed.clock.now + due
        timed.add(request(name, [len(name)], 2, deadline=deadline))
    assert order_of(timed, timed.ended) == ["soon", "before none", "none", "late"]


# --- what it costs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", NAMES)
def test_a_long_queue_costs_a_step_no_more_than_a_short_one(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a step that looks at all that waits: what is looked at is counted, not timed."""
    engine = make_engine(policy=policy, max_num_seqs=4, num_blocks=200)
    for index in range(1000):
        engine.add_request(request(str(index), [index % 900, 1], 4, flow=f"key {index % 300}", priority=index % 5))
    engine.step()
    chosen = type(engine.scheduler.policy)
    calls, original = [], chosen.rank
    monkeypatch.setattr(chosen, "rank", lambda self, item: calls.append(item) or original(self, item))
    for _ in range(8):
        engine.step()
    assert engine.stats().num_generated_tokens_total > 32
    assert len(calls) < 8 * 40
