"""BLOOM: a norm of the embedding, and a bias of scores that falls with the distance and is not scaled."""

from typing import Any

from transformers import BloomConfig, BloomForCausalLM

from tests.families.case import Case

ABSENT = ("intermediate_size", "num_key_value_heads", "max_position_embeddings")


def bloom(name: str, fields: dict[str, Any], **more: Any) -> Case:
    return Case(name, BloomForCausalLM, BloomConfig, fields, without=ABSENT, **more)


CASES = [
    bloom("bloom", {"num_attention_heads": 8}),
    bloom("bloom-12-heads", {"num_attention_heads": 12, "tie_word_embeddings": False}, shape=True),
]
