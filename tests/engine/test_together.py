"""All features on one engine at random: policies, bounded stalls, salts, pins, searches, drafts, failures, steps in
flight."""

from random import Random
from typing import Any

import pytest

from penstock.engine.engine import Engine
from penstock.engine.policies import POLICIES
from penstock.engine.speculation import Speculation
from penstock.errors import InvalidRequestError
from penstock.interface.messages import EngineOutput, EngineRequest
from penstock.interface.outputs import FinishReason
from penstock.interface.step import SchedulerOutput, StepOutput
from penstock_lab.prove.every_draft import EveryDraft
from tests.engine.timed import Clock, Timed, linear_cost
from tests.fakes_drafts import Oracle
from tests.fakes_engine import ScriptedExecutor, expected_outputs, expected_search, make_engine, request, run, token_ids

ENDS = (3, 11)


def make(policy: str, random: Random, window: int | None) -> Engine:
    """An engine short of something, whose steps take time, and sometimes fail."""
    clock = Clock()
    oracle = Oracle(lambda _, ids, count: expected_outputs(ids, count, window), share=0.7, random=random)
    engine = make_engine(
        policy=policy,
        clock=clock,
        max_stall_s=random.choice([None, 0.004, 0.05]),
        num_blocks=random.choice([12, 16, 40]),
        windows=random.choice([(window,), (None, window)]),
        max_num_seqs=random.choice([1, 2, 4, 8]),
        max_num_batched_tokens=random.choice([8, 16, 64]),
        max_model_len=96,
        eos_token_ids=ENDS,
        user_rows=random.random() < 0.2,
        speculation=Speculation(oracle, 5, policy=EveryDraft()),
        depth=random.choice([1, 2, 4]),
    )

    def fail(step: SchedulerOutput) -> set[str]:
        clock.now += linear_cost(step)
        if not engine.scheduler.is_trying and random.random() < 0.02:
            raise MemoryError if random.random() < 0.2 else RuntimeError("scripted")
        return set()

    assert isinstance(engine.executor, ScriptedExecutor)
    engine.executor.fail = fail
    return engine


def a_request(name: str, random: Random) -> EngineRequest:
    prompt = [(random.choice([1, 2]) + 7 * i) % 997 for i in range(random.randint(1, 60))]
    options: dict[str, Any] = {"flow": random.choice(["", "a", "b"]), "priority": random.randint(-2, 2)}
    options |= {"cache_salt": random.choice([None, "s"]), "deadline": random.choice([None, 1010.0])}
    if random.random() < 0.4:
        options |= {"n": random.randint(1, 5), "use_beam_search": True}
    return request(name, prompt, random.randint(1, 25), **options)


def disturb(engine: Engine, random: Random) -> str | None:
    """Preempt, forget, pin or abort; returns what is aborted."""
    what, scheduler = random.random(), engine.scheduler
    if what < 0.05 and scheduler.running:
        scheduler.preempt(random.choice(scheduler.running))
    elif what < 0.06:
        scheduler.reset(engine._requests.values())
    elif what < 0.10:
        try:
            engine.pin("p", [(1 + 7 * i) % 997 for i in range(random.randint(16, 60))])
        except InvalidRequestError:
            engine.unpin("p")
    elif what < 0.11 and engine._requests:
        victim = random.choice(list(engine._requests.values())).source_id
        return victim if engine.abort(victim) else None
    return None


def check(source: EngineRequest, outputs: list[EngineOutput], window: int | None) -> None:
    assert outputs[-1].finish_reason is not None
    assert outputs[-1].error is None
    if source.params.use_beam_search:
        assert outputs[-1].hypotheses == expected_search(source.prompt_token_ids, source.params, ENDS, window)
        return
    wanted = expected_outputs(source.prompt_token_ids, source.params.max_tokens or 0, window)
    stop = next((index + 1 for index, token in enumerate(wanted) if token in ENDS), len(wanted))
    assert token_ids(outputs) == wanted[:stop]


@pytest.mark.covers("C19")
@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("seed", range(4))
def test_all_at_once_changes_nothing(policy: str, seed: int) -> None:
    """Guards against features that are right alone and wrong together: a wrong token or search, a lost block, a request
    that never ends, and books of the policy or of the preempted ones that are off."""
    random = Random(seed)
    window = random.choice([None, 20])
    engine = make(policy, random, window)
    asked: dict[str, EngineRequest] = {}
    found: dict[str, list[EngineOutput]] = {}
    for number in range(4000):
        if number < 60 and random.random() < 0.25:
            source = a_request(str(number), random)
            try:
                engine.add_request(source)
                asked[source.request_id] = source
            except InvalidRequestError:
                continue
        asked.pop(disturb(engine, random) or "", None)
        try:
            for output in engine.step():
                found.setdefault(output.request_id, []).append(output)
        except MemoryError:
            pass
        engine.check_integrity()
        scheduler = engine.scheduler
        assert scheduler.num_preempted == sum(item.has_run for item in scheduler.waiting)
        rows = [item.flow for item in scheduler.running if item.flow]
        assert dict(scheduler.policy.rows) == {flow: rows.count(flow) for flow in rows}  # type: ignore[attr-defined]
        if number >= 60 and not engine.has_work:
            break
    assert not engine.has_work, "a request waits for ever"
    for name, source in asked.items():
        check(source, found[name], window)
    engine.unpin("p")
    assert engine.kv_cache.num_free == engine.kv_cache.num_blocks


@pytest.mark.parametrize("policy", list(POLICIES))
def test_a_search_among_streams_does_not_wait_for_prompts_to_gather(policy: str) -> None:
    """Guards against length classes that let a search wait CLASS_AGING_S for each token, for beams without a row."""
    timed = Timed.make(policy=policy, max_num_seqs=10, num_blocks=300, max_model_len=600)
    for index in range(8):
        timed.add(request(f"stream {index}", [index, 5], 300, ignore_eos=True))
    timed.step()
    timed.add(request("search", [1, 2, 3], 20, n=4, use_beam_search=True, ignore_eos=True))
    timed.run()
    assert timed.ended["search"] - timed.came["search"] < 4


@pytest.mark.parametrize("malformed", [False, True])
def test_a_missing_result_of_a_request_with_drafts_costs_that_request_alone(malformed: bool) -> None:
    """Guards against counting accepted drafts in a result that is not there, or is none, which ended the engine."""
    oracle = Oracle(lambda _, ids, count: expected_outputs(ids, count))
    engine = make_engine(speculation=Speculation(oracle, 4, policy=EveryDraft()))
    collect = engine.executor.collect

    def broken(handle: Any) -> StepOutput:
        output = collect(handle)
        if handle.step_id == 2:
            if malformed:
                output.results["a"].new_token_ids = None  # type: ignore[assignment]
            else:
                del output.results["a"]
        return output

    engine.executor.collect = broken  # type: ignore[method-assign]
    for name in "ab":
        engine.add_request(request(name, [ord(name)], 20))
    found = run(engine)
    assert found["a"][-1].finish_reason is FinishReason.ERROR
    assert token_ids(found["b"]) == expected_outputs([ord("b")], 20)


def test_a_search_whose_bookkeeping_breaks_at_its_end_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an error at the end of a search, which has no beams any more, that ends the engine."""
    engine = make_engine()
    for name, search in (("a", True), ("b", False)):
        engine.add_request(request(name, [ord(name)], 1 if search else 8, use_beam_search=search, n=3 if search else 1))
    with monkeypatch.context() as patch:
        patch.setattr(engine.kv_cache, "free", lambda _: 1 / 0)
        (failed, *_) = [output for output in engine.step() if output.request_id == "a"]
    assert failed.finish_reason is FinishReason.ERROR
    assert token_ids(run(engine)["b"]) == expected_outputs([ord("b")], 8)[1:]
