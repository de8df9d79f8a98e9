"""Find what a model of Transformers is made of: its layers, its parameters, and the numbers of ModelConfig.

This is done by building its class on the meta device, where tensors have shapes but no values, and by running it there
once, so that each of its attention layers shows what it passes on.

A class is refused if the engine could not compute it, or not with the same bits in every arrangement:
    - its attention does not go through Transformers' attention interface, or sees other keys than a causal layer with
      an optional window does;
    - it keeps other state than keys and values;
    - it multiplies by a matrix elsewhere than in nn.Linear, because the order of torch's sums depends on the batch;
    - its rotary embedding depends on the length of the longest sequence in the batch.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import initialization
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from penstock.errors import ModelLoadError
from penstock.layers.swap import ProductWeight
from penstock.models.transformers import ADOPTED
from penstock.models.transformers.probe import PROBE, Probe, Site, find_blocks, refused, short
from penstock.spec.config_reader import MAX_SIZE, ConfigReader
from penstock.spec.model_config import LayerHeads, ModelConfig
from penstock.spec.param_table import Layout, Parameter, ParamTable

BY_LENGTH = ("dynamic", "longrope")  # rotary types whose frequencies depend on the length of the batch
# Keys of older files, which Transformers translates.
OLDER_KEYS = ("rope_theta", "rope_scaling", "partial_rotary_factor", "torch_dtype", "quantization_config")
FEWEST_ROWS = 64  # of a product that ranks split
LEAVES = 8  # pieces in which a product is summed that ranks split along its depth

# Classes that pass every check here, but whose own modules break what the engine promises: the class -> why.
BROKEN: dict[str, str] = {
    "AXK2ForCausalLM": "its attention chooses keys by an index that it keeps beside them",
    "CamembertForCausalLM": "its positions are counted from the id of the padding token on",
    "Data2VecTextForCausalLM": "its positions are counted from the id of the padding token on",
    "DeepseekV32ForCausalLM": "its attention chooses keys by an index that it keeps beside them",
    "Dots3NoteForCausalLM": "its attention chooses keys by an index that it keeps beside them",
    "GlmMoeDsaForCausalLM": "its attention chooses keys by an index that it keeps beside them",
    "Lfm2ForCausalLM": "its convolutions keep other state than keys and values",
    "Lfm2MoeForCausalLM": "its convolutions keep other state than keys and values",
    "MiniMaxForCausalLM": "its linear attention keeps other state than keys and values",
    "MllamaForCausalLM": "its layers read pictures beside the text",
    "XmodForCausalLM": "each text needs a language, which is not among its tokens",
}

# Keys of published files that Transformers does not read: the class -> the values that mean what it computes.
PUBLISHED: dict[str, dict[str, Any]] = {
    "DeepseekV3ForCausalLM": {"ep_size": 1, "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
}


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts of one layer, in the layout of Transformers' experts interface.

    Attributes:
        module: its full name.
        intermediate: the neurons of each expert.
        activation: as kernels/ops.py calls it.
        is_transposed: the weights are [K, N].
    """

    module: str
    num_experts: int
    hidden: int
    intermediate: int
    activation: str
    is_transposed: bool


@dataclass(frozen=True, slots=True)
class Derived:
    """Describe what a class makes of one config.json.

    Attributes:
        sites: its attention layers, in the order in which they compute.
        head, embedding: the full names of the language-model head and of the token embedding.
        table: its parameters, under Transformers' own names.
        hidden_size: the size of the hidden states that the head reads.
        rows, head_rows: the decoder and the head compute a multiple of so many rows (BY_VECTORS).
        products: the parameters with which a module computes a product itself, as routers do.
        float32: the parameters that keep float32 whatever the model's type is.
    """

    sites: tuple[Site, ...]
    head: str
    embedding: str
    table: "DerivedTable"
    hidden_size: int
    rows: int
    head_rows: int
    mixtures: tuple[Mixture, ...]
    products: tuple[str, ...]
    float32: frozenset[str]


@dataclass(frozen=True, slots=True)
class DerivedTable(ParamTable):
    """A table whose parameters are known already: they belong to one config.json."""

    known: tuple[Parameter, ...] = ()

    def parameters(self, config: ModelConfig) -> dict[str, Parameter]:
        return {item.name: item for item in self.known}


def read_config(read: ConfigReader) -> dict[str, Any]:
    """Return the fields of ModelConfig for an architecture that only Transformers has."""
    values = read.everything()
    name = values["architectures"][0]
    model_class = find_class(name)
    kind = model_class.config_class
    known = {*(item.name for item in fields(kind)), *kind.attribute_map, *kind().to_dict()}
    read.forget({*values} - {*known, *OLDER_KEYS, "model_type", "architectures", "auto_map"})
    read.neutral(PUBLISHED.get(name, {}))
    config, found = _config(name, values), derive(name, values)
    site, context = found.sites[0], getattr(config, "max_position_embeddings", None)
    if type(context) is not int or context < 1:
        raise read.fail("max_position_embeddings", "a positive integer")
    rows = {item.name: item.shape for item in found.table.known}
    heads = tuple(LayerHeads(item.num_heads, item.num_kv_heads, item.head_dim) for item in found.sites)
    return {
        "vocab_size": rows[f"{found.head}.weight"][0],
        "hidden_size": found.hidden_size,
        "intermediate_size": max(shape[0] for name, shape in rows.items() if len(shape) == 2),
        "num_hidden_layers": len(found.sites),
        "num_nextn_predict_layers": read.integer("num_nextn_predict_layers", 0, MAX_SIZE, 0),
        "num_attention_heads": site.num_heads,
        "num_key_value_heads": site.num_kv_heads,
        "head_dim": site.head_dim,
        "layer_heads": heads if len(set(heads)) > 1 else (),
        "hidden_act": "silu",  # its modules know their own
        "norm_eps": 0.0,
        "rope": None,
        "max_position_embeddings": context,
        "tie_word_embeddings": any(item.tied_to is not None for item in found.table.known),
        "layer_windows": tuple(item.window for item in found.sites),
        **_mixture_sizes(config, found.mixtures),
    }


def _mixture_sizes(config: Any, mixtures: tuple[Mixture, ...]) -> dict[str, int]:
    if not mixtures:
        return {}
    names = ("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token", "top_k_experts")
    chosen = [value for name in names if type(value := getattr(config, name, None)) is int]
    return {
        "num_experts": mixtures[0].num_experts,
        "num_experts_per_tok": chosen[0] if chosen else mixtures[0].num_experts,  # for the size of buffers
        "moe_intermediate_size": mixtures[0].intermediate,
    }


def find_class(name: str) -> Any:
    """Find a decoder of Transformers, or a program's own that derives from one, by its name.

    Raises:
        ModelLoadError: there is no such class, or it cannot be run by the engine.
    """
    found: Any = ADOPTED.get(name)
    names = [name] if found is None else [base.__name__ for base in found.__mro__]
    listed = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    decoders = {*chain(*((known,) if isinstance(known, str) else known for known in listed))}
    if decoders.isdisjoint(names):
        raise refused(name, "it is not among the decoders of Transformers (AutoModelForCausalLM)")
    found = found or getattr(transformers, name)
    if found._is_stateful:
        raise refused(name, "it keeps other state than keys and values")
    if not found._supports_attention_backend:
        raise refused(name, "its attention does not go through Transformers' attention interface")
    if (broken := next((base for base in names if base in BROKEN), None)) is not None:
        raise refused(name, BROKEN[broken])
    return found


def make_hf_config(name: str, values: Mapping[str, Any], attention: str) -> Any:
    """Make Transformers' config from the contents of config.json."""
    config = _config(name, values)
    config._attn_implementation = attention
    return config


def _config(name: str, values: Mapping[str, Any]) -> Any:
    given = {key: value for key, value in values.items() if key not in ("quantization_config", "auto_map")}
    try:
        return find_class(name).config_class.from_dict(given)
    except Exception as error:  # whatever its checks raise
        raise ModelLoadError(f"config.json: Transformers refuses it: {error}") from error


def derive(name: str, values: Mapping[str, Any]) -> Derived:
    """Find what the class `name` makes of the contents of a config.json.

    Raises:
        ModelLoadError: Transformers refuses the config, or the engine cannot compute the model.
    """
    return _derive(name, json.dumps(values, sort_keys=True))


@lru_cache(maxsize=4)  # it is asked for by the reader of config.json, the loader and the planner
def _derive(name: str, text: str) -> Derived:
    model, head, embedding = _without_values(name, text)
    if head is None or embedding is None:
        raise refused(name, "it has no single embedding and head")
    mixtures, products = _replace_products(name, model)
    probe = Probe(name, model)
    hidden_size, rows, head_rows = probe.run()
    wanted = model.config.num_hidden_layers
    if len(probe.sites) != wanted:
        raise refused(name, f"{len(probe.sites)} attention layers computed, and it has {wanted} layers")
    splits = _Splits(name, model, probe.sites, embedding, head).found()
    table = _table(name, model, head, splits, mixtures, products)
    float32 = frozenset(item.name for item in table.known if _keeps_float32(model, item.name))
    return Derived(
        tuple(probe.sites), head, embedding, table, hidden_size, rows, head_rows, mixtures, tuple(products), float32
    )


def _without_values(name: str, text: str) -> tuple[Any, str | None, str | None]:
    """Build the class on the meta device; return it with the names of its head and its embedding."""
    config = make_hf_config(name, json.loads(text), PROBE)
    try:
        with torch.device("meta"), initialization.no_init_weights():
            model = find_class(name)(config).eval()
        head, embedding = (_name_of(model, get()) for get in (model.get_output_embeddings, model.get_input_embeddings))
    except ModelLoadError:
        raise
    except Exception as error:
        raise refused(name, f"its modules cannot be built: {short(error)}") from error
    _check_rotary(name, model)
    return model, head, embedding


def blocks_of(name: str, values: Mapping[str, Any]) -> dict[str, int]:
    """Find the blocks of a model that stages of a pipeline divide, as find_blocks does."""
    model, _, _ = _without_values(name, json.dumps(values, sort_keys=True))
    _replace_products(name, model)
    return find_blocks(name, model, derive(name, values).sites)


def _keeps_float32(model: Any, name: str) -> bool:
    kept = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    return any(f".{word}." in f".{name}." for word in kept)


def general(name: str) -> str:
    """Replace the numbers in a module's name by *, as Transformers' plans do."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def _name_of(model: nn.Module, wanted: nn.Module | None) -> str | None:
    return next((name for name, module in model.named_modules() if module is wanted), None)


def _check_rotary(name: str, model: nn.Module) -> None:
    for module in model.modules():
        found = getattr(module, "rope_type", None)
        kinds = found.values() if isinstance(found, Mapping) else [found]
        for kind in kinds:
            if isinstance(kind, str) and any(word in kind for word in BY_LENGTH):
                raise refused(name, f"rope_type = {kind}: its frequencies depend on the longest text of a batch")


def _clamped_silu(gate: Tensor) -> Tensor:
    gate = gate.clamp(max=7.0)
    return gate * torch.sigmoid(1.702 * gate)


# The activations of Ops.gated_linear that experts have, and what is multiplied with.
GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda gate, up: nn.functional.silu(gate) * up,
    "gelu": lambda gate, up: nn.functional.gelu(gate) * up,
    "gelu_tanh": lambda gate, up: nn.functional.gelu(gate, approximate="tanh") * up,
    "relu2": lambda gate, up: nn.functional.relu(gate).square() * up,
    "clamped_silu": lambda gate, up: _clamped_silu(gate) * (up.clamp(-7.0, 7.0) + 1),
}


def _replace_products(name: str, model: Any) -> tuple[tuple[Mixture, ...], dict[str, Tensor]]:
    """Replace what multiplies by a matrix elsewhere than in nn.Linear by what has the shape of the result: experts, and
    weights that a module passes to torch.nn.functional.linear. Return the mixtures, and those weights by their names.

    Raises:
        ModelLoadError: there are other matrices, or experts of another kind.
    """
    mixtures: list[Mixture] = []
    products: dict[str, Tensor] = {}
    for prefix, owner in list(model.named_modules()):
        if hasattr(owner, "_is_expert_parallel"):
            mixtures.append(_mixture(name, prefix, owner))
            _put(model, prefix, _NoExperts())
        elif type(owner) is not nn.Linear and not isinstance(owner, nn.Embedding):
            matrices = {
                key: value for key, value in owner._parameters.items() if value is not None and is_matrix(value)
            }
            for key, value in matrices.items():
                full = f"{prefix}.{key}"
                if value.ndim != 2:
                    text = f"{type(owner).__name__} computes with {full} itself"
                    raise refused(name, f"{text}, and sums of torch's depend on the batch")
                products[full] = owner._parameters.pop(key)
                owner.__dict__[key] = ProductWeight(_Widened(value.shape[0]), tuple(value.shape), value.dtype)
    sizes = {(general(item.module), item.num_experts, item.hidden, item.intermediate) for item in mixtures}
    if len(sizes) > 1:
        raise refused(name, "its layers have different experts")
    return tuple(mixtures), products


def is_matrix(value: Tensor) -> bool:
    """Tell whether a parameter has several axes with more than one element."""
    return sum(size > 1 for size in value.shape) > 1


def _mixture(name: str, prefix: str, owner: Any) -> Mixture:
    kind, flags = type(owner).__name__, (owner.has_gate, owner.is_concatenated, not owner.has_bias)
    plain = all(flags) and not owner.has_post_expert_norm and {*owner._parameters} == {"gate_up_proj", "down_proj"}
    activation = _activation(owner) if plain else None
    if activation is None:
        raise refused(name, f"{kind} computes its experts otherwise than down(activation(gate) * up)")
    count, *sizes = owner.gate_up_proj.shape
    wide, hidden = reversed(sizes) if owner.is_transposed else sizes
    return Mixture(prefix, count, hidden, wide // 2, activation, owner.is_transposed)


def _activation(owner: Any) -> str | None:
    """Find the activation that experts have by what it computes; None if it is none of GATES."""
    gate, up = torch.randn((2, 64, 64), generator=torch.Generator().manual_seed(0)) * 5
    found = owner._apply_gate(torch.cat([gate, up], dim=-1))
    same = (name for name, expected in GATES.items() if torch.allclose(found, expected(gate, up), atol=1e-4))
    return next(same, None)


class _NoExperts(nn.Module):
    """Stands for the experts of a layer, with the shape of their result."""

    def forward(self, x: Tensor, *choice: Tensor) -> Tensor:
        return torch.empty_like(x)


@dataclass(frozen=True, slots=True)
class _Widened:
    """Stands for a product, with the shape of its result."""

    columns: int

    def __call__(self, x: Tensor) -> Tensor:
        return x.new_empty((*x.shape[:-1], self.columns))


transformers.logging.set_verbosity_error()  # its warnings are about its own defaults


class _Splits:
    """Finds how ranks split the products of a model, as fields of Parameter by the product's name.

    Where Transformers' own plan of tensor parallelism has the columns of a branch's first products ("colwise") and the
    depth of its last one ("rowwise"), the features in between are split, if the class runs with fewer of them. Of every
    other product the ranks split the rows, and gather its result.
    """

    def __init__(self, name: str, model: Any, sites: list[Site], embedding: str, head: str) -> None:
        self._name, self._model, self._sites = name, model, sites
        self._linears = {key: item for key, item in model.named_modules() if type(item) is nn.Linear}
        self._vocabulary = embedding, head
        base = model.base_model
        prefix = "" if base is model else f"{model.base_model_prefix}."
        plan = getattr(base.config, "base_model_tp_plan", None) or {}
        self._plan = {prefix + key: value for key, value in plan.items()}

    def found(self) -> dict[str, dict[str, Any]]:
        rows: dict[str, Any] = {"shard": 0, "is_gathered": True}
        found = {name: rows for name, item in self._linears.items() if item.out_features >= FEWEST_ROWS}
        found |= {name: {"shard": 0} for name in self._vocabulary}
        branches = self._branches()
        return found | branches if branches and self._runs(branches) else found

    def _branches(self) -> dict[str, dict[str, Any]]:
        """Find the branches of which the plan splits the features; those of attention only if it is so everywhere."""
        found: dict[str, dict[str, Any]] = {}
        heads: dict[str, dict[str, Any]] = {}
        sites = {item.module: item for item in self._sites}
        parents = dict.fromkeys(name.rpartition(".")[0] for name in self._linears)
        for parent in parents:
            below = {name: item for name, item in self._linears.items() if name.startswith(f"{parent}.")}
            kinds = {name: self._plan.get(general(name)) for name in below}
            columns = [name for name, kind in kinds.items() if kind == "colwise"]
            last = [name for name, kind in kinds.items() if kind == "rowwise"]
            if len(last) != 1 or len(columns) != len(below) - 1:
                continue
            (end,) = last
            widths, depth = sorted(below[name].out_features for name in columns), below[end].in_features
            if parent in sites:
                site = sites[parent]
                group = site.num_heads // site.num_kv_heads
                keys, values = site.num_kv_heads * site.head_dim, site.num_kv_heads * site.value_dim
                if widths == sorted([keys * group, keys, values]) and depth == values * group:
                    unit = {"unit": "kv_group", "num_units": site.num_kv_heads, "unit_size": group * site.value_dim}
                    heads |= {name: {"shard": 0, **unit} for name in columns}
                    heads[end] = {"shard": 1, "leaves": LEAVES, **unit}
            elif set(widths) == {depth} and depth >= FEWEST_ROWS and ".experts." not in end:
                found |= {name: {"shard": 0} for name in columns}
                found[end] = {"shard": 1, "leaves": LEAVES}
        num_heads = {(item.num_heads, item.num_kv_heads, item.head_dim, item.value_dim) for item in self._sites}
        return found | heads if len(heads) == 4 * len(self._sites) and len(num_heads) == 1 else found

    def _runs(self, branches: Mapping[str, Mapping[str, Any]]) -> bool:
        """Tell whether the class runs with a part of the features: half of the neurons, one key/value head."""
        whole = {}
        for name, item in branches.items():
            layer = whole[name] = self._linears[name]
            parts = item.get("num_units", 2)
            rows, depth = layer.out_features, layer.in_features
            rows, depth = (rows // parts, depth) if item["shard"] == 0 else (rows, depth // parts)
            _put(self._model, name, nn.Linear(depth, rows, bias=layer.bias is not None, device="meta"))
        probe = Probe(self._name, self._model)
        try:
            probe.run()
        except ModelLoadError:
            return False
        finally:
            for name, layer in whole.items():
                _put(self._model, name, layer)
        split = any("unit" in item for item in branches.values())
        counts = {(item.num_heads, item.num_kv_heads) for item in self._sites}
        expected = {(heads // groups, 1) for heads, groups in counts} if split else counts
        return {(item.num_heads, item.num_kv_heads) for item in probe.sites} == expected


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def _table(
    name: str,
    model: Any,
    head: str,
    splits: Mapping[str, Mapping[str, Any]],
    mixtures: tuple[Mixture, ...],
    products: Mapping[str, Tensor],
) -> DerivedTable:
    """Make the table of a model's parameters."""
    tied = model.all_tied_weights_keys
    modules, found = dict(model.named_modules()), []
    named = [*model.named_parameters(remove_duplicate=False), *saved_buffers(model)]
    for full, value in named:
        owner = modules[full.rpartition(".")[0]]
        quant: bool | str = type(owner) is nn.Linear and value.ndim == 2
        if quant and full == f"{head}.weight":
            quant = "int8"
        shape = tuple(value.shape)
        if not shape:
            raise refused(name, f"{full} is a number without an axis")
        split = {"shard": None, "unit": None, "leaves": 1} | dict(splits.get(full.rpartition(".")[0], {}))
        if value.ndim == 1 and split["shard"] == 1:  # the bias of a product that is summed
            split |= {"shard": None, "unit": None, "leaves": 1}
        layouts = _stored(name, model, full, value, [shape])
        found.append(
            Parameter(
                name=full,
                shape=shape,
                layouts=layouts,
                quant=quant,
                tied_to=tied.get(full),
                **split,
            )
        )
    for full, value in products.items():
        shape, own = tuple(value.shape), f"{full}_product.weight"
        layouts = (*_stored(name, model, full, value, [shape]), Layout({own: shape}, pieces=shape[:1]))
        found.append(Parameter(own, shape, layouts, None, None, False, 1, None))
    found += _experts(name, model, mixtures)
    ignored = {re.sub(r"\.\d+\.", ".*.", full) for full, value in model.named_buffers()} - {full for full, _ in named}
    return DerivedTable((), tuple(sorted(ignored)), (f"{model.base_model_prefix}.",), known=tuple(found))


def _stored(name: str, model: Any, full: str, value: Tensor, shapes: list[tuple[int, ...]]) -> tuple[Layout, ...]:
    """List how checkpoints hold a parameter: as save_pretrained writes it, and under its own name."""
    stored = revert_weight_conversion(model, {full: value})
    if [tuple(item.shape) for item in stored.values()] != shapes:
        raise refused(name, f"its checkpoints hold {full} in another form")
    return tuple(Layout({key: shapes[0]}, pieces=shapes[0][:1]) for key in dict.fromkeys([*stored, full]))


def _experts(name: str, model: Any, mixtures: tuple[Mixture, ...]) -> list[Parameter]:
    """List the parameters of the experts of all layers. Checkpoints hold them one by one, or in two tensors a layer."""
    found = []
    for key in ("gate_up_proj", "down_proj") if mixtures else ():
        first = mixtures[0]
        count, wide, hidden = first.num_experts, first.intermediate, first.hidden
        shape, pieces = ((2 * wide, hidden), (wide, wide)) if key == "gate_up_proj" else ((hidden, wide), (hidden,))
        split: dict[str, Any] = {"shard": 0, "leaves": 1} if key == "gate_up_proj" else {"shard": 1, "leaves": LEAVES}
        tensor = count, *(shape[::-1] if first.is_transposed else shape)
        written = revert_weight_conversion(model, {f"{first.module}.{key}": torch.empty(tensor, device="meta")})
        shapes = [tuple(item.shape) for item in written.values()]
        one_by_one = [(size, shape[1]) for size in pieces for _ in range(count)]
        if shapes != [tensor] and (first.is_transposed or shapes != one_by_one):
            raise refused(name, f"its checkpoints hold {first.module}.{key} in another form")
        for mixture in mixtures:
            names = [_of_layer(item, first.module, mixture.module) for item in written]  # the conversion is slow
            own = f"{mixture.module}.{key}"
            for index in range(count):
                stacked = [_stacked(item, tensor, pieces, mixture.is_transposed, index) for item in (names[0], own)]
                if shapes != [tensor]:
                    stacked[0] = Layout(dict.fromkeys(names[index::count], (pieces[0], shape[1])), pieces=pieces)
                full = f"{mixture.module}.experts.{index}.{key}.weight"
                layouts = (*stacked, Layout({full: shape}, pieces=pieces))
                found.append(Parameter(full, shape, layouts, unit=None, quant=True, tied_to=None, **split))
    return found


def _of_layer(name: str, module: str, other: str) -> str:
    """Rename a tensor of the layer that has one module to that of the layer that has the other."""
    for old, new in zip(re.findall(r"\.(\d+)\.", module), re.findall(r"\.(\d+)\.", other), strict=True):
        name = name.replace(f".{old}.", f".{new}.", 1)
    return name


def _stacked(name: str, shape: tuple[int, ...], pieces: tuple[int, ...], transposed: bool, index: int) -> Layout:
    return Layout({name: shape}, pieces=pieces, transposed=transposed, index=index)


def saved_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """List the buffers that a checkpoint holds and that are numbers of the model."""
    saved = [
        f"{name}.{key}" if name else key
        for name, module in model.named_modules()
        for key in module._buffers
        if key not in module._non_persistent_buffers_set
    ]
    return [(name, value) for name, value in model.named_buffers() if name in saved and value.is_floating_point()]
