"""Tries every decoder of Transformers that no family here computes: a tiny random model of each runs on the engine, and
has to give Transformers' greedy tokens, with the same bits however its requests are arranged.

    python tools/fallback_classes.py [CLASS ...]

It puts a row for each class, or for those that are named, into the table of docs/models.md as it is found, and leaves
out the classes that have a family by now.
"""

import dataclasses
import re
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

sys.path.insert(0, str(Path(__file__).parent.parent))

from penstock import PenstockError
from penstock.assembly import BuiltEngine, build_engine
from penstock.config import EngineConfig
from penstock.models.registry import ARCHITECTURES
from penstock.models.transformers.derive import BROKEN
from penstock.spec.config_file import why_unsupported
from tests.answers import MAX_MODEL_LEN, NUM_TOKENS, PROMPTS, ask, ask_alone, check, request

# Sizes that are no multiples of a vector's, so that a tail that is computed otherwise shows.
SIZES: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 96,
    "intermediate_size": 84,
    "ffn_hidden_size": 84,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rotary_dim": 8,
    "sliding_window": 16,
    "query_pre_attn_scalar": 24,
    "moe_intermediate_size": 36,
    "shared_expert_intermediate_size": 36,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_layers": 2,
    "expert_ffn_hidden_size": 36,
    "zero_expert_num": 2,
    "moe_topk": 2,
    "vocab_size_per_layer_input": 199,
    "hidden_size_per_layer_input": 8,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "max_window_layers": 1,
    "mlp_layer_types": ["dense", "sparse"],  # so that no mixture of experts is tried without its experts
    "mlp_only_layers": [0],
    "is_decoder": True,  # of classes that may be encoders, too
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PAGE = Path(__file__).parent.parent / "docs" / "models.md"
BEGIN, END = "<!-- fallback -->", "<!-- end -->"
ROW = re.compile(r"^\| `(\w+)` \| (.+) \|$", re.MULTILINE)
MAX_PARAMETERS = 20_000_000
ALONE = (0, 2, 4, 8)  # greedy requests of tests/answers.py
ARRANGEMENTS: tuple[dict[str, Any], ...] = (
    {"max_num_batched_tokens": 13, "max_num_seqs": 5, "threads": 2},
    {"max_num_batched_tokens": 50, "enable_prefix_caching": True},
)


def classes() -> list[str]:
    """List the decoders of Transformers whose attention goes through its interface and that have no family here."""
    found = set[str]()
    for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        for name in [names] if isinstance(names, str) else names:
            if name not in ARCHITECTURES and getattr(transformers, name)._supports_attention_backend:
                found.add(name)
    return sorted(found)


def tiny_config(name: str) -> Any:
    """Make a small config of a class, with as many of its own defaults as possible."""
    kind = getattr(transformers, name).config_class
    own, spelling = {item.name for item in dataclasses.fields(kind)}, kind.attribute_map
    values = {spelling.get(key, key): size for key, size in SIZES.items()}
    values = {key: size for key, size in values.items() if key in own}
    if "sparse" not in (getattr(kind(), "mlp_layer_types", None) or ["sparse"]):  # its layers have other names
        values.pop("mlp_layer_types")
    if name == "MiMoV2FlashForCausalLM":  # layers with a window have twice as many
        values["num_key_value_heads"] = SIZES["num_attention_heads"] // 2
    if "kv_lora_rank" in own:  # each head has keys of its own
        values["num_key_value_heads"] = SIZES["num_attention_heads"]
    values |= {key: 0 for key in own if key.endswith("_token_id") and key not in values}
    return kind(**values, architectures=[name])


def make(name: str, directory: Path, seed: int = 0) -> nn.Module:
    """Save a tiny random model, and return it."""
    torch.manual_seed(seed)
    config = tiny_config(name)
    config._attn_implementation = "eager"
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            if parameter.ndim == 1:  # a norm's weight is 1, or 0 where 1 is added to it; a bias is 0
                parameter.copy_(parameter.mean().round() + 0.2 * noise)
            else:
                table = any(part in key for part in ("embed", "wte", "head"))
                parameter.copy_(noise * (2 if table else 1) / parameter.shape[-1] ** 0.5)
    model.save_pretrained(directory)
    return model


def engine(directory: Path, **options: Any) -> BuiltEngine:
    fixed = {
        "model": str(directory),
        "kernels": "cpu",
        "dtype": "float32",
        "threads": 1,
        "max_num_seqs": len(PROMPTS),
        "max_model_len": MAX_MODEL_LEN,
        "enable_prefix_caching": False,
        "model_impl": "transformers",
    }
    return build_engine(EngineConfig.from_options(**fixed | options))


def greedy(model: Any, prompt: list[int]) -> list[int]:
    """Let Transformers continue a prompt, without its cache."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def why_not(name: str, directory: Path, arrangements: Sequence[dict[str, Any]] = ARRANGEMENTS) -> str | None:
    """Try a class. Return why it does not work; None if it does."""
    kind = why_unsupported(name) or BROKEN.get(name)
    if kind is not None:
        return kind
    try:
        config = tiny_config(name)
        with torch.device("meta"):
            if sum(value.numel() for value in getattr(transformers, name)(config).parameters()) > MAX_PARAMETERS:
                return "not tried: its smallest model is too large"
        model = make(name, directory)
    except Exception as error:  # whatever a class says to a small config
        return f"not tried: no tiny model could be made ({_line(error)})"
    try:
        for dtype in ("float32", "bfloat16"):
            alone = ask_alone(engine(directory, dtype=dtype, max_num_batched_tokens=2048).engine, ALONE)
            expected = {index: greedy(model, PROMPTS[index]) for index in ALONE if dtype == "float32"}
            if any(alone[index][0] != tokens for index, tokens in expected.items()):
                return "its tokens are not those of Transformers"
            for options in arrangements:
                asked = [request(index, prompt_logprobs=False) for index in range(len(PROMPTS))]
                found = ask(engine(directory, dtype=dtype, **options).engine, asked)
                try:
                    check(found, alone, prompts=False)
                except AssertionError as error:
                    return f"bits differ in {dtype}: {_line(error)}, {options}"
    except PenstockError as error:
        return _line(error).partition("--model-impl transformers): ")[2] or _line(error).partition(": ")[2]
    except Exception as error:
        return f"{type(error).__name__}: {_line(error)}"
    return None


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def table() -> dict[str, str]:
    """Read the table of docs/models.md: what it says of each class."""
    return dict(ROW.findall(_parts()[1]))


def write(found: dict[str, str]) -> None:
    """Put rows into the table, in the order of their names. Classes that have a family leave it."""
    merged, (before, _, after) = table() | found, _parts()
    rows = "".join(f"| `{name}` | {merged[name]} |\n" for name in classes() if name in merged)
    PAGE.write_text(f"{before}{BEGIN}\n| class | |\n|---|---|\n{rows}{END}{after}", encoding="utf-8")


def _parts() -> tuple[str, str, str]:
    """Split the page into what is before, in and after the table."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    inside, _, after = rest.partition(END)
    return before, inside, after


def main(names: list[str]) -> None:
    """Try classes, and write down what is found."""
    for name in names or classes():
        with tempfile.TemporaryDirectory() as directory:
            said = why_not(name, Path(directory)) or "works"
        print(f"{name}: {said}", flush=True)
        write({name: said})


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    main(sys.argv[1:])
