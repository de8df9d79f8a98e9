"""The language-model head: the product over the vocabulary."""

from penstock.layers.linear import Linear


class LMHead(Linear):
    """hidden [M, hidden] dtype -> logits [M, V] float32. A tied head packs the embedding's rows a second time."""
