"""Proof that a model's file, however damaged or hostile, loads or is refused in one line, within limits."""

import base64
import io
import json
import math
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from penstock import EngineConfig, EngineError
from penstock.models.config_json import load_model_config
from penstock.weights.hub import resolve_model
from penstock.weights.sources import read_parameters
from penstock_lab.convert.pack import convert_model
from penstock_lab.prove.file_mutations import mutate_bytes, mutate_gguf, mutate_json, mutate_safetensors, mutate_yaml
from penstock_lab.prove.proof import Trials

DEADLINE_S = 60.0  # by the clock; the reader's own limit of 10 s of processor time comes first unless it is stuck
MAX_JSON = 2**20  # maximum bytes of a mutated file of the user's model; the demo's file replaces a larger one
TEKKEN = {
    "config": {"pattern": r"\w+|\W", "default_vocab_size": 260, "default_num_special_tokens": 4},
    "vocab": [{"rank": rank, "token_bytes": base64.b64encode(bytes([rank])).decode()} for rank in range(256)],
    "special_tokens": [{"rank": rank, "token_str": token} for rank, token in enumerate(("<unk>", "<s>", "</s>"))],
}
JSON_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MISTRAL = {
    "dim": 32, "n_layers": 2, "head_dim": 16, "hidden_dim": 64, "n_heads": 2, "n_kv_heads": 1, "norm_eps": 1e-5,
    "vocab_size": 64, "sliding_window": [16, None],
}  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|user|>' + message['content'] | trim }}"
    "{% else %}{{ raise_exception('no ' ~ message.role) }}{% endif %}{% endfor %}{% set x = namespace(n=0) %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TEMPLATE_PIECES = (
    b"(" * 6000,
    b"{% for a in ",
    b"{{ x",
    b"}}",
    b"{% endif %}",
    b" | tojson",
    b"'a' * 10**11",
    b"[0] * 9**9",
    b"\xff",
)


@dataclass(frozen=True, slots=True)
class Target:
    """A file that is mutated in its own directory, and what reads it."""

    kind: str
    file: Path
    content: bytes
    mutate: Callable[[Random, bytes], bytes]


class HostileFiles:
    """Mutates the files of a model, and reads each with a server's code. Implements Proof."""

    name: ClassVar[str] = "hostile-files"
    promise: ClassVar[str] = "A damaged or hostile model file loads, or is refused in one line"
    unit: ClassVar[str] = "files"
    goal: ClassVar[int] = 20_000
    weight: ClassVar[float] = 0.5

    def run(self, trials: Trials) -> None:
        counts: Counter[str] = Counter()
        with tempfile.TemporaryDirectory(prefix="penstock-files-") as folder:
            targets = make_targets(Path(folder), resolve_model(trials.subject.model))
            with Reader() as reader:
                while trials.go_on():
                    target = trials.random.choice(targets)
                    content = target.mutate(trials.random, target.content)
                    target.file.write_bytes(content)
                    result = reader.read(target.kind, target.file)
                    counts[result.partition(":")[0]] += 1
                    if result not in ("loaded", "refused"):
                        trials.wrong(f"{target.file.name}, mutation {trials.outcome.tried}: {result}")
                    target.file.write_bytes(target.content)
                    trials.tried()
        for name, count in sorted(counts.items()):
            trials.figure(name, count)


class Reader:
    """The process of prove/file_reader.py, which is started again each time it dies."""

    def __init__(self) -> None:
        self._process = self._start()

    def _start(self) -> "subprocess.Popen[str]":
        command = [sys.executable, "-P", "-m", "penstock_lab.prove.file_reader"]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, errors="replace")

    def read(self, kind: str, file: Path) -> str:
        """Let the process read a file: "loaded", "refused", or what went wrong."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise EngineError("the process that reads files has no pipes")
        with suppress(OSError):
            stdin.write(json.dumps([kind, str(file)]) + "\n")
            stdin.flush()
            if select.select([stdout], [], [], DEADLINE_S)[0] and (line := stdout.readline()):
                return line.rstrip("\n")
        self._process.kill()
        code = self._process.wait()
        self.__exit__()
        self._process = self._start()
        return f"wrong: the process ended with code {code}: a crash, or a limit of time or memory"

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()


def make_targets(folder: Path, model: Path) -> list[Target]:
    """Make a directory for each kind of file, with files of the user's model, if small, and of a tiny model."""
    demo = resolve_model("demo")
    targets: list[Target] = []

    def add(kind: str, name: str, content: bytes, mutate: Any, beside: Path | None = None) -> None:
        place = folder / str(len(targets))
        shutil.copytree(beside, place) if beside is not None else place.mkdir()
        if not (place / "config.json").exists() and name != "params.json":
            (place / "config.json").write_text(json.dumps(TINY))
        (place / name).write_bytes(content)
        targets.append(Target(kind, place / name, content, mutate))

    texts = folder / "texts"
    texts.mkdir()
    for name in JSON_FILES:
        own = model / name
        source = own if own.is_file() and own.stat().st_size <= MAX_JSON else demo / name
        shutil.copy(source, texts / name)
    for name in JSON_FILES:
        kind = "config" if name.endswith("config.json") and not name.startswith("tok") else "tokenizer"
        add(kind, name, (texts / name).read_bytes(), mutate_json, texts)
    add("config", "params.json", json.dumps(MISTRAL).encode(), mutate_json)
    add("tokenizer", "chat_template.jinja", TEMPLATE.encode(), _mutate_template, texts)
    tiny = folder / "tiny"
    tiny.mkdir()
    (tiny / "config.json").write_text(json.dumps(TINY))
    add("gguf", "model.gguf", _gguf(), mutate_gguf)
    checkpoint = _checkpoint(tiny)
    add("checkpoint", "model.safetensors", checkpoint, mutate_safetensors)
    add("checkpoint", "pytorch_model.bin", _pickled(tiny), mutate_bytes)
    add("tokenizer", "tokenizer.model", _sentencepiece(), mutate_bytes)
    add("tokenizer", "tekken.json", json.dumps(TEKKEN).encode(), mutate_json)
    _add_sharded(add, tiny, checkpoint, folder)
    _add_quantized(add, checkpoint, folder)
    for quantization in (None, "int8"):
        packed = folder / f"packed-{quantization}"
        options = {"model": str(tiny), "load_format": "dummy", "quantization": quantization, "dtype": "float32"}
        with suppress(ValueError):  # without native kernels there are no packed files
            convert_model(EngineConfig.from_options(**options), packed)
            add("packed", "penstock.safetensors", (packed / "penstock.safetensors").read_bytes(), mutate_safetensors)
    _add_tables(add, tiny)
    _add_adapter(add, folder)
    return targets


def _add_sharded(add: Callable[..., None], tiny: Path, checkpoint: bytes, folder: Path) -> None:
    names = read_parameters(load_model_config(tiny)).values()
    index = {"metadata": {}, "weight_map": {source: "one.safetensors" for item in names for source in item.sources}}
    place = folder / "sharded"
    place.mkdir()
    (place / "one.safetensors").write_bytes(checkpoint)
    add("checkpoint", "model.safetensors.index.json", json.dumps(index).encode(), mutate_json, place)


def _add_quantized(add: Callable[..., None], floats: bytes, folder: Path) -> None:
    """Add a GPTQ checkpoint whose tensors, and one whose description, is mutated."""
    header = json.loads(floats[8 : 8 + int.from_bytes(floats[:8], "little")])
    tensors: dict[str, tuple[list[int], str]] = {}
    for name, item in header.items():
        if "_proj." not in name:
            tensors |= {name: (item["shape"], "F32")} if name != "__metadata__" else {}
            continue
        (n, k), module = item["shape"], name.removesuffix("weight")
        tensors |= {module + "qweight": ([k // 8, n], "I32"), module + "qzeros": ([k // 16, n // 8], "I32")}
        tensors[module + "scales"] = ([k // 16, n], "F32")
    content, place = _safetensors(tensors), folder / "quantized"
    place.mkdir()
    description = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False, "checkpoint_format": "gptq_v2"}
    config = json.dumps(TINY | {"quantization_config": description})
    (place / "config.json").write_text(config)
    (place / "model.safetensors").write_bytes(content)
    add("checkpoint", "model.safetensors", content, mutate_safetensors, place)
    add("checkpoint", "config.json", config.encode(), mutate_json, place)


def _add_tables(add: Callable[..., None], tiny: Path) -> None:
    from penstock.models.registry import find_model

    parameters = read_parameters(load_model_config(tiny))
    table = find_model("LlamaForCausalLM", "auto").table_file
    add("table", "table.yaml", table.read_bytes(), mutate_yaml)
    names = {name.replace(".0.", ".*."): -1 if item.shard is None else item.shard for name, item in parameters.items()}
    add("sharding", "map.yaml", "\n".join(f"{name} : {axis} # x" for name, axis in names.items()).encode(), mutate_yaml)
    scales = {
        f"layers.0.{kind}": ([1, 16], "F32") for kind in ("key_scale", "value_scale", "key_offset", "value_offset")
    }
    add("scales", "scales.safetensors", _safetensors(scales), mutate_safetensors)


def _add_adapter(add: Callable[..., None], folder: Path) -> None:
    """Add a LoRA adapter whose tensors, and one whose config, is mutated."""
    place = folder / "adapter"
    place.mkdir()
    tensors: dict[str, tuple[list[int], str]] = {}
    for name, n in (("q_proj", 32), ("v_proj", 16)):
        module = f"base_model.model.model.layers.0.self_attn.{name}"
        tensors |= {f"{module}.lora_A.weight": ([4, 32], "F32"), f"{module}.lora_B.weight": ([n, 4], "F32")}
        tensors[f"{module}.lora_magnitude_vector"] = ([n], "F32")
    content = _safetensors(tensors)
    options = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_dora": True, "use_rslora": False, "lora_bias": False}
    patterns = {
        "rank_pattern": {r"layers\.0\..*q_proj": 4},
        "alpha_pattern": {"v_proj": 3.5},
        "layer_replication": None,
    }
    config = json.dumps(options | patterns | {"target_modules": ["q_proj", "v_proj"], "modules_to_save": None})
    (place / "config.json").write_text(json.dumps(TINY))
    (place / "adapter_config.json").write_text(config)
    (place / "adapter_model.safetensors").write_bytes(content)
    add("adapter", "adapter_model.safetensors", content, mutate_safetensors, place)
    add("adapter", "adapter_config.json", config.encode(), mutate_json, place)


def _checkpoint(tiny: Path) -> bytes:
    parameters = read_parameters(load_model_config(tiny))
    shapes = {name: (list(shape), "F32") for item in parameters.values() for name, shape in item.sources.items()}
    return _safetensors(shapes)


def _safetensors(tensors: dict[str, tuple[list[int], str]]) -> bytes:
    """Make a safetensors file of float32 tensors of ones."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in tensors.items():
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"\x00\x00\x80\x3f" * (end // 4)


def _pickled(tiny: Path) -> bytes:
    """Make a file as torch.save does, of tensors of ones."""
    parameters = read_parameters(load_model_config(tiny))
    shapes = {name: shape for item in parameters.values() for name, shape in item.sources.items()}

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    def word(text: str) -> bytes:
        return b"X" + struct.pack("<I", len(text)) + text.encode()

    program, archive = b"\x80\x02}", io.BytesIO()
    with zipfile.ZipFile(archive, "w") as members:
        for index, (name, shape) in enumerate(shapes.items()):
            strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
            storage = b"(" + word("storage") + b"ctorch\nFloatStorage\n" + word(str(index)) + word("cpu")
            storage += number(math.prod(shape)) + b"tQ"
            sizes = b"".join(b"(" + b"".join(map(number, values)) + b"t" for values in (shape, strides))
            program += word(name) + b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number(0) + sizes + b"\x89}tRs"
            members.writestr(f"archive/data/{index}", b"\x00\x00\x80\x3f" * math.prod(shape))
        members.writestr("archive/data.pkl", program + b".")
    return archive.getvalue()


def _sentencepiece() -> bytes:
    """Make a SentencePiece model with bytes for what its few pieces lack."""
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3} | {f"<0x{byte:02X}>": 6 for byte in range(256)}
    kinds |= {"\u2581": 1, "a": 1, "n": 1, "an": 1, "<note>": 4}
    result = b""
    for rank, (piece, kind) in enumerate(kinds.items()):
        name = piece.encode()
        item = b"\x0a" + bytes([len(name)]) + name + b"\x15" + struct.pack("<f", -rank) + b"\x18" + bytes([kind])
        result += b"\x0a" + bytes([len(item)]) + item
    return result + b"\x12\x02\x18\x02" + b"\x1a\x04\x18\x01\x20\x00"  # BPE; a space in front, and none removed


def _gguf() -> bytes:
    """Make a GGUF file of the tiny model, with a tokenizer and matrices in blocks of Q8_0."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\u2581a", "ab"]
    kinds, scores = [2, 3, 3] + [6] * 256 + [1] * 5, [-float(index) for index in range(len(tokens))]
    sizes = {"block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 64}
    heads = {"attention.head_count": 2, "attention.head_count_kv": 1, "rope.dimension_count": 16}
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        **{f"llama.{name}": size for name, size in (sizes | heads).items()},
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.chat_template": TEMPLATE,
    }
    layer = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32), "ffn_gate": (64, 32),
             "ffn_up": (64, 32), "ffn_down": (32, 64), "attn_norm": (32,), "ffn_norm": (32,)}  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {f"blk.0.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {"token_embd.weight": (len(tokens), 32), "output_norm.weight": (32,)}
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(shapes), len(metadata))
    header += b"".join(_gguf_text(name) + _gguf_value(value) for name, value in metadata.items())
    data = b""
    for name, shape in shapes.items():
        header += _gguf_text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape[::-1])
        header += struct.pack("<IQ", 8 if len(shape) > 1 else 0, len(data))
        count = math.prod(shape)
        block = b"\x00\x3c" + bytes(range(32))
        data += block * (count // 32) if len(shape) > 1 else b"\x00\x00\x80\x3f" * count
        data += b"\0" * (-len(data) % 32)
    return header + b"\0" * (-len(header) % 32) + data


def _gguf_text(text: str) -> bytes:
    content = text.encode()
    return struct.pack("<Q", len(content)) + content


def _gguf_value(value: Any) -> bytes:
    """Return a value of GGUF's metadata with its type: uint32, float32, bool, string, or an array of one of them."""
    if isinstance(value, list):
        first = _gguf_value(value[0])[:4]
        return struct.pack("<I4sQ", 9, first, len(value)) + b"".join(_gguf_value(item)[4:] for item in value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _gguf_text(value)
    return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)


def _mutate_template(random: Random, content: bytes) -> bytes:
    if random.random() < 0.5:
        return mutate_bytes(random, content)
    place = random.randrange(len(content))
    return content[:place] + random.choice(TEMPLATE_PIECES) + content[place:]
