"""How the config.json of Phi-3 is read. The model is Llama's (llama.py), its parameter table phi3.yaml."""

from penstock.architecture import Numbers, architecture
from penstock.config_reader import ConfigReader
from penstock.models.config_rules import fixed, same_windows
from penstock.models.llama_config import gated_decoder


@architecture("Phi3ForCausalLM", "phi3", "llama", table="phi3.yaml")
def phi3(read: ConfigReader) -> Numbers:
    """No biases; a window only where the file gives one; perhaps a part of each head is rotated."""
    numbers = gated_decoder(read, partial_rotary=1.0)
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        fixed(read, key, False)
    return numbers | {"layer_windows": same_windows(read, numbers["num_hidden_layers"], None)}
