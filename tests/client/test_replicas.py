"""Replicas of scripted engines: whatever dies whenever, every choice goes on where it was, in one engine at a time."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.client import frames, replica
from penstock.client.child import Launcher
from penstock.client.engine_client import EngineState
from penstock.client.liveness import Liveness
from penstock.client.open_requests import OpenRequests
from penstock.client.prompts import PromptRequest
from penstock.client.records import RecordOptions
from penstock.client.replicas import Replicas
from penstock.errors import EngineDeadError
from penstock.interface.messages import EngineStats
from penstock.interface.sampling_params import SamplingParams
from tests.client.test_recovery import INPUTS, NUM_TOKENS, Engine
from tests.fakes_engine import expected_outputs, model_info

ROWS = 4
HARMFUL = {}  # engine request id -> index of the token at which its engine dies
INFO = replace(model_info(64, 900), max_num_seqs=ROWS)


class Supervisor:
    """Starts scripted engines when the test says so."""

    def __init__(self, start, listener, *, standby, name, launch):
        self.start, self.listener, self.name, self.standby = start, listener, name, standby
        self.model_info = self.failure = self.engine = None
        self.restarts, self.cache_bytes, self.last_death, self.was_let_go = 0, 77, "", False
        self.liveness = Liveness()
        self.child = self

    @property
    def state(self):
        return EngineState.READY if self.engine is not None else EngineState.RECOVERING

    def send(self, frame):
        if self.engine is not None:
            self.engine.take(frame)

    def ready(self, info=INFO):
        self.engine, self.model_info = Engine(HARMFUL), info
        self.listener.engine_ready(info)

    def die(self):
        self.engine = None
        self.restarts += 1
        self.listener.engine_lost()

    def give_up(self, error):
        if self.failure is None:
            self.engine, self.failure = None, error
            self.listener.engine_failed(error)

    def hang_up(self):
        self.was_let_go = self.engine is not None

    def stop(self):
        self.give_up(EngineDeadError("stopped"))

    async def run(self):
        pass


@pytest.fixture(scope="module", autouse=True)
def scripted():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica, "EngineSupervisor", Supervisor)
        patch.setattr(Replicas, "_watch", lambda self, replica: None)
        yield


class Fleet:
    """Replicas of scripted engines, and the listener that owns the requests."""

    def __init__(self, num_engines=2, *, starts=True, standby=False, num_initial=None):
        self.requests = OpenRequests()
        self.blamed, self.errors, self.rows = [], [], 0
        start, none = frames.Start(-1, {}, num_engines=num_engines), RecordOptions(flight_recorder=0)
        outputs_left = lambda at_most, ignore_eos: float(at_most)  # noqa: E731
        launcher = Launcher(num_engines=num_engines, num_initial=num_initial)
        self.replicas = Replicas(start, self.requests, self, outputs_left, none, standby=standby, launcher=launcher)
        if starts:
            self.first.ready()
            for supervisor in self.supervisors[1:]:
                supervisor.ready()

    @property
    def supervisors(self):
        return [one.supervisor for one in self.replicas._replicas]

    @property
    def first(self):
        return self.supervisors[0]

    def engine_ready(self, index, num_rows, info):
        self.rows = num_rows

    def engine_lost(self, index, num_rows, to_blame):
        self.rows = num_rows
        if to_blame is not None:
            self.blamed.append(to_blame.prompt_token_ids)
            self.replicas.dispatcher.abort(self.requests.cancel(to_blame))

    def engine_failed(self, error):
        self.errors.append(str(error))
        for request in self.requests:
            self.replicas.dispatcher.abort(self.requests.cancel(request))

    def received_of(self, request):
        return [choice.token_ids for choice in request.choices]

    def open(self, prompt, *, n=1, harmful_at=None):
        params = SamplingParams(seed=1, max_tokens=NUM_TOKENS, n=n)
        request = INPUTS.process(PromptRequest(prompt, params=params))
        if harmful_at is not None:
            HARMFUL.update({one.request_id: harmful_at for one in request.engine_requests})
        self.requests.open(request)
        self.replicas.dispatcher.submit(request)
        return request

    def step(self, index):
        """Let an engine make a step; it dies of what is harmful."""
        supervisor = self.supervisors[index]
        if supervisor.engine is None:
            return
        outputs = supervisor.engine.step()
        if outputs is None:
            supervisor.die()
        elif outputs:
            supervisor.listener.received(frames.Outputs(0, outputs, EngineStats()))

    def received(self, index, frame):
        for _, _, to_abort in self.requests.add(frame.outputs):
            self.replicas.dispatcher.abort(to_abort)

    def places(self):
        """Return in which engines each choice is."""
        found = {}
        for index, supervisor in enumerate(self.supervisors):
            for request_id in supervisor.engine.requests if supervisor.engine is not None else ():
                found.setdefault(request_id, []).append(index)
        return found

    def finish(self):
        for _ in range(1000):
            if not self.requests.num_running:
                return
            for index, supervisor in enumerate(self.supervisors):
                if supervisor.engine is None and supervisor.failure is None:
                    supervisor.ready()
                self.step(index)
        raise AssertionError("requests wait for ever")

    def check_nothing_is_kept(self):
        assert not self.replicas.dispatcher._homes
        for one in self.replicas._replicas:
            assert (one.queued.total, one.queued.rows, len(one.queued)) == (0, 0, 0)
            assert not one.recovery._mine
            assert not one.recovery._sent


def test_the_first_engine_plans_for_all():
    """Guards against engines with caches of different sizes: what one has accepted might not fit the next."""
    fleet = Fleet(3, starts=False, standby=True)
    assert [len(fleet.supervisors), fleet.replicas.state] == [1, EngineState.STARTING]
    with pytest.raises(EngineDeadError, match="engine 1 has not been started yet"):  # /status/record?engine=1
        fleet.replicas.records(1)
    fleet.first.ready()
    assert [supervisor.name for supervisor in fleet.supervisors] == [f"engine process {index}" for index in range(3)]
    taken = {"max_model_len": 64, "kv_cache_memory_bytes": 77}
    assert [supervisor.start.options for supervisor in fleet.supervisors[1:]] == [taken, taken]
    assert all(supervisor.start.takes_over for supervisor in fleet.supervisors[1:])
    assert all(supervisor.standby for supervisor in fleet.supervisors)
    assert not fleet.replicas.settled.is_set()
    fleet.supervisors[2].ready()
    fleet.supervisors[1].ready()
    assert fleet.replicas.settled.is_set()
    assert (fleet.replicas.state, fleet.rows) == (EngineState.READY, 3 * ROWS)


def test_a_stream_goes_on_at_once_in_an_engine_with_a_free_row():
    """Guards against a stream that waits for the restart of its engine while another one has room, and against one that
    displaces what another engine computes."""
    fleet = Fleet()
    requests = [fleet.open([number], n=2) for number in range(3)]  # 2 in one engine, 1 in the other
    assert sorted(len(one.queued) for one in fleet.replicas._replicas) == [2, 4]
    fuller = max((0, 1), key=lambda index: len(fleet.replicas._replicas[index].queued))
    other = fleet.supervisors[1 - fuller]
    fleet.step(0)
    fleet.step(1)
    fleet.supervisors[fuller].die()
    assert [len(request.output_token_ids) for request in other.engine.requests.values()] == [0, 0, 1, 1]
    assert (fleet.rows, fleet.replicas.restarts) == (ROWS, 1)
    waiting = next(
        request for request in requests if not set(fleet.requests.running_of(request)) & fleet.places().keys()
    )
    for _ in range(NUM_TOKENS - 2):
        fleet.step(1 - fuller)
    assert fleet.requests.num_running == 6
    fleet.step(1 - fuller)  # rows are free now, though its engine has not come back
    assert set(fleet.requests.running_of(waiting)) == fleet.places().keys()
    fleet.finish()
    for number, request in enumerate(requests):
        assert fleet.received_of(request) == [expected_outputs([number], NUM_TOKENS)] * 2
    fleet.check_nothing_is_kept()


def test_an_engine_that_leaves_ends_its_streams_first():
    """Guards against a replica that is taken away under its streams, gets new ones, or never goes; and against a leave
    that outlives the engine."""
    fleet = Fleet()
    first, replica = fleet.open([1]), fleet.replicas._replicas[0]
    assert fleet.places()[fleet.requests.running_of(first)[0]] == [0]
    replica.leaving()
    others = [fleet.open([number]) for number in (2, 3, 4)]
    assert {tuple(fleet.places()[fleet.requests.running_of(request)[0]]) for request in others} == {(1,)}
    for _ in range(NUM_TOKENS - 1):
        fleet.step(0)
    assert not fleet.first.was_let_go
    fleet.step(0)
    assert fleet.first.was_let_go
    assert fleet.received_of(first) == [expected_outputs([1], NUM_TOKENS)]
    fleet.first.die()
    fleet.first.ready()
    fleet.open([5])
    assert sorted(len(supervisor.engine.requests) for supervisor in fleet.supervisors) == [1, 3]
    fleet.finish()
    fleet.check_nothing_is_kept()


def test_engines_beyond_the_first_ones_come_when_they_can():
    """Guards against a server that waits for machines which a cluster may never have."""
    fleet = Fleet(3, starts=False, num_initial=2)
    fleet.first.ready()
    assert not fleet.replicas.settled.is_set()
    fleet.supervisors[2].ready()
    assert (fleet.replicas.settled.is_set(), fleet.replicas.state) == (True, EngineState.READY)
    fleet.open([1]), fleet.open([2])
    fleet.supervisors[1].ready()
    fleet.open([3])
    assert [len(supervisor.engine.requests) for supervisor in fleet.supervisors] == [1, 1, 1]


def test_choices_of_one_prompt_and_equal_prefixes_stay_together():
    """Guards against a prompt that is computed in two engines."""
    fleet = Fleet()
    prefix = list(range(48))
    first = fleet.open([*prefix, 100], n=3)
    places = fleet.places()
    assert {tuple(places[name]) for name in fleet.requests.running_of(first)} == {(places.popitem()[1][0],)}
    fleet.finish()
    home = next(index for index in (0, 1) if fleet.replicas.dispatcher.router._known.get(index))
    second, other = fleet.open([*prefix, 101]), fleet.open([7] * 49)
    assert fleet.places()[fleet.requests.running_of(second)[0]] == [home]
    assert fleet.places()[fleet.requests.running_of(other)[0]] == [1 - home]


def test_an_engine_that_computes_otherwise_is_not_let_in(caplog):
    """Guards against two versions of a model behind one address, after its files were changed under a server."""
    fleet = Fleet()
    changed = replace(INFO, system_fingerprint="fp-changed")
    request = fleet.open([1])
    fleet.first.die()
    fleet.first.ready(changed)
    assert "computes differently from the others (fp-fake became fp-changed)" in str(fleet.first.failure)
    assert "engine process 0 is given up, and the others go on" in caplog.text
    fleet.finish()
    assert fleet.received_of(request) == [expected_outputs([1], NUM_TOKENS)]
    assert (fleet.errors, fleet.replicas.state) == ([], EngineState.READY)
    fleet.supervisors[1].die()
    fleet.open([1])
    fleet.supervisors[1].ready(changed)  # nobody computes the old one any more
    assert fleet.errors == ["the new engine computes differently: fp-fake became fp-changed"]
    assert fleet.replicas.model_info == changed


def test_the_service_ends_with_its_last_engine():
    """Guards against a server that goes on without an engine, and one that ends while it has one."""
    fleet = Fleet()
    requests = [fleet.open([number]) for number in range(2)]
    fleet.supervisors[1].give_up(EngineDeadError("it died too often"))
    assert (fleet.replicas.failure, fleet.errors) == (None, [])
    assert len(fleet.first.engine.requests) == 2
    fleet.finish()
    assert [fleet.received_of(request) for request in requests] == [[expected_outputs([n], NUM_TOKENS)] for n in (0, 1)]
    fleet.first.give_up(EngineDeadError("it died too often, too"))
    assert fleet.errors == ["it died too often, too"]
    assert fleet.replicas.state is EngineState.FAILED
    unstartable = Fleet(starts=False)
    unstartable.first.ready()
    unstartable.supervisors[1].give_up(EngineDeadError("no memory"))  # before it was ever ready
    assert unstartable.errors == ["no memory"]


@pytest.mark.parametrize("num_engines", [1, 2])
def test_a_trial_takes_no_rows_from_the_queues_forecast(num_engines):
    """Guards against a server that refuses requests after a trial, because its engine counted as having no row."""
    fleet = Fleet(num_engines)
    tried = fleet.open([1])
    for _ in range(3 - num_engines):  # two deaths, after which it is tried
        for supervisor in fleet.supervisors:
            supervisor.die()
        for supervisor in fleet.supervisors:
            supervisor.ready()
    assert not all(one.recovery.accepts for one in fleet.replicas._replicas)
    assert fleet.rows == num_engines * ROWS
    fleet.finish()
    assert fleet.received_of(tried) == [expected_outputs([1], NUM_TOKENS)]


def test_an_engine_that_is_ready_when_all_were_stopped_starts_no_others():
    """Guards against processes that outlive their client: the first engine's word was on the way at the stop."""
    fleet = Fleet(2, starts=False)
    fleet.replicas.stop()
    fleet.first.listener.engine_ready(INFO)
    assert len(fleet.supervisors) == 1


def test_what_an_engine_leaves_behind_waits_for_a_trial_and_no_longer():
    """Guards against choices of an engine that is given up while the other one tries a choice alone: nothing else would
    tell that there is an engine for them again, before the end of a stream."""
    fleet = Fleet()
    tried = fleet.open([1])
    first = next(iter(fleet.places().values()))[0]
    fleet.supervisors[first].die()
    fleet.supervisors[1 - first].die()
    left = fleet.open([2])
    last = fleet.supervisors[1 - first]
    last.ready()
    assert [*last.engine.requests] == fleet.requests.running_of(tried)  # alone: it was there at two deaths
    home = fleet.replicas.dispatcher._homes[fleet.requests.running_of(left)[0]].replica.index
    assert (home, fleet.rows) == (first, ROWS)
    fleet.supervisors[first].give_up(EngineDeadError("it died too often"))
    assert len(last.engine.requests) == 1
    fleet.step(1 - first)
    assert len(last.engine.requests) == 2
    fleet.finish()
    fleet.check_nothing_is_kept()


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.integers(0, 9), st.integers(1, 3), st.booleans()),
        st.tuples(st.just("close"), st.integers(0, 9)),
        st.tuples(st.sampled_from(["step", "step", "step", "ready", "die"]), st.integers(0, 2)),
    ),
    max_size=50,
)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from([2, 3]), ACTIONS)
def test_whatever_happens(num_engines, actions):
    """No token is lost, repeated or changed; no choice is in two engines; the harmful fail alone; nothing is kept."""
    fleet = Fleet(num_engines)
    opened, closed = [], set()
    for action, number, *options in actions:
        if action == "open":
            n, is_harmful = options
            request = fleet.open([number] * 20, n=n, harmful_at=2 if is_harmful and number == 0 else None)
            opened.append((request, is_harmful and number == 0))
        elif action == "close":
            if number < len(opened) and number not in closed:
                closed.add(number)
                fleet.replicas.dispatcher.abort(fleet.requests.close(opened[number][0]))
        else:
            index = number % num_engines
            supervisor = fleet.supervisors[index]
            if action == "step":
                fleet.step(index)
            elif action == "ready" and supervisor.engine is None:
                supervisor.ready()
            elif (
                action == "die"
                and supervisor.engine is not None
                and not fleet.replicas._replicas[index].recovery._trials
            ):
                supervisor.die()
        assert all(len(indices) == 1 for indices in fleet.places().values())
        assert set(fleet.places()) <= set(fleet.requests.running())
    fleet.finish()
    fleet.check_nothing_is_kept()
    for number, (request, is_harmful) in enumerate(opened):
        expected = expected_outputs(request.prompt_token_ids, NUM_TOKENS)
        for tokens in fleet.received_of(request):
            if is_harmful or number in closed:
                assert tokens == expected[: len(tokens)]
                assert not is_harmful or len(tokens) <= 2
            else:
                assert tokens == expected
    assert all(prompt == [0] * 20 for prompt in fleet.blamed)
