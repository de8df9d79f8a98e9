"""The proof of the flight recorder: random traffic is recorded up to a death, computed again, and compared.

Each record is replayed twice: unchanged, which must give the same bits, and with one changed bit, which must be found
and named. Without the second replay, a replay that compares nothing would prove the promise.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import msgspec

from penstock import EngineConfig, SamplingParams
from penstock.assembly import BuiltEngine, build_engine
from penstock.client.recorder import Recorder, describe
from penstock.client.records import Bundle, Computed, EngineDescription, Ring, make_bundle, pack
from penstock.engine.engine import Engine
from penstock.engine.kv_cache_manager import KVCacheManager, peak_blocks
from penstock.engine.observer import EngineObserver
from penstock.engine.policies import Scheduling
from penstock.engine.speculation import NgramProposer, Speculation
from penstock.interface.messages import EngineRequest
from penstock.interface.step import CacheGroup, Executor, SchedulerOutput, StepOutput
from penstock_lab.bench.record_history import unpack
from penstock_lab.prove.every_draft import EveryDraft
from penstock_lab.prove.proof import Trials
from penstock_lab.prove.recompute import LOGITS, ReplayReport, compute
from penstock_lab.prove.replay import build_for, check_bundle

MAX_MODEL_LEN = 192
OPTIONS = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 4, "max_num_batched_tokens": 48}
RING_BYTES = (24_000, 48_000, 2**20)  # the smaller rings wrap around within a trial
STEPS = (20, 120)
MAX_DRAFTS = 4


class _DeathError(BaseException):
    """The end of an engine, which nothing catches."""


@dataclass(slots=True)
class _Death(EngineObserver):
    """Ends the engine after a step was computed, before anybody else learns its results."""

    steps_to_live: int

    def collected(self, plan: SchedulerOutput, output: StepOutput, seconds: float) -> None:
        self.steps_to_live -= 1
        if self.steps_to_live == 0:
            raise _DeathError


class Replays:
    """Records random requests, aborts and preemptions up to the death of their engine, and replays them."""

    name: ClassVar[str] = "replay"
    promise: ClassVar[str] = "A record of the last minutes replays to the same bits, and a changed bit is found"
    unit: ClassVar[str] = "records"
    goal: ClassVar[int] = 100
    weight: ClassVar[float] = 1.0

    def run(self, trials: Trials) -> None:
        subject = trials.subject
        config = EngineConfig.from_options(**{**OPTIONS, **subject.options, "model": subject.model})
        planned = build_engine(config)
        groups = [_few_blocks(group) for group in planned.engine.kv_cache.groups]
        kernels = planned.config.numerics.kernels
        planned.engine.shutdown()
        if kernels != "cpu":
            trials.skip(f"--kernels {kernels} promises no bits")
            return
        recorded = build_engine(config, groups=groups)
        description = describe(recorded.engine, recorded.config, recorded.info)
        replaying = build_for(description, [group.num_blocks for group in groups], model=subject.model,
                              imports=config.imports)  # fmt: skip
        try:
            _Proof(trials, recorded, replaying, description).run()
        finally:
            recorded.engine.shutdown()
            replaying.engine.shutdown()


def _few_blocks(group: CacheGroup) -> CacheGroup:
    """Leave the group room for one and a half of the longest requests, so that requests are preempted."""
    longest = peak_blocks(group, MAX_MODEL_LEN, OPTIONS["max_num_batched_tokens"])
    return replace(group, num_blocks=longest + 1 + longest // 2)


@dataclass(slots=True)
class _Proof:
    trials: Trials
    recorded: BuiltEngine
    replaying: BuiltEngine
    description: EngineDescription
    steps: int = 0
    tokens: int = 0
    restored: int = 0
    preemptions: int = 0
    drafts: int = 0
    num_bytes: int = 0

    def run(self) -> None:
        while self.trials.go_on():
            data = self._record()
            if data is not None:
                self._check(unpack(data))
                self.num_bytes += len(data)
                self.trials.tried()
        for name in ("steps", "tokens", "restored", "preemptions", "drafts"):
            self.trials.figure(name, getattr(self, name))
        self.trials.figure("bytes_per_record", self.num_bytes // max(1, self.trials.outcome.tried))

    def _record(self) -> bytes | None:
        """Run random traffic up to a death. Return the bundle, or None if nothing was recorded."""
        choose, inner = self.trials.random, self.recorded.engine.executor
        ring = Ring.create(choose.choice(RING_BYTES))
        observers = [_Death(choose.randint(*STEPS)), Recorder(ring, self.description)]
        engine = _engine_on(inner, observers, self.description, self.recorded, drafts=choose.random() < 0.5)
        names: list[str] = []
        prefix = self._ids(choose.randint(20, 60))
        try:
            while True:
                if len(names) < 4 or choose.random() < 0.15:
                    names.append(f"r{len(names)}")
                    engine.add_request(self._request(names[-1], prefix))
                if choose.random() < 0.05:
                    engine.abort(choose.choice(names))
                engine.step()
        except _DeathError:
            self.preemptions += engine.scheduler.num_preemptions
            self.drafts += engine.stats().num_draft_tokens_total
        inner.collect(inner.submit(SchedulerOutput(-1, [], [], names)))
        segments = ring.read()
        return pack(make_bundle(segments, "the proof")) if segments else None

    def _request(self, name: str, prefix: list[int]) -> EngineRequest:
        choose = self.trials.random
        prompt = prefix[: choose.randrange(len(prefix) + 1)] + self._ids(choose.randint(1, 40))
        params = SamplingParams(
            seed=choose.getrandbits(63),
            temperature=choose.choice((0.0, 0.7, 1.0)),
            top_k=choose.choice((0, 0, 40)),
            top_p=choose.choice((1.0, 0.9)),
            frequency_penalty=choose.choice((0.0, 0.0, 0.5)),
            repetition_penalty=choose.choice((1.0, 1.0, 1.2)),
            logprobs=choose.choice((None, None, 3)),
            prompt_logprobs=choose.choice((None, None, None, 1)),
            max_tokens=choose.randint(1, 80),
            ignore_eos=choose.random() < 0.8,
        )
        outputs = self._ids(choose.randint(1, 20)) if choose.random() < 0.2 else []
        return EngineRequest(name, prompt, params, choose.randrange(3), outputs)

    def _ids(self, count: int) -> list[int]:
        return [self.trials.random.randrange(self.description.vocab_size) for _ in range(count)]

    def _check(self, bundle: Bundle) -> None:
        """Replay a bundle, unchanged and with one changed bit."""
        report = self._replay(bundle)
        self.steps, self.tokens = self.steps + report.steps, self.tokens + report.tokens
        self.restored += report.restored
        if not report.passed:
            self.trials.wrong(f"record {self.trials.outcome.tried}: {[*report.differences, *report.findings][0]}")
            return
        changed, step_id, request = self._change_a_bit(bundle)
        if step_id is None:
            return
        found = self._replay(changed).differences
        if [(item.step_id, item.what) for item in found] != [(step_id, LOGITS)]:
            what = f"the bit changed in step {step_id}, result {request}, was not named: {found}"
            self.trials.wrong(f"record {self.trials.outcome.tried}: {what}")

    def _replay(self, bundle: Bundle) -> ReplayReport:
        report = ReplayReport(bundle.reason)
        check_bundle(bundle, report)
        num_blocks = [group.num_blocks for group in self.description.groups]
        compute(bundle, self.replaying.engine.executor, report, num_blocks)
        return report

    def _change_a_bit(self, bundle: Bundle) -> tuple[Bundle, int | None, int]:
        """Change one bit of one checksum; also return its step, and the index of the result in the step."""
        places = [
            (at, index)
            for at, record in enumerate(bundle.records)
            if isinstance(record, Computed)
            for index, checksum in enumerate(record.checksums)
            if checksum is not None
        ]
        if not places:
            return bundle, None, 0
        at, index = self.trials.random.choice(places)
        records, record = list(bundle.records), bundle.records[at]
        if not isinstance(record, Computed):
            return bundle, None, 0
        checksums = list(record.checksums)
        checksums[index] = (checksums[index] or 0) ^ 1 << self.trials.random.randrange(64)
        records[at] = msgspec.structs.replace(record, checksums=checksums)
        return msgspec.structs.replace(bundle, records=records), record.step_id, index


def _engine_on(
    executor: Executor,
    observers: list[EngineObserver],
    description: EngineDescription,
    built: BuiltEngine,
    *,
    drafts: bool,
) -> Engine:
    """Make a new engine on an executor without requests. drafts: the engine drafts by prompt lookup."""
    made = Engine(
        executor,
        KVCacheManager(description.groups, enable_prefix_caching=built.config.cache.enable_prefix_caching),
        scheduling=Scheduling(
            max_num_seqs=description.max_num_seqs, max_num_batched_tokens=description.max_num_batched_tokens
        ),
        max_model_len=description.max_model_len,
        vocab_size=description.vocab_size,
        eos_token_ids=built.info.eos_token_ids,
    )
    for observer in observers:
        made.observe(observer)
    made.speculate(Speculation(NgramProposer(4, 1), MAX_DRAFTS, policy=EveryDraft()) if drafts else None)
    return made
