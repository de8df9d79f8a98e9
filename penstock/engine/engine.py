"""Engine: add, abort, step. The Scheduler plans a step, an Executor computes it, and the engine commits the results.

It handles token ids, not text, and does not import torch, so tests drive it with a scripted executor in milliseconds.
State changes only with the results of a step, so a failed step can be repeated: each of its requests is computed alone,
and a request that fails alone ends with the error. If the bookkeeping breaks off half-way, its state is dropped, and
all requests are computed anew.
"""

import time

from penstock.engine.adapters import Adapters
from penstock.engine.beam_search import Beam, Search, check_search
from penstock.engine.kv_cache_manager import KVCacheManager
from penstock.engine.observer import EngineObserver
from penstock.engine.policies import Scheduling
from penstock.engine.request import Request
from penstock.engine.scheduler import InFlightStep, Scheduler
from penstock.engine.speculation import Speculation
from penstock.engine.step_log import StepLog
from penstock.errors import EngineError, ExecutorLostError, InvalidRequestError, check_float, check_ids, invalid
from penstock.interface.messages import AdapterInfo, EngineOutput, EngineRequest, EngineStats
from penstock.interface.outputs import FinishReason
from penstock.interface.plugins import check_registered
from penstock.interface.sampling_params import SamplingParams
from penstock.interface.step import Executor, RequestStepOutput, ScheduledRequest, SchedulerOutput, num_rejected_drafts

MAX_FAILED_STEPS = 3  # in a row that blame a request, or cannot be planned: the engine is then broken


class Engine:
    """The requests of one model. `kv_cache` has the cache groups that the executor was built with."""

    def __init__(
        self,
        executor: Executor,
        kv_cache: KVCacheManager,
        *,
        scheduling: Scheduling,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        adapters: Adapters | None = None,
    ) -> None:
        self._executor = executor
        self._observers: tuple[EngineObserver, ...] = ()
        self.speculation: Speculation | None = None
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.kv_cache = kv_cache
        self.scheduler = Scheduler(self.kv_cache, scheduling, max_model_len, executor.depth, self._note_preemption)
        self.adapters = adapters
        self._clock = scheduling.clock
        self._requests: dict[str, Request] = {}
        self._searches: dict[str, Search] = {}  # the open ones, by the id of the request; its beams are in _requests
        self._log = StepLog()  # no observer: its intervals are part of the outputs, and it reads the requests' state
        self._early_outputs: list[EngineOutput] = []  # of requests that ended without a step
        self._num_arrived = 0
        self._num_steps = self._num_failed_steps = self._failed_in_a_row = 0
        self._num_generated_tokens = 0
        self._num_bytes_received = self._num_compiled = self._num_recorded = 0

    @property
    def executor(self) -> Executor:
        return self._executor

    def observe(self, observer: EngineObserver) -> None:
        """Call an observer from now on, after those that came before it."""
        self._observers = (*self._observers, observer)

    def stop_observing(self, observer: EngineObserver) -> None:
        self._observers = tuple(item for item in self._observers if item is not observer)

    def speculate(self, speculation: Speculation | None) -> None:
        """Ask for drafts from now on; with None, stop asking."""
        self.speculation = speculation
        if speculation is not None:
            speculation.fit(self.kv_cache.groups)

    def add_request(self, source: EngineRequest) -> None:
        """Queue a request. It continues after its output_token_ids, if it has any.

        Raises:
            InvalidRequestError: it is empty, too long, has ids outside the vocabulary or no seed to sample with, its id
                is in use, or it names a logits processor or an adapter that is unknown.
        """
        self._check(source)
        request = self._made(source)
        self._num_arrived += 1
        if not self._fits(request):
            message = f"prompt and output of up to {request.max_total_tokens} tokens do not fit the cache"
            message += " beside the pinned prefixes" if self.kv_cache.pins else ""
            raise InvalidRequestError(message, param="max_tokens", code="context_length_exceeded")
        reason, stop_token = request.ending(self.eos_token_ids)
        if reason is not None:  # resumed after its last token
            last = EngineOutput(
                source.request_id, request.num_output_tokens, [], finish_reason=reason, stop_reason=stop_token
            )
            self._early_outputs.append(last)
        else:
            if isinstance(request, Beam):
                self._searches[source.request_id] = request.search
            self._requests[request.request_id] = request
            self._log.arrived(request, self._clock(), self.scheduler)
            self.scheduler.add(request)
        for observer in self._observers:
            observer.arrived(source)

    def _fits(self, request: Request) -> bool:
        return self.kv_cache.fits_beside_pins(request, self.scheduler.max_num_batched_tokens)

    def pin(
        self, name: str, prompt_token_ids: list[int], cache_salt: str | None = None, adapter: str | None = None
    ) -> None:
        """Keep the full blocks of a prefix in the cache until `unpin`, once a request has computed them.

        Raises:
            InvalidRequestError: it cannot be pinned (KVCacheManager.pin), has ids outside the vocabulary or an unknown
                adapter, or leaves too little of the cache for a request that is open.
        """
        check_ids("prompt", prompt_token_ids, self.vocab_size)
        prefix = self._made(
            EngineRequest(name, prompt_token_ids, SamplingParams(max_tokens=1), cache_salt=cache_salt, adapter=adapter)
        )
        known = [(item, len(item.block_hashes), item.pending_salt) for item in self._requests.values()]
        self.kv_cache.pin(name, prefix)
        for request in (prefix, *self._requests.values()):
            if not self._fits(request):
                self.kv_cache.pins.remove(name)
                for item, count, salt in known:  # undo hashes that lack the salt because of this pin
                    del item.block_hashes[count:]
                    item.pending_salt = salt
                what = "there is no room to compute it" if request is prefix else "a request that runs has too little"
                message = f"beside all pinned prefixes {what}; at most half of the cache may be pinned"
                raise invalid("prompt", message, "pin_limit_exceeded")

    def unpin(self, name: str) -> bool:
        """Let the blocks of a pinned prefix be evicted like any others. Return False if no pin has this name."""
        return self.kv_cache.pins.remove(name)

    def add_adapter(self, name: str, path: str, sha256: str | None = None) -> AdapterInfo:
        """Load a LoRA adapter, for requests that name it. Raise InvalidRequestError as Adapters.add does."""
        in_use = {item.adapter for item in self._requests.values() if item.adapter is not None}
        return self._with_adapters().add(name, path, in_use, sha256)

    def remove_adapter(self, name: str) -> bool:
        """Refuse new requests with an adapter; open ones go on with it. Return False if the name is unknown."""
        return self.adapters is not None and self.adapters.remove(name)

    def _with_adapters(self) -> Adapters:
        if self.adapters is None:
            raise invalid("model", "this engine has no LoRA adapters; enable_lora = true")
        return self.adapters

    def _made(self, source: EngineRequest) -> Request:
        adapter = None if source.adapter is None else self._with_adapters().find(source.adapter)
        if source.params.use_beam_search:
            return Beam(source, self._num_arrived, self.max_model_len, self.eos_token_ids, self._clock(), adapter)
        return Request(source, self._num_arrived, self.max_model_len, self._clock(), adapter)

    def _check(self, source: EngineRequest) -> None:
        in_use = source.request_id in self._requests or source.request_id in self._searches
        if in_use or any(output.request_id == source.request_id for output in self._early_outputs):
            raise invalid("request_id", f"{source.request_id!r} is in use")
        check_registered(source.params.logits_processors or ())
        length = len(source.prompt_token_ids)
        if length == 0:
            raise invalid("prompt", "it is empty")
        if length + (source.params.pooling is None) > self.max_model_len:
            more = " and one output" if source.params.pooling is None else ""
            message = f"{length} tokens{more} exceed the context of {self.max_model_len}"
            raise invalid("prompt", message, "context_length_exceeded")
        if source.params.seed is None and not source.params.greedy:
            raise invalid("seed", "a sampled request needs one; the client resolves it")
        draws_depend = source.params.has_sampler_state and not source.params.greedy
        if draws_depend and source.output_token_ids and not source.sampler_state:
            raise invalid("sampler_state", "outputs of a request with mirostat come with it, or are computed again")
        for number in source.sampler_state or ():
            check_float("sampler_state", number, -1e9, 1e9)
        if source.params.use_beam_search:
            check_search(source, self.vocab_size)
        check_ids("prompt", [*source.prompt_token_ids, *source.output_token_ids], self.vocab_size)

    def abort(self, request_id: str) -> bool:
        """End a request without another output. Return False if it is not open (it may just have finished)."""
        if request_id in self._searches:
            self._finish(self._searches[request_id].beams[0])
        elif request_id in self._requests:
            self._finish(self._requests[request_id])
        else:
            num_early = len(self._early_outputs)
            self._early_outputs = [output for output in self._early_outputs if output.request_id != request_id]
            if len(self._early_outputs) == num_early:
                return False
        for observer in self._observers:
            observer.aborted(request_id)
        return True

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._early_outputs)

    def step(self) -> list[EngineOutput]:
        """Compute one step. Return an output for each request with new tokens; finished ones have a finish_reason.

        Raises:
            EngineError: MAX_FAILED_STEPS steps in a row failed as a whole.
            MemoryError: a step found no memory. The requests are as before it, and this or another engine may go on.
            ExecutorLostError: nothing can be computed any more. Another engine may go on.
        """
        outputs, self._early_outputs = self._early_outputs, []
        if not self.scheduler.has_work:
            return outputs
        if not self._observers:
            return self._step(outputs)
        for observer in self._observers:
            observer.step_began()
        try:
            return self._step(outputs)
        finally:
            for observer in self._observers:
                observer.step_ended()

    def _step(self, outputs: list[EngineOutput]) -> list[EngineOutput]:
        """Submit what can be submitted, then collect and commit the oldest step. Return `outputs` and its outputs."""
        try:
            self._submit_steps()
        except Exception as error:
            self._note_failure(error)
            self.scheduler.reset(self._requests.values())
            return outputs
        step, live = self.scheduler.in_flight.pop_oldest()
        plan = step.plan
        try:
            results = self._collected(step)
        except (MemoryError, ExecutorLostError):  # no request is to blame, and the next step would fail too
            self._early_outputs = outputs
            self._give_up(plan, live)
            raise
        except Exception as error:  # must not reach the other requests
            self._num_steps += 1
            if not self.scheduler.is_trying or _is_lost(plan, live):
                self._num_failed_steps += 1
                self._give_up(plan, live)
                return outputs
            self._note_failure(error)
            results = {item.request_id: _failure(error) for item in plan.scheduled}
        else:
            self._num_steps += 1
            self._failed_in_a_row = 0
            self._note_success(step, live, results)
        return outputs + self._commit_all(plan.scheduled, live, results)

    def _submit_steps(self) -> None:
        """Plan and submit steps while the executor can have one more in flight, and a request is ready for it."""
        scheduler, flights = self.scheduler, self.scheduler.in_flight
        while flights.has_room and (scheduler.waiting or len(scheduler.running) > len(flights) or not flights.steps):
            wants_checksums = False
            for observer in self._observers:
                observer.planning()
                wants_checksums = wants_checksums or observer.wants_checksums
            plan = scheduler.schedule(self._drafts(), wants_checksums)
            if not plan.scheduled and flights.steps:
                scheduler.withdraw(plan)
                return
            proposal = None if self.speculation is None else self.speculation.proposal
            step = InFlightStep(plan, proposal, self._clock())
            flights.add(step, self._requests)
            try:
                for observer in self._observers:
                    observer.submitting(plan)
                step.handle = self._executor.submit(plan)
            except Exception as error:  # belongs to this step, and is raised when the step is collected
                step.error = error
                return

    def _collected(self, step: InFlightStep) -> dict[str, RequestStepOutput]:
        started = time.monotonic()
        try:
            if step.error is not None:
                raise step.error
            output = self._executor.collect(step.handle)
            if self._observers:
                seconds = time.monotonic() - started
                for observer in self._observers:
                    observer.collected(step.plan, output, seconds)
        except Exception as error:
            for observer in self._observers:
                observer.failed(step.plan, error)
            raise
        self._num_bytes_received += output.bytes_received
        self._num_compiled += output.num_compiled
        self._num_recorded += output.num_recorded
        return output.results

    def _note_preemption(self, request: Request) -> None:
        for observer in self._observers:
            observer.preempted(request.source_id)

    def _give_up(self, plan: SchedulerOutput, live: dict[str, Request]) -> None:
        """Handle a step that failed for an unknown reason. If no request wanted its results, none is suspected."""
        if _is_lost(plan, live):
            self.scheduler.repeat_removals(plan)
        else:
            self.scheduler.isolate(plan)

    def _note_success(
        self, step: InFlightStep, live: dict[str, Request], results: dict[str, RequestStepOutput]
    ) -> None:
        plan, began = step.plan, max(step.began, self._log.ended)
        if self.speculation is not None and step.proposal is not None:
            accepted = _num_accepted(plan.scheduled, results)
            known = {name: count for name, count in accepted.items() if name in live}
            self.speculation.note(step.proposal, plan.scheduled, known)
        ended = self._clock()
        if self.scheduler.pace is not None:
            self.scheduler.pace.note(plan.scheduled, ended - began)
        self._log.stepped(plan, self._requests, live, self.scheduler, began, ended)

    def _drafts(self) -> dict[str, list[int]]:
        """Propose the next tokens of running requests; none while a request is computed alone."""
        if self.speculation is None or self.scheduler.is_trying:
            return {}
        return self.speculation.propose(self.scheduler.ready)

    def _note_failure(self, error: Exception) -> None:
        self._num_failed_steps += 1
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= MAX_FAILED_STEPS:
            raise EngineError(f"{MAX_FAILED_STEPS} steps in a row failed; the last: {error}") from error

    def _commit_all(
        self, scheduled: list[ScheduledRequest], live: dict[str, Request], results: dict[str, RequestStepOutput]
    ) -> list[EngineOutput]:
        """Commit each live request's results. A request whose results cannot be committed fails alone."""
        outputs: list[EngineOutput] = []
        is_broken = False
        for item in scheduled:
            request = live.get(item.request_id)
            if request is None or item.request_id not in self._requests:  # a beam of a search that has ended
                continue
            start = request.num_output_tokens
            try:
                output = self._commit(request, item, results[item.request_id], start)
            except Exception as error:
                is_broken = True
                self._forget(request)
                self._forget_drafts(item.request_id)
                output = self._ended(request, start, _failure(error).error)
            if output is not None:
                outputs.append(output)
        for search in list(self._searches.values()):
            first = search.beams[0]  # there may be none afterwards
            try:
                output = self._advance(search)
            except Exception as error:
                is_broken = True
                self._forget(first)
                output = self._ended(first, 0, _failure(error).error)
            if output is not None:
                output.intervals = output.intervals or self._log.finished(first)
                outputs.append(output)
        if is_broken:
            self.scheduler.reset(self._requests.values())
        return outputs

    def _commit(
        self, request: Request, item: ScheduledRequest, result: RequestStepOutput, start: int
    ) -> EngineOutput | None:
        """Commit what a step has computed for a request with `start` outputs: mostly one token, and nothing else."""
        if result.error is not None:
            output = self._ended(request, start, result.error)
            self._finish(request)
            return output
        computed = item.num_computed_tokens
        assert request.num_computed_tokens == computed, "a request has moved while it was computed"
        num_rejected = num_rejected_drafts(item, result) if item.draft_token_ids else 0
        computed += item.num_new_tokens - num_rejected
        if isinstance(request, Beam):
            request.num_computed_tokens = computed
            self._score(request, result)
            return None
        reason, stop_token = self._append(request, result.new_token_ids)
        if result.pooled is not None:
            reason = FinishReason.STOP
        if result.sampler_state is not None:
            request.sampler_state = result.sampler_state
        if computed >= (num_tokens := len(request.token_ids)):  # it has ended, perhaps within its drafts
            assert reason is not None, "a request goes on with nothing to compute"
            computed = num_tokens
        request.num_computed_tokens = computed
        self.kv_cache.commit(request)
        new_ids = request.token_ids[request.num_prompt_tokens + start :]
        self._num_generated_tokens += len(new_ids)
        self.scheduler.policy.generated(request, len(new_ids))
        output = EngineOutput(request.request_id, start, new_ids)
        output.num_cached_tokens = request.num_cached_tokens or 0
        if result.prompt_logprobs:
            output.prompt_logprobs_start = request.num_prompt_logprobs + 1
            fresh = request.new_prompt_logprobs(item.num_computed_tokens, result.prompt_logprobs)
            output.prompt_logprobs = fresh or None
        if reason is None and not new_ids and not output.prompt_logprobs:
            return None
        output.intervals = self._log.committed(request, has_token=bool(new_ids), has_ended=reason is not None)
        if reason is not None:
            output.finish_reason, output.stop_reason = reason, stop_token
            self._finish(request)
        elif new_ids:
            self.scheduler.acquit(request)
        if result.logprobs is not None:
            output.logprobs = result.logprobs[: len(new_ids)]
        if item.draft_token_ids:
            output.num_accepted_tokens = len(item.draft_token_ids) - num_rejected
            output.num_rejected_tokens = num_rejected
        output.sampler_state, output.pooled = result.sampler_state, result.pooled
        return output

    def _append(self, request: Request, token_ids: list[int]) -> tuple[FinishReason | None, int | None]:
        """Append tokens up to the first that ends the request. Return why it ends, if it does, and the stop token."""
        for token_id in token_ids:
            request.token_ids.append(token_id)
            reason, stop_token = request.ending(self.eos_token_ids)
            if reason is not None:
                return reason, stop_token
        return None, None

    def _score(self, beam: Beam, result: RequestStepOutput) -> None:
        """Note what a step has computed for a beam; its search chooses the token."""
        self.kv_cache.commit(beam)
        if result.logprobs:
            beam.scored = result.logprobs[0]
            self._num_generated_tokens += 1
            self.scheduler.policy.generated(beam, 1)
            self._log.has_token(beam)
            self.scheduler.acquit(beam)

    def _advance(self, search: Search) -> EngineOutput | None:
        """Let a search choose tokens. Return its output if it has ended; its beams are gone then."""
        before = search.beams
        output = search.advance(self.scheduler)
        if search.beams is not before:
            for beam in before:
                del self._requests[beam.request_id]
            self._requests.update((beam.request_id, beam) for beam in search.beams)
        if output is not None:
            del self._searches[search.request_id]
        return output

    def _ended(self, request: Request, start: int, error: str | None) -> EngineOutput:
        cached, intervals = request.num_cached_tokens or 0, self._log.finished(request)
        return EngineOutput(
            request.source_id, start, [], finish_reason=FinishReason.ERROR, num_cached_tokens=cached, error=error,
            intervals=intervals,
        )  # fmt: skip

    def _finish(self, request: Request) -> None:
        """End a request, or the whole search of a beam."""
        self._log.forget(request)
        for member in self._forget(request):
            self._forget_drafts(member.request_id)
            self.scheduler.remove(member)

    def _forget(self, request: Request) -> list[Request]:
        """Remove a request, or every beam of its search, from those that are open. Return what was removed."""
        members = [request]
        if isinstance(request, Beam):
            self._searches.pop(request.source_id, None)
            members = [item for item in self._requests.values() if item.source_id == request.source_id]
        for member in members:
            self._requests.pop(member.request_id, None)
        return members

    def _forget_drafts(self, request_id: str) -> None:
        if self.speculation is not None:
            self.speculation.forget(request_id)

    def stats(self) -> EngineStats:
        offload = self.kv_cache.offload
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_prefilling=self.scheduler.num_prefilling,
            num_preempted=self.scheduler.num_preempted,
            num_slots=self.scheduler.max_num_seqs,
            kv_blocks_total=self.kv_cache.num_blocks,
            kv_blocks_free=self.kv_cache.num_free,
            kv_blocks_cached=self.kv_cache.num_cached,
            kv_blocks_pinned=self.kv_cache.pins.num_held,
            num_steps_total=self._num_steps,
            num_prompt_tokens_total=self.scheduler.num_prompt_tokens,
            num_prefix_queries_total=self.scheduler.num_prefix_queries,
            num_cached_tokens_total=self.scheduler.num_cached_tokens,
            num_generated_tokens_total=self._num_generated_tokens,
            num_preemptions_total=self.scheduler.num_preemptions,
            num_failed_steps_total=self._num_failed_steps,
            num_bytes_received_total=self._num_bytes_received,
            num_compiled_total=self._num_compiled,
            num_recorded_total=self._num_recorded,
            num_loaded_blocks_total=0 if offload is None else offload.num_loaded,
            **({} if offload is None else offload.store.counters()),
            **({} if self.speculation is None else self.speculation.counters()),
        )

    def check_integrity(self) -> None:
        """Raise PenstockError unless every block is accounted for."""
        self.kv_cache.check_integrity()

    def shutdown(self) -> None:
        self._executor.shutdown()
        if self.speculation is not None:
            self.speculation.shutdown()


def _is_lost(plan: SchedulerOutput, live: dict[str, Request]) -> bool:
    """Tell whether a step had requests, but none of them wants its results any more."""
    return bool(plan.scheduled) and not live


def _num_accepted(scheduled: list[ScheduledRequest], results: dict[str, RequestStepOutput]) -> dict[str, int]:
    """Count the accepted drafts of each request that had drafts and did not fail."""
    try:
        return {
            item.request_id: len(item.draft_token_ids) - num_rejected_drafts(item, result)
            for item in scheduled
            if item.draft_token_ids and (result := results.get(item.request_id)) is not None and result.error is None
        }
    except (AttributeError, TypeError):  # a malformed result, which the commit will find
        return {}


def _failure(error: Exception) -> RequestStepOutput:
    return RequestStepOutput([], error=f"{type(error).__name__}: {error}")
