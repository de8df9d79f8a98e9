"""Phi-3: fused projections in the checkpoint, a window, part of a head rotated."""

from transformers import Phi3Config, Phi3ForCausalLM

from tests.families.case import Case

PHI3 = {"pad_token_id": 0}  # its own default lies beyond a small vocabulary

CASES = [
    Case("phi3", Phi3ForCausalLM, Phi3Config, PHI3 | {"sliding_window": 16}),
    Case("phi3-multi-head-tied", Phi3ForCausalLM, Phi3Config, PHI3 | {
        "num_key_value_heads": 6, "tie_word_embeddings": True,
    }),
]  # fmt: skip
