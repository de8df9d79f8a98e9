"""Several ranks answer with the bits of one process; and what happens when one of them ends, hangs or fails."""

import asyncio
import errno
import json
import os
import random
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM

from penstock import LLM, AsyncLLM, SamplingParams
from penstock.assembly import build_engine
from penstock.config import EngineConfig
from penstock.errors import EngineError, ExecutorLostError, InvalidRequestError, ModelLoadError
from penstock.interface import entry_points
from penstock.interface.messages import EngineRequest
from penstock.models.config_json import load_model_config
from penstock.ranks import build, links
from penstock.ranks.build import degrees_of
from penstock.ranks.group import Group
from penstock.ranks.launcher import HostLauncher, open_launcher
from penstock.ranks.layers import SplitHead
from penstock.ranks.links import Mesh, SharedMemoryLinks, SocketLinks
from penstock.ranks.sharding import Degrees
from penstock_lab.bench.profile import Profile
from penstock_lab.bench.split_meter import SplitMeter
from penstock_lab.convert.pack import convert_model
from penstock_lab.planner.table_template import table_text
from penstock_lab.prove import tiny_models
from penstock_lab.prove.parallel import BASE, answers, differs, draw_map, start_threads
from tests.families.case import all_cases
from tests.hf_models import TINY, make_llama
from tests.kernels.packed import levels
from tests.ranks.test_sharding_map import JETSTREAM

pytestmark = pytest.mark.skipif(not levels(), reason="no native library")

SPLITS: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {"tensor_parallel_size": 2, "dtype": "float32"}),
    ("Llama", {"tensor_parallel_size": 8, "dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"}),
    ("Falcon", {"tensor_parallel_size": 4, "dtype": "bfloat16", "quantization": "int4"}),
    ("Gemma 2", {"tensor_parallel_size": 4, "mlp_parallel_size": 2, "dtype": "bfloat16"}),
    ("Mixtral", {"tensor_parallel_size": 2, "dtype": "bfloat16", "quantization": "int8"}),
    ("Qwen3-MoE", {"mlp_parallel_size": 4, "expert_parallel_size": 2, "dtype": "bfloat16", "quantization": "int8-x2"}),
    ("Llama", {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "dtype": "float32"}),
    ("Llama", {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "attention_sinks": 3, "sliding_window": 9}),
    ("Falcon", {"pipeline_parallel_size": 2, "tensor_parallel_size": 4, "dtype": "bfloat16", "quantization": "int4"}),
    (
        "Gemma 2",
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "mlp_parallel_size": 4, "kv_cache_dtype": "int8"},
    ),
    (
        "Mixtral",
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "expert_parallel_size": 2, "quantization": "int8"},
    ),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return tiny_models.write(tmp_path_factory.mktemp("models"))


@pytest.mark.covers("J11", "J20", "F24", "F29", "C16")
@pytest.mark.parametrize(("name", "options"), SPLITS, ids=[f"{name} {index}" for index, (name, _) in enumerate(SPLITS)])
def test_every_split_has_the_bits_of_one_process(models: dict[str, str], name: str, options: dict[str, Any]) -> None:
    """Guards against a sum in another order, a rounding too early, and ranks that disagree. `penstock prove --only
    parallel` draws from all splits."""
    assert differs(models[name], options, as_processes=False) is None


@pytest.mark.covers("F29")
@pytest.mark.parametrize(
    "fields", [{"num_attention_heads": 16}, {"num_attention_heads": 32, "bias": True, "alibi": True}]
)
def test_sixteen_ranks_share_attention(models: dict[str, str], fields: dict[str, Any], tmp_path: Path) -> None:
    """Guards against half a group that has another half's queries, slopes, or rows of the product after it: attention
    over 16 ranks, two to a key/value head, and the feed-forward branch over 8, with the bits of one process."""
    config = json.loads((Path(models["Falcon"]) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_kv_heads": 8, "hidden_size": 128} | fields))
    base = BASE | {"model": str(tmp_path), "dtype": "float32"}
    split = EngineConfig.from_options(**base, attention_parallel_size=16, tensor_parallel_size=8)
    assert degrees_of(split.resolve(load_model_config(tmp_path)), load_model_config(tmp_path)) == Degrees(16, 16, 8, 8)
    assert answers(split, start_threads) == answers(EngineConfig.from_options(**base))


@pytest.mark.covers("F24")
@pytest.mark.parametrize(("pieces", "multiple"), [(8, 1000), (3, 1)])
def test_a_split_head_in_pieces_and_padded(
    models: dict[str, str], pieces: int, multiple: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against padding on a rank in the middle, logits of another width than all ranks' columns, and options that
    are ignored: the head of each of four ranks in pieces, and the last one's padded, has the bits of a plain head in
    one process; also under a soft cap, which would turn the padding's -inf into a number."""
    seen, forward = set(), SplitHead.forward
    monkeypatch.setattr(
        SplitHead, "forward", lambda head, x: (seen.add((len(head.packed), head.width)), forward(head, x))[1]
    )
    options = {"tensor_parallel_size": 4, "lm_head_pieces": pieces, "pad_vocab_multiple": multiple}
    for name in ("Falcon", "Gemma 2"):  # 4096 tokens
        assert differs(models[name], options, as_processes=False) is None
    assert seen == {(pieces, 1024), (pieces, 1024 + -4096 % multiple)}


@pytest.mark.covers("J20")
@pytest.mark.parametrize("name", ["llama", "falcon-40b", "gpt-oss"])
def test_weights_of_a_checkpoint_are_split_like_random_ones(name: str, tmp_path: Path) -> None:
    """Guards against rows or columns of a rank that are read from another place of the file: dummy weights, which the
    other tests have, are computed where they are needed. Separate and fused queries, keys and values; sink logits."""
    case = next(case for case in all_cases() if case.name == name)
    base = BASE | {"load_format": "auto", "model": str(case.make(tmp_path)[1]), "dtype": "float32"}
    whole = answers(EngineConfig.from_options(**base))
    assert answers(EngineConfig.from_options(**base, tensor_parallel_size=2), start_threads) == whole


@pytest.mark.covers("J20")
def test_fused_and_separate_projections_of_one_model(tmp_path: Path) -> None:
    """Guards against a fused projection that ranks cut across queries, keys and values: the weights of a Llama, which
    has them in tensors of their own, are saved once more as a Phi-3, which has them in one. Both give the same bits, on
    one, two and four ranks."""
    shape = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False}
    llama, separate = make_llama(tmp_path, **shape)
    weights = llama.state_dict()
    for layer in range(llama.config.num_hidden_layers):
        for block, names in {"self_attn.qkv": ("q", "k", "v"), "mlp.gate_up": ("gate", "up")}.items():
            prefix, (module, fused) = f"model.layers.{layer}.", block.split(".")
            parts = [weights.pop(f"{prefix}{module}.{name}_proj.weight") for name in names]
            weights[f"{prefix}{module}.{fused}_proj.weight"] = torch.cat(parts)
    config = Phi3Config(**TINY | shape, pad_token_id=0, rms_norm_eps=llama.config.rms_norm_eps)
    phi = Phi3ForCausalLM(config)
    phi.load_state_dict(weights)
    phi.save_pretrained(tmp_path / "fused")
    found = [
        answers(EngineConfig.from_options(**BASE | {"load_format": "auto", "dtype": "float32", "model": str(model),
                                                    "tensor_parallel_size": size}), start_threads)
        for model in (separate, tmp_path / "fused") for size in (1, 2, 4)
    ]  # fmt: skip
    assert found == found[:1] * 6


@pytest.mark.covers("M28")
@pytest.mark.parametrize(("name", "options"), SPLITS, ids=[f"{name} {index}" for index, (name, _) in enumerate(SPLITS)])
def test_converted_parts_have_the_bits_of_one_process(
    models: dict[str, str], name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Guards against a rank that maps another rank's part, or scales of its own part instead of the whole weight's."""
    serving = ("kv_cache_dtype", "pipeline_parallel_size")
    own = {name: value for name, value in options.items() if name not in serving}
    convert_model(EngineConfig.from_options(model=models[name], load_format="dummy", **own), tmp_path / "parts")
    numerics = {name: value for name, value in options.items() if not name.endswith("parallel_size")}
    whole = answers(EngineConfig.from_options(model=models[name], **BASE, **numerics))
    parts = BASE | {"load_format": "auto", "model": str(tmp_path / "parts")}
    assert answers(EngineConfig.from_options(**parts, **options), start_threads) == whole


def test_parts_serve_the_split_that_they_were_made_for(models: dict[str, str], tmp_path: Path) -> None:
    """Guards against parts that are put together otherwise, and against an error that does not say what they are."""
    config = EngineConfig.from_options(model=models["Llama"], load_format="dummy", tensor_parallel_size=2)
    convert_model(config, tmp_path / "parts")
    for options in ({}, {"tensor_parallel_size": 4}, {"tensor_parallel_size": 2, "mlp_parallel_size": 1}):
        with pytest.raises(InvalidRequestError, match="packed for ranks \\(size 2, attention 2, mlp 2") as refused:
            build_engine(EngineConfig.from_options(model=str(tmp_path / "parts"), **options))
        assert refused.value.param == "tensor_parallel_size"
    convert_model(EngineConfig.from_options(model=models["Llama"], load_format="dummy"), tmp_path / "whole")
    with pytest.raises(InvalidRequestError, match="packed for one process, not for ranks"):
        build_engine(EngineConfig.from_options(model=str(tmp_path / "whole"), tensor_parallel_size=2))


@pytest.mark.covers("J11", "J12")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "Mixtral", "Falcon"])
def test_any_sharding_map_has_the_bits_of_one_process(
    models: dict[str, str], name: str, seed: int, tmp_path: Path
) -> None:
    """Guards against a map whose weights are put together in another order. `penstock prove --only parallel` draws
    more; tests/ranks/test_sharding.py has what every map must fulfil."""
    chance, file = random.Random(seed), tmp_path / "map.yaml"
    file.write_text(draw_map(Path(models[name]), chance))
    options = {
        "dtype": "bfloat16", "quantization": chance.choice([None, "int8", "int4"]), "sharding_config": str(file),
        "tensor_parallel_size": chance.choice([2, 4]), "pipeline_parallel_size": chance.choice([1, 2]),
    }  # fmt: skip
    assert differs(models[name], options, as_processes=False) is None


@pytest.mark.covers("J9", "J11")
def test_the_document_s_map_runs_on_four_ranks(tmp_path: Path) -> None:
    """Guards against JetStream's example, to the letter, that is read but cannot be used: one key/value head for four
    ranks, an embedding that is split along its columns, and a head that is tied to it."""
    shape = {"head_dim": 16, "num_key_value_heads": 1, "tie_word_embeddings": True}
    gemma = {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"}
    (tmp_path / "config.json").write_text(json.dumps(tiny_models.LLAMA | gemma | shape))
    file = tmp_path / "gemma.yaml"
    file.write_text(JETSTREAM)
    options = {"tensor_parallel_size": 4, "sharding_config": str(file), "dtype": "bfloat16"}
    assert differs(str(tmp_path), options, as_processes=False) is None


def received(model: str, **options: Any) -> tuple[list[int], dict[str, Any], list[dict[str, Any]]]:
    """What a split model answers, the bytes that it receives, and the trace of it."""
    config = EngineConfig.from_options(model=model, **BASE, dtype="bfloat16", **options)
    built = build_engine(config, start=start_threads)
    meter, profile, token_ids = SplitMeter(built), Profile(), []
    meter.begin_run(profile)
    for index in range(2):
        params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)
        built.engine.add_request(EngineRequest(str(index), [5 + index, 6, 7], params))
    while built.engine.has_work:
        outputs, _ = meter.step(built.engine.step)
        token_ids += [token_id for output in outputs for token_id in output.new_token_ids]
    meter.end_run()
    built.engine.shutdown()
    return token_ids, meter.between_processes(), profile.events


@pytest.mark.covers("J13")
def test_hints_change_bytes_and_nothing_else(models: dict[str, str], tmp_path: Path) -> None:
    """Guards against a hint that is accepted and ignored or changes an answer, and against bytes that are counted or
    predicted wrongly, over ranks and stages; and against a timeline without its stages."""
    file, found = tmp_path / "map.yaml", []
    axes = table_text(Path(models["Llama"]), sharding=True).replace("down_proj.weight : 1", "down_proj.weight : 0")
    for hint in ("", "model.layers.*.mlp : 1\n", "layers.*.mlp : -1\nmodel.layers.*.self_attn : -1\n"):
        file.write_text(axes + hint)
        stages = 2 if hint.startswith("layers") else 1
        split = {"tensor_parallel_size": 2, "pipeline_parallel_size": stages, "sharding_config": str(file)}
        token_ids, between, events = received(models["Llama"], **split)
        assert between["bytes_received"] == between["predicted_bytes_received"] > 0
        assert {event["tid"] for event in events if event["cat"] == "stage"} == (set() if stages == 1 else {2, 3})
        found.append((sorted(token_ids), between["bytes_received"]))
    (plain, bytes_plain), (split_too, bytes_split), (whole, bytes_whole) = found
    assert plain == split_too == whole
    assert bytes_plain == bytes_split != bytes_whole


def test_the_comparison_can_fail(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a comparison that sees nothing: here the ranks' parts are added from left to right."""
    monkeypatch.setattr("penstock.kernels.cpu.calls.tree_sum", lambda parts, out: np.copyto(out, sum(parts)) or out)
    assert differs(models["Llama"], {"tensor_parallel_size": 4, "dtype": "float32"}, as_processes=False) is not None


class NoMemory(HostLauncher):
    """As on several machines: arrays cross the connections."""

    shares_memory = False


@contextmanager
def linked(size: int, buffer_bytes: int = 4096, launcher: HostLauncher | None = None) -> Iterator[list[Any]]:
    """The links of ranks in this process."""
    mesh = Mesh(size, buffer_bytes, launcher)
    ranks = [mesh.links(rank) for rank in range(size)]
    mesh.close()
    yield ranks
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize("launcher", [HostLauncher(), NoMemory()])
def test_ranks_gather_in_order_and_in_blocks(launcher: HostLauncher) -> None:
    """Guards against a buffer that is written to while another rank still reads it, in blocks of changing size."""
    wrong: list[tuple[int, int]] = []

    def gather(rank: SharedMemoryLinks | SocketLinks) -> None:
        for count in range(200):
            degree = (2, 4, 4, 2)[count % 4]
            first = rank.rank // degree * degree
            parts = rank.gather(np.full(8, 1000 * count + rank.rank, np.float32), degree)
            if [float(part[0]) for part in parts] != [1000 * count + first + index for index in range(degree)]:
                wrong.append((rank.rank, count))

    with linked(4, launcher=launcher) as ranks:
        threads = [threading.Thread(target=gather, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert ranks[0].bytes_received == 100 * 32 * (1 + 3)


def test_a_rank_that_ends_hangs_or_is_elsewhere_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against ranks that wait for ever."""
    some = np.zeros(4, np.float32)
    with linked(2) as (one, other):
        other.close()
        with pytest.raises(ExecutorLostError, match="rank 1 has ended") as caught:
            one.gather(some, 2)
    assert caught.value.rank == 1
    monkeypatch.setattr(links, "TIMEOUT_S", 1)
    with linked(2) as (one, other):
        with pytest.raises(ExecutorLostError, match="rank 1 has not answered for 1 s"):
            one.gather(some, 2)
        with pytest.raises(ExecutorLostError, match="planned"):
            one.gather(np.zeros(4096, np.float32), 2)
        other._notify(0, b"?")
        with pytest.raises(ExecutorLostError, match="another place"):
            one.gather(some, 2)


def test_ranks_on_several_machines_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against ranks that both wait for the other to read, and against one that waits for ever."""
    large, some = np.ones(2**21, np.float32), np.zeros(4, np.float32)  # more than a connection holds
    with linked(2, launcher=NoMemory()) as (one, other):
        thread = threading.Thread(target=other.gather, args=(2 * large, 2, [(2**21,), (2**21,)]))
        thread.start()
        parts = one.gather(large, 2)
        thread.join()
        assert [float(part.sum()) for part in parts] == [2.0**21, 2.0**22]
        one._peers[1].send(b"??" + bytes(some.nbytes))
        with pytest.raises(ExecutorLostError, match="another place"):
            other.gather(some, 2)
        other.close()
        with pytest.raises(ExecutorLostError, match="rank 1 has ended"):
            one.gather(large, 2)
    monkeypatch.setattr(links, "TIMEOUT_S", 0.1)
    with linked(2, launcher=NoMemory()) as (one, _), pytest.raises(ExecutorLostError, match="rank 1 has not answered"):
        one.gather(some, 2)


class OneShort(HostLauncher):
    """Has a connection for all ranks but the last."""

    def __init__(self, num_connections: int) -> None:
        self.left, self.ends, self.closed = num_connections, [], False

    def connect(self, one: int, other: int) -> tuple[socket.socket, socket.socket]:
        if not self.left:
            raise OSError(errno.EMFILE, "Too many open files")
        self.left -= 1
        self.ends += (pair := super().connect(one, other))
        return pair

    def start(self, number: int, module: str, words: Sequence[Any]) -> None: ...

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("num_connections", [2, 4])
def test_ranks_that_cannot_be_started_are_an_error_with_its_cause(num_connections: int) -> None:
    """Guards against an OSError that says nothing of ranks, and against connections that stay open."""
    launcher = OneShort(num_connections)  # three ranks need 3 among them, and 2 with the leader
    with pytest.raises(EngineError, match=r"3 ranks cannot be started: .*Too many open files"):
        Group(3, 64, None, launcher)
    assert all(end.fileno() < 0 for end in launcher.ends)


def test_ranks_end_when_one_says_why_it_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against ranks that stay when the leader learns from one of them why it has ended."""

    class OneSaysWhy:
        links, is_closed = None, False

        def __init__(self, *args: Any) -> None:
            made.append(self)

        def wait_until_ready(self) -> None:
            raise ModelLoadError("rank 1: its file is damaged")

        def close(self) -> None:
            self.is_closed = True

    made: list[OneSaysWhy] = []

    def lose(*args: Any) -> None:
        raise ExecutorLostError("rank 1 has ended", rank=1)

    monkeypatch.setattr(build, "Group", OneSaysWhy)
    monkeypatch.setattr(build, "make_runner", lose)
    config = EngineConfig.from_options(model="demo", tensor_parallel_size=2)
    plan: Any = SimpleNamespace(config=config, weights=None, degrees=Degrees(), max_gather_bytes=64)
    with pytest.raises(ModelLoadError, match="its file is damaged"):
        build.start_ranks(plan, None, None, HostLauncher())  # type: ignore[arg-type]  # the fakes need neither
    assert [group.is_closed for group in made] == [True]


@pytest.mark.parametrize(("backend", "asked"), [("mp", []), ("ray", [("launchers", "ray")])])
def test_only_a_config_that_asks_for_a_plug_in_loads_it(
    backend: str, asked: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against ranks on this machine that need Ray, and against a plug-in that is loaded and not used."""
    loaded, elsewhere = [], NoMemory()

    def load(group: str, name: str, option: str) -> Any:
        loaded.append((group, name))
        return lambda config, option: elsewhere

    monkeypatch.setattr(entry_points, "load", load)
    config = EngineConfig.from_options(tensor_parallel_size=2, distributed_executor_backend=backend)
    assert (open_launcher(config) is elsewhere) == bool(asked)
    assert loaded == asked


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(word) for word in (task / "children").read_text().split()]
    return found


@pytest.mark.covers("J11")
def test_a_killed_rank_is_one_event_and_the_stream_goes_on(models: dict[str, str]) -> None:
    """Guards against a hang in a gather, a lost or repeated token, and ranks that outlive their engine."""
    options: dict[str, Any] = {
        "model": models["Llama"], "load_format": "dummy", "threads": 1, "max_model_len": 128,
        "kv_cache_memory_bytes": 2**22, "dtype": "bfloat16", "quantization": "int8",
    }  # fmt: skip
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.0, seed=3, detokenize=False)
    prompt = {"prompt_token_ids": [5, 6, 7]}
    with LLM(**options) as llm:
        expected = llm.generate([prompt], params)[0].outputs[0].token_ids

    async def stream() -> tuple[list[int], list[int], list[int]]:
        async with AsyncLLM(**options, tensor_parallel_size=2) as llm:
            engine = llm.status().pid
            ranks, token_ids = children(engine), []
            killed = False
            async for output in llm.generate(prompt, params, "0"):
                token_ids = list(output.outputs[0].token_ids)
                if len(token_ids) > 5 and not killed:
                    killed = True
                    os.kill(ranks[0], signal.SIGKILL)
            after = children(llm.status().pid)
            return token_ids, [engine, *ranks], [llm.status().pid, *after]

    token_ids, before, after = asyncio.run(stream())
    assert list(token_ids) == list(expected)
    assert len(before) == len(after) == 2
    assert not set(before) & set(after)
    for pid in (*before, *after):
        with suppress(ProcessLookupError):
            os.kill(pid, 0)
            assert Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z", f"{pid} lives on"
