"""Penstock: an inference and serving engine for language models, in readable Python.

    from penstock import LLM, SamplingParams

    with LLM(model="demo") as llm:
        print(llm.generate("Once upon a time", SamplingParams(max_tokens=32))[0].outputs[0].text)

The names of `__all__` are the whole public interface. Importing the package is cheap: a name's module is loaded on
first use, and only `LLM` may import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.client.async_llm import AsyncLLM
    from penstock.client.llm import LLM
    from penstock.client.prompts import read_prompts
    from penstock.config import EngineConfig
    from penstock.errors import (
        EngineDeadError,
        EngineError,
        EngineOverloadedError,
        InvalidRequestError,
        ModelLoadError,
        NotSupportedError,
        PenstockError,
        RequestFailedError,
    )
    from penstock.interface.messages import LoRARequest
    from penstock.interface.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        FinishReason,
        Logprob,
        PrefixUse,
        RequestOutput,
    )
    from penstock.interface.plugins import register_logits_processor
    from penstock.interface.pooling import (
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingParams,
        PoolingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from penstock.interface.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
    from penstock.interface.structured_outputs import StructuredOutputsParams
    from penstock.models.registry import register_model
    from penstock.tokenizer.answer_formats import ReasoningFormat, ToolFormat, register_parser

__version__ = "0.1.0"

_HOMES = {
    "AsyncLLM": "client.async_llm",
    "BeamSearchOutput": "interface.outputs",
    "BeamSearchParams": "interface.sampling_params",
    "BeamSearchSequence": "interface.outputs",
    "ClassificationOutput": "interface.pooling",
    "ClassificationRequestOutput": "interface.pooling",
    "CompletionOutput": "interface.outputs",
    "EmbeddingOutput": "interface.pooling",
    "EmbeddingRequestOutput": "interface.pooling",
    "EngineConfig": "config",
    "EngineDeadError": "errors",
    "EngineError": "errors",
    "EngineOverloadedError": "errors",
    "FinishReason": "interface.outputs",
    "InvalidRequestError": "errors",
    "LLM": "client.llm",
    "LoRARequest": "interface.messages",
    "Logprob": "interface.outputs",
    "ModelLoadError": "errors",
    "NotSupportedError": "errors",
    "PenstockError": "errors",
    "PoolingOutput": "interface.pooling",
    "PoolingParams": "interface.pooling",
    "PoolingRequestOutput": "interface.pooling",
    "PrefixUse": "interface.outputs",
    "ReasoningFormat": "tokenizer.answer_formats",
    "RequestFailedError": "errors",
    "RequestOutput": "interface.outputs",
    "RequestOutputKind": "interface.sampling_params",
    "SamplingParams": "interface.sampling_params",
    "StructuredOutputsParams": "interface.structured_outputs",
    "ScoringOutput": "interface.pooling",
    "ScoringRequestOutput": "interface.pooling",
    "ToolFormat": "tokenizer.answer_formats",
    "read_prompts": "client.prompts",
    "register_logits_processor": "interface.plugins",
    "register_model": "models.registry",
    "register_parser": "tokenizer.answer_formats",
}

__all__ = [  # noqa: RUF022  (in the order a reader needs them; a test checks it against _HOMES)
    "LLM",
    "AsyncLLM",
    "SamplingParams",
    "StructuredOutputsParams",
    "EngineConfig",
    "RequestOutput",
    "CompletionOutput",
    "RequestOutputKind",
    "FinishReason",
    "Logprob",
    "PrefixUse",
    "read_prompts",
    "LoRARequest",
    "BeamSearchParams",
    "BeamSearchOutput",
    "BeamSearchSequence",
    "PoolingParams",
    "PoolingOutput",
    "PoolingRequestOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "ScoringOutput",
    "ScoringRequestOutput",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "register_model",
    "register_logits_processor",
    "register_parser",
    "ToolFormat",
    "ReasoningFormat",
    "PenstockError",
    "InvalidRequestError",
    "NotSupportedError",
    "ModelLoadError",
    "EngineError",
    "EngineDeadError",
    "EngineOverloadedError",
    "RequestFailedError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(importlib.import_module(f"penstock.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
