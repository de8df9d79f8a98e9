"""TorchWatch: tells what a forward pass on torch's tensors does besides native calls.

Views and new memory are kept alive with the program. A program cannot contain any other torch operation.
"""

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

HARMLESS = {  # allocate memory or create views, and compute nothing
    "aten::empty.memory_format",
    "aten::new_empty",
    "aten::slice.Tensor",
    "aten::select.int",
    "aten::view",
    "aten::view.dtype",
    "aten::_unsafe_view",
    "aten::alias",
    "aten::detach",
    "aten::unsqueeze",
    "aten::squeeze.dim",
    "aten::split.Tensor",
    "aten::split_with_sizes",
}


class TorchWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches torch while it is entered.

    Args:
        keep: called with each view and each new memory.
        refuse: called with the name of any other operation.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing here is compiled, and True would import the compiler, which takes a second."""
        return False

    def __init__(self, keep: Callable[[object], None], refuse: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keep, self._refuse = keep, refuse

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.name() in HARMLESS:
            self._keep(result)
        else:
            self._refuse(func.name())
        return result
