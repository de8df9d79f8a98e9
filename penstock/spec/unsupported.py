"""Why a model is not supported: what its architecture's name says about it, for error messages."""

import difflib
import re
from collections.abc import Iterable

SUPPORTED = "only autoregressive decoders with a key/value cache are supported"

# Patterns of Transformers' class names -> the kind of model that they stand for.
UNSUPPORTED: dict[str, str] = {
    r"Pipeline$|UNet|Diffusion|Autoencoder|Transformer2D": "a diffusion model: it refines a whole image at once",
    r"For(MaskedLM|PreTraining|(Sequence|Token|Image)Classification|QuestionAnswering|MultipleChoice)$|^Bert|Roberta": (
        "an encoder: it reads a text and does not continue one"
    ),
    r"^(T5|MT5|Bart|MBart|Pegasus|Marian|Whisper|Speech2Text)": "an encoder-decoder: it needs a cross-attention cache",
    r"Mamba|Rwkv|RecurrentGemma|Jamba|Zamba": "a recurrent model: its state is not a key/value cache",
    r"ForConditionalGeneration$|Vision|LlavaFor|Audio": "a multimodal model",
    r"(?<!LMHead)Model$": "a model without a language-model head",
}


def why_unsupported(architecture: str) -> str | None:
    """Return the kind of model that an architecture's name stands for, or None where the name does not tell."""
    return next((reason for pattern, reason in UNSUPPORTED.items() if re.search(pattern, architecture)), None)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that is most like this one."""
    return difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)[0]
