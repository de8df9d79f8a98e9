"""Run a model of Transformers on the meta device, where tensors have shapes but no values, and note what its attention
layers pass on."""

import copy
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_outputs import MoeModelOutputWithPast

from penstock.errors import ModelLoadError

PROBE, PROBED_TOKENS = "penstock_probe", 8  # the name of the attention that looks and does not compute
BLOCK = re.compile(r"(.*?\.\d+)\.")  # the name of the decoder block that a module is in, up to the first number
FARTHEST = 2**17  # positions at which masks are examined
# torch computes these functions with vector instructions, and what is left at the end of a tensor with others, which
# round differently: so no tensor may have such a rest. Its loops take up to VECTOR elements at once.
VECTOR_FUNCTIONS = "celu elu erfc exp2 expm1 gelu glu log_sigmoid_forward mish pow sigmoid silu softplus"
BY_VECTORS = frozenset(VECTOR_FUNCTIONS.split())
EXACT_POWERS = (0.5, 1, 2, 3)  # which are products and roots
VECTOR = 64


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


def refused(name: str, why: str) -> ModelLoadError:
    """Make the error for a class that Transformers has and the engine cannot run."""
    return ModelLoadError(f"{name}: the class of Transformers cannot be used (--model-impl transformers): {why}")


class _Output(MoeModelOutputWithPast):  # type: ignore[misc]
    """A decoder's result without what some heads pass on."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class Hidden(nn.Module):
    """Stands for the decoder when only the head computes: its result is `states` [1, M, hidden]."""

    states: Tensor

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _Output(last_hidden_state=self.states)


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
        is_exact = name == "pow" and isinstance(args[1], int | float) and args[1] in EXACT_POWERS
        if name in BY_VECTORS and not is_exact:
            width = result.numel() // PROBED_TOKENS if result.numel() % PROBED_TOKENS == 0 else 1
            self.rows = max(self.rows, VECTOR // math.gcd(VECTOR, width))
        return result


def short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:300]


class Probe:
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
            raise refused(self._name, f"its modules cannot be run: {short(error)}") from error
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


_running: Probe | None = None  # Transformers calls registered functions by name


def _probe_attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    assert _running is not None
    return _running.attend(module, q, k, v, mask, options), None


def _probe_mask(*args: Any, mask_function: Callable[..., Tensor], **options: Any) -> Tensor:
    assert _running is not None
    return _running.mask(mask_function)


class _Flow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds the tensors that depend on the text: on what the embedding returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept: dict[int, Tensor] = {}  # by storage; kept, so that no other tensor gets it

    def add(self, value: Any) -> None:
        """Note the tensors in a result."""
        for item in tensors(value):
            self._kept[item.untyped_storage()._cdata] = item

    def has(self, value: Any) -> bool:
        """Tell whether a value has such a tensor."""
        return any(item.untyped_storage()._cdata in self._kept for item in tensors(value))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.has((args, kwargs)):
            self.add(result)
        return result


def tensors(value: Any) -> list[Tensor]:
    """List the tensors in an argument or a result."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [item for part in value for item in tensors(part)]
    return [value] if isinstance(value, Tensor) else []


def find_blocks(name: str, model: Any, sites: Sequence[Site]) -> dict[str, int]:
    """Find the decoder's blocks in order, each with the length of the tuple that it returns; 0: a tensor.

    Raises:
        ModelLoadError: a block gets something else of the text than what the block before returns.
    """
    why = "pipeline_parallel_size: its layers pass on more than hidden states"
    matches = [BLOCK.match(site.module) for site in sites]
    names = [match[1] for match in matches if match is not None]
    if len({*names}) < len(sites) or len({item.rpartition(".")[0] for item in names}) > 1:
        raise refused(name, why)
    flow, found, last = _Flow(), dict[str, int](), list[Tensor]()

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        (first, *others) = [*args, *kwargs.values()]
        if (last and first is not last[-1]) or flow.has(others):
            raise refused(name, why)

    def after(module: nn.Module, args: Any, result: Any) -> None:
        found[names[len(found)]] = len(result) if isinstance(result, tuple) else 0
        last.append(result[0] if isinstance(result, tuple) else result)

    for item in names:
        block = model.get_submodule(item)
        block.register_forward_pre_hook(before, with_kwargs=True)
        block.register_forward_hook(after)
    model.get_input_embeddings().register_forward_hook(lambda module, args, result: flow.add(result))
    with flow:
        Probe(name, model).run()
    return found


transformers.AttentionInterface.register(PROBE, _probe_attention)


AttentionMaskInterface.register(PROBE, _probe_mask)
