"""How the config.json of Phi-3 is read. The model is Llama's (llama.py), its parameter table phi3.yaml."""

from penstock.spec.config_reader import ConfigReader
from penstock.spec.config_rules import Numbers, fixed, gated_decoder, same_windows

ORIGINAL_CONTEXT = 4096  # before scaling, where the file is silent, as Transformers has it
SCALINGS = ("default", "longrope")
NEUTRAL = {"full_attn_mod": 1, "interpolate_factor": 1}  # Phi-4-mini's files name them; no model has another value


def read_phi3(read: ConfigReader) -> Numbers:
    """No biases; a window only where the file gives one; perhaps a part of each head is rotated."""
    numbers = gated_decoder(read, partial_rotary=1.0, original_context=ORIGINAL_CONTEXT)
    if numbers["rope"].rope_type not in SCALINGS:
        key = "rope_parameters" if read.has("rope_parameters") else "rope_scaling"
        raise read.fail(key, f"of rope_type {' or '.join(SCALINGS)} for this architecture, or absent")
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        fixed(read, key, False)
    read.neutral(NEUTRAL)
    return numbers | {"layer_windows": same_windows(read, numbers["num_hidden_layers"], None)}
