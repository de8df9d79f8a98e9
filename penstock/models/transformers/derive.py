"""Find what a model of Transformers is made of: its layers, its parameters, and the numbers of ModelConfig.

This is done by building its class on the meta device, where tensors have shapes but no values, and by running it there
once, so that each of its attention layers shows what it passes on.

A class is refused if the engine could not compute it, or not with the same bits in every arrangement:
    - its attention does not go through Transformers' attention interface, or sees other keys than a causal layer with
      an optional window does;
    - it keeps other state than keys and values, or its layers have different heads;
    - it multiplies by a matrix elsewhere than in nn.Linear, because the order of torch's sums depends on the batch;
    - its rotary embedding depends on the length of the longest sequence in the batch.
"""

import copy
import inspect
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import initialization
from transformers.core_model_loading import revert_weight_conversion
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from penstock.errors import ModelLoadError
from penstock.models.registry import unsupported
from penstock.spec.config_reader import ConfigReader
from penstock.spec.model_config import ModelConfig
from penstock.spec.param_table import Layout, Parameter, ParamTable

PROBE, PROBED_TOKENS = "penstock_probe", 8  # the name of the attention that looks and does not compute
BY_LENGTH = ("dynamic", "longrope")  # rotary types whose frequencies depend on the length of the batch
# Keys of older files, which Transformers translates.
OLDER_KEYS = ("rope_theta", "rope_scaling", "partial_rotary_factor", "torch_dtype", "quantization_config")
FARTHEST = 2**17  # positions at which masks are examined
# torch computes these functions with vector instructions, and what is left at the end of a tensor with others, which
# round differently: so no tensor may have such a rest. Its loops take up to VECTOR elements at once.
VECTOR_FUNCTIONS = "celu elu erfc exp2 expm1 gelu glu log_sigmoid_forward mish pow sigmoid silu softplus"
BY_VECTORS = frozenset(VECTOR_FUNCTIONS.split())
EXACT_POWERS = (0.5, 1, 2, 3)  # which are products and roots
VECTOR = 64

# Classes that pass every check here, but whose own modules break what the engine promises: the class -> why.
BROKEN: dict[str, str] = {
    "DeepseekV32ForCausalLM": "its attention chooses keys by an index that it keeps beside them",
    "GlmMoeDsaForCausalLM": "its attention chooses keys by an index that it keeps beside them",
}


@dataclass(frozen=True, slots=True)
class Site:
    """One attention layer.

    Attributes:
        module: its full name.
        num_heads, num_kv_heads, head_dim: of its queries and keys.
        value_dim: the size of its values, which may differ from head_dim.
    """

    module: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    softcap: float | None
    window: int | None


@dataclass(frozen=True, slots=True)
class Derived:
    """Describe what a class makes of one config.json.

    Attributes:
        sites: its attention layers, in the order in which they compute.
        head, embedding: the full names of the language-model head and of the token embedding.
        table: its parameters, under Transformers' own names.
        hidden_size: the size of the hidden states that the head reads.
        rows, head_rows: the decoder and the head compute a multiple of so many rows (BY_VECTORS).
    """

    sites: tuple[Site, ...]
    head: str
    embedding: str
    table: "DerivedTable"
    hidden_size: int
    rows: int
    head_rows: int


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
    config, found = _config(name, values), derive(name, values)
    site, context = found.sites[0], getattr(config, "max_position_embeddings", None)
    if type(context) is not int or context < 1:
        raise read.fail("max_position_embeddings", "a positive integer")
    rows = {item.name: item.shape for item in found.table.known}
    return {
        "vocab_size": rows[f"{found.head}.weight"][0],
        "hidden_size": found.hidden_size,
        "intermediate_size": max(shape[0] for name, shape in rows.items() if len(shape) == 2),
        "num_hidden_layers": len(found.sites),
        "num_attention_heads": site.num_heads,
        "num_key_value_heads": site.num_kv_heads,
        "head_dim": site.head_dim,
        "hidden_act": "silu",  # its modules know their own
        "norm_eps": 0.0,
        "rope": None,
        "max_position_embeddings": context,
        "tie_word_embeddings": any(item.tied_to is not None for item in found.table.known),
        "layer_windows": tuple(item.window for item in found.sites),
    }


def find_class(name: str) -> Any:
    """Find a decoder of Transformers by its name.

    Raises:
        ModelLoadError: Transformers has no such class, or it cannot be run by the engine.
    """
    decoders = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    if not any(name in ((known,) if isinstance(known, str) else known) for known in decoders):
        raise unsupported(name)
    found = getattr(transformers, name)
    if found._is_stateful:
        raise refused(name, "it keeps other state than keys and values")
    if not found._supports_attention_backend:
        raise refused(name, "its attention does not go through Transformers' attention interface")
    if name in BROKEN:
        raise refused(name, BROKEN[name])
    return found


def refused(name: str, why: str) -> ModelLoadError:
    """Make the error for a class that Transformers has and the engine cannot run."""
    return ModelLoadError(f"{name}: the class of Transformers cannot be used (--model-impl transformers): {why}")


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
    config = make_hf_config(name, json.loads(text), PROBE)
    try:
        with torch.device("meta"), initialization.no_init_weights():
            model = find_class(name)(config).eval()
        head, embedding = (_name_of(model, get()) for get in (model.get_output_embeddings, model.get_input_embeddings))
    except ModelLoadError:
        raise
    except Exception as error:
        raise refused(name, f"its modules cannot be built: {_short(error)}") from error
    _check_rotary(name, model)
    if head is None or embedding is None:
        raise refused(name, "it has no single embedding and head")
    table, probe = _table(name, model, head), _Probe(name, model)
    hidden_size, rows, head_rows = probe.run()
    wanted = config.num_hidden_layers
    if len(probe.sites) != wanted:
        raise refused(name, f"{len(probe.sites)} attention layers computed, and it has {wanted} layers")
    if len({(item.num_heads, item.num_kv_heads, item.head_dim) for item in probe.sites}) > 1:
        raise refused(name, "its layers have different heads")
    return Derived(tuple(probe.sites), head, embedding, table, hidden_size, rows, head_rows)


class Hidden(nn.Module):
    """Stands for the decoder when only the head computes: its result is `states` [1, M, hidden]."""

    states: Tensor

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = MoeModelOutputWithPast(last_hidden_state=self.states)
        out.cross_attentions = None
        return out


def split_decoder(model: Any) -> tuple[Any, Any, Hidden]:
    """Return the decoder that the model's forward calls; a model that shares all but the decoder with this one; and
    what stands in the decoder's place.
    """
    called = re.search(rf"self\.({model.base_model_prefix}(\.\w+)*)\(", inspect.getsource(type(model).forward))
    name = model.base_model_prefix if called is None else called[1]
    hidden, head = Hidden(), copy.copy(model)
    *parents, leaf = name.split(".")
    place = head
    for part in parents:
        child = copy.copy(place._modules[part])
        place._modules = {**place._modules, part: child}
        place = child
    place._modules = {**place._modules, leaf: hidden}
    return model.get_submodule(name), head, hidden


class _Widths(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds how many rows make every result of BY_VECTORS a multiple of VECTOR elements."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows = 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        is_exact = name == "pow" and len(args) > 1 and args[1] in EXACT_POWERS
        if name in BY_VECTORS and not is_exact:
            width = result.numel() // PROBED_TOKENS if result.numel() % PROBED_TOKENS == 0 else 1
            self.rows = max(self.rows, VECTOR // math.gcd(VECTOR, width))
        return result


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:300]


def _name_of(model: nn.Module, wanted: nn.Module | None) -> str | None:
    return next((name for name, module in model.named_modules() if module is wanted), None)


def _check_rotary(name: str, model: nn.Module) -> None:
    for module in model.modules():
        found = getattr(module, "rope_type", None)
        kinds = found.values() if isinstance(found, Mapping) else [found]
        for kind in kinds:
            if isinstance(kind, str) and any(word in kind for word in BY_LENGTH):
                raise refused(name, f"rope_type = {kind}: its frequencies depend on the longest text of a batch")


class _Probe:
    """Runs a model of the meta device, and notes what its attention layers pass on."""

    def __init__(self, name: str, model: Any) -> None:
        self._name, self._model = name, model
        self._windows: dict[int, int | None] = {}  # storage of a mask -> the window that it shows
        self._masks: list[Tensor] = []  # kept, so that no other tensor gets their storage
        self._names = {id(module): name for name, module in model.named_modules()}
        self.sites: list[Site] = []

    def run(self) -> tuple[int, int, int]:
        """Return the size of the hidden states, and how many rows the decoder and the head compute at once.

        Raises:
            ModelLoadError: the model cannot be run in this way.
        """
        global _running
        ids = torch.zeros((1, PROBED_TOKENS), dtype=torch.int64, device="meta")
        places = torch.arange(PROBED_TOKENS, device="meta")[None]
        given = {"position_ids": places, "attention_mask": torch.ones_like(ids)}  # else the positions are looked at
        decoder, head, hidden = split_decoder(self._model)
        _running, decoder_widths, head_widths = self, _Widths(), _Widths()
        try:
            with torch.no_grad(), decoder_widths:
                hidden.states = decoder(input_ids=ids, **given, use_cache=False).last_hidden_state
            with torch.no_grad(), head_widths:
                head(input_ids=ids, use_cache=False)
        except ModelLoadError:
            raise
        except Exception as error:
            raise refused(self._name, f"its modules cannot be run: {_short(error)}") from error
        finally:
            _running = None
        return int(hidden.states.shape[-1]), decoder_widths.rows, head_widths.rows

    def mask(self, sees: Callable[..., Tensor]) -> Tensor:
        """Make a mask that stands for the pattern of a mask function."""
        mask = torch.empty((1, 1, PROBED_TOKENS, PROBED_TOKENS), dtype=torch.bool, device="meta")
        self._masks.append(mask)
        self._windows[mask.untyped_storage()._cdata] = self._window(sees)
        return mask

    def _window(self, sees: Callable[..., Tensor]) -> int | None:
        """Find the window of a mask function; None: it is only causal."""
        keys, zero = torch.arange(FARTHEST), torch.zeros((), dtype=torch.int64)

        def seen(at: int) -> Tensor:
            with torch.device("cpu"):
                return torch.as_tensor(sees(zero, zero, torch.tensor(at), keys)).expand(FARTHEST)

        last = int(seen(FARTHEST - 1).sum())
        for at in (0, 1, 2, 5, 17, last - 1, last, FARTHEST // 2, FARTHEST - 2, FARTHEST - 1):
            if 0 <= at < FARTHEST and not torch.equal(seen(at), (keys <= at) & (keys > at - last)):
                raise refused(self._name, "its layers see other keys than a causal layer with a window")
        return None if last == FARTHEST else last

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: Mapping[str, Any]
    ) -> Tensor:
        """Note a layer, and return what has the shape of its result."""
        window = options.get("sliding_window")
        if mask is not None:
            masked = self._windows.get(mask.untyped_storage()._cdata, "unknown")
            if masked == "unknown" or (window is not None and window < FARTHEST and window != masked):
                raise refused(self._name, "its scores have a bias or a mask of its own")
            window = masked
        elif not getattr(module, "is_causal", False):
            raise refused(self._name, "its attention is not causal")
        name = self._names[id(module)]
        if any(item.module == name for item in self.sites):
            raise refused(self._name, f"{name} computes several layers")
        tokens = {item.shape[2] for item in (q, k, v)}
        if tokens != {PROBED_TOKENS} or {item.ndim for item in (q, k, v)} != {4} or q.shape[3] != k.shape[3]:
            raise refused(self._name, f"{name} attends to other keys than those of its tokens")
        heads, kv_heads, head_dim, value_dim = q.shape[1], k.shape[1], q.shape[3], v.shape[3]
        scale = options.get("scaling")
        cap = options.get("softcap")
        self.sites.append(
            Site(
                name,
                heads,
                kv_heads,
                max(head_dim, value_dim),
                value_dim,
                head_dim**-0.5 if scale is None else float(scale),
                float(cap) if cap else None,
                window,
            )
        )
        return q.new_empty((1, PROBED_TOKENS, heads, value_dim))


transformers.logging.set_verbosity_error()  # its warnings are about its own defaults
_running: _Probe | None = None  # Transformers calls registered functions by name


def _probe_attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    assert _running is not None
    return _running.attend(module, q, k, v, mask, options), None


def _probe_mask(*args: Any, mask_function: Callable[..., Tensor], **options: Any) -> Tensor:
    assert _running is not None
    return _running.mask(mask_function)


transformers.AttentionInterface.register(PROBE, _probe_attention)
AttentionMaskInterface.register(PROBE, _probe_mask)


def _table(name: str, model: Any, head: str) -> DerivedTable:
    """Make the table of a model's parameters."""
    tied = model.all_tied_weights_keys
    modules, found = dict(model.named_modules()), []
    named = [*model.named_parameters(remove_duplicate=False), *saved_buffers(model)]
    for full, value in named:
        owner = modules[full.rpartition(".")[0]]
        linear = type(owner) is nn.Linear
        if value.ndim > 1 and not (linear or isinstance(owner, nn.Embedding)):
            kind = type(owner).__name__
            raise refused(name, f"{kind} computes with {full} itself, and sums of torch's depend on the batch")
        quant: bool | str = linear and value.ndim == 2
        if quant and full == f"{head}.weight":
            quant = "int8"
        shape = tuple(value.shape)
        if not shape:
            raise refused(name, f"{full} is a number without an axis")
        stored = revert_weight_conversion(model, {full: value})  # as save_pretrained writes it
        if [tuple(item.shape) for item in stored.values()] != [shape]:
            raise refused(name, f"its checkpoints hold {full} in another form")
        found.append(
            Parameter(
                name=full,
                shape=shape,
                layouts=tuple(Layout({key: shape}, pieces=(shape[0],)) for key in dict.fromkeys([*stored, full])),
                shard=None,
                unit=None,
                quant=quant,
                leaves=1,
                tied_to=tied.get(full),
            )
        )
    ignored = {re.sub(r"\.\d+\.", ".*.", full) for full, value in model.named_buffers()} - {full for full, _ in named}
    return DerivedTable((), tuple(sorted(ignored)), f"{model.base_model_prefix}.", tuple(found))


def saved_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """List the buffers that a checkpoint holds and that are numbers of the model."""
    saved = [
        f"{name}.{key}" if name else key
        for name, module in model.named_modules()
        for key in module._buffers
        if key not in module._non_persistent_buffers_set
    ]
    return [(name, value) for name, value in model.named_buffers() if name in saved and value.is_floating_point()]
