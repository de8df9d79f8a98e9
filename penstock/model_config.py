"""ModelConfig: an architecture's numbers, read strictly from a Hugging Face config.json.

A required key that is missing, a wrong type, a contradiction or a key that may change the mathematics and is not
known here is a ModelLoadError that names it. Both spellings of Transformers are read: the older (`rope_theta`,
`rope_scaling`, `torch_dtype`) and that of Transformers 5 (`rope_parameters`, `dtype`). This file knows no torch and
no weights; which module computes an architecture is its `family`.
"""

import difflib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.config_reader import MAX_SIZE, ConfigReader, same
from penstock.errors import ModelLoadError, NotSupportedError
from penstock.rope_config import RopeConfig, read_rope
from penstock.sampling_params import MAX_TOKENS, MIN_TEMPERATURE
from penstock.validation import shown

DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS = {  # Hugging Face's name -> the mathematical one in kernels/ops.py
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

# Keys of Transformers that say nothing about the mathematics of a forward pass.
HARMLESS_KEYS = """
    transformers_version use_cache initializer_range attention_dropout hidden_dropout resid_pdrop embd_pdrop
    output_hidden_states output_attentions return_dict chunk_size_feed_forward pretraining_tp torchscript
    use_bfloat16 gradient_checkpointing finetuning_task task_specific_params problem_type id2label label2id num_labels
    name_or_path tokenizer_class tokenizer_max_length prefix pad_token_id sep_token_id decoder_start_token_id
    attn_implementation experts_implementation tf_legacy_loss unsloth_version unsloth_fixed transformers.js_config
    is_llama_config max_sequence_length

    max_length min_length do_sample num_beams temperature top_k top_p min_p typical_p repetition_penalty
    length_penalty diversity_penalty num_beam_groups num_return_sequences no_repeat_ngram_size early_stopping
    encoder_no_repeat_ngram_size bad_words_ids output_scores return_dict_in_generate forced_bos_token_id
    forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
"""  # the second paragraph: old files repeat generation settings, which Transformers 5 drops too
HARMLESS = frozenset(HARMLESS_KEYS.split())

# Keys that would change the mathematics, with the value that does not.
NEUTRAL: dict[str, Any] = {
    "is_encoder_decoder": False,
    "is_decoder": False,
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "tie_encoder_decoder": False,
    "pruned_heads": {},
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "use_mrope": False,
    "per_layer_config": None,
}

# Sizes that a file must give, and the largest that is believed: far beyond any model, small enough to be counted with.
LARGEST = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**20,
    "num_hidden_layers": 4096,
    "num_attention_heads": 2**16,
    "max_position_embeddings": 2**24,
}
MAX_HEAD_DIM = 2**16

# generation_config.json: keys that change no token here, ...
GENERATION_HARMLESS_KEYS = """
    transformers_version pad_token_id decoder_start_token_id use_cache cache_implementation cache_config
    return_legacy_cache return_dict_in_generate output_scores output_logits output_attentions output_hidden_states
    is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
    assistant_early_exit assistant_lookbehind target_lookbehind prompt_lookup_num_tokens max_matching_ngram_size
    compile_config disable_compile low_memory prefill_chunk_size use_model_defaults chat_format
"""
GENERATION_HARMLESS = frozenset(GENERATION_HARMLESS_KEYS.split())
# ... and those that would, where another value stands than this one. Null and [] are neutral for all.
GENERATION_NEUTRAL: dict[str, Any] = {
    "max_length": 20,
    "min_length": 0,
    "min_new_tokens": 0,
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "length_penalty": 1.0,
    "diversity_penalty": 0.0,
    "early_stopping": False,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "penalty_alpha": 0.0,
    "guidance_scale": 1.0,
    "renormalize_logits": False,
    "remove_invalid_values": False,
    "token_healing": False,
}
# What of it becomes a default of SamplingParams where the file says do_sample, and the range of each.
SAMPLING_RANGES = {"temperature": (0.0, 100.0), "top_p": (1e-12, 1.0), "min_p": (0.0, 1.0)}


@dataclass(frozen=True, slots=True)
class Architecture:
    """What a config.json of one architecture means, where architectures differ.

    A bias that is None stands in the file (`attention_bias`, `mlp_bias`); otherwise the architecture decides and the
    file may only agree.

    Attributes:
        family: module in penstock.models that computes it, and the name of its parameter table.
        model_type: what config.json must say; None allows anything.
        windows: "none"; "all" layers have `sliding_window`; "by_layer", as Qwen chooses them.
        default_head_dim: where the file is silent; None is hidden_size / num_attention_heads.
    """

    family: str
    model_type: str | None
    windows: str = "none"
    attention_bias: bool | None = False
    attention_out_bias: bool | None = False
    mlp_bias: bool | None = False
    qk_norm: bool = False
    default_head_dim: int | None = None


ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture("llama", "llama", attention_bias=None, attention_out_bias=None, mlp_bias=None),
    "MistralForCausalLM": Architecture("llama", "mistral", "all"),
    "Qwen2ForCausalLM": Architecture("llama", "qwen2", "by_layer", attention_bias=True),
    "Qwen3ForCausalLM": Architecture(
        "llama", "qwen3", "by_layer", attention_bias=None, attention_out_bias=None, qk_norm=True, default_head_dim=128
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """An architecture's numbers. Names are Transformers'.

    Attributes:
        hidden_act: "silu", "gelu" (exact) or "gelu_tanh".
        dtype: type of the checkpoint: "float32", "bfloat16" or "float16"; float32 where the file is silent.
        layer_windows: for each layer, how many tokens one sees, itself included; None sees all.
        attention_bias: the products for q, k and v have a bias.
        attention_out_bias: so has the product after attention.
        qk_norm: each head of q and k is RMS-normed before the rotation.
        eos_token_ids: tokens that end a text; generation_config.json goes before config.json.
        default_sampling: temperature, top_p, top_k, min_p, repetition_penalty, max_tokens as far as
            generation_config.json gives them. Transformers samples only where `do_sample` is true, so the first four
            count only then, and a file that says `do_sample: false` means temperature 0. The repetition penalty and
            max_tokens (there `max_new_tokens`) also count without. Values the file leaves out are not filled in.
        ignored_generation: keys of generation_config.json that would change the answer, or are unknown, and are not
            applied; sorted. For the user to be told.
    """

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str
    layer_windows: tuple[int | None, ...]
    attention_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    default_sampling: dict[str, Any] = field(default_factory=dict, hash=False)
    ignored_generation: tuple[str, ...] = field(default=(), repr=False)  # repr: what answers depend on

    @classmethod
    def from_dict(cls, config: dict[str, Any], generation_config: dict[str, Any] | None = None) -> "ModelConfig":
        """From the contents of config.json and, if there is one, generation_config.json.

        Raises:
            ModelLoadError: a key is missing, wrong, contradictory or unknown.
            NotSupportedError: quantised weights, or a kind of rotary scaling that is not built.
        """
        read = ConfigReader(config, "config.json")
        generation = ConfigReader(generation_config or {}, "generation_config.json")
        _refuse_foreign(read)
        name, architecture = _read_architecture(read)
        model_type = read.raw("model_type") or architecture.model_type or ""
        shape = _read_shape(read, architecture)
        result = cls(
            architecture=name,
            model_type=model_type,
            **shape,
            hidden_act=ACTIVATIONS[read.choice("hidden_act", ACTIVATIONS, "silu")],
            rms_norm_eps=read.number("rms_norm_eps", 0.0, 1.0),
            tie_word_embeddings=read.boolean("tie_word_embeddings", False),
            dtype=_read_dtype(read),
            layer_windows=_read_windows(read, architecture, shape["num_hidden_layers"]),
            attention_bias=_read_bias(read, "attention_bias", architecture.attention_bias),
            attention_out_bias=_read_out_bias(read, architecture),
            mlp_bias=_read_bias(read, "mlp_bias", architecture.mlp_bias),
            qk_norm=architecture.qk_norm,
            rope=read_rope(read, shape["max_position_embeddings"]),
            eos_token_ids=_read_eos(read, generation, shape["vocab_size"]),
            bos_token_id=_read_bos(read, generation, shape["vocab_size"]),
            default_sampling=_read_sampling(generation),
            ignored_generation=_read_ignored(generation),
        )
        read.finish(HARMLESS)
        return result

    @classmethod
    def from_directory(cls, path: str | Path) -> "ModelConfig":
        """From a model directory: config.json and, if there is one, generation_config.json."""
        directory = Path(path)
        config = _load_json(directory / "config.json")
        generation_file = directory / "generation_config.json"
        generation = _load_json(generation_file) if generation_file.exists() else None
        try:
            return cls.from_dict(config, generation)
        except ModelLoadError as error:
            raise ModelLoadError(f"{directory}: {error}") from None

    def cache_groups(self) -> list[tuple[tuple[int, ...], int | None]]:
        """Layers that look equally far back: (their indices, the window), ordered by first layer."""
        groups: dict[int | None, list[int]] = {}
        for index, window in enumerate(self.layer_windows):
            groups.setdefault(window, []).append(index)
        return [(tuple(layers), window) for window, layers in groups.items()]


def nearest(name: str, known: list[str]) -> str:
    """The known name most like this one."""
    return difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]


def find_architecture(name: str) -> Architecture:
    """What a config.json of that architecture means.

    Raises:
        ModelLoadError: nobody has registered it.
    """
    if name not in ARCHITECTURES:
        known = sorted(ARCHITECTURES)
        raise ModelLoadError(
            f"config.json: architectures = {shown(name)} is not supported; supported are {', '.join(known)} "
            f"(nearest: {nearest(name, known)})"
        )
    return ARCHITECTURES[name]


def _load_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path}: no such file; a model directory needs it") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: holds {shown(value)}; it must be an object")
    return value


def _refuse_foreign(read: ConfigReader) -> None:
    """Refuse what would need code or formats that are not ours, and check the neutral keys."""
    if read.has("auto_map"):
        raise ModelLoadError(
            "config.json: auto_map asks for Python code from the checkpoint; such code is never run. "
            "Remove the key if the architecture is one of " + ", ".join(sorted(ARCHITECTURES))
        )
    if read.has("quantization_config"):
        raise NotSupportedError(
            "config.json: quantization_config: quantised checkpoints are not supported yet", param="model"
        )
    for key, neutral in NEUTRAL.items():
        if read.has(key) and not same(read.raw(key), neutral):
            raise read.fail(key, f"{json.dumps(neutral)}, or absent")


def _read_architecture(read: ConfigReader) -> tuple[str, Architecture]:
    names = read.raw("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise read.fail("architectures", "a list of one of " + ", ".join(sorted(ARCHITECTURES)))
    architecture = find_architecture(names[0])
    if architecture.model_type is not None:
        read.choice("model_type", [architecture.model_type])
    return names[0], architecture


def _read_shape(read: ConfigReader, architecture: Architecture) -> dict[str, int]:
    shape = {key: read.integer(key, 1, largest) for key, largest in LARGEST.items()}
    heads = shape["num_attention_heads"]
    kv_heads = shape["num_key_value_heads"] = read.integer("num_key_value_heads", 1, heads, heads)
    if heads % kv_heads:
        raise read.fail("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    default = architecture.default_head_dim or shape["hidden_size"] // heads
    if not read.has("head_dim") and architecture.default_head_dim is None and shape["hidden_size"] % heads:
        raise read.fail("hidden_size", f"a multiple of num_attention_heads = {heads} where head_dim is absent")
    shape["head_dim"] = read.integer("head_dim", 2, MAX_HEAD_DIM, default)
    if shape["head_dim"] % 2:
        raise read.fail("head_dim", "even, because rotary embedding turns pairs")
    return shape


def _read_dtype(read: ConfigReader) -> str:
    older = read.choice("torch_dtype", DTYPES, "float32")
    return read.choice("dtype", DTYPES, older)


def _read_bias(read: ConfigReader, key: str, fixed: bool | None) -> bool:
    value = read.boolean(key, bool(fixed))
    if fixed is not None and value != fixed:
        raise read.fail(key, f"{str(fixed).lower()} for this architecture, or absent")
    return value


def _read_out_bias(read: ConfigReader, architecture: Architecture) -> bool:
    if architecture.attention_out_bias is None:
        return read.boolean("attention_bias", False)
    return architecture.attention_out_bias


def _read_windows(read: ConfigReader, architecture: Architecture, num_layers: int) -> tuple[int | None, ...]:
    if architecture.windows == "by_layer":
        return _read_layer_windows(read, num_layers)
    if read.has("layer_types") and read.raw("layer_types") != ["full_attention"] * num_layers:
        raise read.fail("layer_types", "absent for this architecture")
    if read.boolean("use_sliding_window", False) and architecture.windows == "none":
        raise read.fail("use_sliding_window", "false for this architecture, or absent")
    if architecture.windows == "none":
        if read.has("sliding_window"):
            raise read.fail("sliding_window", "null for this architecture, or absent")
        return (None,) * num_layers
    window = _read_window(read)
    if window is not None and not read.boolean("use_sliding_window", True):
        raise read.fail("use_sliding_window", f"true or absent beside sliding_window = {window}")
    return (window,) * num_layers


def _read_window(read: ConfigReader) -> int | None:
    """`sliding_window`: null is no window; where it is absent, Transformers' default holds, which is 4096."""
    if read.is_null("sliding_window"):
        return None
    return read.integer("sliding_window", 1, MAX_SIZE, 4096)


def _read_layer_windows(read: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Qwen: nothing slides unless use_sliding_window; then layer_types says which layers do, else those from
    max_window_layers on."""
    window = _read_window(read)
    first_sliding = read.integer("max_window_layers", 0, MAX_SIZE, 28)
    if not read.boolean("use_sliding_window", False):
        window = None
    types = read.raw("layer_types")
    if types is None:
        return tuple(window if index >= first_sliding else None for index in range(num_layers))
    allowed = {"full_attention": None, "attention": None, "sliding_attention": window}
    if not isinstance(types, list) or len(types) != num_layers or not all(item in list(allowed) for item in types):
        raise read.fail("layer_types", f"a list of {num_layers} of full_attention, sliding_attention")
    if window is None and "sliding_attention" in types:
        raise read.fail("layer_types", "full_attention only, where use_sliding_window is false or sliding_window null")
    return tuple(allowed[item] for item in types)


def _read_eos(read: ConfigReader, generation: ConfigReader, vocab_size: int) -> tuple[int, ...]:
    own, later = _read_ids(read, "eos_token_id", vocab_size), _read_ids(generation, "eos_token_id", vocab_size)
    return later or own


def _read_ids(read: ConfigReader, key: str, vocab_size: int) -> tuple[int, ...]:
    """One id or a list of ids, each once, in the order of the file."""
    value = read.raw(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for item in ids:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < vocab_size:
            raise read.fail(key, f"an id from 0 to {vocab_size - 1}, or a list of such ids")
    return tuple(dict.fromkeys(ids))


def _read_bos(read: ConfigReader, generation: ConfigReader, vocab_size: int) -> int | None:
    ids = _read_ids(generation, "bos_token_id", vocab_size), _read_ids(read, "bos_token_id", vocab_size)
    return next((found[0] for found in ids if found), None)


def _read_sampling(read: ConfigReader) -> dict[str, Any]:
    """What the file says about sampling, checked as SamplingParams would; what does not count is only a number."""
    sampling: dict[str, Any] = {}
    if read.has("repetition_penalty"):
        sampling["repetition_penalty"] = read.number("repetition_penalty", 0.01, 100.0)
    if read.has("max_new_tokens"):
        sampling["max_tokens"] = read.integer("max_new_tokens", 1, MAX_TOKENS)
    samples = read.boolean("do_sample", False)
    drawing = _read_drawing(read, samples)
    if samples:
        return sampling | drawing
    return sampling | {"temperature": 0.0} if read.has("do_sample") else sampling


def _read_drawing(read: ConfigReader, counts: bool) -> dict[str, Any]:
    """The keys that shape the distribution that is drawn from."""
    anything = (-float(MAX_SIZE), float(MAX_SIZE))
    drawing: dict[str, Any] = {
        key: read.number(key, *(range_ if counts else anything))
        for key, range_ in SAMPLING_RANGES.items()
        if read.has(key)
    }
    if read.has("top_k"):
        drawing["top_k"] = read.integer("top_k", -1 if counts else -MAX_SIZE, MAX_SIZE)
    if counts and 0.0 < drawing.get("temperature", 0.0) < MIN_TEMPERATURE:
        raise read.fail("temperature", f"0 (greedy) or a number from {MIN_TEMPERATURE:g} to 100")
    return drawing


def _read_ignored(read: ConfigReader) -> tuple[str, ...]:
    """Every other key that says something; to be called last."""
    return tuple(key for key in read.unread(GENERATION_HARMLESS) if not _is_neutral(key, read.raw(key)))


def _is_neutral(key: str, value: Any) -> bool:
    return value is None or value == [] or (key in GENERATION_NEUTRAL and same(value, GENERATION_NEUTRAL[key]))
