"""The options of LoRA adapters, under vLLM's names; a part of EngineConfig (config.py)."""

import json
from dataclasses import dataclass
from typing import Any

from penstock.errors import check_options, fail, option, string_tuple

MAX_LORAS, MAX_LORA_RANK = 1024, 256


def _named_paths(name: str, value: Any) -> tuple[str, ...]:
    """Check a list of texts NAME=PATH whose names differ. vLLM's JSON objects become such texts."""
    found = string_tuple(name, value, max_items=MAX_LORAS, max_length=4096)
    found = tuple(_of_json(name, item) if item.startswith("{") else item for item in found)
    names = [item.partition("=")[0] for item in found]
    if not all(item.partition("=")[0] and item.partition("=")[2] for item in found) or len(set(names)) < len(names):
        raise fail(name, value, "a list of NAME=PATH, each with a name of its own")
    return found


def _of_json(name: str, text: str) -> str:
    try:
        found = json.loads(text)
        if found.keys() == {"name", "path"} and "=" not in found["name"]:
            return f"{found['name']}={found['path']}"
    except (ValueError, TypeError, RecursionError):
        pass
    raise fail(name, text, 'NAME=PATH, or {"name": ..., "path": ...} without other fields')


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAConfig:
    """LoRA adapters, in vLLM's names. The engine plans memory for max_loras adapters of rank max_lora_rank; requests
    choose one by its name. Alternatively, one adapter becomes part of the weights as they are loaded."""

    enable_lora: bool = option(False, bool, "keep room for LoRA adapters, which requests choose by name")
    max_loras: int = option(1, range(1, MAX_LORAS + 1), "LoRA adapters that are loaded at once")
    max_lora_rank: int = option(16, range(1, MAX_LORA_RANK + 1), "largest rank of a LoRA adapter")
    lora_modules: tuple[str, ...] = option((), _named_paths, "LoRA adapters to load at the start")

    merge_lora: str | None = option(None, str, "directory of a LoRA adapter that becomes part of the weights")

    def __post_init__(self) -> None:
        check_options(self)
        if self.merge_lora is not None and self.enable_lora:
            raise fail("merge_lora", self.merge_lora, "left out: adapters of requests are made for the base model")
        for name, default in (("max_loras", 1), ("max_lora_rank", 16), ("lora_modules", ())):
            if getattr(self, name) != default and not self.enable_lora:
                raise fail(name, getattr(self, name), "left out unless enable_lora = true")
        if len(self.lora_modules) > self.max_loras:
            raise fail("max_loras", self.max_loras, f"at least {len(self.lora_modules)}, one for each of lora_modules")

    @property
    def modules(self) -> dict[str, str]:
        """The path of each adapter of lora_modules, by its name."""
        return dict(item.split("=", 1) for item in self.lora_modules)
