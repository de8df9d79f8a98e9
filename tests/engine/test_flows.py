"""Who gets the rows: a call with many choices, and a short one beside it."""

from typing import Any

import pytest

from penstock.engine.engine import Engine
from penstock.engine.scheduler import LEAST_OF_A_FLOW, SHARED_S
from penstock.interface.step import SchedulerOutput
from tests.fakes_engine import expected_outputs, make_engine, request, token_ids

SHORT = [5, 6, 7]


def order_of_ends(engine: Engine) -> list[str]:
    """Run to the end; the requests in the order in which they finished."""
    ended = []
    while engine.has_work:
        ended += [output.request_id for output in engine.step() if output.finish_reason]
        engine.check_integrity()
    return ended


def add_call(engine: Engine, number: int, choices: int, max_tokens: int = 90) -> None:
    for choice in range(choices):
        name = f"{number}-{choice}"
        engine.add_request(request(name, [number, 2, 3], max_tokens, choice=choice, flow=str(number)))


@pytest.mark.parametrize("num_blocks", [400, 20])
def test_a_call_of_many_choices_keeps_no_short_one_out(num_blocks: int) -> None:
    """Guards against three calls with as many choices as there are rows each: a short request waited for all of them,
    for rows in the first case, for blocks in the second."""
    engine = make_engine(num_blocks=num_blocks, max_num_seqs=8, max_model_len=112)
    for number in (1, 2, 3):
        add_call(engine, number, 8)
    for _ in range(20):
        engine.step()
    engine.add_request(request("short", SHORT, max_tokens=5, flow="short"))
    outputs = [output for _ in range(10) for output in engine.step() if output.request_id == "short"]
    assert token_ids(outputs) == expected_outputs(SHORT, 5)
    assert len(order_of_ends(engine)) == 24


def test_a_step_has_a_part_of_a_flows_prompts_while_others_are_there() -> None:
    """Guards against steps full of one key's long prompts, for each of which the others' first tokens wait; against a
    limit where nobody else is there, or has been a moment ago; and against a flow that waits because another has had
    its part."""
    now = [5.0]
    sizes = {"num_blocks": 4000, "max_num_seqs": 8, "max_num_batched_tokens": 1024, "max_model_len": 2048}
    engine = make_engine(**sizes, clock=lambda: now[0])
    plans: list[dict[str, int]] = []
    schedule = engine.scheduler.schedule

    def noted(*args: Any, **options: Any) -> SchedulerOutput:
        plan = schedule(*args, **options)
        plans.append({item.request_id: item.num_new_tokens for item in plan.scheduled})
        return plan

    engine.scheduler.schedule = noted  # type: ignore[method-assign]
    for index in range(4):
        engine.add_request(request(f"long{index}", [index + 10] * 600, max_tokens=1, flow="crowd"))
    engine.step()
    assert plans[-1] == {"long0": 600, "long1": 424}
    for flow in ("a", "b"):
        engine.add_request(request(flow, SHORT, max_tokens=9, flow=flow))
    engine.step()
    assert plans[-1] == {"long1": LEAST_OF_A_FLOW, "a": 3, "b": 3}
    engine.step()
    assert plans[-1] == {"long1": 48, "long2": LEAST_OF_A_FLOW - 48, "a": 1, "b": 1}
    while plans[-1].keys() & {"a", "b"}:
        engine.step()
    assert sum(plans[-1].values()) == LEAST_OF_A_FLOW
    engine.add_request(request("long4", [9] * 2000, max_tokens=1, flow="crowd"))
    now[0] += SHARED_S
    engine.step()
    assert sum(plans[-1].values()) == 1024
    order_of_ends(engine)


def test_as_many_flows_as_arrive_have_rows_in_the_next_step() -> None:
    """Guards against keys that get their rows one step after the other from a key that has all of them."""
    engine = make_engine(num_blocks=400, max_num_seqs=8, max_model_len=112)
    add_call(engine, 1, 12)
    engine.step()
    for flow in ("a", "b", "c"):
        engine.add_request(request(flow, SHORT, max_tokens=1, flow=flow))
    assert {output.request_id for output in engine.step() if output.finish_reason} == {"a", "b", "c"}
    assert engine.stats().num_preemptions_total == 3
    order_of_ends(engine)


def test_a_call_alone_has_every_row() -> None:
    """Guards against fairness that leaves rows empty while nobody else wants them."""
    engine = make_engine(num_blocks=400, max_num_seqs=8)
    add_call(engine, 1, 16)
    for _ in range(3):
        engine.step()
    assert engine.stats().num_running == 8
    order_of_ends(engine)
    assert engine.stats().num_preemptions_total == 0


def test_many_short_calls_do_not_starve_a_long_one() -> None:
    """Guards against a call that loses each row to the next arrival: it keeps its last one, and goes on."""
    engine = make_engine(num_blocks=400, max_num_seqs=4)
    add_call(engine, 1, 4, max_tokens=30)
    long_ended = short_added = 0
    while long_ended < 4:
        while engine.stats().num_waiting < 6:
            engine.add_request(request(f"short{short_added}", SHORT, max_tokens=8, flow=f"short{short_added}"))
            short_added += 1
        long_ended += sum(output.request_id.startswith("1-") for output in engine.step() if output.finish_reason)
        assert short_added < 1000, "the long call does not get on"


def test_one_row_each_is_not_taken() -> None:
    """Guards against preempting a call for another one where each has but one row: that would help nobody."""
    engine = make_engine(num_blocks=400, max_num_seqs=4)
    for index in range(12):
        engine.add_request(request(f"short{index}", SHORT, max_tokens=20, flow=f"short{index}"))
    assert order_of_ends(engine) == [f"short{index}" for index in range(12)]
    assert engine.stats().num_preemptions_total == 0


def test_the_calls_of_one_key_share_its_turns() -> None:
    """Guards against a key that gets more of the machine by sending more calls."""
    engine = make_engine(num_blocks=400, max_num_seqs=4)
    for index in range(20):
        engine.add_request(request(f"{index + 10}-0", [index + 10, 2, 3], max_tokens=20, flow="crowd"))
    engine.step()
    for index in range(2):
        engine.add_request(request(f"short{index}", SHORT, max_tokens=20, flow="other"))
    ended = order_of_ends(engine)
    assert max(ended.index("short0"), ended.index("short1")) <= 7  # in order of arrival: 21


def test_without_flows_requests_come_in_order() -> None:
    """Guards against a batch whose choices are torn apart: those of one prompt share its cache and its reads."""
    engine = make_engine(num_blocks=400, max_num_seqs=4)
    for index in range(12):
        engine.add_request(request(f"{index // 4}-{index % 4}", [index // 4, 2, 3], max_tokens=9, choice=index % 4))
    assert order_of_ends(engine) == [f"{index // 4}-{index % 4}" for index in range(12)]
