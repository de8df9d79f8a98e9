"""A model of JetStream's calling convention that several ranks share: its map, its hints, and a tensor in parts."""

import json
import random
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.assembly import build_engine
from penstock.config import EngineConfig
from penstock_lab.conventions.jetstream import Int8QuantizedLinear
from penstock_lab.conventions.sharded import Borders, Sharded, part, whole
from penstock_lab.prove import tiny_models
from penstock_lab.prove.parallel import BASE, LocalGroup, Received, answers, draw_map, requests, start_threads
from tests.kernels.packed import levels
from tests.lab.compat.user_file import imported
from tests.ranks.test_sharding_map import JETSTREAM

pytestmark = pytest.mark.skipif(not levels(), reason="no native library")

# Gemma as JetStream's document ports it, with its names.
GEMMA = """
import torch
from torch import nn
from penstock_lab.compat.jetstream import AttentionKernel, register_model
from penstock_lab.conventions.plain_llama import PlainNorm, rotate


class Block(nn.Module):
    def __init__(self, config, env, layer):
        super().__init__()
        self.config, self.env = config, env
        self.input_layernorm, self.post_attention_layernorm = PlainNorm(config), PlainNorm(config)
        heads, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        self.self_attn.wq = nn.Linear(config.hidden_size, heads, bias=False)
        self.self_attn.wk = nn.Linear(config.hidden_size, keys, bias=False)
        self.self_attn.wv = nn.Linear(config.hidden_size, keys, bias=False)
        self.self_attn.wo = nn.Linear(heads, config.hidden_size, bias=False)
        self.mlp.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.mlp.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.mlp.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)
        self.kernel = AttentionKernel(env, layer)

    def forward(self, x, rotary, cache, mask):
        batch, tokens, hidden = x.shape
        y, attn = self.input_layernorm(x), self.self_attn
        shape = (batch, tokens, -1, self.config.head_dim)
        q, k, v = (proj(y).reshape(shape).transpose(1, 2) for proj in (attn.wq, attn.wk, attn.wv))
        mixed = self.kernel(rotate(q, rotary), rotate(k, rotary), v, mask, cache)
        x = x + attn.wo(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        y = self.post_attention_layernorm(x)
        gated = HINT(self.env, nn.functional.relu(self.mlp.gate_proj(y)) * self.mlp.up_proj(y))
        return x + self.mlp.down_proj(gated)


@register_model("LlamaForCausalLM", table="gemma.yaml", version="ported", convention="jetstream")
class Gemma(nn.Module):
    def __init__(self, config, env):
        super().__init__()
        self.env, self.scale = env, config.hidden_size**0.5
        self.embedder = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, env, index) for index in range(config.num_hidden_layers))
        self.norm = PlainNorm(config)
        self.cos_sin = env.make.rotary(config.rope, config).cos_sin

    def forward(self, tokens, input_pos, caches, mask):
        x = self.embedder(tokens) * self.scale
        rotary = self.cos_sin[input_pos][:, None]
        for block, cache in zip(self.layers, caches):
            x = block(x, rotary, cache, mask)
        return self.norm(x) @ self.embedder.weight.T
"""
TABLE = """
embedder.weight: {shape: [vocab, hidden], shard: 1}
layers.*.input_layernorm.weight: {shape: [hidden]}
layers.*.post_attention_layernorm.weight: {shape: [hidden]}
layers.*.self_attn.wq.weight: {shape: [q, hidden], shard: 0, unit: kv_group, quant: true}
layers.*.self_attn.wk.weight: {shape: [kv, hidden], shard: 0, unit: kv_group, quant: true}
layers.*.self_attn.wv.weight: {shape: [kv, hidden], shard: 0, unit: kv_group, quant: true}
layers.*.self_attn.wo.weight:
  {shape: [hidden, q], from: [o_proj], shard: 1, unit: kv_group, quant: true, leaves: 8}
layers.*.mlp.gate_proj.weight: {shape: [intermediate, hidden], shard: 0, quant: true}
layers.*.mlp.gate_proj.bias: {shape: [intermediate], shard: 0}
layers.*.mlp.up_proj.weight: {shape: [intermediate, hidden], shard: 0, quant: true}
layers.*.mlp.up_proj.bias: {shape: [intermediate], shard: 0}
layers.*.mlp.down_proj.weight: {shape: [hidden, intermediate], shard: 1, quant: true, leaves: 8}
layers.*.mlp.down_proj.bias: {shape: [hidden]}
norm.weight: {shape: [hidden]}
ignore: [freqs_cis, layers.*.self_attn.qkv_proj.weight, layers.*.self_attn.o_proj.weight]
"""
NO_HINT = "\ndef HINT(env, x):\n    return x\n"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Options of the ported model, in a user's file. Call it with the source of its hint."""
    shape = {"head_dim": 16, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 192}
    (tmp_path / "config.json").write_text(json.dumps(tiny_models.LLAMA | shape))
    (tmp_path / "gemma.yaml").write_text(TABLE)
    with_file: list[Any] = []

    def make(hint: str = NO_HINT, source: str = GEMMA) -> dict[str, Any]:
        file = tmp_path / f"gemma_{len(with_file)}.py"
        file.write_text(source.replace('version="ported"', f'version="ported{len(with_file)}"') + hint)
        with_file.append(imported(file, monkeypatch))
        with_file[-1].__enter__()
        version = f"ported{len(with_file) - 1}"
        return BASE | {"model": str(tmp_path), "model_impl": version, "dtype": "float32"}

    yield make
    for context in reversed(with_file):
        context.__exit__(None, None, None)


def run(options: dict[str, Any], **more: Any) -> tuple[Any, int]:
    """Let a split model answer. Return the answers, and the bytes that its first rank received for them."""
    engines: list[Any] = []

    def start(*args: Any) -> Any:
        executor = start_threads(*args)
        engines.append(executor)
        return executor

    found = answers(EngineConfig.from_options(**options, **more), start)
    return found, engines[0].group.bytes_received if engines else 0


@pytest.mark.covers("J9", "J11")
@pytest.mark.parametrize("size", [2, 4])
def test_the_document_s_map_splits_its_model(model: Any, size: int, tmp_path: Path) -> None:
    """Guards against JetStream's map, to the letter, that is checked and splits nothing."""
    file = tmp_path / "map.yaml"
    file.write_text(JETSTREAM)
    options = model()
    expected, _ = run(options)
    found, received = run(options, tensor_parallel_size=size, sharding_config=str(file))
    assert found == expected
    assert received > 0


@pytest.mark.covers("J12")
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_any_map_gives_the_same_bits(model: Any, quantization: str | None, tmp_path: Path) -> None:
    """Guards against a map on which the answer depends, silly ones included."""
    file, options = tmp_path / "map.yaml", model() | {"quantization": quantization}
    expected, _ = run(options)
    received = set()
    for seed in range(15):
        file.write_text(draw_map(tmp_path, random.Random(seed), options["model_impl"]))
        found, count = run(options, tensor_parallel_size=2, sharding_config=str(file))
        assert found == expected, file.read_text()
        received.add(count)
    assert len(received) > 5


@pytest.mark.covers("J13")
def test_hints_move_bytes_and_change_no_answer(model: Any) -> None:
    """Guards against apply_sharding that is checked and does nothing: after a reshape from [A, B*C] to [A, B, C], the
    parts stay where they are, are split anew along C, or are gathered."""
    expected, _ = run(model())
    received = []
    for axis in (2, 3, None):
        hint = f"""
def HINT(env, x):
    return env.apply_sharding(x.unflatten(-1, (12, 16)), axis={axis}).flatten(-2)
"""
        found, count = run(model(hint), tensor_parallel_size=2)
        assert found == expected
        received.append(count)
    plain, _ = run(model(), tensor_parallel_size=2)
    assert plain == expected
    assert received[0] < received[2] < received[1]  # split anew, it is gathered twice


@pytest.mark.covers("J15")
def test_layers_swapped_by_hand_are_int8(model: Any) -> None:
    """Guards against an Int8QuantizedLinear that stays in floating point, or that ranks split otherwise; all swapped,
    a model answers as with the option `quantization`, which replaces its scheme of activations."""
    options = model()
    plain, _ = run(options)
    source = GEMMA.replace("nn.Linear(", "Linear(").replace("intermediate_size)", "intermediate_size, True)")
    source = source.replace(
        "config.intermediate_size, config.hidden_size)", "config.intermediate_size, config.hidden_size, True)"
    )
    by_hand = model(source="from penstock_lab.compat.jetstream import Int8QuantizedLinear as Linear\n" + source)
    found, _ = run(by_hand)
    assert found != plain
    assert found == run(options, quantization="int8-x3")[0]
    assert found == run(by_hand, tensor_parallel_size=2)[0]
    fast = run(options, quantization="int8")[0]
    assert fast != found
    assert run(by_hand, quantization="int8")[0] == fast


@pytest.mark.covers("J15")
def test_a_linear_quantised_outside_the_engine() -> None:
    """Guards against another rounding than to the nearest of 255 steps of each row, a bias that is lost, and a weight
    that stays beside its codes."""
    torch.manual_seed(0)
    linear, x = nn.Linear(48, 20, dtype=torch.bfloat16), torch.randn(2, 3, 48)
    made = Int8QuantizedLinear.from_linear(linear)
    weight = linear.weight.detach().float()
    steps = weight.abs().amax(dim=1) / 127
    rounded = made.codes * steps[:, None]
    assert ((rounded - weight).abs() <= 0.5001 * steps[:, None]).all()
    torch.testing.assert_close(made(x), x @ rounded.T + linear.bias.float(), atol=1e-5, rtol=1e-5)
    assert made(x.bfloat16()).dtype == torch.bfloat16
    sizes = [sum(item.nbytes for item in layer.state_dict().values()) for layer in (made, linear)]
    assert sizes == [48 * 20 + 4 * 20 + 2 * 20, 2 * 48 * 20 + 2 * 20]
    by_hand = Int8QuantizedLinear(48, 20, bias=True)
    by_hand.load_state_dict({name: value.float() for name, value in linear.state_dict().items()})
    assert torch.equal(by_hand(x), made(x))


@pytest.mark.covers("J14")
def test_two_environments_in_one_process(model: Any, tmp_path: Path) -> None:
    """Guards against an environment that is shared: two models of one class at the same time, each with its own
    quantisation, sharding and number of ranks, which their constructors see, answer as they do alone."""
    seen = """
ENVIRONMENTS = []
def HINT(env, x):
    ENVIRONMENTS.append((env.enable_weight_quantization, env.scheme and env.scheme.name, env.sharding))
    return x
"""
    options, files = model(seen), []
    for name, axis in (("whole", -1), ("split", 1)):
        files.append(tmp_path / f"{name}.yaml")
        files[-1].write_text(JETSTREAM.replace("mlp.down_proj.weight : 1", f"mlp.down_proj.weight : {axis}"))
    own: list[dict[str, Any]] = [
        {"tensor_parallel_size": 2, "sharding_config": str(files[0])},
        {"tensor_parallel_size": 4, "sharding_config": str(files[1]), "quantization": "int8"},
    ]
    alone = [run(options, **more)[0] for more in own]
    noted = sys.modules["gemma_0"].ENVIRONMENTS
    noted.clear()
    configs = [EngineConfig.from_options(**options | more) for more in own]
    engines = [build_engine(config, start=start_threads).engine for config in configs]
    found: list[dict[str, Received]] = [{}, {}]
    try:
        for engine, received in zip(engines, found, strict=True):
            received |= {item.request_id: Received() for item in requests(engine.vocab_size)}
            for item in requests(engine.vocab_size):
                engine.add_request(item)
        while any(engine.has_work for engine in engines):
            for engine, received in zip(engines, found, strict=True):
                for output in engine.step() if engine.has_work else ():
                    received[output.request_id].add(output)
    finally:
        for engine in engines:
            engine.executor.shutdown()
    assert found == alone
    assert alone[0] != alone[1]
    down = "layers.*.mlp.down_proj.weight"
    assert {(is_on, name, axes[down]) for is_on, name, axes in noted} == {(False, None, None), (True, "int8", 1)}
    assert noted[0][2]["layers.*.self_attn.wq.weight"] == 0


def on_ranks(work: Any, size: int = 2) -> list[Any]:
    """Run a function on ranks that are threads; it gets the borders of an axis of 8."""
    group, found = LocalGroup(size), [None] * size

    def rank(index: int) -> None:
        found[index] = work(Borders(tuple(range(0, 9, 8 // size)), index, group.ranks[index]))

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


OPERATIONS: dict[str, Any] = {
    "activation": lambda x: nn.functional.silu(x) * x + 1,
    "broadcast": lambda x: x * torch.arange(8.0) - x[:, :1],
    "heads": lambda x: x.view(2, 3, 4, 2).transpose(1, 2) * 2,
    "merged": lambda x: x.view(6, 8).t().reshape(2, 24),
    "inside a unit": lambda x: x.view(2, 3, 1, 8).unsqueeze(0).view(2, 3, 8),
    "chunks": lambda x: torch.cat(x.view(2, 3, 2, 4).chunk(2, dim=3), dim=-1),
    "of the split axis": lambda x: x.softmax(-1) + x.mean(-1, keepdim=True),
    "in place": lambda x: x.clone().mul_(2).add_(x),
    "a slice that is written": lambda x: write(x.clone()),
    "product": lambda x: x @ x.transpose(1, 2),
    "permuted": lambda x: x.permute(2, 0, 1)[:, 1:].float().contiguous(),
}


def write(x: Tensor) -> Tensor:
    x[..., 3] = 7.0
    return x


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_on_parts(name: str) -> None:
    """Guards against an operation that mixes features and is computed on a part."""
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    expected = OPERATIONS[name](x.clone())

    def work(borders: Borders) -> Tensor:
        result: Tensor = OPERATIONS[name](Sharded(part(x, -1, borders).clone(), 2, borders))
        assert result.shape == expected.shape
        found: Tensor = whole(result)
        return found

    for found in on_ranks(work):
        assert torch.equal(found, expected)
