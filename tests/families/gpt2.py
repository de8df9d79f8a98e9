"""GPT-2: learned positions, weights on their side, scores scaled by layer."""

from typing import Any

from transformers import GPT2Config, GPT2LMHeadModel

from tests.families.case import Case
from tests.hf_models import TINY

ABSENT = tuple(name for name in TINY if not name.endswith("token_id") and name != "vocab_size")
SIZES: dict[str, Any] = {"n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 512}


def gpt2(name: str, fields: dict[str, Any], **more: Any) -> Case:
    return Case(name, GPT2LMHeadModel, GPT2Config, SIZES | fields, without=ABSENT, **more)


CASES = [
    gpt2("gpt2", {}),
    gpt2("gpt2-scaled-by-layer", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True,
                                  "n_inner": 80, "n_head": 4, "tie_word_embeddings": False}, shape=True),
    gpt2("gpt2-head-14", {"n_embd": 42, "n_head": 3}, shape=True),
    gpt2("gpt2-unscaled", {"scale_attn_weights": False, "n_head": 3, "activation_function": "gelu"}, shape=True),
]  # fmt: skip
