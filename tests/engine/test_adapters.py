"""Adapters that come and go between steps, of which several may be in flight: in the engine, and in its record."""

from contextlib import suppress
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.client.recorder import Recorder
from penstock.client.records import EngineDescription, Ring, make_bundle
from penstock.engine.adapters import Adapters
from penstock.errors import InvalidRequestError
from penstock.interface.messages import AdapterInfo
from penstock_lab.mock import next_token
from penstock_lab.prove.recompute import ReplayReport, compute
from penstock_lab.prove.replay import check_bundle
from tests.fakes_engine import VOCAB, ScriptedExecutor, make_engine, request, token_ids

LIMITS = {"max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 24}
CONTENTS = [f"{number:064x}" for number in range(4)]  # digests of files, and their paths


def adapters_for(executor: ScriptedExecutor, max_loras: int) -> Adapters:
    def read(name: str, path: str) -> tuple[AdapterInfo, str]:
        return AdapterInfo(name, path, 1, (), path, 1), path

    return Adapters(max_loras, read, executor.load_adapter)


def expected(prompt: list[int], count: int, content: str | None) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, adapter=content or ""))
    return tokens[len(prompt) :]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    depth=st.sampled_from([1, 3, 4]),
    max_loras=st.integers(1, 2),
    num_bytes=st.sampled_from([6_000, 2**20]),
)
def test_a_request_keeps_its_adapter(seed: int, depth: int, max_loras: int, num_bytes: int) -> None:
    """Guards against a slot that is given away under a request that is open, against blocks of a cached prefix that
    another adapter has computed, and against a record that names the adapter which has the slot by the time that a step
    which was in flight is written, or restores what it does not have with another one."""
    draw, engine = Random(seed), make_engine(num_blocks=20, depth=depth, **LIMITS)
    executor, ring = engine.executor, Ring.create(num_bytes)
    assert isinstance(executor, ScriptedExecutor)
    engine.adapters = adapters_for(executor, max_loras)
    options = {"system_fingerprint": "penstock-0-scripted", "options": {}, "vocab_size": VOCAB, **LIMITS}
    engine.observe(Recorder(ring, EngineDescription(groups=executor.groups, **options), 0, engine.adapters))
    asked: dict[str, list[int]] = {}
    found: dict[str, list[int]] = {}
    for turn in range(30):
        for name in draw.choices("ab", k=draw.randrange(3)):
            with suppress(InvalidRequestError):  # no slot is free
                engine.add_adapter(name, draw.choice(CONTENTS))
            if draw.random() < 0.3:
                engine.remove_adapter(name)
        loaded = {item.name: item.sha256 for item in engine.adapters}
        for number in range(draw.randrange(4)):
            adapter, prompt = draw.choice([None, *loaded]), [draw.randrange(2)] * draw.choice([4, 4, 20, 40]) + [turn]
            asked[f"{turn} {number}"] = expected(prompt, 9, adapter and loaded[adapter])
            engine.add_request(request(f"{turn} {number}", prompt, 9, adapter=adapter))
        for number in range(draw.choice([0, 0, 60])):  # what is noted of them fills a ring
            engine.add_request(request(f"{number}", [1], 9))
            engine.abort(f"{number}")
        for _ in range(draw.randrange(3)):
            for output in engine.step():
                found.setdefault(output.request_id, []).extend(token_ids([output]))
        for name in list(asked)[::-1][: draw.choice([0, 0, 2, 20])]:  # some may be in flight for the first time
            if engine.abort(name):
                del asked[name]
    while engine.has_work:
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(token_ids([output]))
    assert {name: found[name] for name in asked} == asked
    if not ring.read():
        return
    bundle, report = make_bundle(ring.read(), "").decoded(), ReplayReport("")
    num_blocks = check_bundle(bundle, report)[1]
    again = ScriptedExecutor(executor.groups)
    compute(bundle, again, report, num_blocks, adapters=adapters_for(again, max_loras))
    assert report.passed, (report.differences, report.findings)
