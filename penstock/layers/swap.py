"""Replaces torch's layers by the engine's, so that a model written with them is quantised, and attends to the cache."""

from collections.abc import Callable, Collection
from copy import copy
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import NotSupportedError
from penstock.kernels.metadata import AttentionParams
from penstock.layers.decoder import GatedMLP
from penstock.layers.factory import LayerFactory
from penstock.layers.module import ForwardContext
from penstock.layers.weights import WeightLayer
from penstock.spec.model_config import ModelConfig


class OverAxes:
    """Computes a layer over the last axis of tensors of any number of axes, and returns a new tensor."""

    ops: Any

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = super().forward(x.reshape(-1, x.shape[-1]).contiguous())  # type: ignore[misc]
        return rows.to(self.ops.dtype, copy=True).view(*x.shape[:-1], -1)


class _Head(OverAxes):
    """Maps x [..., K] dtype to logits [..., V] float32."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = super(OverAxes, self).forward(x.reshape(-1, x.shape[-1]).contiguous())  # type: ignore[misc]
        return logits.view(*x.shape[:-1], -1)


class _Lookup(OverAxes):
    """Maps ids [...] to [..., hidden] dtype, a new tensor."""

    def forward(self, ids: Tensor) -> Tensor:
        rows: Tensor = super(OverAxes, self).forward(ids.reshape(-1).contiguous())  # type: ignore[misc]
        return rows.to(self.ops.dtype, copy=True).view(*ids.shape, -1)


@cache
def _torch_kind(shape: Any, kind: Any) -> Any:
    return type(f"Torch{kind.__name__}", (shape, kind, nn.Module), {})


def _as_torch(layer: WeightLayer, shape: type) -> Any:
    """Make a torch.nn.Module that computes as one of the engine's layers does, whatever its class: those of ranks
    compute a part. shape: how it calls the layer."""
    own: Any = type(layer)
    kind = _torch_kind(shape, own)
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    made.__dict__.update(vars(layer))
    return made


def swap_linears(
    model: nn.Module, make: LayerFactory, shape: type = OverAxes, kind: type[nn.Linear] = nn.Linear
) -> dict[str, Any]:
    """Replace every nn.Linear in a model, or every layer of another `kind` of it, by a product that is quantised and
    split as the parameter table allows: x [..., K] dtype -> [..., N] dtype, a new tensor. Return the products by their
    names.

    Call it at the end of the model's __init__, with the LayerFactory that __init__ received. shape: a subclass of
    OverAxes, if the products are to be called otherwise.

    Raises:
        ModelLoadError: a weight is not in the table.
    """
    linears = [name for name, module in model.named_modules() if type(module) is kind]
    made = {name: _as_torch(make.linear(name), shape) for name in linears}
    for name, layer in made.items():
        _put(model, name, layer)
    return made


def swap_vocabulary(model: nn.Module, make: LayerFactory, embedding: str, head: str) -> None:
    """Replace the embedding and the head with these names, so that one can hold the rows of both. An embedding of
    another class than torch's is kept."""
    _put(model, head, _as_torch(make.lm_head(head), _Head))
    if type(model.get_submodule(embedding)) is nn.Embedding:
        _put(model, embedding, _as_torch(make.embedding(embedding), _Lookup))


class SwappedNorm(nn.Module):
    """A norm over the last axis, x [..., K] -> [..., K] of the same type, with the parameters of the module that it
    replaces. It rounds once, at the end."""

    def __init__(self, make: LayerFactory, like: nn.Module, eps: float, offset: float) -> None:
        """like: a torch.nn.LayerNorm, or else an RMS norm. offset: what is added to its weight."""
        super().__init__()
        self._ops, self._eps, self._offset, self._is_rms = make.ops, eps, offset, type(like) is not nn.LayerNorm
        self._parameters.update(like._parameters)
        self._values: Any = None

    def forward(self, x: Tensor) -> Tensor:
        """Norm each row by itself."""
        if self._values is None:  # the parameters are loaded now
            found: Any = self._parameters
            bias = found.get("bias")
            weight = (found["weight"].detach().float() + self._offset).contiguous()
            self._values = weight, None if bias is None else bias.detach().float().contiguous()
        rows, (weight, bias) = x.reshape(-1, x.shape[-1]).float().contiguous(), self._values
        if self._is_rms:
            result: Tensor = self._ops.rms_norm(rows, weight, self._eps, dtype=x.dtype)
        else:
            result = self._ops.layer_norm(rows, weight, bias, self._eps).to(x.dtype)
        return result.view(x.shape)


def swap_norms(model: nn.Module, make: LayerFactory, kept: Collection[str] = ()) -> None:
    """Replace the layer norms and RMS norms in a model, whatever their classes, but those whose weights are in `kept`.

    An RMS norm is recognised by what it computes: x / sqrt(mean(x^2) + eps) * (weight + 0 or 1).
    """
    known: dict[Any, tuple[float, float] | None] = {}
    for name, module in list(model.named_modules()):
        weight = module._parameters.get("weight")
        if weight is None or weight.ndim != 1 or f"{name}.weight" in kept or list(module.children()):
            continue
        if type(module) is nn.LayerNorm:
            _put(model, name, SwappedNorm(make, module, module.eps, 0.0))
        elif list(module._parameters) == ["weight"] and not module._buffers:
            numbers = tuple((key, value) for key, value in vars(module).items() if type(value) is float)
            key = type(module), tuple(weight.shape), numbers
            if key not in known:
                known[key] = _rms_norm(module, [value for _, value in numbers])
            if (found := known[key]) is not None:
                _put(model, name, SwappedNorm(make, module, *found))


def _rms_norm(module: nn.Module, numbers: list[float]) -> tuple[float, float] | None:
    """Try a module with values. Return the eps, which is one of its numbers, and the offset of an RMS norm; None if it
    is something else."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(module._parameters["weight"].shape, generator=draw)  # type: ignore[union-attr]
    x = torch.randn((2, 3, len(weight)), generator=draw) * torch.tensor([[[1.0]], [[1e-3]]])  # of which eps is seen
    tried = copy(module)
    tried._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
    try:
        result = tried(x)
    except Exception:  # it is called otherwise
        return None
    for eps, offset in product(numbers, (0.0, 1.0)):
        expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight + offset)
        if isinstance(result, Tensor) and result.shape == x.shape and torch.allclose(result, expected, rtol=1e-4):
            return eps, offset
    return None


class ProductWeight:
    """Stands for a weight [N, K] where a module's own code passes it to torch.nn.functional.linear, and computes the
    product itself. The module can do nothing else with it."""

    device = torch.device("cpu")

    def __init__(self, compute: Callable[[Tensor], Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """compute: maps x [..., K] to x @ weight.T. dtype: the weight's; the result has it."""
        self.shape, self.dtype = shape, dtype
        self._compute = compute

    def to(self, dtype: torch.dtype) -> "ProductWeight":
        """Convert it, as Tensor.to does."""
        return ProductWeight(self._compute, self.shape, dtype)

    type = to

    def float(self) -> "ProductWeight":
        """Convert it to float32."""
        return self.to(torch.float32)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
        plain = len(args) == 2 or (len(args) == 3 and args[2] is None)
        if func is not nn.functional.linear or not plain or kwargs or not isinstance(args[1], cls):
            raise NotSupportedError(f"a weight is passed to {getattr(func, '__name__', func)}")
        return args[1]._compute(args[0]).to(args[1].dtype)


def swap_weight(model: nn.Module, make: LayerFactory, name: str) -> None:
    """Replace a parameter that a module multiplies by itself, as routers do. The table has it as `name`_product."""
    parent, _, key = name.rpartition(".")
    owner: Any = model.get_submodule(parent)
    made = make.linear(f"{name}_product")
    owner._parameters.pop(key)
    setattr(owner, f"{key}_product", made)

    def compute(x: Tensor) -> Tensor:
        rows: Tensor = made(x.to(make.ops.dtype).reshape(-1, x.shape[-1]).contiguous())
        return rows.clone().view(*x.shape[:-1], -1)

    owner.__dict__[key] = ProductWeight(compute, made.spec.shape, make.ops.dtype)


class SwappedExperts(nn.Module):
    """The experts of a layer, as Transformers calls them: (hidden states, chosen experts, their weights)."""

    def __init__(self, make: LayerFactory, cfg: ModelConfig, activation: str) -> None:
        super().__init__()
        self.experts = [GatedMLP(make.at(f"experts.{index}"), activation) for index in range(make.num_experts(cfg))]
        down = [item.down_proj for item in self.experts]
        self._activation, self._ops = activation, make.ops
        self._mixture = make.mixture(cfg, down)
        self._out = make.slot("mixture", (cfg.hidden_size,), "float32")
        self._packed: tuple[Any, Any] | None = None

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Map x [..., hidden], and the choice [T, k] of each row, to the sum of its experts' results."""
        if self._packed is None:  # they are packed when the first pass begins
            parts = [item.gate_up_proj for item in self.experts], [item.down_proj for item in self.experts]
            gate_up, down = (tuple(item.packed[0] for item in part) for part in parts)
            self._packed = gate_up, down
        rows = x.reshape(-1, x.shape[-1]).to(self._ops.dtype).contiguous()
        choice = chosen.long().contiguous(), weights.float().contiguous()
        out = self._out(rows.shape[0])
        mixed: Tensor = self._mixture(rows, *self._packed, choice, self._activation, out=out)
        return mixed.to(x.dtype, copy=True).view(x.shape)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


class PagedAttention:
    """The engine's attention of one layer, for queries, keys and values as torch's models arrange them."""

    def __init__(self, make: LayerFactory, layer: int, head_dim: int, *, scale: float, softcap: float | None) -> None:
        """head_dim: that of the cache; keys and values with smaller heads are filled up."""
        self._ops, self._layer, self._head_dim = make.ops, layer, head_dim
        self._scale, self._softcap = scale, softcap
        self._params: AttentionParams | None = None

    def __call__(self, ctx: ForwardContext, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Map q [1, H, R, d], k [1, Hkv, R, d] and v [1, Hkv, R, e] to [1, R, H, e]. Store the new keys and values.

        The rows from the step's tokens on are padding; their results are zeros.
        """
        if self._params is None:  # sinks are weights, which are loaded now
            logits = None if sinks is None else sinks.detach().float().contiguous()
            self._params = AttentionParams(self._scale, self._softcap, sink_logits=logits)
        cache, meta = ctx.layer(self._layer)
        queries, keys, values = (self._rows(item, ctx.positions.shape[0]) for item in (q, k, v))
        mixed: Tensor = self._ops.attend(queries, keys, values, cache, meta, self._params).view(queries.shape)
        return whole_rows(mixed, q.shape[2])[None, ..., : v.shape[3]]

    def _rows(self, x: Tensor, tokens: int) -> Tensor:
        """Rearrange [1, heads, R, d] as [T, heads, D]. The zeros that fill up a head change no score."""
        x = x[0].transpose(0, 1)[:tokens].to(self._ops.dtype)
        missing = self._head_dim - x.shape[-1]
        return (nn.functional.pad(x, (0, missing)) if missing else x).contiguous()


def whole_rows(x: Tensor, multiple: int) -> Tensor:
    """Append rows of zeros, so that their number is a multiple of `multiple`."""
    missing = -x.shape[0] % multiple
    return torch.cat([x, x.new_zeros((missing, *x.shape[1:]))]) if missing else x


def fix_buffers(model: nn.Module, names: list[str]) -> None:
    """Make parameters of buffers, which are read from checkpoints, too."""
    for name in names:
        parent, _, leaf = name.rpartition(".")
        owner: Any = model.get_submodule(parent)
        owner.register_parameter(leaf, nn.Parameter(owner._buffers.pop(leaf), requires_grad=False))


def keep_float32(model: nn.Module, names: Collection[str]) -> None:
    """Keep parameters of torch's layers with these names in float32, whatever the model's type is."""
    for name, value in model.named_parameters():
        if name in names:
            vars(value)["keeps_float32"] = True
