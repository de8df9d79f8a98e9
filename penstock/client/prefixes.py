"""Prefixes: the record that a client keeps of prefixes in the cache: which are pinned, and how often each was found.

The blocks belong to the engine (engine/block_pool.py) and are lost with it. What must outlive it is here: the token ids
of each pin. The next engine gets them before anything else, and computes them after the open requests have gone on. A
pin is computed by an ordinary request for its tokens and one output, which waits and may be refused like any other.

A hit counts for the longest pin that it covers, or otherwise for the prefix that was found. This module knows no engine
and sends nothing.
"""

import heapq
import itertools
import re
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from penstock.errors import fail, invalid
from penstock.interface.messages import EngineRequest
from penstock.interface.outputs import PrefixUse
from penstock.interface.sampling_params import RequestOutputKind, SamplingParams

MAX_PINS = 64
MAX_PREFIXES = 256  # unpinned prefixes to remember: those that were found last
NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
ONE_OUTPUT = SamplingParams(
    temperature=0.0, max_tokens=1, seed=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
)


@dataclass(slots=True)
class Pin:
    """A pinned prefix.

    Attributes:
        request: the request that computes it; its tokens are the prefix in whole blocks.
        is_computed: whether that request has ended, so that it may be sent again to another engine.
        num_deaths: deaths of engines that were computing it again.
    """

    name: str
    request: EngineRequest
    use: PrefixUse
    is_computed: bool = False
    num_deaths: int = 0

    def is_found_by(self, request: EngineRequest, num_cached: int) -> bool:
        """Check whether a request, the first tokens of whose prompt were cached, has found it."""
        own = self.request
        is_alike = own.cache_salt in (None, request.cache_salt) and own.adapter == request.adapter
        size = len(own.prompt_token_ids)
        return is_alike and size <= num_cached and request.prompt_token_ids[:size] == own.prompt_token_ids


@dataclass(slots=True)
class Prefixes:
    """The pins of a client, and the uses of cached prefixes."""

    _pins: dict[str, Pin] = field(default_factory=dict)
    _found: OrderedDict[bytes, PrefixUse] = field(default_factory=OrderedDict)
    _num_pins: int = 0  # made so far

    def __iter__(self) -> Iterator[Pin]:
        return iter(list(self._pins.values()))

    def get(self, name: str) -> Pin | None:
        return self._pins.get(name)

    def pin(
        self, name: str | None, token_ids: list[int], salt: str | None, block_size: int, adapter: str | None = None
    ) -> Pin:
        """Make a pin of the whole blocks of a prefix, or find the existing pin if name and prefix are the same.

        Raises:
            InvalidRequestError: the name is malformed, or belongs to another prefix or to one that is being computed;
                or there are too many pins, or no whole block.
        """
        if name is None:
            name = next(free for index in itertools.count() if (free := f"pin-{index}") not in self._pins)
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise fail("name", name, "1 to 64 letters, digits and _ . @ -")
        ids = token_ids[: len(token_ids) // block_size * block_size]
        if not ids:
            raise invalid(
                "prompt", f"{len(token_ids)} tokens do not fill a block of {block_size}, so there is none to pin"
            )
        known = self._pins.get(name)
        if known is not None:
            own = known.request
            if (own.prompt_token_ids, own.cache_salt, own.adapter) != (ids, salt, adapter):
                raise invalid("name", f"{name!r} is the name of another pin; unpin it first", "name_in_use")
            if not known.is_computed:
                raise invalid("name", f"{name!r} is being computed for another call", "name_in_use")
            return known
        if len(self._pins) >= MAX_PINS:
            raise invalid(
                "name", f"there are {MAX_PINS} pins, which is the most; unpin one first", "pin_limit_exceeded"
            )
        engine_id = f"pin {name}#pin {self._num_pins}"
        request = EngineRequest(engine_id, ids, ONE_OUTPUT, flow=engine_id, cache_salt=salt, adapter=adapter)
        self._num_pins += 1
        pin = self._pins[name] = Pin(name, request, PrefixUse(len(ids), name=name))
        return pin

    def unpin(self, name: str) -> bool:
        """Forget a pin. Return False if no pin has this name."""
        return self._pins.pop(name, None) is not None

    def computed_by(self, engine_request_id: str) -> Pin | None:
        return next((pin for pin in self if pin.request.request_id == engine_request_id), None)

    def note(self, request: EngineRequest, num_cached: int) -> None:
        """Count a hit: num_cached tokens of the request's prompt were found."""
        pins = [pin for pin in self if pin.is_computed and pin.is_found_by(request, num_cached)]
        if pins:
            use = max(pins, key=lambda pin: pin.use.num_tokens).use
        else:
            found, apart = request.prompt_token_ids[:num_cached], repr((request.cache_salt, request.adapter))
            key = blake2b(array("q", found).tobytes() + apart.encode(), digest_size=16).digest()
            use = self._found.setdefault(key, PrefixUse(num_cached))
            self._found.move_to_end(key)
            if len(self._found) > MAX_PREFIXES:
                self._found.popitem(last=False)
        use.hits += 1
        use.tokens_saved += num_cached
        use.last_used = time.time()

    def pinned(self) -> list[PrefixUse]:
        """List the computed pins, oldest first."""
        return [replace(pin.use) for pin in self if pin.is_computed]

    def most_used(self, count: int) -> list[PrefixUse]:
        uses = [*(pin.use for pin in self if pin.use.hits), *self._found.values()]
        return [replace(use) for use in heapq.nlargest(count, uses, key=lambda use: use.hits)]
