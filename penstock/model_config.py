"""ModelConfig: an architecture's numbers, read strictly from a Hugging Face config.json.

A required key that is missing, a wrong type, a contradiction or a key that may change the mathematics and is not
known is a ModelLoadError that names it. Both spellings of Transformers are read: the older (`rope_theta`,
`rope_scaling`, `torch_dtype`) and that of Transformers 5 (`rope_parameters`, `dtype`). This file knows no torch, no
weights and no architecture: what a file of one means is told by its family (architecture.py).
"""

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from penstock import params_json
from penstock.architecture import WHAT_IS_SERVED, Architecture, find_architecture, known_architectures, nearest
from penstock.config_reader import ConfigReader
from penstock.errors import ModelLoadError, NotSupportedError
from penstock.generation_config import read_ignored, read_sampling
from penstock.rope_config import RopeConfig
from penstock.validation import shown

CONFIG = "config.json"
PIPELINE = "model_index.json"  # what a diffusion pipeline has in place of config.json
DTYPES = ("float32", "bfloat16", "float16")

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
    cache_implementation
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
    "rope_interleaved": False,
    "use_mrope": False,
    "per_layer_config": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """An architecture's numbers. Names are Transformers'; what has a default is something that most models lack.

    Attributes:
        hidden_act: "silu", "gelu" (exact) or "gelu_tanh".
        norm_eps: of the norms, whichever kind they are.
        dtype: type of the checkpoint: "float32", "bfloat16" or "float16"; float32 where the file is silent.
        layer_windows: for each layer, how many tokens one sees, itself included; None sees all.
        rope: None: positions enter otherwise (alibi, or learned positions).
        local_rope: of the layers with a window, where theirs differs.
        attention_bias: the products for q, k and v have a bias.
        attention_out_bias: so has the product after attention.
        mlp_bias: so have the products of the feed-forward branch.
        qk_norm: q and k are RMS-normed before the rotation.
        embedding_scale: what token embeddings are multiplied by.
        attention_scale: what scores are multiplied by; None is 1 / sqrt(head_dim).
        attn_logit_softcapping, final_logit_softcapping: soft limits of scores and of logits.
        alibi: scores have a bias that falls with the distance (Press et al., 2022), before they are scaled.
        num_parallel_norms: attention and feed-forward read the same residual stream, behind one norm or one each; 0:
            one branch comes after the other.
        num_experts: of a sparse feed-forward branch; 0: none is.
        num_experts_per_tok: how many of them a token goes through.
        moe_intermediate_size: of each expert.
        norm_topk_prob: the weights of the chosen experts are divided by their sum.
        sparse_layers: for each layer, whether its feed-forward branch is made of experts.
        extra: numbers that only a family of a user's own file knows.
        eos_token_ids: tokens that end a text; generation_config.json goes before config.json.
        default_sampling: temperature, top_p, top_k, min_p, repetition_penalty, max_tokens as far as
            generation_config.json gives them. Transformers samples only where `do_sample` is true, so the first four
            count only then, and a file that says `do_sample: false` means temperature 0. The repetition penalty and
            max_tokens (there `max_new_tokens`) also count without. Values the file leaves out are not filled in.
        model_impl: which of the architecture's registered versions computes it, an engine option; "auto" is the default
            one.
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
    norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str
    layer_windows: tuple[int | None, ...]
    rope: RopeConfig | None
    local_rope: RopeConfig | None = None
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    alibi: bool = False
    num_parallel_norms: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    sparse_layers: tuple[bool, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict, hash=False)
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    default_sampling: dict[str, Any] = field(default_factory=dict, hash=False)
    model_impl: str = "auto"
    ignored_generation: tuple[str, ...] = field(default=(), repr=False)  # repr: what answers depend on

    @classmethod
    def from_dict(cls, config: dict[str, Any], generation_config: dict[str, Any] | None = None) -> "ModelConfig":
        """From the contents of config.json and, if there is one, generation_config.json.

        Raises:
            ModelLoadError: a key is missing, wrong, contradictory or unknown, or the architecture cannot be served.
            NotSupportedError: quantised weights, or a kind of rotary scaling that is not built.
        """
        read = ConfigReader(config, "config.json")
        generation = ConfigReader(generation_config or {}, "generation_config.json")
        _refuse_foreign(read)
        name, architecture = _read_architecture(read)
        read.neutral(NEUTRAL)
        model_type = read.raw("model_type") or architecture.model_type or ""
        numbers = architecture.read(read)
        _check_fields(name, numbers)
        vocab_size = numbers["vocab_size"]
        result = cls(
            architecture=name,
            model_type=model_type,
            **numbers,
            dtype=_read_dtype(read),
            eos_token_ids=_read_eos(read, generation, vocab_size),
            bos_token_id=_read_bos(read, generation, vocab_size),
            default_sampling=read_sampling(generation),
            ignored_generation=read_ignored(generation),
        )
        for rope in (result.rope, result.local_rope):
            if rope is not None:
                rope.check(result.head_dim)
        read.finish(HARMLESS)
        return result

    @classmethod
    def from_directory(cls, path: str | Path) -> "ModelConfig":
        """From a model directory: its config and, if there is one, generation_config.json."""
        directory = Path(path)
        config = load_config(directory)
        generation_file = directory / "generation_config.json"
        generation = _load_json(generation_file) if generation_file.exists() else None
        try:
            return cls.from_dict(config, generation)
        except ModelLoadError as error:
            raise ModelLoadError(f"{directory}: {error}") from None

    @property
    def context(self) -> int:
        """How many tokens a text may have: max_position_embeddings, and more where rotary scaling begins there."""
        stretch = self.rope.factor if self.rope is not None and self.rope.rope_type == "dynamic" else 1.0
        return int(self.max_position_embeddings * stretch)

    def cache_groups(self) -> list[tuple[tuple[int, ...], int | None]]:
        """Layers that look equally far back: (their indices, the window), ordered by first layer."""
        groups: dict[int | None, list[int]] = {}
        for index, window in enumerate(self.layer_windows):
            groups.setdefault(window, []).append(index)
        return [(tuple(layers), window) for window, layers in groups.items()]


def has_config(directory: Path) -> bool:
    """Whether a directory says what model it holds."""
    return any((directory / name).exists() for name in (CONFIG, params_json.NAME))


def load_config(directory: Path) -> dict[str, Any]:
    """What config.json holds; where there is none, what Mistral's params.json says in its words.

    Raises:
        ModelLoadError: there is neither, or it cannot be read.
    """
    config, params = directory / CONFIG, directory / params_json.NAME
    if params.is_file() and not config.exists():
        try:
            return params_json.config_of(_load_json(params))
        except ModelLoadError as error:
            raise ModelLoadError(f"{directory}: {error}") from None
    if (directory / PIPELINE).is_file() and not config.exists():
        raise ModelLoadError(f"{directory}: {PIPELINE} makes it a diffusion pipeline; {WHAT_IS_SERVED}")
    return _load_json(config)


def _check_fields(architecture: str, numbers: dict[str, Any]) -> None:
    """
    Raises:
        ModelLoadError: the function that reads this architecture's file returns something that is no field.
    """
    known = {item.name for item in fields(ModelConfig)}
    for name in numbers.keys() - known:
        raise ModelLoadError(
            f"{architecture}: its config function returns {name!r}, which is no field of ModelConfig (is "
            f"{nearest(name, sorted(known))} meant? numbers of its own go into `extra`)"
        )


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
    """Refuse what would need code or formats that are not ours."""
    if read.has("auto_map"):
        raise ModelLoadError(
            "config.json: auto_map asks for Python code from the checkpoint; such code is never run. "
            "Remove the key if the architecture is one of " + ", ".join(sorted(known_architectures()))
        )
    if read.has("quantization_config"):
        raise NotSupportedError(
            "config.json: quantization_config: quantised checkpoints are not supported yet", param="model"
        )
    if read.has("_class_name"):
        raise ModelLoadError(
            f"config.json: _class_name = {shown(read.raw('_class_name'))} is a part of a diffusion model; "
            f"{WHAT_IS_SERVED}"
        )


def _read_architecture(read: ConfigReader) -> tuple[str, Architecture]:
    names = read.raw("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise read.fail("architectures", "a list of one of " + ", ".join(sorted(known_architectures())))
    architecture = find_architecture(names[0])
    if architecture.model_type is not None:
        read.choice("model_type", [architecture.model_type])
    return names[0], architecture


def _read_dtype(read: ConfigReader) -> str:
    older = read.choice("torch_dtype", DTYPES, "float32")
    return read.choice("dtype", DTYPES, older)


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
