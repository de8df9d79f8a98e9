"""The interfaces of a model: CausalLM; ForwardContext, the arguments of a pass; Module, a node in the tree of layers.

The context is passed down as an argument. There is no global context, so several engines can run in one process. Module
offers what the loader and `check` need of torch.nn.Module, without torch. A model may mix both kinds: a torch.nn.Module
may have our modules as attributes, and the other way round.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.kernels.metadata import AttentionMetadata, KVCache
from penstock.kernels.tensors import Tensor as Tensor  # for models of a user's own


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One step's positions and caches.

    Attributes:
        positions: [T] int64, each token's absolute position in its own sequence.
        kv_caches: one cache per decoder layer.
        attention: metadata of each cache group.
        layer_group: index into `attention` for each decoder layer.
        token_types: [T] int64, 1 for the tokens of the second text of a pair, else 0; None: the model has no types.
    """

    positions: Tensor
    kv_caches: tuple[KVCache, ...]
    attention: tuple[AttentionMetadata, ...]
    layer_group: tuple[int, ...]
    token_types: Tensor | None = None

    def layer(self, index: int) -> tuple[KVCache, AttentionMetadata]:
        return self.kv_caches[index], self.attention[self.layer_group[index]]


class CausalLM(Protocol):
    """A decoder and its head. The head is called separately, so that logits are computed only where they are needed.

    Its class is called with (ModelConfig, LayerFactory).
    """

    def __call__(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """Map ids [T] int64 to [T, hidden] dtype after the final norm. Stores keys and values in the caches of ctx."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states [M, hidden] dtype, at the wanted positions only, to logits [M, V] float32."""


class Module:
    """A part of a model. Its children are those of its attributes that are modules or lists of modules, except for
    attributes whose name begins with an underscore."""

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)

    def forward(self, *args: Any) -> Any:
        """Compute the module's results."""
        raise NotImplementedError


def named_modules(module: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a module of either kind, under the name `prefix`, and all modules below it: each once, parents first."""
    seen: set[int] = set()
    waiting = [(prefix, module)]  # not recursive: models have thousands of modules, and are walked many times
    while waiting:
        name, found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        yield name, found
        below = list(children(found))
        waiting.extend((f"{name}.{part}" if name else part, child) for part, child in reversed(below))


def children(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, module) for the modules of either kind directly below a module."""
    yield from vars(module).get("_modules", {}).items()  # torch's modules below a torch.nn.Module
    for name, value in vars(module).items():
        if name.startswith("_"):
            continue
        if is_module(value):
            yield name, value
        elif isinstance(value, list) and value and all(map(is_module, value)):
            yield from ((f"{name}.{index}", item) for index, item in enumerate(value))


@contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Give a module another attribute inside the block: how a pass is watched without a line of it in the layers."""
    own = vars(module)  # a method that stands in the class is not in it
    before, had = own.get(name), name in own
    setattr(module, name, value)
    try:
        yield
    finally:
        if had:
            setattr(module, name, before)
        else:
            delattr(module, name)


def is_module(value: object) -> bool:
    """Tell whether a value is a module of either kind."""
    return isinstance(value, Module) or is_torch_module(value)


def is_torch_module(value: object) -> bool:
    """Tell whether a value is a torch.nn.Module, without importing torch."""
    return hasattr(type(value), "register_parameter") and hasattr(value, "_modules")


def get_submodule(module: Any, name: str) -> Any:
    """Find the module with the full name `name` below a module. Raise AttributeError if there is none."""
    for found, child in named_modules(module):
        if found == name:
            return child
    raise AttributeError(f"{type(module).__name__} has no module {name!r}")
