"""Salts and pins on a scripted executor: who may read whose cached blocks, and which of them stay."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.engine import Engine
from penstock.errors import InvalidRequestError
from tests.fakes_engine import ScriptedExecutor, expected_outputs, make_engine, request, run, token_ids

FAMILIES, MAX_LEN = 3, 160
SALTS = (None, "a", "b")


def prompt_of(length: int, family: int = 1) -> list[int]:
    return [(family + 7 * i) % 997 for i in range(length)]


def ask(engine: Engine, name: str, prompt: list[int], **options: object) -> int:
    """Ask for two tokens; return how many of the prompt were found in the cache."""
    engine.add_request(request(name, prompt, max_tokens=2, **options))
    return run(engine)[name][-1].num_cached_tokens


def steps_of(engine: Engine, name: str) -> list[int]:
    """How many tokens of a request each step computed: all that its client can notice of the cache."""
    return [item.num_new_tokens for step in engine.executor.steps for item in step.scheduled if item.request_id == name]


# --- salts ------------------------------------------------------------------------------------------------------------


def test_a_salt_is_found_by_the_same_salt_only():
    """Guards against a tenant whose first token comes sooner because another tenant has sent the same prompt."""
    engine = make_engine()
    prompt = prompt_of(100)
    for round_, cached in enumerate((0, 96)):
        for salt in (None, "a", "b", "a" * 300):
            assert ask(engine, f"{salt}{round_}", prompt, cache_salt=salt) == cached


@settings(max_examples=25)
@given(others=st.lists(st.tuples(st.integers(1, 100), st.integers(0, 30)), max_size=6), chunk=st.integers(8, 70))
def test_a_request_has_the_same_steps_whatever_prompt_others_sent_under_another_salt(others, chunk):
    """Guards against any other trace of a neighbour's prompt: waiting for blocks that it computes, or finding them."""
    found = []
    for family in (1, 2):  # the others send the same beginning, or another one
        engine = make_engine(num_blocks=64, max_num_batched_tokens=chunk)
        for index, (length, steps) in enumerate(others):
            engine.add_request(
                request(str(index), prompt_of(length, family), max_tokens=3, cache_salt=f"other {index}")
            )
            for _ in range(steps if engine.has_work else 0):
                engine.step()
        engine.add_request(request("probe", prompt_of(100), max_tokens=2, cache_salt="probe"))
        assert run(engine)["probe"][-1].num_cached_tokens == 0
        found.append(steps_of(engine, "probe"))
    assert found[0] == found[1]


def test_choices_of_a_salted_prompt_still_compute_it_once():
    engine = make_engine()
    for choice in range(3):
        engine.add_request(request(f"c{choice}", prompt_of(100), choice=choice, cache_salt="a"))
    outputs = run(engine)
    assert [outputs[f"c{choice}"][-1].num_cached_tokens for choice in range(3)] == [0, 96, 96]


# --- pins -------------------------------------------------------------------------------------------------------------


def test_a_pinned_prefix_outlives_a_crowd_that_fills_the_cache():
    """Guards against a system prompt that is evicted at night and missing in the morning."""
    engine = make_engine(num_blocks=24)
    engine.pin("system", prompt_of(80))
    assert ask(engine, "first", prompt_of(90)) == 0
    assert engine.stats().kv_blocks_pinned == 5
    for index in range(40):
        ask(engine, str(index), prompt_of(150, 100 + index))
    assert ask(engine, "later", prompt_of(90)) == 80
    assert engine.unpin("system")
    assert not engine.unpin("system")
    for index in range(40):
        ask(engine, str(index), prompt_of(150, 200 + index))
    assert ask(engine, "last", prompt_of(90)) == 0


def test_a_pin_takes_what_is_in_the_cache_already():
    engine = make_engine()
    ask(engine, "a", prompt_of(90))
    engine.pin("system", prompt_of(90))
    assert engine.stats().kv_blocks_pinned == 5


@pytest.mark.parametrize(("windows", "held"), [((20,), 3), ((None, 20), 6 + 3), ((None, 500), 6 + 6)])
def test_with_a_window_a_pin_holds_what_a_token_behind_it_sees(windows, held):
    """Guards against a pin that keeps a window model's passed blocks for nothing, or too few to go on from."""
    engine = make_engine(windows=windows, num_blocks=20, max_num_batched_tokens=40)
    engine.pin("system", prompt_of(100))
    ask(engine, "first", prompt_of(100))
    assert engine.stats().kv_blocks_pinned == held
    for index in range(20):
        ask(engine, str(index), prompt_of(150, 100 + index))
    assert ask(engine, "longer", prompt_of(120)) == 96
    assert ask(engine, "other end", [*prompt_of(90), *prompt_of(9, 5)]) == 80


def test_a_public_pin_is_read_under_every_salt_and_what_follows_it_is_not():
    """Guards against tenants with salts who compute the common system prompt each for themselves, and against what they
    write behind it being found by another."""
    engine = make_engine()
    engine.pin("system", prompt_of(64))
    assert ask(engine, "a", prompt_of(100), cache_salt="a") == 0
    assert ask(engine, "b", prompt_of(100), cache_salt="b") == 64
    assert ask(engine, "none", prompt_of(100)) == 64
    assert ask(engine, "a again", prompt_of(100), cache_salt="a") == 96


def test_a_salted_pin_is_for_its_salt():
    engine = make_engine()
    engine.pin("private", prompt_of(64), "a")
    assert [ask(engine, str(salt), prompt_of(70), cache_salt=salt) for salt in ("a", "b", None)] == [0, 0, 0]
    assert engine.stats().kv_blocks_pinned == 4
    assert ask(engine, "again", prompt_of(70), cache_salt="a") == 64


@pytest.mark.parametrize(
    ("options", "length", "message"),
    [
        ({"enable_prefix_caching": False}, 64, "prefix caching is off"),
        ({"user_rows": True}, 64, "prefix caching is off"),
        ({}, 15, "15 tokens do not fill a block of 16"),
        ({"num_blocks": 20}, 11 * 16, "11 of 20 blocks; at most 10"),
    ],
)
def test_what_cannot_be_pinned_is_refused(options, length, message):
    engine = make_engine(**options)
    with pytest.raises(InvalidRequestError, match=message):
        engine.pin("system", prompt_of(length))
    assert len(engine.kv_cache.pins) == 0


def test_a_name_is_taken_once():
    engine = make_engine()
    engine.pin("system", prompt_of(64))
    with pytest.raises(InvalidRequestError, match="another pin"):
        engine.pin("system", prompt_of(64, 2))


def test_no_request_waits_for_ever_for_pinned_blocks():
    """Guards against a request that is let in though the pins leave too little for it: nothing would ever free blocks.
    One that begins with the pinned prefix has room for more, since it shares these blocks."""
    engine = make_engine(num_blocks=20)
    engine.pin("system", prompt_of(160))
    with pytest.raises(InvalidRequestError, match="beside the pinned prefixes"):
        engine.add_request(request("other", prompt_of(100, 2), max_tokens=100))
    engine.add_request(request("shares", prompt_of(170), max_tokens=100))
    assert token_ids(run(engine)["shares"]) == expected_outputs(prompt_of(170), 100)
    engine.unpin("system")
    engine.add_request(request("big", prompt_of(100, 2), max_tokens=200))
    engine.step()
    with pytest.raises(InvalidRequestError, match="a request that runs"):
        engine.pin("system", prompt_of(160))
    assert token_ids(run(engine)["big"])[1:] == expected_outputs(prompt_of(100, 2), 200)[1:]


def test_with_windows_shared_blocks_are_not_counted_on():
    """Guards against the same where a prompt leaves the pinned prefix half-way: its window is not in the cache there,
    so that it computes the shared blocks again, beside the pinned ones."""
    engine = make_engine(num_blocks=20, windows=(None, 20))
    with pytest.raises(InvalidRequestError, match="no room to compute it"):
        engine.pin("system", prompt_of(160))
    engine.pin("system", prompt_of(144))
    ask(engine, "first", prompt_of(144))
    with pytest.raises(InvalidRequestError, match="beside the pinned prefixes"):
        engine.add_request(request("half", [*prompt_of(80), *prompt_of(80, 5)], max_tokens=75))
    ask(engine, "fits", [*prompt_of(80), *prompt_of(70, 5)])


class Witness(ScriptedExecutor):
    """Knows under which salt each slot was written, and fails a request that reads one of another salt.

    Requests are named "salt number"; what a public pin holds may be read by all.
    """

    public: tuple[list[int], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.owners: dict[tuple[int, int], str] = {}
        self._reader = ""

    def _run(self, item):
        self._reader = item.request_id.split()[0]
        return super()._run(item)

    def _write(self, index, group, row, token_ids, start, stop):
        super()._write(index, group, row, token_ids, start, stop)
        self.owners |= {(index, self._slot(group, row.tables[index], at)): self._reader for at in range(start, stop)}

    def _check_context(self, index, group, row, start):
        super()._check_context(index, group, row, start)
        first = 0 if group.sliding_window is None else max(0, start - group.sliding_window + 1)
        common = max((shared for prefix in self.public if (shared := _common(prefix, row.token_ids))), default=0)
        for position in range(max(first, common // group.block_size * group.block_size), start):
            owner = self.owners[index, self._slot(group, row.tables[index], position)]
            assert owner == self._reader, f"position {position} was computed under {owner}"


def _common(prefix: list[int], token_ids: list[int]) -> int:
    pairs = zip(prefix, token_ids, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(prefix), len(token_ids)))


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "pin", "unpin", "abort", "preempt", "reset", "step", "step"]),
        st.integers(1, FAMILIES),
        st.integers(1, 110),
        st.sampled_from(SALTS),
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=80)
@given(
    actions=ACTIONS,
    windows=st.sampled_from([(None,), (20,), (None, 40)]),
    sinks=st.sampled_from([0, 4]),
    blocks=st.integers(14, 40),
    chunk=st.integers(5, 70),
)
def test_whatever_happens_pins_stay_salts_are_apart_and_no_block_is_lost(actions, windows, sinks, blocks, chunk):
    """Guards against a pinned block that is evicted, given to another or lost, against blocks that cross a salt,
    against requests that wait for ever, and a wrong token: pins, aborts, preemptions and resets at any moment."""
    engine = make_engine(
        num_blocks=blocks, windows=windows, sinks=sinks, max_num_batched_tokens=chunk, max_model_len=MAX_LEN,
        wrap=lambda executor: Witness(executor.groups),
    )  # fmt: skip
    witness = engine.executor
    asked: dict[str, list[int]] = {}
    public = {"first": prompt_of(40)}
    outputs: dict[str, list] = {}
    engine.pin("first", prompt_of(40))
    engine.add_request(request("None first", prompt_of(40), max_tokens=1))
    run(engine)
    witness.public = (prompt_of(40),)

    def step() -> None:
        before = [dict(held) for held in engine.kv_cache.pins._held]
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.check_integrity()
        for held, now in zip(before, engine.kv_cache.pins._held, strict=True):
            assert held.items() <= now.items(), "a pin has lost a block"

    for number, (action, family, length, salt) in enumerate(actions):
        name = f"{salt} {number}"
        running = engine.scheduler.running
        try:
            if action == "ask":
                engine.add_request(request(name, prompt_of(length, family), max_tokens=12, cache_salt=salt))
                asked[name] = prompt_of(length, family)
            elif action == "pin":
                engine.pin(name, prompt_of(length, family), salt)
                if salt is None:
                    public[name] = prompt_of(length, family)
                    witness.public = (*witness.public, prompt_of(length, family))
        except InvalidRequestError:
            continue
        if action == "unpin" and public:
            engine.unpin(public.popitem()[0])
        elif action == "abort" and asked:
            victim = sorted(asked)[number % len(asked)]
            if engine.abort(victim):
                del asked[victim]
        elif action == "preempt" and running:
            engine.scheduler.preempt(running[number % len(running)])
        elif action == "reset":
            engine.scheduler.reset(engine._requests.values())
        elif action == "step" and engine.has_work:
            step()
        engine.check_integrity()
    for _ in range(5000):
        if not engine.has_work:
            break
        step()
    assert not engine.has_work, "a request waits for ever"
    window = min(window or 10**9 for window in windows)
    for name, prompt in asked.items():
        assert token_ids(outputs[name]) == expected_outputs(prompt, 12, window)
    assert engine.kv_cache.num_free == engine.kv_cache.num_blocks - engine.stats().kv_blocks_pinned
    for name in list(engine.kv_cache.pins._pins):
        engine.unpin(name)
    engine.check_integrity()
    assert engine.kv_cache.num_free == engine.kv_cache.num_blocks


def test_a_pin_that_is_refused_leaves_no_trace_in_hashes() -> None:
    """Guards against a salted request that others find, because it was hashed while a refused pin seemed public."""
    engine = make_engine(num_blocks=16)
    engine.add_request(request("secret", prompt_of(64), max_tokens=1, cache_salt="a"))
    engine.add_request(request("large", [7] * 230, max_tokens=20))
    with pytest.raises(InvalidRequestError, match="a request that runs has too little"):
        engine.pin("first", prompt_of(64))
    engine.abort("large")
    run(engine)
    engine.add_request(request("guess", prompt_of(64), max_tokens=1))
    (output,) = run(engine)["guess"]
    assert output.num_cached_tokens == 0
