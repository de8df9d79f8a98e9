"""Falcon's decode backend: its loop, its inputs of fixed shapes, its cache as a list, and its lists of products."""

import itertools
import json
import queue
import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import LLM, InvalidRequestError, NotSupportedError, SamplingParams
from penstock.kernels.backends import load_ops
from penstock.kernels.cpu.library import best_level
from penstock.models.config_json import load_model_config, parse_model_config
from penstock.spec.config_file import modern_falcon
from penstock.weights.hub import MODEL_DIR
from penstock.weights.loader import load_model
from penstock_lab.compat.falcon import ARGS, STAGES, DecodeBackend, EngineForward, check_args, main, run_backend
from penstock_lab.conventions.falcon import RWForCausalLM, flash_decode_attention, init_kv_cache, static_inputs
from tests.families import falcon
from tests.families.case import Case
from tests.hf_models import random_ids
from tests.kernels.packed import levels
from tests.kernels.test_attention_parts import Operations
from tests.models.test_falcon import PRINTED

pytestmark = pytest.mark.skipif(not levels(), reason="no native library")
torch.set_num_threads(1)
ROWS, SLOTS, LAYERS, GROUPS, HEADS, DIM = 32, 20, 2, 4, 8, 8
NAN = float("nan")
PROMPTS = ["Once upon a time", "The dog", "A bird sat in a tree and sang"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Falcon-40B with 2 narrow layers, and the demo model's tokenizer."""
    case = next(case for case in falcon.CASES if case.name == "falcon-40b")
    shape = {"num_attention_heads": HEADS, "num_kv_heads": GROUPS, "hidden_size": HEADS * DIM, "vocab_size": 4096}
    _, made = case.make(tmp_path_factory.mktemp("falcon"), **shape)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_DIR / name, made)
    return made


def arguments(directory: Path, **args: Any) -> dict[str, Any]:
    """The printed arguments, but for those of the model's size."""
    return ARGS | {"model": str(directory), "num_layers": LAYERS, "seqlen": SLOTS, "fracture_mlp": 4} | args


def backend(directory: Path, **args: Any) -> DecodeBackend:
    return DecodeBackend(arguments(directory, **args))


def graph(directory: Path) -> RWForCausalLM:
    made = backend(directory, precision="fp32").model
    assert isinstance(made, RWForCausalLM)
    return made


def run_row(
    model: RWForCausalLM, ids: Sequence[int], row: int, past: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """The logits after each token of a sequence in one row, and the cache. All other rows are empty."""
    active, found = torch.zeros(1, ROWS, dtype=torch.bool), []
    active[0, row] = True
    for position, token in enumerate(ids):
        inputs = static_inputs(torch.full((1, ROWS), token), torch.full((1, ROWS), position), active, SLOTS)
        output = model.main_forward_part(**inputs, past_key_values=past)
        assert output.logits is not None
        assert output.last_hidden_state.shape == (1, ROWS, HEADS * DIM)
        assert torch.equal(output.last_hidden_state[0].isnan().any(dim=1), ~active[0])  # empty rows are NaN
        found.append(output.logits[0, row])
        past = output.past_key_values
    return found, past


# --- the loop --------------------------------------------------------------------------------------------------------


@pytest.mark.covers("F1", "F3", "F4")
def test_fifty_ticks_have_the_document_s_stages_and_inputs(directory: Path) -> None:
    """Guards against a stage that is left out, done in another order, or does another one's work: rows are filled by
    pick_prompts and freed by update_users alone. The inputs of each tick have the document's shapes and types."""
    made, seen = backend(directory), []

    def note(stage: str) -> None:
        seen.append((stage, sum(user is not None for user in made.users)))
        if stage == "switch_tokens":
            row, whole = (1, ROWS), torch.int64
            for name, shape, dtype in (
                ("input_ids", row, whole), ("prompt_tokens", (ROWS, SLOTS), whole), ("position_ids", row, whole),
                ("prompt_lengths", (ROWS,), whole), ("attention_mask", (*row, SLOTS), torch.bool),
                ("kv_mask_id", row, whole),
            ):  # fmt: skip
                given = getattr(made, name)
                assert (tuple(given.shape), given.dtype) == (shape, dtype), name

    made.trace = note
    for tick in range(50):
        if tick % 9 == 0:
            for prompt in PROMPTS:
                made.input_queue.put((tick, prompt))
        made.tick()
        assert made.status == {"input_queue": 0, "num_users": sum(user is not None for user in made.users)}
    assert [stage for stage, _ in seen] == [*STAGES] * 50
    assert STAGES == ("pick_prompts", "prepare_inputs", "decode", "switch_tokens", "push_outputs", "update_users",
                      "send_status")  # fmt: skip
    changed = {one[0] for one, other in itertools.pairwise(seen) if one[1] != other[1]}
    assert changed == {"pick_prompts", "update_users"}


@pytest.mark.covers("F3", "F5", "F7", "F11")
def test_the_backend_answers_as_the_engine_does(directory: Path) -> None:
    """Guards against a prompt token that is answered, noise of another position, a stop string that gets out, a
    neighbour that is felt, and rows that are NaN because they were empty: more prompts than rows, sampled as the
    document does, have the engine's texts."""
    prompts, made = [f"{PROMPTS[index % 3]} {index}" for index in range(36)], backend(directory, stop="e")
    made.generate(prompts[-1:])
    found = made.generate(prompts)
    params = [
        SamplingParams(temperature=1.0, top_k=5, top_p=0.9, seed=number, stop=["e"], max_tokens=SLOTS)
        for number, _ in enumerate(prompts, 1)
    ]
    with LLM(str(directory), dtype="bfloat16", max_model_len=SLOTS, threads=1) as llm:
        assert [output.outputs[0].text for output in llm.generate(prompts, params)] == found
    assert len(set(found)) > 20
    made = backend(directory, temperature=0.0)
    for index in range(3):
        made.input_queue.put((index, PROMPTS[index]))
    for _ in range(9):
        made.tick()
    made.cancel(1)
    made.tick()
    assert [user and user.user_id for user in made.users[:4]] == [0, None, 2, None]


def test_a_backend_talks_through_its_queues(directory: Path) -> None:
    """Guards against a backend that does not end, a prompt that is too long and ends all others, and a cancellation
    that is taken for a prompt."""
    queues = [queue.Queue[Any]() for _ in range(3)]
    for item in [("a", "The dog"), ("b", "x " * SLOTS), ("c", "Once"), ("c", None), None]:
        queues[0].put(item)
    worker = threading.Thread(target=run_backend, args=(arguments(directory), *queues))
    worker.start()
    worker.join()
    outputs, statuses = ([own.get() for _ in range(own.qsize())] for own in queues[1:])
    assert statuses[-1] == {"input_queue": 0, "num_users": 0}
    (refused,) = [item for user, item in outputs if user == "b"]
    assert f"prompt: it must have 1 to {SLOTS - 1} tokens" in str(refused)
    assert "".join(item for user, item in outputs if user == "a") == backend(directory).generate(["The dog"])[0]
    assert not [item for user, item in outputs if user == "c"]


# --- the graph -------------------------------------------------------------------------------------------------------


@pytest.mark.covers("F22", "F31", "F41")
@pytest.mark.parametrize(
    "args",
    [
        {"precision": "fp32", "num_tokens": 9},
        {"fuse": True},
        {"fracture_attn": 8, "fracture_mlp": 8, "od_lm_head": False},
        {"amp_level": 1, "opt_level": 1},
        {"amp_level": 2},
        {"fuse": True, "fracture_mlp": 0, "fracture_vocab": False, "padded_lm_head": False},
    ],
    ids=str,
)
def test_every_form_of_the_graph_has_the_engine_s_bits(directory: Path, args: dict[str, Any]) -> None:
    """Guards against an option that changes a bit, or is ignored: `verify` compares the logits of every tick with the
    engine's own pass. Groups together or by themselves, other fractures, int8 and int4 weights, another
    instruction level."""
    made = backend(directory, verify=True, **args)
    made.generate(PROMPTS[:2])
    layer, ops = made.model.transformer.h[1], made.model.ops
    parts = args.get("fracture_attn", GROUPS)
    lists = 1 if args.get("fuse") else parts
    assert [len(layer.self_attention.o_proj.packed), len(layer.mlp.down_proj.packed)] == [
        lists, args.get("fracture_mlp", 4) or 1
    ]  # fmt: skip
    if lists > 1:
        shapes = [tuple(item.shape) for item in layer.self_attention.qkv_proj.packed]
        heads, hidden = HEADS // parts, HEADS * DIM
        assert shapes == [(heads * DIM, hidden)] * parts + [(DIM, hidden)] * (2 * GROUPS)  # wq_list, wk_list, wv_list
        assert [tuple(item.shape) for item in layer.self_attention.o_proj.packed] == [(hidden // parts, hidden)] * parts
    assert len(made.model.lm_head.packed) == (1 if args.get("fracture_vocab") is False else 8)
    assert made.logits.shape[2] == 4096 + (0 if args.get("padded_lm_head") is False else 512)
    assert ops.level == ("portable" if "opt_level" in args else best_level())
    scheme = layer.mlp.up_proj.spec.packing.scheme
    assert (scheme and scheme.name) == {1: "int8", 2: "int4"}.get(args.get("amp_level", 0))


@pytest.mark.covers("F31")
@pytest.mark.parametrize("case", [case for case in falcon.CASES if not case.shape], ids=str)
def test_every_generation_has_the_engine_s_bits(case: Case, tmp_path: Path) -> None:
    """Guards against a version that is another model: every generation of Falcon, served by the engine with this graph
    and with its own pass, in chunks, in blocks and in rows, gives the same tokens and log-probabilities."""
    _, made = case.make(tmp_path)
    prompts = [{"prompt_token_ids": random_ids(length, length)} for length in (1, 11, 4)]
    found, params = [], SamplingParams(temperature=0.0, max_tokens=4, logprobs=2, ignore_eos=True)
    for options in (
        {},
        {"model_impl": "efficient-40b"},
        {"model_impl": "efficient-40b", "block_size": "max-model-len"},
    ):
        with LLM(str(made), max_model_len=32, max_num_batched_tokens=8, threads=1, kernels="cpu", **options) as llm:
            found.append(
                [(item.outputs[0].token_ids, item.outputs[0].logprobs) for item in llm.generate(prompts, params)]
            )
    assert found[0] == found[1] == found[2]


@pytest.mark.covers("F41")
def test_a_sum_fused_with_the_norm_after_it(tmp_path: Path) -> None:
    """Guards against a fused layer that is another one: in RW one branch follows the other, with a norm in between."""
    _, made = next(case for case in falcon.CASES if case.name == "falcon-rw").make(tmp_path)
    cfg, ops, found = load_model_config(made), load_ops("cpu", torch.bfloat16), []
    for fuse in (False, True):
        version = replace(cfg, model_impl="efficient-40b", extra={"fuse": fuse})
        model: Any = load_model(made, version, ops, "auto", max_model_len=SLOTS)
        found.append(run_row(model, [5, 60, 7], 4, model.init_kv_cache())[0])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.covers("F41")
def test_without_optimisation_the_text_is_the_same(directory: Path) -> None:
    """Guards against an optimisation level that computes something else: plain torch."""
    found = []
    for level in (0, 4):
        made = backend(directory, precision="fp32", opt_level=level, num_tokens=4)
        made.input_queue.put((0, PROMPTS[1]))
        made.run_generate()
        found.append(made.users[0].token_ids)  # type: ignore[union-attr]
    assert found[0] == found[1]
    assert len(found[0]) == 4


@pytest.mark.covers("F3", "F4")
def test_a_row_is_the_same_wherever_it_is(directory: Path) -> None:
    """Guards against a row that feels the others: in the first, in the last and in another row, among rows of NaN, and
    a row whose last user has left NaN."""
    model, ids = graph(directory), [5, 99, 1000, 7]
    expected, _ = run_row(model, ids, 0, model.init_kv_cache())
    for row in (6, 31):
        past = [torch.full_like(x, NAN) for x in model.init_kv_cache()]
        for x in past:
            x[0, row] = 0.0
        found, after = run_row(model, ids, row, past)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert all(bool(x[0, row].isfinite().all()) for x in after)


@pytest.mark.covers("F15")
def test_the_cache_is_updated_without_a_scatter(directory: Path) -> None:
    """Guards against an update of another slot or row, and one that is not functional: for random slots it is
    index_copy, all other slots keep their bits, and the argument is as it was."""
    model, generator = graph(directory), torch.Generator().manual_seed(3)
    slots = torch.randint(0, SLOTS, (1, ROWS), generator=generator)
    ids = torch.randint(0, 4096, (1, ROWS), generator=generator)
    inputs = static_inputs(ids, torch.zeros_like(slots), torch.ones(1, ROWS, dtype=torch.bool), SLOTS)
    inputs["kv_mask_id"] = slots
    zeros = model.init_kv_cache()
    cache = [torch.randn(x.shape, generator=generator) for x in zeros]
    before = [x.clone() for x in cache]
    with Operations() as watched:
        found = model.main_forward_part(**inputs, past_key_values=cache).past_key_values
    assert not [name for name in watched.counts if "scatter" in name or name in ("index_put", "index_copy")]
    new = model.main_forward_part(**inputs, past_key_values=zeros).past_key_values  # no slot is seen, so it is the same
    for old, after, alone, kept in zip(cache, found, new, before, strict=True):
        assert torch.equal(old, kept)
        expected = old.clone()
        for row, slot in enumerate(slots[0].tolist()):
            expected[0, row].index_copy_(0, torch.tensor([slot]), alone[0, row, slot][None])
        assert torch.equal(after, expected)


@pytest.mark.covers("F26")
def test_the_cache_is_a_flat_list_of_960_tensors() -> None:
    """Guards against a cache that is counted and not there: the list goes into the graph and comes out of it, and the
    next token reads it. For the printed file of 40B its tensors have the document's shape and 7680 MiB."""
    whole = init_kv_cache(parse_model_config(modern_falcon(PRINTED)), 2048, torch.bfloat16, "meta")
    assert [tuple(x.shape) for x in whole] == [(1, 32, 2048, 64)] * 960
    assert sum(x.numel() * x.element_size() for x in whole) == 7680 * 2**20
    assert sum(x.numel() * x.element_size() for x in whole[:16]) == 128 * 2**20
    narrow = parse_model_config(modern_falcon(PRINTED | {"hidden_size": 16, "n_head": 8, "vocab_size": 64}))
    ops, active, slots = load_ops("cpu", torch.float32), torch.ones(1, ROWS, dtype=torch.bool), 16
    model, plain = (
        load_model(MODEL_DIR, replace(narrow, model_impl=version, extra=extra), ops, "dummy", max_model_len=slots)
        for version, extra in (("efficient-40b", {"fuse": True}), ("default", {}))
    )
    past, engine = model.init_kv_cache(), EngineForward(plain, ops, narrow, slots)
    assert [tuple(x.shape) for x in past] == [(1, ROWS, slots, 2)] * 960
    for position in range(2):
        ids, positions = torch.arange(ROWS)[None] + position, torch.full((1, ROWS), position)
        inputs = static_inputs(ids, positions, active, slots)
        output = model.main_forward_part(**inputs, past_key_values=past)
        past = output.past_key_values
        assert len(past) == 960
        assert torch.equal(output.logits, engine(ids, positions, inputs["kv_mask_id"]))
    for wrong in (past[:959], [x[..., :1] for x in past]):
        with pytest.raises(InvalidRequestError, match=r"past_key_values: .* 960 tensors \[1, 32, 16, 2\]"):
            model.main_forward_part(**inputs, past_key_values=wrong)


@pytest.mark.covers("F16", "F17")
@pytest.mark.parametrize("cached", [0, 1, 11, SLOTS])
def test_two_loops_and_one_are_the_softmax(cached: int) -> None:
    """Guards against statistics that miss the cache or the new token: in two loops and in one, it is the attention over
    both together. Hidden slots are NaN. In two loops nothing is rescaled: one multiplication a set, by the scale."""
    generator = torch.Generator().manual_seed(cached)

    def draw(*shape: int) -> Tensor:
        return torch.randn(1, ROWS, *shape, generator=generator, dtype=torch.float64)

    q, ks, vs = draw(HEADS, DIM), [draw(SLOTS, DIM), draw(1, DIM)], [draw(SLOTS, DIM), draw(1, DIM)]
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, torch.cat([ks[0][:, :, :cached], ks[1]], dim=2), torch.cat([vs[0][:, :, :cached], vs[1]], dim=2)
    )
    ks[0][:, :, cached:], vs[0][:, :, cached:] = NAN, NAN
    mask = (torch.arange(SLOTS) < cached).expand(1, ROWS, HEADS, SLOTS)
    with Operations() as watched:
        two = flash_decode_attention(Q=q, Ks=ks, Vs=vs, attn_masks=[mask, None])
    for found in (two, flash_decode_attention(q, ks, vs, [mask, None], loops=1)):
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)
    assert watched.counts["mul"] == 2
    with pytest.raises(InvalidRequestError, match="loops: 3"):
        flash_decode_attention(q, ks, vs, [mask, None], loops=3)


# --- the arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.covers("F35", "F39")
def test_the_printed_arguments(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against an argument of the document that is refused as printed, and one that is ignored."""
    assert check_args({}) == check_args(ARGS) == ARGS
    for args, message in (
        ({"user_rows": 16}, "user_rows: 16 is not allowed; 32 is: user rows are 32"),
        ({"num_chips": 8}, "num_chips: 8 .* this machine's; penstock plan --placement"),
        ({"seq_len": 8}, "seq_len: unknown argument; known are amp_level"),
        ({"top_p": 2.0}, "top_p: 2.0 is not allowed"),
        ({"version": "efficient"}, "version: 'efficient' .* efficient-40b"),
        ({"num_layers": 60}, "num_layers: 60 .* 2, as the model has"),
        ({"fracture_attn": 6}, "fracture_attn: 6 .* a multiple of 4 that divides 8"),
        ({"fracture_mlp": 3}, "fracture_mlp: 3 .* one of 0, 1, 2, 4, 8"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            backend(directory, **args)
    (tmp_path / "prompts.json").write_text(json.dumps(PROMPTS[:1]))
    own = {
        "model": str(directory),
        "num_layers": LAYERS,
        "seqlen": SLOTS,
        "prompts_file": str(tmp_path / "prompts.json"),
    }
    assert main([json.dumps(own | {"output_at_end": True, "version": "default"})]) == 0
    text = backend(directory).generate(PROMPTS[:1])[0]
    assert capsys.readouterr().out == f"{PROMPTS[0]}{text}\n\n"
    assert main([json.dumps(own | {"mode": "alone"})]) == 2
    assert "falcon: mode: 'alone' is not allowed" in capsys.readouterr().err
    made = backend(directory, num_tokens=5)
    made.input_queue.put((0, "The dog"))
    made.run_generate()
    assert len(made.users[0].token_ids) == 5  # type: ignore[union-attr]


def test_the_graph_refuses_what_it_does_not_compute(directory: Path) -> None:
    """Guards against a window or ranks that the graph would ignore."""
    for options in ({"sliding_window": 8, "attention_sinks": 2}, {"tensor_parallel_size": 2}):
        with pytest.raises((NotSupportedError, InvalidRequestError)):
            LLM(str(directory), model_impl="efficient-40b", **options)
