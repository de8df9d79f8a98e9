"""Adapters: the LoRA adapters of a client, by the names that users know, and by the content that a name stands for now.

    name "sql"  ──▶  id "sql@9f86d081884c7d65"  ──▶  the engines, their standbys and their successors

A request is given an id, never a name, and an id stands for one content. So the request keeps its weights whatever the
name comes to mean: in its engine, in the next one after a death, and in the journal. An adapter whose name is gone
stays in the engines until its last open request has ended. This module knows no engine and sends nothing.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ModelLoadError, RequestFailedError, invalid
from penstock.interface.messages import AdapterInfo, LoRARequest

DIGITS = 16  # of the hash, in an id


@dataclass(eq=False, slots=True)
class Adapter:
    """An adapter with the content that its files have had.

    Attributes:
        source: the name under which users find it, and the directory of its files.
        sha256: of its files.
        info: the engine's description; None until an engine has loaded it.
        failure: what ends its requests in an engine that could not load it again; None if every engine could.
    """

    source: LoRARequest
    sha256: str
    info: AdapterInfo | None = None
    failure: RequestFailedError | None = None

    @classmethod
    def read(cls, source: LoRARequest) -> "Adapter":
        """Read the hash of an adapter's files. Raise InvalidRequestError if they cannot be read."""
        from penstock.weights.adapters import digest_of  # with much of the kernels, which few clients need

        try:
            return cls(source, digest_of(Path(source.lora_path)))
        except ModelLoadError as error:
            raise invalid("lora_path", str(error)) from None

    @property
    def name(self) -> str:
        return self.source.lora_name

    @property
    def id(self) -> str:
        """The name and the content: what engines, requests and records know the adapter by."""
        return f"{self.name}@{self.sha256[:DIGITS]}"

    @property
    def root_hash(self) -> bytes:
        """The parent of the hash of a prompt's first block (engine/request.py)."""
        return bytes.fromhex(self.sha256)


def name_of(adapter_id: str) -> str:
    return adapter_id.rpartition("@")[0]


def content_of(adapter_id: str) -> str:
    """Find the part of an adapter's id that stands for its content."""
    return adapter_id.rpartition("@")[2]


class Adapters:
    """The adapters that the engines of a client hold: those with a name, and those that open requests still use.

    Attributes:
        by_name: those that new requests may use.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, Adapter] = {}
        self._held: dict[str, Adapter] = {}  # by id

    def held(self) -> list[Adapter]:
        """List the adapters that a new engine needs."""
        return list(self._held.values())

    @property
    def are_loaded(self) -> bool:
        """True once an engine has loaded each of them."""
        return all(adapter.info is not None for adapter in self._held.values())

    def loaded(self, info: AdapterInfo) -> None:
        """Note an engine's description of an adapter."""
        if (adapter := self._held.get(info.name)) is not None:
            adapter.info = info

    def get(self, adapter_id: str | None) -> Adapter | None:
        return None if adapter_id is None else self._held.get(adapter_id)

    def root_hash(self, adapter_id: str | None) -> bytes:
        """Find the root hash of an adapter; that of the base model for None."""
        adapter = self.get(adapter_id)
        return b"" if adapter is None else adapter.root_hash

    def check_room(self, adapter: Adapter, max_loras: int) -> None:
        """Raise InvalidRequestError if the engines have no place for another adapter."""
        if adapter.id not in self._held and len(self._held) >= max_loras:
            if max_loras == 0:
                raise invalid("enable_lora", "this model has no room for adapters; start it with --enable-lora")
            held = ", ".join(self._held)
            message = f"{max_loras} adapters are loaded ({held}), some perhaps only for requests that are still open; "
            raise invalid("max_loras", message + "unload one, or increase max_loras", "adapter_limit_exceeded")

    def add(self, adapter: Adapter) -> Adapter:
        """Let a name stand for this adapter from now on. Return the entry of its content, which may be an older one."""
        found = self.by_name[adapter.name] = self._held.setdefault(adapter.id, adapter)
        found.failure = None
        return found

    def forget(self, name: str) -> Adapter | None:
        """Let a name stand for nothing. Return its adapter, which open requests may still use."""
        return self.by_name.pop(name, None)

    def check(self, adapter_id: str) -> None:
        """Raise InvalidRequestError if the engines do not hold this adapter, or not any more."""
        if adapter_id not in self._held:
            raise invalid("model", f"the adapter {adapter_id} is not loaded, or no longer", "model_not_found")

    def pop_unused(self, in_use: Collection[str | None]) -> list[Adapter]:
        """Take out the adapters that have no name and are not in use."""
        kept = {adapter.id for adapter in self.by_name.values()}.union(in_use)
        unused = [adapter for key, adapter in self._held.items() if key not in kept]
        for adapter in unused:
            del self._held[adapter.id]
        return unused
