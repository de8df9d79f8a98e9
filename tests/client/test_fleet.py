"""A fleet of scripted engines: whatever dies whenever, every choice goes on where it was, in one engine at a time."""

import gc
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.client import fleet as fleets
from penstock.client import frames
from penstock.client.engine_client import EngineState
from penstock.client.engine_handle import EnginePlan, Liveness
from penstock.client.input_processor import PromptRequest
from penstock.client.open_requests import OpenRequests
from penstock.client.records import RecordOptions
from penstock.errors import EngineDeadError
from penstock.interface.messages import EngineStats
from penstock.interface.sampling_params import SamplingParams
from penstock.interface.timeline import IntervalKind
from tests.client.test_recovery import INPUTS, NUM_TOKENS, Engine
from tests.fakes_engine import expected_outputs, model_info

ROWS = 4
HARMFUL = {}  # engine request id -> index of the token at which its engine dies
INFO = replace(model_info(64, 900), max_num_seqs=ROWS)


class Handle:
    """Starts scripted engines when the test says so."""

    def __init__(self, start, deliver, *, standby, name, launch, adapters):
        self.start, self.deliver, self.name, self.standby = start, deliver, name, standby
        self.model_info = self.failure = self.engine = None
        self.restarts, self.was_let_go = 0, False
        self.liveness = Liveness()
        self.connection = self

    @property
    def state(self):
        if self.failure is not None:
            return EngineState.FAILED
        return EngineState.READY if self.engine is not None else EngineState.RECOVERING

    def send(self, frame):
        if self.engine is not None:
            self.engine.take(frame)

    def ready(self, info=INFO):
        self.engine, self.model_info = Engine(HARMFUL), info
        self.deliver(frames.Ready(0, info, EngineStats(), 77))

    def die(self):
        """Die, and be started again later; the fleet learns of it where it awaits a death."""
        self.engine = None
        self.restarts += 1
        self.fleet._engine_lost(self.replica)

    def fail(self, error):
        """Be given up, because it died too often; the fleet learns of it where it awaits a death."""
        self.give_up(error)
        self.fleet._give_up(self.replica)

    def give_up(self, error):
        if self.failure is None:
            self.engine, self.failure = None, error

    def hang_up(self):
        self.was_let_go = self.engine is not None


@pytest.fixture(scope="module", autouse=True)
def scripted():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleets, "EngineHandle", Handle)
        patch.setattr(fleets.Fleet, "_watch", lambda self, replica: None)
        yield


class Client:
    """The owner of the requests, and its fleet of scripted engines."""

    def __init__(self, num_engines=2, *, starts=True, standby=False, num_initial=None):
        self.requests = OpenRequests()
        self.blamed, self.errors, self.rows = [], [], 0
        start, none = frames.Start(-1, {}, num_engines=num_engines), RecordOptions(flight_recorder=0)
        outputs_left = lambda at_most, ignore_eos: float(at_most)  # noqa: E731
        engine_plan = EnginePlan(num_engines=num_engines, num_initial=num_initial)
        self.fleet = fleets.Fleet(
            start, self.requests, self, outputs_left, none, standby=standby, engine_plan=engine_plan
        )
        if starts:
            self.first.ready()
            for handle in self.handles[1:]:
                handle.ready()

    @property
    def handles(self):
        for one in self.fleet._replicas:
            one.handle.fleet, one.handle.replica = self.fleet, one
        return [one.handle for one in self.fleet._replicas]

    @property
    def first(self):
        return self.handles[0]

    def engine_ready(self, index, num_rows, info):
        self.rows = num_rows

    def engine_lost(self, index, num_rows, to_blame):
        self.rows = num_rows
        if to_blame is not None:
            self.blamed.append(to_blame.prompt_token_ids)
            self.fleet.abort(self.requests.cancel(to_blame))

    def engine_failed(self, error):
        self.errors.append(str(error))
        for request in self.requests:
            self.fleet.abort(self.requests.cancel(request))

    def received_of(self, request):
        return [choice.token_ids for choice in request.choices]

    def open(self, prompt, *, n=1, harmful_at=None):
        params = SamplingParams(seed=1, max_tokens=NUM_TOKENS, n=n)
        request = INPUTS.process(PromptRequest(prompt, params=params))
        if harmful_at is not None:
            HARMFUL.update({one.request_id: harmful_at for one in request.engine_requests})
        self.requests.open(request)
        self.fleet.submit(request)
        return request

    def step(self, index):
        """Let an engine make a step; it dies of what is harmful."""
        handle = self.handles[index]
        if handle.engine is None:
            return
        outputs = handle.engine.step()
        if outputs is None:
            handle.die()
        elif outputs:
            handle.deliver(frames.Outputs(0, outputs, EngineStats()))

    def received(self, index, outputs, stats):
        for _, _, abort_ids in self.requests.add(outputs):
            self.fleet.abort(abort_ids)

    def places(self):
        """Return in which engines each choice is."""
        found = {}
        for index, handle in enumerate(self.handles):
            for request_id in handle.engine.requests if handle.engine is not None else ():
                found.setdefault(request_id, []).append(index)
        return found

    def finish(self):
        for _ in range(1000):
            if not self.requests.num_running:
                return
            for index, handle in enumerate(self.handles):
                if handle.engine is None and handle.failure is None:
                    handle.ready()
                self.step(index)
        raise AssertionError("requests wait for ever")

    def check_nothing_is_kept(self):
        assert not self.fleet._assigned
        for one in self.fleet._replicas:
            assert (one.queued.total, one.queued.rows, len(one.queued)) == (0, 0, 0)
            assert not one.recovery._assigned
            assert not one.recovery._sent


def test_the_first_engine_plans_for_all():
    """Guards against engines with caches of different sizes: what one has accepted might not fit the next."""
    client = Client(3, starts=False, standby=True)
    assert [len(client.handles), client.fleet.state] == [1, EngineState.STARTING]
    with pytest.raises(EngineDeadError, match="engine 1 has not been started yet"):  # /status/record?engine=1
        client.fleet.records(1)
    client.first.ready()
    assert [handle.name for handle in client.handles] == [f"engine process {index}" for index in range(3)]
    taken = {"max_model_len": 64, "kv_cache_memory_bytes": 77}
    assert [handle.start.options for handle in client.handles[1:]] == [taken, taken]
    assert all(handle.start.takes_over for handle in client.handles[1:])
    assert all(handle.standby for handle in client.handles)
    assert not client.fleet.settled.is_set()
    client.handles[2].ready()
    client.handles[1].ready()
    assert client.fleet.settled.is_set()
    assert (client.fleet.state, client.rows) == (EngineState.READY, 3 * ROWS)


def test_a_stream_goes_on_at_once_in_an_engine_with_a_free_row():
    """Guards against a stream that waits for the restart of its engine while another one has room, and against one that
    displaces what another engine computes."""
    client = Client()
    requests = [client.open([number], n=2) for number in range(3)]  # 2 in one engine, 1 in the other
    assert sorted(len(one.queued) for one in client.fleet._replicas) == [2, 4]
    fuller = max((0, 1), key=lambda index: len(client.fleet._replicas[index].queued))
    other = client.handles[1 - fuller]
    client.step(0)
    client.step(1)
    client.handles[fuller].die()
    assert [len(request.output_token_ids) for request in other.engine.requests.values()] == [0, 0, 1, 1]
    assert (client.rows, client.fleet.restarts) == (ROWS, 1)
    waiting = next(
        request for request in requests if not set(client.requests.running_of(request)) & client.places().keys()
    )
    for _ in range(NUM_TOKENS - 2):
        client.step(1 - fuller)
    assert client.requests.num_running == 6
    client.step(1 - fuller)  # rows are free now, though its engine has not come back
    assert set(client.requests.running_of(waiting)) == client.places().keys()
    client.finish()
    for number, request in enumerate(requests):
        assert client.received_of(request) == [expected_outputs([number], NUM_TOKENS)] * 2
    client.check_nothing_is_kept()


def test_an_engine_that_leaves_ends_its_streams_first():
    """Guards against a replica that is taken away under its streams, gets new ones, or never goes; and against a leave
    that outlives the engine."""
    client = Client()
    first = client.open([1])
    assert client.places()[client.requests.running_of(first)[0]] == [0]
    client.first.deliver(frames.Leaving(0))
    others = [client.open([number]) for number in (2, 3, 4)]
    assert {tuple(client.places()[client.requests.running_of(request)[0]]) for request in others} == {(1,)}
    for _ in range(NUM_TOKENS - 1):
        client.step(0)
    assert not client.first.was_let_go
    client.step(0)
    assert client.first.was_let_go
    assert client.received_of(first) == [expected_outputs([1], NUM_TOKENS)]
    client.first.die()
    client.first.ready()
    client.open([5])
    assert sorted(len(handle.engine.requests) for handle in client.handles) == [1, 3]
    client.finish()
    client.check_nothing_is_kept()


def test_engines_beyond_the_first_ones_come_when_they_can():
    """Guards against a server that waits for machines which a cluster may never have."""
    client = Client(3, starts=False, num_initial=2)
    client.first.ready()
    assert not client.fleet.settled.is_set()
    client.handles[2].ready()
    assert (client.fleet.settled.is_set(), client.fleet.state) == (True, EngineState.READY)
    client.open([1]), client.open([2])
    client.handles[1].ready()
    client.open([3])
    assert [len(handle.engine.requests) for handle in client.handles] == [1, 1, 1]


def test_choices_of_one_prompt_and_equal_prefixes_stay_together():
    """Guards against a prompt that is computed in two engines."""
    client = Client()
    prefix = list(range(48))
    first = client.open([*prefix, 100], n=3)
    places = client.places()
    assert {tuple(places[name]) for name in client.requests.running_of(first)} == {(places.popitem()[1][0],)}
    client.finish()
    home = next(index for index in (0, 1) if client.fleet.router._known.get(index))
    second, other = client.open([*prefix, 101]), client.open([7] * 49)
    assert client.places()[client.requests.running_of(second)[0]] == [home]
    assert client.places()[client.requests.running_of(other)[0]] == [1 - home]


def test_an_engine_that_computes_otherwise_is_not_let_in(caplog):
    """Guards against two versions of a model behind one address, after its files were changed under a server."""
    client = Client()
    changed = replace(INFO, system_fingerprint="fp-changed")
    request = client.open([1])
    client.first.die()
    client.first.ready(changed)
    assert "computes differently from the others (fp-fake became fp-changed)" in str(client.first.failure)
    assert "engine process 0 is given up, and the others go on" in caplog.text
    client.finish()
    assert client.received_of(request) == [expected_outputs([1], NUM_TOKENS)]
    assert (client.errors, client.fleet.state) == ([], EngineState.READY)
    client.handles[1].die()
    client.open([1])
    client.handles[1].ready(changed)  # nobody computes the old one any more
    assert client.errors == ["the new engine computes differently: fp-fake became fp-changed"]
    assert client.fleet.model_info == changed


def test_the_service_ends_with_its_last_engine():
    """Guards against a server that goes on without an engine, and one that ends while it has one."""
    client = Client()
    requests = [client.open([number]) for number in range(2)]
    client.handles[1].fail(EngineDeadError("it died too often"))
    assert (client.fleet.failure, client.errors) == (None, [])
    assert len(client.first.engine.requests) == 2
    client.finish()
    assert [client.received_of(request) for request in requests] == [
        [expected_outputs([n], NUM_TOKENS)] for n in (0, 1)
    ]
    client.first.fail(EngineDeadError("it died too often, too"))
    assert client.errors == ["it died too often, too"]
    assert client.fleet.state is EngineState.FAILED
    unstartable = Client(starts=False)
    unstartable.first.ready()
    unstartable.handles[1].fail(EngineDeadError("no memory"))  # before it was ever ready
    assert unstartable.errors == ["no memory"]


@pytest.mark.parametrize("num_engines", [1, 2])
def test_a_trial_takes_no_rows_from_the_queues_forecast(num_engines):
    """Guards against a server that refuses requests after a trial, because its engine counted as having no row."""
    client = Client(num_engines)
    tried = client.open([1])
    for _ in range(3 - num_engines):  # two deaths, after which it is tried
        for handle in client.handles:
            handle.die()
        for handle in client.handles:
            handle.ready()
    assert not all(one.recovery.accepts for one in client.fleet._replicas)
    assert client.rows == num_engines * ROWS
    client.finish()
    assert client.received_of(tried) == [expected_outputs([1], NUM_TOKENS)]


def test_an_engine_that_is_ready_when_all_were_stopped_starts_no_others():
    """Guards against processes that outlive their client: the first engine's word was on the way at the stop."""
    client = Client(2, starts=False)
    client.fleet.stop()
    client.first.deliver(frames.Ready(0, INFO, EngineStats()))
    assert len(client.handles) == 1


def test_what_an_engine_leaves_behind_waits_for_a_trial_and_no_longer():
    """Guards against choices of an engine that is given up while the other one tries a choice alone: nothing else would
    tell that there is an engine for them again, before the end of a stream."""
    client = Client()
    tried = client.open([1])
    first = next(iter(client.places().values()))[0]
    client.handles[first].die()
    client.handles[1 - first].die()
    left = client.open([2])
    last = client.handles[1 - first]
    last.ready()
    assert [*last.engine.requests] == client.requests.running_of(tried)  # alone: it was there at two deaths
    home = client.fleet._assigned[client.requests.running_of(left)[0]].replica.index
    assert (home, client.rows) == (first, ROWS)
    client.handles[first].fail(EngineDeadError("it died too often"))
    assert len(last.engine.requests) == 1
    client.step(1 - first)
    assert len(last.engine.requests) == 2
    client.finish()
    client.check_nothing_is_kept()


def test_outputs_from_an_engine_that_a_choice_has_left_are_dropped():
    """Guards against tokens that count twice, or an end that is not the choice's own: a paused request may go on in
    another engine while the last outputs of the first one are still on the way."""
    client = Client()
    request = client.open([1])
    (name,) = client.requests.running_of(request)
    (first,) = client.places()[name]
    client.step(first)
    late = client.handles[first].engine.step()
    client.fleet.abort([name])
    client.handles[first].die()
    client.fleet.submit(request)
    client.handles[first].ready()
    assert client.places()[name] == [1 - first]
    client.handles[first].deliver(frames.Outputs(0, late, EngineStats()))
    assert client.received_of(request) == [expected_outputs([1], 1)]
    client.finish()
    assert client.received_of(request) == [expected_outputs([1], NUM_TOKENS)]
    client.check_nothing_is_kept()


def test_frames_for_a_client_that_was_dropped_change_nothing():
    """Guards against an engine that is supervised, or its requests moved, for a client that exists no more."""
    client = Client(1)
    fleet, handle = client.fleet, client.first
    client.open([1])
    outputs = handle.engine.step()
    del client
    gc.collect()
    handle.deliver(frames.Outputs(0, outputs, EngineStats()))
    assert fleet._replicas[0].last_outputs_at == 0.0
    fleet.stop()
    assert str(handle.failure) == "the engine was shut down"


def test_a_choice_to_try_alone_does_not_stay_with_an_engine_that_is_given_up():
    """Guards against a request that waits for ever for a trial in an engine that never comes back."""
    client = Client()
    request = client.open([1])
    (first,) = client.places()[client.requests.running_of(request)[0]]
    suspect, other = client.handles[first], client.handles[1 - first]
    other.die()  # so that it cannot move
    suspect.die()
    suspect.ready()
    suspect.die()
    other.ready()
    assert not other.engine.requests  # it waits for a trial in the engine that it was in
    suspect.fail(EngineDeadError("it died too often"))
    assert [*other.engine.requests] == client.requests.running_of(request)
    client.finish()
    assert client.received_of(request) == [expected_outputs([1], NUM_TOKENS)]


def test_what_a_death_costs_is_measured_from_the_last_outputs():
    """Guards against a timeline that counts time before the death as recovery, and against a prompt that is sent to an
    engine because of a cache that has gone with its process."""
    client = Client(2)
    request = client.open(list(range(40)))
    (first,) = client.places()[client.requests.running_of(request)[0]]
    client.step(first)
    timeline, last = request.choices[0].timeline, client.fleet._replicas[first].last_outputs_at
    assert timeline.start < last < time.monotonic()
    assert client.fleet.router._known[first]
    client.handles[first].die()
    assert (timeline.state, timeline.end) == (IntervalKind.RECOVERY, last)
    assert first not in client.fleet.router._known


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.integers(0, 9), st.integers(1, 3), st.booleans()),
        st.tuples(st.just("close"), st.integers(0, 9)),
        st.tuples(st.sampled_from(["step", "step", "step", "ready", "die"]), st.integers(0, 2)),
    ),
    max_size=50,
)


@settings(max_examples=80)
@given(st.sampled_from([2, 3]), ACTIONS)
def test_whatever_happens(num_engines, actions):
    """No token is lost, repeated or changed; no choice is in two engines; the harmful fail alone; nothing is kept."""
    client = Client(num_engines)
    opened, closed = [], set()
    for action, number, *options in actions:
        if action == "open":
            n, is_harmful = options
            request = client.open([number] * 20, n=n, harmful_at=2 if is_harmful and number == 0 else None)
            opened.append((request, is_harmful and number == 0))
        elif action == "close":
            if number < len(opened) and number not in closed:
                closed.add(number)
                client.fleet.abort(client.requests.close(opened[number][0]))
        else:
            index = number % num_engines
            handle = client.handles[index]
            if action == "step":
                client.step(index)
            elif action == "ready" and handle.engine is None:
                handle.ready()
            elif action == "die" and handle.engine is not None and not client.fleet._replicas[index].recovery._trials:
                handle.die()
        assert all(len(indices) == 1 for indices in client.places().values())
        assert set(client.places()) <= set(client.requests.running())
    client.finish()
    client.check_nothing_is_kept()
    for number, (request, is_harmful) in enumerate(opened):
        expected = expected_outputs(request.prompt_token_ids, NUM_TOKENS)
        for tokens in client.received_of(request):
            if is_harmful or number in closed:
                assert tokens == expected[: len(tokens)]
                assert not is_harmful or len(tokens) <= 2
            else:
                assert tokens == expected
    assert all(prompt == [0] * 20 for prompt in client.blamed)
