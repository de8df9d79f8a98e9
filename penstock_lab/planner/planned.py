"""A model as the planner sees it: its config values and sizes, from config.json and the headers of the weights."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import cast

from penstock import EngineConfig, InvalidRequestError, NotSupportedError
from penstock.assembly import model_sizes, why_no_gpu
from penstock.assembly.memory import ModelSizes
from penstock.assembly.streaming import as_served
from penstock.config import DEGREES, TRITON
from penstock.errors import fail, unsupported
from penstock.interface.plugins import import_files
from penstock.kernels.backends import load_ops
from penstock.kernels.ops import Ops
from penstock.kernels.scheme import Scheme
from penstock.kernels.triton.device import leaves_of
from penstock.kernels.triton.sizes import CountingOps
from penstock.layers.weights import HeadLayout
from penstock.models.config_json import load_model_config
from penstock.models.registry import FallbackVersion, find_model
from penstock.ranks.build import RankPlace, check_codes
from penstock.ranks.layers import Split
from penstock.ranks.links import NoLinks
from penstock.ranks.sharding import Share, cut_all, heads_are_together
from penstock.ranks.stage import Stage
from penstock.spec.model_config import ModelConfig
from penstock.spec.param_table import Parameter
from penstock.weights import packed
from penstock.weights.hub import resolve_model
from penstock.weights.loader import ANYWHERE, Place, Stored, dtype_for, make_slots, open_stored
from penstock.weights.sources import read_parameters
from penstock_lab.planner.machines import Hardware
from penstock_lab.planner.placement import operation_of

# (name, shape, leaf ends) of each parameter of a rank's part; () for a whole model
Shapes = tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]


@dataclass(frozen=True)
class PlannedModel:
    """The config values of a model, an engine config that is not yet resolved, and how the weights are coded.

    Attributes:
        gpu: the GPU for which it is planned; "" for the native kernels.
    """

    config: EngineConfig
    model: ModelConfig
    stored: Stored = field(default_factory=Stored)
    gpu: str = ""

    @classmethod
    def read(cls, config: EngineConfig, hardware: Hardware | None = None) -> "PlannedModel":
        """Read the config.json of a config's model and, if it has weights, their headers.

        hardware: the devices for which it is planned; None: this machine's processor.

        Raises:
            ModelLoadError: there is no such model, or it cannot be served.
            InvalidRequestError: the model computes in torch, which allocates its own memory, or cannot be served on
                the GPU.
        """
        asked = {config.numerics.kernels, config.numerics.device} - {"auto"}
        gpu = hardware.name if hardware is not None and hardware.kernels == TRITON and "cpu" not in asked else ""
        if not gpu and asked - {"cpu", "reference"}:
            raise fail("device", config.numerics.device, "cpu or auto, unless --hardware names the GPU")
        _refuse_unplanned(config)
        import_files(config.imports)
        directory = resolve_model(config.model, weights=False)
        numerics = config.numerics
        model = load_model_config(directory, numerics.hf_overrides, numerics.rope_scaling)
        model = as_served(model, numerics)
        numerics, _ = packed.fit(config.numerics, directory)
        stored = open_stored(directory, model, numerics.load_format, is_complete=False)
        if gpu and (why := why_no_gpu(config, model, directory)):
            raise NotSupportedError(f"hardware: {gpu} cannot be used: {why}; --kernels cpu plans without it")
        numerics, stored = (replace(numerics, kernels=TRITON), stored.decoded()) if gpu else (numerics, stored)
        numerics, _ = numerics.with_codings(stored.codings)
        planned = cls(replace(config, numerics=numerics), model, stored, gpu)
        check_codes(planned.resolved(), model, stored)
        kernels = planned.resolved().numerics.kernels
        by_modules = isinstance(find_model(model.architecture, model.model_impl), FallbackVersion)
        # The backend may import torch, so it comes last.
        if not gpu and (kernels != "cpu" or not (by_modules or planned.ops.is_planned)):
            raise fail("kernels", kernels, "cpu: only models of the native kernels can be planned")
        return planned

    def layer_shapes(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        return layer_shapes(self.parameters)

    def resolved(self, num_ranks: int = 0) -> EngineConfig:
        """Resolve the config. num_ranks: the tensor_parallel_size; 0 keeps the config's."""
        config = self.config
        if num_ranks:
            config = replace(config, parallel=replace(config.parallel, tensor_parallel_size=num_ranks))
        why = "plans count the memory of the native kernels"
        return config.resolve(self.model, why_no_gpu=why, planned_on=self.gpu)

    @cached_property
    def formats(self) -> str:
        """The codings of a quantised checkpoint's weights; empty for others."""
        return ", ".join(coding.name for coding in self.stored.codings)

    @cached_property
    def possible(self) -> tuple[int, ...]:
        """The numbers of parts into which the weights can be cut."""
        return tuple(degree for degree in DEGREES if not self.formats or self._can_be_cut(degree))

    def _can_be_cut(self, degree: int) -> bool:
        try:
            check_codes(self.resolved(degree), self.model, self.stored)
        except InvalidRequestError:
            return False
        return True

    @cached_property
    def ops(self) -> Ops:
        """The backend whose layers are counted."""
        numerics = self.resolved().numerics
        return load_ops(numerics.kernels, dtype_for(self.model, numerics.kernels, numerics.dtype))

    def _ops_of(self, share: Share | None) -> Ops:
        """Choose the backend whose layers are counted for a rank."""
        if not self.gpu:
            return self.ops
        ranks = 1 if share is None else share.degrees.size
        return cast(Ops, CountingOps(self.resolved().numerics.dtype, leaves_of(ranks)))

    @property
    def head(self) -> HeadLayout:
        """The cut and the padding of the LM head."""
        return HeadLayout(self.config.parallel.lm_head_pieces, self.config.parallel.pad_vocab_multiple)

    @property
    def together(self) -> bool:
        """True if queries or keys are normalised over all heads of a token."""
        return heads_are_together(self.parameters, self.model)

    @property
    def num_elements(self) -> int:
        """The number of weights; tied weights count once."""
        return num_elements(self.parameters.values())

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        return read_parameters(self.model)

    @cached_property
    def _found(self) -> dict[tuple[Scheme | None, Shapes, range | None, bool], ModelSizes]:
        return {}

    @cached_property
    def _parts(self) -> dict[Share, tuple[Place, Shapes]]:
        return {}

    def sizes(self, scheme: Scheme | None, share: Share | None, layers: range | None = None) -> ModelSizes:
        """Count the bytes of the model, or of a rank's part of it, or of a stage with some layers. Parts with equal
        shapes are counted once."""
        place, shapes = (ANYWHERE, ()) if share is None or share.degrees.size == 1 else self._part(share)
        pads = share is not None and share.rank % share.degrees.vocab == share.degrees.vocab - 1  # the head
        key = scheme, shapes, layers, pads and not self.head.is_plain
        if key not in self._found:
            if layers is not None:
                split = place.split if isinstance(place, RankPlace) else None
                place = RankPlace(split=split, stage=Stage(layers, self.model.num_hidden_layers))
            ops, slices = self._ops_of(share), self.config.numerics.activation_slices
            options = {"scheme": scheme, "slices": slices, "lora": make_slots(self.config, ops)}
            found = model_sizes(self.model, ops, self.head, self.stored, place, **options)
            self._found[key] = found
        return self._found[key]

    def _part(self, share: Share) -> tuple[Place, Shapes]:
        if share not in self._parts:
            cuts = cut_all(self.parameters, share, self.model)
            shapes = tuple((name, cut.own.shape, cut.own.leaf_ends) for name, cut in cuts.items())
            self._parts[share] = RankPlace(split=Split(share, NoLinks(), cuts)), shapes
        return self._parts[share]


def layer_shapes(parameters: Mapping[str, Parameter]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Group the shapes of the first layer's parameters by the operation that they belong to, as "mlp.up_proj". "host":
    what belongs to none."""
    found: dict[str, list[tuple[int, ...]]] = {"host": []}
    for name, parameter in parameters.items():
        operation = operation_of(name) or "layers.0.host"
        if operation.startswith("layers.0."):
            found.setdefault(operation.removeprefix("layers.0."), []).append(parameter.shape)
    return {name: tuple(shapes) for name, shapes in found.items()}


def _refuse_unplanned(config: EngineConfig) -> None:
    """Refuse options that use memory or time for which there is no plan."""
    asked = {
        "speculative_config": config.speculation.speculative_config is not None,
        "sharding_config": config.parallel.sharding_config is not None,
        "load_format": config.numerics.load_format == "mock",
        "kv_offload_memory_bytes": config.cache.offload_option is not None,
    }
    for name, given in asked.items():
        if given:
            raise unsupported(name, "a plan does not count it; leave it out")


def num_elements(parameters: Iterable[Parameter]) -> int:
    """Count the stored elements; tied parameters count once."""
    return sum(item.num_elements for item in parameters if item.tied_to is None)
