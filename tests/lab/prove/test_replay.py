"""`penstock replay` and its proof, on the demo model with the native kernels."""

import asyncio
import itertools
import json
import os
import signal
import stat
from pathlib import Path

import msgspec
import pytest

from penstock import AsyncLLM, InvalidRequestError, LoRARequest, SamplingParams, StructuredOutputsParams
from penstock.cli.main import main
from penstock.client import records as keeper
from penstock.client.input_processor import PromptRequest
from penstock.client.records import Begun, Bundle, Computed, RecordKeeper, RecordOptions, Segment, pack
from penstock.kernels.cpu.library import best_level
from penstock_lab.bench import record_history
from penstock_lab.bench.record_history import unpack
from penstock_lab.prove import records as proof_module
from penstock_lab.prove.adapters import write_adapter
from penstock_lab.prove.proof import Outcome, Subject, Trials
from penstock_lab.prove.records import Replays
from penstock_lab.prove.replay import compare_fingerprints, replay

native = pytest.mark.skipif(best_level() is None, reason="the reference kernels promise no bits")


async def killed(directory: str) -> tuple[str, bytes]:
    """Stream three requests through a kill of their engine; return the file that it left, and a record asked for."""
    async with AsyncLLM("demo", max_num_seqs=2, record_dir=directory) as llm:

        async def read(index: int) -> None:
            form = StructuredOutputsParams(regex="[ab]0123456789" * 9) if index == 2 else None  # with forced tokens
            logprobs = None if index == 2 else index
            params = SamplingParams(max_tokens=40, ignore_eos=True, seed=index, logprobs=logprobs, output_kind="delta",
                                    structured_outputs=form)  # fmt: skip
            count = 0
            async for _ in llm.generate("Once upon a time" * (1 + index), params):
                count += 1
                if index == 0 and count == 20:
                    os.kill(llm.status().pid, signal.SIGKILL)

        await asyncio.gather(*(read(index) for index in range(3)))
        after_the_death = os.listdir(directory)
        asked = await llm.record()
    (file,) = [name for name in os.listdir(directory) if name != os.path.basename(asked.file)]
    assert file in after_the_death
    return os.path.join(directory, file), asked.data


@pytest.fixture(scope="module")
def left(tmp_path_factory) -> tuple[str, bytes]:
    return asyncio.run(killed(str(tmp_path_factory.mktemp("records"))))


@native
def test_a_killed_engine_leaves_a_record_that_replays(left, capsys):
    """Guards against a record that dies with its engine, or cannot be computed again."""
    assert stat.S_IMODE(os.stat(left[0]).st_mode) == 0o600
    assert main(["replay", left[0], "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["passed"], report["computed"]) == (True, True)
    assert report["reason"] == "the engine process died (signal 9)"
    assert report["tokens"] >= 30
    assert main(["replay", left[0]]) == 0
    assert "the same bits" in capsys.readouterr().out


@native
def test_a_changed_bit_is_named(left, tmp_path, capsys):
    """Guards against a comparison that cannot fail: one bit of one checksum, and one token id."""
    bundle = unpack(Path(left[0]).read_bytes())
    at = next(i for i, item in enumerate(bundle.records) if isinstance(item, Computed) and item.step_id == 7)
    record = bundle.records[at]
    for changed, what in (
        (msgspec.structs.replace(record, checksums=[record.checksums[0] ^ 1 << 40, *record.checksums[1:]]), "logits"),
        (msgspec.structs.replace(record, token_ids=[[record.token_ids[0][0] ^ 1], *record.token_ids[1:]]), "token ids"),
    ):
        records = [*bundle.records[:at], changed, *bundle.records[at + 1 :]]
        file = tmp_path / "changed"
        file.write_bytes(pack(msgspec.structs.replace(bundle, records=records)))
        assert main(["replay", str(file)]) == 1
        assert "first difference: step 7, request" in (out := capsys.readouterr().out)
        assert f": {what}: " in out


@native
def test_a_record_asked_for_has_no_text(left, tmp_path, capsys):
    bundle = unpack(left[1])
    assert not bundle.has_text
    assert {item.epoch for item in bundle.records if isinstance(item, Begun)} == {0, 1}  # both engines are in it
    file = tmp_path / "without"
    file.write_bytes(left[1])
    assert main(["replay", str(file)]) == 0
    assert "nothing could be computed" in capsys.readouterr().out


def test_what_cannot_be_replayed_is_one_line(left, tmp_path, capsys, monkeypatch):
    """Guards against a traceback, a download, or a user's file that runs because a record names it."""
    bundle = unpack(Path(left[0]).read_bytes())

    def with_options(**options: object) -> Bundle:
        changed = [
            msgspec.structs.replace(
                item, engine=msgspec.structs.replace(item.engine, options={**item.engine.options, **options})
            )
            if isinstance(item, Begun)
            else item
            for item in bundle.records
        ]
        return msgspec.structs.replace(bundle, records=changed)

    cases = {
        "is not a directory here": with_options(model="owner/model"),
        "files of the user's own": with_options(imports=["evil.py"]),
        "unknown option": with_options(surprise=1),
        "block_size: 'a lot'": with_options(block_size="a lot"),
    }
    for expected, changed in cases.items():
        file = tmp_path / "file"
        file.write_bytes(pack(changed))
        assert main(["replay", str(file)]) == 2
        assert expected in (error := capsys.readouterr().err)
        assert "Traceback" not in error
    assert main(["replay", str(tmp_path / "missing")]) == 2
    (tmp_path / "rubbish").write_bytes(b"rubbish")
    assert main(["replay", str(tmp_path / "rubbish")]) == 2
    capsys.readouterr()
    assert main(["replay", "/dev/zero"]) == 2  # it has no end
    assert capsys.readouterr().err == "penstock: BUNDLE: /dev/zero: it is not a record of Penstock\n"
    monkeypatch.setattr(record_history, "MAX_BYTES", 10)
    assert main(["replay", left[0]]) == 2
    assert "it is larger than 10 bytes" in capsys.readouterr().err


def test_another_engine_is_named():
    old, new = "penstock-3-cpu.avx512-bfloat16-aaaa", "penstock-3-cpu.avx2-bfloat16-bbbb"
    assert compare_fingerprints(old, old) == []
    assert "the kernels (cpu.avx512 there, cpu.avx2 here)" in compare_fingerprints(old, new)[0]
    assert "the model's files" in compare_fingerprints(old, old.replace("aaaa", "bbbb"))[0]


# --- the proof --------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(proof_module, "STEPS", (15, 45))
    monkeypatch.setattr(proof_module, "RING_BYTES", (16_000, 24_000, 2**20))


def prove(goal: int, **options: object) -> Outcome:
    outcome = Outcome(Replays.name, Replays.promise, Replays.unit)
    Replays().run(Trials(Subject("demo", options), outcome, goal=goal, seed=7))
    return outcome


@native
@pytest.mark.parametrize("options", [{}, {"block_size": 2**14}, {"kv_cache_dtype": "int8"}], ids=str)
def test_records_replay_to_the_same_bits(options):
    outcome = prove(2, **options)
    assert outcome.passed, outcome.wrong
    assert outcome.figures["tokens"] > 10


@native
def test_the_proof_fails_where_a_replay_sees_nothing(monkeypatch):
    """Guards against a proof that cannot fail."""
    monkeypatch.setattr("penstock_lab.prove.recompute.differences", lambda *args: [])
    outcome = prove(1)
    assert outcome.num_wrong == outcome.tried == 1
    assert "was not named" in outcome.wrong[0]


@native
def test_the_proof_fails_where_the_bits_change(monkeypatch):
    """Guards against the same, from the other side: the replaying engine gets another first token."""
    monkeypatch.setattr(proof_module, "compute", _on_other_tokens)
    outcome = prove(2)
    assert outcome.num_wrong == outcome.tried == 2


def _on_other_tokens(bundle, executor, report, num_blocks):
    from penstock_lab.prove.recompute import compute

    class Confused:
        def submit(self, plan):
            for new in plan.new_requests:
                new.token_ids[0] = (new.token_ids[0] + 1) % 100
            return executor.submit(plan)

        def collect(self, handle):
            return executor.collect(handle)

    compute(bundle, Confused(), report, num_blocks)


# --- the client's end -------------------------------------------------------------------------------------------------


def test_options_are_checked(tmp_path):
    wrong: dict[str, dict] = {
        "flight_recorder": {"flight_recorder": 5},
        "record_dir": {"record_dir": str(tmp_path / "missing")},
        "record_text": {"record_text": "yes"},
    }
    for name, case in wrong.items():
        with pytest.raises(InvalidRequestError) as caught:
            RecordOptions(**case)
        assert caught.value.param == name
    with pytest.raises(InvalidRequestError, match="is off"):
        RecordOptions(0, str(tmp_path))


def test_the_recorder_can_be_off():
    made = RecordKeeper(RecordOptions(0))
    assert made.descriptor is None
    made.engine_died("signal 9")
    with pytest.raises(InvalidRequestError, match="off"):
        made.save()
    made.close()


def test_files_are_few(left, tmp_path, monkeypatch):
    """Guards against a directory that fills up with records of an engine that dies again and again."""
    monkeypatch.setattr(keeper, "MAX_FILES", 3)
    monkeypatch.setattr(keeper, "_numbers", itertools.count(1))  # other tests have made files in this process
    made = RecordKeeper(RecordOptions(record_dir=str(tmp_path)))
    (tmp_path / "mine").touch()
    segment = Segment(1, [msgspec.msgpack.encode(unpack(left[1]).records[0])])
    monkeypatch.setattr(made._ring, "read", lambda: [segment])
    for _ in range(12):
        made.engine_died("signal 9")
    for index in range(5):
        made.request_failed(str(index))  # one a minute
    made.close()
    files = sorted(os.listdir(tmp_path))
    assert len(files) == 4
    assert "mine" in files
    assert any(name.endswith("-13.record") for name in files)


async def adapted(folder: Path) -> bytes:
    """Stream with two adapters that have the same slot, one after the other, and kill the engine. Return its record."""
    paths = [write_adapter("demo", folder / str(seed), seed) for seed in range(2)]
    async with AsyncLLM("demo", enable_lora=True, max_lora_rank=2, record_dir=str(folder)) as llm:
        for path in (None, *paths):
            adapter = None if path is None else await llm.load_adapter(LoRARequest("a", path))
            params = SamplingParams(max_tokens=20, ignore_eos=True, seed=1)
            request = PromptRequest(list(range(3, 40)), adapter=None if adapter is None else adapter.id, params=params)
            for _ in range(2):  # the second finds the prefix in the cache
                async for _ in llm.client.generate(request):
                    pass
            await llm.unload_adapter("a")
        os.kill(llm.status().pid, signal.SIGKILL)
        async for _ in llm.generate("Once", SamplingParams(max_tokens=1)):  # by the next engine
            pass
    (file,) = folder.glob("*.record")
    return file.read_bytes()


@native
def test_a_record_with_adapters_replays(tmp_path):
    """Guards against a replay with the base model, or with the adapter that had the slot before; and against one with
    files that have changed since."""
    bundle = unpack(asyncio.run(adapted(tmp_path)))
    report = replay(bundle)
    assert (report.passed, report.differences) == (True, [])
    assert report.tokens == 6 * 20
    (tmp_path / "1" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 3}')
    with pytest.raises(InvalidRequestError, match="have changed since it was loaded"):
        replay(bundle)
