"""Adapters: the LoRA adapters that an engine has loaded, by name, and the slots in which its executor keeps them.

An open request keeps the adapter that it began with: an adapter whose name is removed, or taken by other content, stays
in its slot until its last request has ended. The engine never looks inside an adapter.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from penstock.errors import invalid
from penstock.interface.messages import AdapterInfo

Read = Callable[[str, str], tuple[AdapterInfo, Any]]  # (name, path) -> its description, and what an executor loads


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter in a slot."""

    info: AdapterInfo
    slot: int


class Adapters:
    """At most `max_loras` adapters. One that no open request uses makes way for a new one."""

    def __init__(self, max_loras: int, read: Read, load: Callable[[int, Any], None]) -> None:
        """read: reads and checks the files of an adapter. load: puts what it returns into a slot of the executor."""
        self._max_loras = max_loras
        self._read, self._load = read, load
        self._named: dict[str, Adapter] = {}  # the least recently used first

    def __iter__(self) -> Iterator[AdapterInfo]:
        return iter([item.info for item in self._named.values()])

    def add(self, name: str, path: str, in_use: Collection[Adapter], sha256: str | None = None) -> AdapterInfo:
        """Load an adapter. If `name` has this content already, nothing changes; other content takes the name over.

        Args:
            in_use: the adapters of open requests.
            sha256: the digest that its files must have; None: any.

        Raises:
            InvalidRequestError: the files cannot be read, do not fit the model or have another digest, or every slot
                holds an adapter that an open request uses. What was loaded stays as it is.
        """
        info, content = self._checked(name, path, sha256)
        known = self._named.get(name)
        if known is None or known.info.sha256 != info.sha256:
            slot = self._free_slot(in_use)
            self._load(slot, content)
            self._named = {key: item for key, item in self._named.items() if key != name and item.slot != slot}
            self._named[name] = Adapter(info, slot)
        return self._named[name].info

    def _checked(self, name: str, path: str, sha256: str | None) -> tuple[AdapterInfo, Any]:
        info, content = self._read(name, path)
        if sha256 not in (None, info.sha256):
            raise invalid("lora_path", f"the files of adapter {name!r} in {path} have changed since it was loaded")
        return info, content

    def restore(self, slot: int, path: str, sha256: str) -> None:
        """Load an adapter into the slot that it had in another engine, for steps that name the slot. Raise as `add`."""
        self._load(slot, self._checked(f"slot {slot}", path, sha256)[1])

    def remove(self, name: str) -> bool:
        """Forget a name. Return False if it is unknown."""
        return self._named.pop(name, None) is not None

    def find(self, name: str) -> Adapter:
        """Find the adapter of a new request, which is then the one used last."""
        if name not in self._named:
            known = ", ".join(self._named) or "none"
            raise invalid("model", f"the LoRA adapter {name!r} is not loaded; loaded are: {known}", "model_not_found")
        self._named[name] = self._named.pop(name)
        return self._named[name]

    def _free_slot(self, in_use: Collection[Adapter]) -> int:
        """Choose an empty slot, or that of the least recently used adapter."""
        taken = {item.slot for item in in_use}
        held = {item.slot for item in self._named.values()}
        empty = [slot for slot in range(self._max_loras) if slot not in taken | held]
        idle = [item.slot for item in self._named.values() if item.slot not in taken]
        if not empty + idle:
            message = f"requests are open that use all {self._max_loras} adapters; increase it, or wait"
            raise invalid("max_loras", message, "adapter_limit_exceeded")
        return (empty + idle)[0]
