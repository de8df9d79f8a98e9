"""Traffic: how many bytes a rank receives from other ranks in a step, computed from the model's split. No torch."""

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.ranks.sharding import EXPERT, IN_A_LAYER, Cut, Share, is_beginning, is_looked_up
from penstock.spec.model_config import ModelConfig

FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a rank receives for each token that a step computes, and for each row of logits."""

    per_token: int = 0
    per_logits: int = 0

    def of(self, num_tokens: int, num_logits: int) -> int:
        """Return the bytes for `num_tokens` tokens and `num_logits` rows of logits."""
        return num_tokens * self.per_token + num_logits * self.per_logits

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.per_token + other.per_token, self.per_logits + other.per_logits)


def predict(cuts: Iterable[Cut], share: Share, config: ModelConfig, element: int) -> Traffic:
    """Return what a rank with these cuts receives. element: bytes of an activation that a product multiplies."""
    per_token = per_logits = 0
    mixtures: set[str] = set()  # modules whose experts the ranks share
    for cut in cuts:
        if EXPERT.search(cut.own.name):
            mixtures.add(EXPERT.split(cut.own.name)[0])
        elif len(cut.own.shape) < 2:
            continue
        elif is_looked_up(cut.whole):
            per_token += FLOAT32_BYTES * _of_table(cut)
        elif not IN_A_LAYER.search(cut.own.name):  # the LM head
            per_logits += FLOAT32_BYTES * (cut.whole.shape[0] - cut.own.shape[0])
        else:
            per_token += _of_product(cut, element, share.rank)
    results = config.num_experts_per_tok * config.hidden_size
    per_token += len(mixtures) * (share.degrees.mixture - 1) * results * FLOAT32_BYTES
    return Traffic(per_token, per_logits)


def handed_on(num_stages: int, config: ModelConfig) -> Traffic:
    """Return what the stages of a pipeline receive: the residual stream and the branch not yet added to it. (OLMo 2 has
    no such branch, so its stages receive half of that.)"""
    return Traffic((num_stages - 1) * 2 * config.hidden_size * FLOAT32_BYTES)


def _of_table(cut: Cut) -> int:
    if not cut.ranges:
        return 0
    columns = cut.whole.shape[1]
    return (cut.part.degree - 1) * columns if cut.axis == 0 else columns - cut.own.shape[1]


def _of_product(cut: Cut, element: int, rank: int) -> int:
    """Return the bytes received for a product's input and result, per token."""
    received = 0
    if cut.wiring.gathers_input:
        received += element * _others(cut.wiring.gathers_input, rank % (len(cut.wiring.gathers_input) - 1))
    if cut.is_summed:
        received += FLOAT32_BYTES * (cut.part.degree - 1) * cut.own.shape[0]
    if cut.wiring.gathers_result:
        is_activated = is_beginning(cut.whole) and cut.whole.unit is None
        received += (element if is_activated else FLOAT32_BYTES) * _others(cut.wiring.gathers_result, cut.part.index)
    return received


def _others(borders: tuple[int, ...], own: int) -> int:
    """Return how many columns the other ranks have."""
    return borders[-1] - (borders[own + 1] - borders[own])
