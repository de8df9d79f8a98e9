"""Read the config.json of OLMo 2."""

from penstock.models.llama.config import attention_biases
from penstock.spec.config_reader import ConfigReader
from penstock.spec.config_rules import Numbers, gated_decoder, no_windows


def read_olmo2(read: ConfigReader) -> Numbers:
    """Read the numbers: biases if the file says so, no windows, norms of q and k."""
    numbers = gated_decoder(read) | attention_biases(read)
    return numbers | {"qk_norm": True, "layer_windows": no_windows(read, numbers["num_hidden_layers"])}
