"""Penstock: an inference and serving engine for language models, in readable Python.

    from penstock import LLM, SamplingParams

    with LLM(model="demo") as llm:
        print(llm.generate("Once upon a time", SamplingParams(max_tokens=32))[0].outputs[0].text)

This is the whole public surface. Importing it is cheap: a name's module is loaded when the name is first used, and
only `LLM` and `register_model` bring torch in.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.async_llm import AsyncLLM
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
    from penstock.llm import LLM
    from penstock.logits_processors import register as register_logits_processor
    from penstock.models.registry import register as register_model
    from penstock.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput
    from penstock.sampling_params import RequestOutputKind, SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "AsyncLLM": "async_llm",
    "CompletionOutput": "outputs",
    "EngineConfig": "config",
    "EngineDeadError": "errors",
    "EngineError": "errors",
    "EngineOverloadedError": "errors",
    "FinishReason": "outputs",
    "InvalidRequestError": "errors",
    "LLM": "llm",
    "Logprob": "outputs",
    "ModelLoadError": "errors",
    "NotSupportedError": "errors",
    "PenstockError": "errors",
    "RequestFailedError": "errors",
    "RequestOutput": "outputs",
    "RequestOutputKind": "sampling_params",
    "SamplingParams": "sampling_params",
}

_DECORATORS = {"register_logits_processor": "logits_processors", "register_model": "models.registry"}

__all__ = [  # noqa: RUF022  (sorted by what a reader looks for, checked against _HOMES by a test)
    "LLM",
    "AsyncLLM",
    "SamplingParams",
    "EngineConfig",
    "RequestOutput",
    "CompletionOutput",
    "RequestOutputKind",
    "FinishReason",
    "Logprob",
    "register_model",
    "register_logits_processor",
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
    if name in _DECORATORS:
        return importlib.import_module(f"penstock.{_DECORATORS[name]}").register
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(importlib.import_module(f"penstock.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
