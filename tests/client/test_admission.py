"""What is let in: on a clock of the test's own, with an engine of four rows that nobody computes."""

from dataclasses import replace
from typing import Any

import pytest

from penstock.client.admission import MARGIN, MAX_UNMEASURED, Admission, AdmissionLimits
from penstock.client.input_processor import InputProcessor, PromptRequest
from penstock.client.open_requests import OpenRequest, OpenRequests, Wait
from penstock.errors import EngineOverloadedError, InvalidRequestError
from penstock.interface.messages import EngineOutput, EngineStats
from penstock.interface.outputs import FinishReason
from penstock.interface.sampling_params import SamplingParams
from tests.fakes_engine import model_info

ROWS = 4
RATE = 100  # tokens per second


class Queue:
    """An Admission and what it let in."""

    def __init__(self, **limits: object) -> None:
        self.now = 0.0
        self.requests = OpenRequests()
        self.admission = Admission(AdmissionLimits(**limits), self.requests, lambda: self.now)
        self.admission.engine_ready(ROWS)
        self._inputs = InputProcessor(None, replace(model_info(10_000, 100), scheduling_policy="priority"))
        self._computed = 0

    def send(
        self, prompt: int = 10, max_tokens: int = 90, n: int = 1, ignore_eos: bool = True, flow: str | None = None,
        priority: int = 0, **fields: Any,
    ) -> OpenRequest:  # fmt: skip
        params = SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=ignore_eos, detokenize=False, **fields)
        request = self._inputs.process(PromptRequest([1] * prompt, params=params, flow=flow, priority=priority))
        self.wait = self.admission.admit(request)
        self.requests.open(request)
        return request

    def fill_rows(self, max_tokens: int = 91) -> list[OpenRequest]:
        """Requests in every row, with their first token."""
        made = [self.send(max_tokens=max_tokens) for _ in range(ROWS)]
        for request in made:
            list(self.requests.add([EngineOutput(request.choices[0].request.request_id, 0, [1])]))
        self.now += 1
        return made

    def measure(self, rate: int = RATE, seconds: int = 4) -> None:
        """Steps of a tenth of a second, with a queue."""
        for _ in range(10 * seconds + 1):
            self.now += 0.1
            self._computed += rate // 10
            stats = EngineStats(ROWS, 1, num_generated_tokens_total=self._computed)
            self.admission.note([], stats)

    def serve_cohorts(self, number: int = 3) -> None:
        """Steps with a queue, in which all rows begin and end together: prompts of 10 tokens take 0.1 s, which is that
        of an output, and 20 steps of one output per row."""
        prompts = 0
        for step in range(number * 21):
            self.now += 0.1
            prompts += 10 * ROWS if step % 21 == 0 else 0
            self._computed += ROWS if step % 21 else 0
            stats = EngineStats(ROWS, 1, num_generated_tokens_total=self._computed, num_prompt_tokens_total=prompts)
            self.admission.note([], stats)

    def refusal(self, **size: Any) -> EngineOverloadedError:
        with pytest.raises(EngineOverloadedError) as caught:
            self.send(**size)
        return caught.value


def test_the_queue_is_bounded_in_requests() -> None:
    """Guards against a bound that counts what runs, or lets one more in than it says."""
    queue = Queue(max_queued_requests=3)
    queue.fill_rows()
    for _ in range(3):
        queue.send()
    assert "3 of 3 requests" in str(queue.refusal())
    queue.now += 1
    assert "3 of 3 requests" in str(queue.refusal())
    with pytest.raises(EngineOverloadedError):
        queue.admission.check(None)


def test_what_comes_next_is_let_in() -> None:
    """Guards against a full queue of what can wait that keeps out what cannot; and against one without an end."""
    queue = Queue(max_queued_requests=3)
    queue.fill_rows()
    for _ in range(3):
        queue.send()
    queue.send(priority=-1)
    for priority in (-1, 0):
        queue.refusal(priority=priority)
    queue.now += 1
    queue.refusal(priority=-1)
    queue.send(priority=-2)


def test_priorities_are_not_judged_before_they_are_known() -> None:
    """Guards against an urgent request that is refused by its headers, before its body has said that it is urgent."""
    queue = Queue(max_queued_requests=3)
    queue.admission.engine_ready(ROWS, has_priorities=True)
    queue.fill_rows()
    for _ in range(3):
        queue.send()
    queue.admission.check(None, num_arriving=1)
    queue.refusal(priority=0)
    queue.send(priority=-1)


def test_a_search_takes_its_rows_and_waits_as_one() -> None:
    """Guards against a search that fills the queue for as long as it runs, because it tells nothing before its end."""
    queue = Queue(max_queued_requests=3)
    queue.send(n=ROWS, use_beam_search=True)
    queue.now += 1
    for _ in range(2):
        queue.send()
    queue.now += 1
    assert queue.admission._queue.must_wait
    queue.send(n=1)


def test_requests_on_their_way_count() -> None:
    """Guards against a burst in one turn of the event loop, of which each request finds the queue as it was before."""
    queue = Queue(max_queued_requests=3)
    queue.admission.check(None, num_arriving=ROWS + 2)
    with pytest.raises(EngineOverloadedError, match="7 of 3 requests"):
        queue.admission.check(None, num_arriving=ROWS + 3)
    queue = Queue(max_queue_wait=4.6 / MARGIN)
    queue.fill_rows()
    queue.measure()
    queue.admission.check(None, num_arriving=0)
    with pytest.raises(EngineOverloadedError, match="first token would take"):
        queue.admission.check(None, num_arriving=ROWS + 1)


def test_a_flow_that_has_nothing_waits_for_no_other() -> None:
    """Guards against a 429 for a key that gets the next row, because of another key's choices, even while no rate is
    known."""
    queue = Queue(max_queue_wait=0.5)
    for _ in range(9):
        queue.send(n=128, flow="crowd")
    queue.now += 1
    queue.send(flow="other")
    with pytest.raises(EngineOverloadedError, match="not known yet"):
        queue.send(flow="crowd")
    queue.measure()
    queue.admission.check("a third")
    queue.send(flow="a third")
    with pytest.raises(EngineOverloadedError, match="first token would take"):
        queue.send(flow="crowd")


def test_the_queue_is_bounded_in_tokens() -> None:
    """Guards against a few long prompts that fill a queue in which there is room for many requests."""
    queue = Queue(max_queued_tokens=1000)
    queue.fill_rows()
    queue.send(prompt=600)
    assert "600 of 1000 tokens" in str(queue.refusal(prompt=401))
    queue.send(prompt=400)
    assert "1000 of 1000 tokens" in str(queue.refusal(prompt=100))


def test_a_request_larger_than_the_queue_can_be_served() -> None:
    """Guards against a request that is told to try again later, and never could be let in."""
    queue = Queue(max_queued_requests=1, max_queued_tokens=10)
    queue.send(prompt=500, n=64)
    assert queue.requests.num_running == 64


def test_choices_count_one_by_one_and_their_prompt_once() -> None:
    """Guards against a call with many choices that counts as one, or as many prompts."""
    queue = Queue(max_queued_requests=100, max_queued_tokens=1000)
    queue.fill_rows()
    queue.send(prompt=500, n=60)
    assert "60 of 100 requests" in str(queue.refusal(n=41))
    queue.send(prompt=500, n=40)


def test_the_wait_is_forecast_from_the_measured_rate() -> None:
    """Guards against a bound that is no bound: rows of 90 tokens at 100 tokens/s are free after 3.6 s, and the request
    after them waits for 100 tokens more."""
    queue = Queue(max_queue_wait=4.6 / MARGIN)
    queue.fill_rows()
    queue.measure()
    for _ in range(ROWS):
        queue.send(prompt=10, max_tokens=90)
        assert queue.wait is not None
        assert queue.wait.limit_s == 4.6 / MARGIN
    queue.now += 1
    error = queue.refusal(prompt=10, max_tokens=90)
    assert "7.7 s" in str(error)
    assert error.retry_after_s == pytest.approx(7.7 - 4.6)


def test_a_forecast_that_was_wrong_is_corrected() -> None:
    """Guards against a forecast that lets in, for as long as the load lasts, what is then refused after its time. 90
    tokens are left of each row, at 100 per second: 3.6 s, and 0.1 s for the prompt. Requests waited twice as long."""
    queue = Queue(max_queue_wait=4.6 / MARGIN)
    queue.fill_rows()
    queue.measure()
    for _ in range(30):
        queue.admission.note_wait(Wait(5.0, 2.0), 4.0)
    assert "7.2 s" in str(queue.refusal(prompt=10))
    for _ in range(60):
        queue.admission.note_wait(Wait(5.0, 2.0), 2.0)
    queue.send()
    queue.admission.note_wait(Wait(5.0, 0.0), 4.0)  # of which nothing was foretold


def test_prompts_do_not_promise_outputs() -> None:
    """Guards against a rate that counts a prompt's tokens as much as outputs, which take ten times as long: it let in
    what then waited in vain. The rows have 20 outputs left, of 40 per second."""
    queue = Queue(max_queue_wait=2.1 / MARGIN)
    queue.fill_rows(max_tokens=21)
    queue.serve_cohorts()
    queue.send(max_tokens=20)
    queue = Queue(max_queue_wait=1.9 / MARGIN)
    queue.fill_rows(max_tokens=21)
    queue.serve_cohorts()
    assert "2.0 s" in str(queue.refusal(max_tokens=20))


def test_a_free_row_is_no_wait() -> None:
    """Guards against refusing work that the machine could do at once."""
    queue = Queue(max_queue_wait=0.001)
    for _ in range(ROWS):
        queue.send(prompt=5000)
        assert queue.wait is None
    queue.measure()
    queue.refusal()


def test_what_may_end_by_itself_is_expected_to_be_as_long_as_others_were() -> None:
    """Guards against refusing nearly everybody because chat requests allow the whole context and use little of it."""
    queue = Queue(max_queue_wait=10.0)
    for request in [queue.send(max_tokens=9000, ignore_eos=False) for _ in range(ROWS)]:
        ended = EngineOutput(request.choices[0].request.request_id, 0, [1] * 20, finish_reason=FinishReason.STOP)
        queue.admission.note([ended], EngineStats())
    queue.now += 1
    queue.measure()
    queue.send(max_tokens=9000, ignore_eos=False)
    for _ in range(ROWS):
        queue.send(max_tokens=9000)
    queue.refusal()


def test_a_burst_before_anything_is_measured_is_bounded() -> None:
    """Guards against thousands of requests let in by a server that does not know yet how slow it is."""
    queue = Queue(max_queue_wait=10.0)
    for _ in range(MAX_UNMEASURED + 1):
        queue.send()
    assert "not known yet" in str(queue.refusal())


def test_a_new_engine_does_not_upset_the_rate() -> None:
    """Guards against a rate that falls below zero with the counters of a new engine."""
    queue = Queue(max_queue_wait=5.0)
    queue.fill_rows()
    queue.measure()
    queue._computed = 0
    queue.admission.engine_ready(ROWS)
    queue.measure()
    queue.send()


def test_a_paused_request_takes_no_place() -> None:
    """Guards against readers that stand still and keep all others out, though the engine computes nothing for them."""
    queue = Queue(max_queue_wait=0.5)
    made = queue.fill_rows()
    queue.measure()
    queue.refusal()
    made[0].paused = True
    queue.now += 1
    queue.send()
    assert queue.wait is None


def test_a_call_of_many_choices_does_not_fill_the_queue_for_others() -> None:
    """Guards against one call that makes the server refuse everybody else, though the engine would give them a turn."""
    queue = Queue(max_queued_requests=20, max_queue_wait=5.0)
    queue.send(n=64, max_tokens=900)
    queue.measure()
    queue.now += 1
    for _ in range(3):
        queue.send()
    assert queue.wait is not None
    queue.refusal(n=20)


def test_choices_that_ended_without_a_token_do_no_harm() -> None:
    """Guards against dividing by the length of answers that failed before their first token."""
    queue = Queue(max_queued_requests=1)
    failed = [EngineOutput(str(i), 0, [], finish_reason=FinishReason.ERROR) for i in range(100)]
    queue.admission.note(failed, EngineStats())
    for _ in range(ROWS + 1):
        queue.send(ignore_eos=False)
    assert queue.refusal(ignore_eos=False).retry_after_s >= 1


def test_a_key_waits_for_its_own_requests() -> None:
    """Guards against a key that keeps to the limit with each call, and fills the queue with many."""
    queue = Queue(max_queue_wait=5.0)
    for _ in range(8):
        queue.send(flow="key a")
    queue.measure()
    queue.now += 1
    queue.refusal(flow="key a")
    queue.send(flow="key b")


@pytest.mark.parametrize("wrong", [{"max_queued_requests": 0}, {"max_queued_tokens": 1.5}, {"max_queue_wait": 0.0}])
def test_wrong_limits_are_named(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(wrong))):
        AdmissionLimits(**wrong)
