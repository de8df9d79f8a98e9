"""Falcon: its three generations, each in the shape of the model that was published.

Of the bias that falls with the distance (RW), two things in Transformers are no part of the mathematics. Its eager
attention adds the bias twice (the mask brings it once more), so the other implementation is the oracle. And it rounds
slopes, positions and their products to bfloat16 in a float32 model too: `unrounded_bias` takes the place of that
function. tests/models/test_falcon.py holds both against Transformers as it is.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import FalconConfig, FalconForCausalLM
from transformers.models.falcon import modeling_falcon

from penstock.layers.decoder import alibi_slopes
from tests.families.case import Case

rounded_bias = modeling_falcon.build_alibi_tensor


def unrounded_bias(attention_mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    """attention_mask [B, S] -> slope * position [B * H, 1, S], rounded to the model's type alone."""
    positions = ((attention_mask.cumsum(dim=-1) - 1) * attention_mask)[:, None, :]
    bias = torch.from_numpy(alibi_slopes(num_heads))[:, None] * positions
    return bias.reshape(-1, 1, attention_mask.shape[1]).to(dtype)


modeling_falcon.build_alibi_tensor = unrounded_bias

ABSENT = ("intermediate_size", "num_key_value_heads")
NEW: dict[str, Any] = {"new_decoder_architecture": True, "multi_query": False}
RW = {"alibi": True, "parallel_attn": False, "multi_query": False, "bias": True, "hidden_size": 64}


def falcon(name: str, fields: dict[str, Any], **more: Any) -> Case:
    return Case(name, FalconForCausalLM, FalconConfig, fields, without=ABSENT, **more)


CASES = [
    falcon("falcon-7b", {"num_attention_heads": 3}),
    falcon("falcon-40b", NEW | {"hidden_size": 96, "num_attention_heads": 16, "num_kv_heads": 4}),
    falcon("falcon-11b", NEW | {"num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "ffn_hidden_size": 80,
                                "tie_word_embeddings": False}),
    falcon("falcon-rw", RW | {"num_attention_heads": 8, "tie_word_embeddings": False}, attention="sdpa"),
    falcon("falcon-rw-12-heads", RW | {"hidden_size": 48, "num_attention_heads": 12}, attention="sdpa", shape=True),
    falcon("falcon-40b-8-per-kv-head", NEW | {"hidden_size": 80, "num_attention_heads": 8, "num_kv_heads": 1,
                                              "bias": True}, shape=True),
    falcon("falcon-40b-multi-head", NEW | {"num_attention_heads": 4, "num_kv_heads": 4}, shape=True),
    falcon("falcon-7b-sequential", {"num_attention_heads": 8, "parallel_attn": False, "bias": True}, shape=True),
]  # fmt: skip
