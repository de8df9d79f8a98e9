"""How the config.json of OLMo 2 is read."""

from penstock.architecture import Numbers, architecture
from penstock.config_reader import ConfigReader
from penstock.models.config_rules import no_windows
from penstock.models.llama_config import gated_decoder


@architecture("Olmo2ForCausalLM", "olmo2", "olmo2")
def olmo2(read: ConfigReader) -> Numbers:
    """`attention_bias` stands for all four products of attention."""
    numbers = gated_decoder(read)
    bias = read.boolean("attention_bias", False)
    return numbers | {
        "attention_bias": bias,
        "attention_out_bias": bias,
        "qk_norm": True,
        "layer_windows": no_windows(read, numbers["num_hidden_layers"]),
    }
