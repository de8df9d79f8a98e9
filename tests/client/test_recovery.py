"""Recovery against engines that die: every choice goes on where it was, and one that kills its engines fails alone."""

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.client import frames
from penstock.client.fleet import Recovery
from penstock.client.input_processor import InputProcessor, PromptRequest
from penstock.client.open_requests import OpenRequests
from penstock.interface.messages import EngineOutput, EngineRequest
from penstock.interface.outputs import FinishReason
from penstock.interface.sampling_params import SamplingParams
from tests.fakes_engine import expected_outputs, model_info

NUM_TOKENS = 6
INPUTS = InputProcessor(None, model_info(64, 900), seed=0)


class Engine:
    """An engine in which each running choice gets one token per step, and some choices end the process."""

    def __init__(self, harmful: dict[str, int]) -> None:
        self.harmful = harmful  # engine request id -> index of the token at which the process dies
        self.requests: dict[str, EngineRequest] = {}
        self.num_tokens: dict[str, int] = {}

    def take(self, frame: frames.ToEngine) -> None:
        match frame:
            case frames.AddRequest(request):
                assert request.request_id not in self.requests, "sent twice to the same engine"
                self.requests[request.request_id] = request
                self.num_tokens[request.request_id] = len(request.output_token_ids)
            case frames.Abort(request_ids):
                for request_id in request_ids:
                    self.requests.pop(request_id, None)

    def step(self) -> list[EngineOutput] | None:
        """Return a token of each request; None if the process dies instead."""
        if any(self.num_tokens[request_id] == self.harmful.get(request_id) for request_id in self.requests):
            return None
        outputs = []
        for request_id, request in list(self.requests.items()):
            start = self.num_tokens[request_id]
            token = expected_outputs(request.prompt_token_ids, start + 1)[start]
            self.num_tokens[request_id] += 1
            finished = FinishReason.LENGTH if start + 1 == NUM_TOKENS else None
            outputs.append(EngineOutput(request_id, start, [token], finish_reason=finished))
            if finished:
                del self.requests[request_id]
        return outputs


class World:
    """A client's requests, the recovery under test, and one engine after the other."""

    def __init__(self) -> None:
        self.requests = OpenRequests()
        self.recovery = Recovery(self.requests, self._send, {})
        self.harmful: dict[str, int] = {}
        self.engine: Engine | None = None
        self.blamed: list[str] = []
        self.alone: list[bool] = []  # per death that was blamed on a choice: nothing else was in the engine
        self.received: dict[str, list[int]] = {}

    def _send(self, frame: frames.ToEngine) -> None:
        if self.engine is not None:
            self.engine.take(frame)

    def add(self, prompt: list[int], *, harmful_at: int | None = None) -> str:
        opened = INPUTS.process(PromptRequest(prompt, params=SamplingParams(seed=1, max_tokens=NUM_TOKENS)))
        (request,) = opened.engine_requests
        if harmful_at is not None:
            self.harmful[request.request_id] = harmful_at
        self.requests.open(opened)
        self.received[request.request_id] = []
        self.recovery.submit([request.request_id])
        return request.request_id

    def start(self) -> None:
        self.engine = Engine(self.harmful)
        self.recovery.engine_ready()

    def kill(self) -> None:
        present = set() if self.engine is None else set(self.engine.requests)
        self.engine = None
        to_blame = self.recovery.engine_lost()
        if to_blame is not None:
            self.blamed.append(to_blame)
            self.alone.append(present == {to_blame})
            self.recovery.abort(self.requests.cancel(self.requests.owner(to_blame)))

    def step(self) -> None:
        outputs = self.engine.step()
        if outputs is None:
            self.kill()
            return
        for request, _, to_abort in self.requests.add(outputs):
            self.recovery.abort(to_abort)
            for choice in request.choices:
                self.received[choice.request.request_id] = list(choice.token_ids)
        self.recovery.received([output.request_id for output in outputs])

    def abort(self, request_id: str) -> None:
        request = self.requests.owner(request_id)
        if request is not None:
            self.recovery.abort(self.requests.close(request))

    def finish(self) -> None:
        """Step, with a new engine after each death, until nothing runs."""
        for _ in range(1000):
            if not self.requests.num_running:
                return
            if self.engine is None:
                self.start()
            else:
                self.step()
        raise AssertionError("requests wait for ever")


def test_what_comes_while_there_is_no_engine_waits_for_one():
    world = World()
    name = world.add([1, 2])
    world.finish()
    assert world.received[name] == expected_outputs([1, 2], NUM_TOKENS)


def test_a_new_engine_continues_with_the_next_token():
    """Guards against tokens that are computed, or counted, twice."""
    world = World()
    names = [world.add([number]) for number in range(3)]
    world.start()
    world.step()
    world.step()
    world.kill()
    late = world.add([9])
    world.start()
    assert [len(request.output_token_ids) for request in world.engine.requests.values()] == [2, 2, 2, 0]
    world.finish()
    for prompt, name in zip(([0], [1], [2], [9]), [*names, late], strict=True):
        assert world.received[name] == expected_outputs(prompt, NUM_TOKENS)
    assert world.blamed == []


def test_a_harmful_request_fails_alone_and_nobody_else_does():
    """Guards against one request that ends every engine, and with it the service."""
    world = World()
    names = [world.add([number], harmful_at=3 if number == 2 else None) for number in range(5)]
    world.finish()
    assert (world.blamed, world.alone) == ([names[2]], [True])
    for number, name in enumerate(names):
        expected = expected_outputs([number], NUM_TOKENS)
        assert world.received[name] == (expected[:3] if number == 2 else expected)


def test_a_request_that_received_tokens_between_deaths_is_not_suspected():
    """Guards against long streams that fail because engines die now and then for other reasons."""
    world = World()
    name = world.add([1])
    for _ in range(NUM_TOKENS - 1):
        world.start()
        world.step()
        world.kill()
    assert world.blamed == []
    world.finish()
    assert world.received[name] == expected_outputs([1], NUM_TOKENS)


def test_nothing_is_kept():
    """Guards against memory that grows with every request."""
    world = World()
    for _ in range(3):
        world.add([1])
        world.abort(world.add([2]))
        world.start()
        world.kill()
        world.start()
        world.kill()
        world.finish()
        world.kill()
    assert not world.recovery._sent
    assert not world.recovery._deaths
    assert not world.recovery._trials


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 9), st.one_of(st.none(), st.integers(0, NUM_TOKENS - 1))),
        st.tuples(st.just("abort"), st.integers(0, 9)),
        st.tuples(st.sampled_from(["step", "step", "start", "kill"])),
    ),
    max_size=60,
)


@settings(max_examples=300)
@given(ACTIONS)
def test_whatever_happens(actions):
    """No token is lost, repeated or changed, the harmful fail, and they alone do.

    A kill from outside while a choice is tried alone cannot be told from one by the choice, so there is none here.
    """
    world, prompts, aborted = World(), {}, set()
    for action, *values in actions:
        if action == "add":
            name = world.add([values[0]], harmful_at=values[1])
            prompts[name] = [values[0]]
        elif action == "abort" and values[0] < len(prompts):
            name = list(prompts)[values[0]]
            aborted.add(name)
            world.abort(name)
        elif world.engine is None:
            if action == "start":
                world.start()
        elif action == "step":
            world.step()
        elif action == "kill" and not world.recovery._trials:
            world.kill()
    world.finish()
    assert set(world.blamed) <= set(world.harmful)
    assert all(world.alone)
    for name, prompt in prompts.items():
        expected = expected_outputs(prompt, NUM_TOKENS)
        if name in aborted:
            assert world.received[name] == expected[: len(world.received[name])]
        else:
            assert world.received[name] == expected[: world.harmful.get(name, NUM_TOKENS)]
            assert (name in world.blamed) == (name in world.harmful)
