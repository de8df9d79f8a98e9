"""Read the config.json of Phi-3. The model is Llama's (llama/model.py) with its own parameter table."""

from penstock.spec.config_reader import ConfigReader
from penstock.spec.config_rules import Numbers, fixed, gated_decoder, same_windows

ORIGINAL_CONTEXT = 4096  # the context before scaling; Transformers' default
SCALINGS = ("default", "longrope")
NEUTRAL = {"full_attn_mod": 1, "interpolate_factor": 1}  # keys of Phi-4-mini; no model has another value


def read_phi3(read: ConfigReader) -> Numbers:
    """Read the numbers: no biases, a window if the file gives one, and the fraction of each head that is rotated."""
    numbers = gated_decoder(read, partial_rotary=1.0, original_context=ORIGINAL_CONTEXT)
    if numbers["rope"].rope_type not in SCALINGS:
        key = "rope_parameters" if read.has("rope_parameters") else "rope_scaling"
        raise read.fail(key, f"of rope_type {' or '.join(SCALINGS)} for this architecture, or absent")
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        fixed(read, key, False)
    read.neutral(NEUTRAL)
    return numbers | {"layer_windows": same_windows(read, numbers["num_hidden_layers"], None)}
