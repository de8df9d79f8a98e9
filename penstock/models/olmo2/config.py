"""Read the config.json of OLMo 2, OLMo 3 and EXAONE 4."""

from penstock.models.llama.config import attention_biases
from penstock.spec.config_reader import MAX_SIZE, ConfigReader
from penstock.spec.config_rules import (
    DEFAULT_WINDOW,
    Numbers,
    gated_decoder,
    no_windows,
    sliding_window,
    window_pattern,
    windows_by_type,
)

OLMO3_THETA = 500000.0
PERIOD = 4  # the last of so many layers has no window, unless layer_types says otherwise


def read_olmo2(read: ConfigReader) -> Numbers:
    """Read the numbers of OLMo 2: biases if the file says so, no windows, norms of q and k over all heads."""
    numbers = gated_decoder(read) | attention_biases(read)
    return numbers | {"qk_norm": True, "layer_windows": no_windows(read, numbers["num_hidden_layers"])}


def read_olmo3(read: ConfigReader) -> Numbers:
    """Read the numbers of OLMo 3: windows, and rotary scaling in the layers without one."""
    numbers = gated_decoder(read, theta=OLMO3_THETA, local_theta=OLMO3_THETA) | attention_biases(read)
    window, layers = sliding_window(read, DEFAULT_WINDOW), numbers["num_hidden_layers"]
    windows = windows_by_type(read, layers, window, window_pattern(layers, PERIOD))
    return numbers | {"qk_norm": True, "layer_windows": windows}


def read_exaone4(read: ConfigReader) -> Numbers:
    """Read the numbers of EXAONE 4: norms of each head of q and k; beside windows, the other layers do not rotate."""
    numbers = gated_decoder(read)
    window, layers = sliding_window(read, DEFAULT_WINDOW), numbers["num_hidden_layers"]
    pattern = window_pattern(layers, 1)
    if window is None or read.has("layer_types"):
        read.raw("sliding_window_pattern")  # which describes layer_types in words, "LLLG" for instance
    else:
        pattern = window_pattern(layers, read.integer("sliding_window_pattern", 1, MAX_SIZE, PERIOD))
    windows = windows_by_type(read, layers, window, pattern)
    rotary = () if window is None else tuple(item is not None for item in windows)
    return numbers | {"qk_norm": True, "layer_windows": windows, "rotary_layers": rotary}
