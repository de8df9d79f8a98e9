"""Apply the options that change the numbers of a model: the implementation, and the windows of StreamingLLM.

With attention_sinks N and sliding_window W (Xiao et al., "Efficient Streaming Language Models with Attention Sinks",
2024), a token at position p sees the first N tokens, the sinks, and the last W tokens up to itself. Positions are those
within the cache of N + W tokens: the distances within the window are the true ones, and a sink at position i is seen
from position min(p, N + W - 1), as if the window followed the sinks directly. Keys are cached as rotated at their own
positions, which later tokens share; instead, each query is rotated a second time, for the sinks (layers/decoder.py).
"""

from dataclasses import replace

from penstock.config import NumericsConfig
from penstock.errors import fail
from penstock.models.registry import find_model
from penstock.spec.model_config import ModelConfig

BY_LENGTH = ("dynamic", "longrope")  # rotary scaling under which a distance does not always mean the same angle


def as_served(model: ModelConfig, numerics: NumericsConfig) -> ModelConfig:
    """Return the numbers of a model as it is served with these options.

    Raises:
        InvalidRequestError: the model cannot have sink tokens, or N + W tokens exceed its context.
    """
    model = replace(model, model_impl=numerics.model_impl)
    sinks, window = numerics.attention_sinks, numerics.sliding_window
    if sinks is None or window is None:
        return model
    if (why := _why_no_sinks(model)) is not None:
        raise fail("attention_sinks", sinks, f"left out: {model.architecture} {why}")
    if sinks + window > model.longest_context:
        allowed = f"at most {model.longest_context - sinks}, the model's context without the attention_sinks"
        raise fail("sliding_window", window, allowed)
    return replace(model, num_sink_tokens=sinks, layer_windows=(window,) * model.num_hidden_layers)


def _why_no_sinks(model: ModelConfig) -> str | None:
    if any(model.layer_windows) or model.local_rope is not None:
        return "has windows of its own"
    if model.bidirectional:
        return "is an encoder, which continues no text"
    if model.rope is None:
        return "has no rotary embedding"
    if model.rope.rope_type in BY_LENGTH:
        return f"has {model.rope.rope_type} rotary scaling, which depends on the length of the text"
    if model.query_scale is not None:
        return "scales its queries by their positions"
    if find_model(model.architecture, model.model_impl).needs_torch:
        return "is computed in torch by a class that is not one of the built-in families"
    return None
