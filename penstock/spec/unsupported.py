"""Parts of error messages: why an architecture is not supported, the nearest known name, a short list of names."""

import difflib
import re
from collections.abc import Iterable

SUPPORTED = "only autoregressive decoders with a key/value cache are supported"
DOCUMENTATION = "https://github.com/penstock/penstock/tree/main/docs"  # for users who have only installed the package
MAX_LISTED = 8  # most names that an error lists

# Pattern of class names -> the kind of model.
UNSUPPORTED: dict[str, str] = {
    r"^(?i:llada|dream)": "a diffusion language model: it refines all tokens of a text at once",
    r"Pipeline$|UNet|Diffusion|Autoencoder|Transformer2D": "a diffusion model: it refines a whole image at once",
    r"For(MaskedLM|PreTraining|(Sequence|Token|Image)Classification|QuestionAnswering|MultipleChoice)$|^Bert|Roberta": (
        "an encoder: it reads a text and does not continue one"
    ),
    r"^(T5|MT5|Bart|MBart|Pegasus|Marian|Whisper|Speech2Text)": "an encoder-decoder: it needs a cross-attention cache",
    r"Mamba|Rwkv|RecurrentGemma|Jamba|Zamba": "a recurrent model: its state is not a key/value cache",
    r"ForConditionalGeneration$|Vision|LlavaFor|Audio": "a multimodal model: it reads more than text",
    r"(?<!LMHead)Model$": "a model without a language-model head",
}


def why_unsupported(architecture: str) -> str | None:
    """Return the kind of model that an architecture's name or a model_type indicates, or None if neither is known."""
    return next((reason for pattern, reason in UNSUPPORTED.items() if re.search(pattern, architecture)), None)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that is most similar to this one."""
    return difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)[0]


def hint(name: str, known: Iterable[str]) -> str:
    """Return a question that suggests the most similar known name, or "" if none is similar."""
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f" (is {near[0]} meant?)" if near else ""


def listed(names: list[str], separator: str = ", ") -> str:
    """Join the first names for an error message, and say how many more there are."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return separator.join(names[:MAX_LISTED]) + more
