"""RankPlan: the plan from which several processes build their parts of one model. make_runner builds a part."""

from dataclasses import dataclass
from pathlib import Path
from socket import gethostname

from penstock.assembly.model import Weights, make_model, read_scales
from penstock.config import EngineConfig
from penstock.errors import ModelLoadError
from penstock.interface.step import CacheGroup
from penstock.kernels.arena import LOGITS_ROWS
from penstock.kernels.metadata import KVScales
from penstock.kernels.ops import Ops
from penstock.kernels.tensors import as_array
from penstock.layers.split import Split
from penstock.layers.stage import Stage
from penstock.layers.wires import Ranks
from penstock.runner.following import FollowingRunner
from penstock.runner.model_runner import ModelRunner
from penstock.runner.structured import Forms
from penstock.spec.model_config import ModelConfig
from penstock.spec.shares import IN_A_LAYER, Degrees, Share
from penstock.weights.safetensors import fingerprint
from penstock.weights.sources import read_parameters


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What every rank builds its part from: a resolved config, the whole model's config, its weights, the cache groups.

    Attributes:
        degrees: how the ranks split the layers; with several stages, how the ranks of each stage do.
        fingerprint: the fingerprint of the weights that every rank must find; None if all ranks have the same files.
    """

    config: EngineConfig
    model_config: ModelConfig
    weights: Weights
    groups: tuple[CacheGroup, ...]
    degrees: Degrees
    fingerprint: str | None = None

    @property
    def largest_meeting(self) -> int:
        """The most bytes that a rank passes to the others at once."""
        model, rows = self.model_config, max(self.config.scheduler.max_num_batched_tokens or 1, LOGITS_ROWS)
        branches = max(1, model.num_experts_per_tok)
        columns = max(model.hidden_size * branches, -(-model.vocab_size // self.degrees.vocab) + 1)
        if self.degrees.forms is not None:  # with a sharding map, inputs and results of products are gathered, too
            products = (item for item in read_parameters(model).values() if IN_A_LAYER.search(item.name))
            columns = max(columns, *(max(item.shape) for item in products))
        return 4 * max(rows * columns, model.num_experts * model.hidden_size)


def make_runner(
    plan: RankPlan, ops: Ops, rank: int, ranks: Ranks | None, forms: Forms | None = None, stage: Stage | None = None
) -> ModelRunner:
    """Load a rank's part of the model, or of a stage of it, and allocate its part of the cache.

    ranks: how it exchanges arrays with the other ranks; None: the layers are not split over ranks.

    Raises:
        ModelLoadError, InvalidRequestError: the part cannot be loaded.
    """
    if (
        plan.fingerprint is not None
        and isinstance(plan.weights, Path)
        and fingerprint(plan.weights) != plan.fingerprint
    ):
        raise ModelLoadError(
            f"{plan.weights} on {gethostname()} differs from the engine's; give all machines the same files"
        )
    config, whole, share = plan.config, plan.model_config, Share(rank, plan.degrees)
    model = make_model(config, whole, plan.weights, ops, None if ranks is None else Split(share, ranks), stage)
    scales = read_scales(config, whole)
    own_scales = None if scales is None else [_own_scales(item, share, whole) for item in scales]
    kind = ModelRunner if rank == 0 else FollowingRunner
    return kind(model, ops, plan.groups, config, share.config(whole), own_scales, forms, stage)


def _own_scales(scales: KVScales, share: Share, whole: ModelConfig) -> KVScales:
    """Return the scales of the key/value heads that a rank has."""
    first, last = share.attention.bounds(whole.num_key_value_heads)
    parts = (scales.key_scales, scales.key_offsets, scales.value_scales, scales.value_offsets)
    return KVScales(*(as_array(item)[first:last].copy() for item in parts))
