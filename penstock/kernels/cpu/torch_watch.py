"""TorchWatch: tells a Recorder what a forward pass on torch's tensors does besides native calls.

Views and new memory are kept alive with the program. A program cannot contain any other torch operation.
"""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from penstock.kernels.cpu.calls import Recorder

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
    """Watches torch while it is entered."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing here is compiled, and True would import the compiler, which takes a second."""
        return False

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.name() in HARMLESS:
            self._recorder.keep(result)
        else:
            self._recorder.foreign = func.name()
        return result
