"""Placement: which chips compute which part of a model, in epochs, and whether their memory suffices. No torch.

Each layer is an epoch (Tenstorrent's Falcon-40B: 60 layers in 60 consecutive epochs); the head, if it is on the device,
is the last epoch. In an epoch, a chip's SRAM holds its part of the layer's cache and either its part of the weights
(`resident`) or a buffer that they pass through (`streamed`, from the chip's DRAM, which holds the weights of all
epochs). `load_placement` reads a placement from a YAML file; docs/planning.md has its fields.

    layers.3.attention, layers.3.mlp      the branches of a layer; the operations of a branch follow each other
    layers.3.attention.o_proj             one operation: on its branch's chips, unless an override names it
    lm_head, lm_head.2                    the head, and the piece of it that its third chip has
"""

import fnmatch
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from penstock import InvalidRequestError
from penstock.errors import check_choice, fail
from penstock.kernels.attention.items import ELEMENT_BYTES
from penstock.spec.model_config import ModelConfig
from penstock_lab.planner.yaml_file import MAX_BYTES, load, names_in, whole

STREAMED, RESIDENT = "streamed", "resident"
WEIGHT_BYTES = ELEMENT_BYTES["bfloat16"]  # a placement's weights are bfloat16
LAYER = re.compile(r"\.(\d+)\.")
FOLDER = Path(__file__).parent / "placements"
RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)
OPERATIONS = ("attention", "mlp", "lm_head")
ATTEND = "attend"  # the operation that reads the cache
MAX_CHIPS = 2**12  # each has a line in the plan
MAX_TOKENS = 2**24
COUNTS = {
    "rows": 2**16,
    "context": MAX_TOKENS,
    "chips": MAX_CHIPS,
    "sram_per_chip": MAX_BYTES,
    "dram_per_chip": MAX_BYTES,
    "stream_buffer": MAX_BYTES,
}
OPTIONAL_COUNTS = ("stream_buffer",)


@dataclass(frozen=True, slots=True)
class Placement:
    """The places of a model's operations; docs/planning.md has the fields of the file.

    Attributes:
        chips_of: the chips of "attention", "mlp" and "lm_head". Without "lm_head" the head is a NOP: hidden states are
            returned to the host.
        head_pad: number of tokens added to the vocabulary.
        overrides: pattern of a name ("layers.3.mlp", "layers.*.o_proj") -> its chips; the last match counts. A pattern
            that matches a branch matches all of its operations.
    """

    rows: int
    context: int
    cache_type: str
    chips: int
    sram_per_chip: int
    dram_per_chip: int
    chips_of: Mapping[str, tuple[int, ...]]
    weights: str = STREAMED
    stream_buffer: int = 0
    head_pad: int = 0
    overrides: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def where(self, name: str) -> tuple[int, ...]:
        """Find the chips of a branch, of one of its operations, of the head, or of a piece of it."""
        branch = branch_of(name)
        found = self.chips_of.get(branch.rpartition(".")[2], ())
        for pattern, chips in self.overrides:
            if fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(branch, pattern):
                found = chips
        return found

    def head(self) -> tuple[int, ...]:
        """Find the chip of each piece of the head. A piece that an override gives several chips has them all."""
        chips = self.where("lm_head")
        own = [self.where(f"lm_head.{piece}") for piece in range(len(chips))]
        return tuple(at for piece, chip in enumerate(chips) for at in ((chip,) if own[piece] == chips else own[piece]))


def operation_of(parameter: str) -> str | None:
    """Find the operation to which a parameter belongs, by its name: "layers.3.mlp.up_proj" or "lm_head"; None for the
    embedding and the final norm."""
    if parameter.startswith("lm_head."):
        return "lm_head"
    found = LAYER.search(parameter)
    if found is None:
        return None
    branch = "mlp" if ".mlp." in parameter else "attention"
    path = parameter[found.end() :].rpartition(".")[0]
    return f"layers.{found[1]}.{branch}.{path.partition('.')[2] or path}"


def branch_of(operation: str) -> str:
    """Find the branch of an operation, as "layers.3.mlp", or "lm_head"."""
    return ".".join(operation.split(".")[: 3 if operation.startswith("layers.") else 1])


@dataclass(frozen=True, slots=True)
class Operation:
    """A part of an epoch. Its bytes are those of all its chips together."""

    name: str
    chips: tuple[int, ...]
    weight_bytes: int
    cache_bytes: int = 0

    @property
    def weight_bytes_per_chip(self) -> int:
        return -(-self.weight_bytes // len(self.chips))

    @property
    def cache_bytes_per_chip(self) -> int:
        return -(-self.cache_bytes // len(self.chips))


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """The epochs of a placement, with the memory that they take; `problems` says why it is not possible."""

    placement: Placement
    epochs: tuple[tuple[Operation, ...], ...]
    key_bytes: int
    layers: int
    problems: tuple[str, ...]
    host_bytes: int = 0

    @property
    def chip_weight_bytes(self) -> int:
        """The bytes of the weights of all operations."""
        return sum(operation.weight_bytes for epoch in self.epochs for operation in epoch)

    @property
    def weight_bytes(self) -> int:
        """The bytes of all weights, with those that stay on the host: the embedding and the final norm."""
        return self.chip_weight_bytes + self.host_bytes

    def figures(self) -> dict[str, Any]:
        place = self.placement
        attention = len(place.chips_of["attention"])
        return {
            "key_bytes": self.key_bytes,
            "cache_bytes_per_layer": 2 * self.key_bytes,
            "cache_bytes": 2 * self.key_bytes * self.layers,
            "sram_bytes": attention * place.sram_per_chip,
            "weight_bytes": self.weight_bytes,
            "weight_bytes_per_layer": self.weight_bytes // self.layers,
            "chip_weight_bytes": self.chip_weight_bytes,
            "epochs": self.layers,
            "streamed_bytes_per_token": self.streamed_bytes,
            "peak_sram_bytes_per_chip": max(self.sram().values()),
            "peak_dram_bytes_per_chip": max(self.dram().values()),
            "lm_head": "on the device" if place.chips_of.get("lm_head") else "NOP: hidden states come back",
            "sram_bytes_per_chip": place.sram_per_chip,
            "dram_bytes_per_chip": place.dram_per_chip,
            "sram_bytes_by_chip": _by_chip(self.sram()),
            "dram_bytes_by_chip": _by_chip(self.dram()),
            "areas": self.areas(),
            "fits": not self.problems,
            "problems": list(self.problems),
        }

    @property
    def streamed_bytes(self) -> int:
        """The bytes of weights that pass through SRAM while each row gets one token."""
        if self.placement.weights == RESIDENT:
            return 0
        return self.chip_weight_bytes

    def areas(self) -> list[dict[str, Any]]:
        """List which chips compute each operation, with the runs of consecutive epochs in which they do so."""
        found: list[dict[str, Any]] = []
        latest: dict[str, dict[str, Any]] = {}
        for index, epoch in enumerate(self.epochs):
            for operation in epoch:
                kind, chips = operation.name.split(".", 2)[-1], list(operation.chips)
                area = latest.get(kind)
                if area is not None and area["chips"] == chips and area["last_epoch"] == index - 1:
                    area["last_epoch"] = index
                    continue
                latest[kind] = {"operation": kind, "chips": chips, "first_epoch": index, "last_epoch": index}
                found.append(latest[kind])
        return found

    def sram(self) -> dict[int, int]:
        """Find the maximum number of bytes that each chip's SRAM holds in one epoch."""
        peak = dict.fromkeys(range(self.placement.chips), 0)
        for epoch in self.epochs:
            for chip, size in _sram_of(self.placement, epoch).items():
                peak[chip] = max(peak.get(chip, 0), size)
        return peak

    def dram(self) -> dict[int, int]:
        """Count the bytes in each chip's DRAM: the weights of its epochs."""
        held = dict.fromkeys(range(self.placement.chips), 0)
        for epoch in self.epochs:
            for operation in epoch:
                for chip in operation.chips:
                    held[chip] = held.get(chip, 0) + operation.weight_bytes_per_chip
        return held


def plan_placement(model: ModelConfig, weights: Mapping[str, int], placement: Placement) -> PlacementPlan:
    """Divide the operations of a model into epochs.

    weights: bytes of each operation of a layer, of the padded head, and of what stays on the host (see
        `operation_bytes`).
    """
    element = ELEMENT_BYTES[placement.cache_type]
    key = placement.rows * placement.context * model.num_key_value_heads * model.head_dim * element
    epochs: list[tuple[Operation, ...]] = []
    for layer in range(model.num_hidden_layers):
        branches = (_operations(placement, f"layers.{layer}.{kind}", weights, 2 * key) for kind in OPERATIONS[:2])
        epochs.append(tuple(operation for branch in branches for operation in branch))
    if head := placement.head():
        epochs.append((Operation("lm_head", head, weights["lm_head"]),))
    known = tuple(tuple(operation for operation in epoch if operation.chips) for epoch in epochs)
    names = [f"layers.{layer}.{name}" for layer in range(model.num_hidden_layers) for name in weights if "." in name]
    names += [f"lm_head.{piece}" for piece in range(len(placement.where("lm_head")))]
    problems = (*_unmatched(placement, names), *_problems(placement, epochs, known))
    return PlacementPlan(placement, known, key, model.num_hidden_layers, problems, weights.get("host", 0))


def _operations(placement: Placement, branch: str, weights: Mapping[str, int], cache: int) -> Iterator[Operation]:
    """Yield a branch of a layer, without its operations on other chips, and then each of these. cache: bytes of the
    layer's cache."""
    kind, chips = branch.rpartition(".")[2], placement.where(branch)
    held = {name.partition(".")[2]: size for name, size in weights.items() if name.startswith(f"{kind}.")}
    where = {name: placement.where(f"{branch}.{name}") for name in held}
    together = [name for name in held if where[name] == chips]
    if together:
        yield Operation(branch, chips, sum(held[name] for name in together), cache if ATTEND in together else 0)
    for name, size in held.items():
        if where[name] != chips:
            yield Operation(f"{branch}.{name}", where[name], size, cache if name == ATTEND else 0)


def _unmatched(placement: Placement, names: Sequence[str]) -> Iterator[str]:
    """Yield the patterns that match no operation."""
    for pattern, _ in placement.overrides:
        if not any(fnmatch.fnmatchcase(text, pattern) for name in names for text in (name, branch_of(name))):
            layer = sorted({name.split(".", 2)[2] for name in names if name.startswith("layers.")})
            both = f"{branch_of(names[0])} to {branch_of(names[-1])}; in a layer {', '.join(layer)}"
            yield f"overrides: the pattern {pattern} matches no operation; they are {both}"


def _problems(
    placement: Placement, epochs: Sequence[tuple[Operation, ...]], known: tuple[tuple[Operation, ...], ...]
) -> Iterator[str]:
    """Yield why a placement is not possible: the first problem of each kind, with the operation and the chip."""
    for operation in (operation for epoch in epochs for operation in epoch):
        if not operation.chips:
            yield f"{operation.name} is on no chip"
            break
        if (high := max(operation.chips)) >= placement.chips:
            yield f"{operation.name}: there is no chip {high}, only 0 to {placement.chips - 1}"
            return
    for epoch in known:
        counts = Counter(chip for name in _branches(epoch).values() for chip in name)
        if shared := [chip for chip, count in counts.items() if count > 1]:
            names = [operation.name for operation in epoch if shared[0] in operation.chips]
            yield f"{' and '.join(names)} overlap on chip {shared[0]}"
            break
    head, pieces = placement.head(), placement.where("lm_head")
    if len(head) != len(pieces) or len(set(head)) < len(head):
        yield f"lm_head: its {len(pieces)} pieces need a chip each, and no other's, not {', '.join(map(str, head))}"
    yield from _over_budget(placement, known)


def _branches(epoch: Sequence[Operation]) -> dict[str, set[int]]:
    """Collect the chips of each branch. Its operations follow each other, so they may share chips."""
    found: dict[str, set[int]] = {}
    for operation in epoch:
        found.setdefault(branch_of(operation.name), set()).update(operation.chips)
    return found


def _over_budget(placement: Placement, epochs: tuple[tuple[Operation, ...], ...]) -> Iterator[str]:
    for epoch in epochs:
        sizes = _sram_of(placement, epoch)
        chip = max(sizes, key=lambda index: sizes[index], default=None)
        if chip is not None and sizes[chip] > placement.sram_per_chip:
            name = next(operation.name for operation in epoch if chip in operation.chips)
            over = sizes[chip] - placement.sram_per_chip
            yield (
                f"{name} needs {sizes[chip]} bytes of SRAM on chip {chip}, {over} more than its "
                f"{placement.sram_per_chip}"
            )
            break
    plan = PlacementPlan(placement, epochs, 0, 1, ())
    held = plan.dram()
    chip = max(held, key=lambda index: held[index])
    if placement.weights == STREAMED and held[chip] > placement.dram_per_chip:
        names = {operation.name for epoch in epochs for operation in epoch if chip in operation.chips}
        over = held[chip] - placement.dram_per_chip
        yield (
            f"{', '.join(sorted(names)[:2])} and others need {held[chip]} bytes of DRAM on chip {chip}, {over} more "
            f"than its {placement.dram_per_chip}"
        )


def _by_chip(sizes: Mapping[int, int]) -> list[int]:
    return [size for _, size in sorted(sizes.items())]


def _sram_of(placement: Placement, epoch: Sequence[Operation]) -> dict[int, int]:
    """Count the bytes in each chip's SRAM in an epoch."""
    held: Counter[int] = Counter()
    for operation in epoch:
        weights = operation.weight_bytes_per_chip
        if placement.weights == STREAMED:
            weights = min(placement.stream_buffer, weights)
        for chip in operation.chips:
            held[chip] += weights + operation.cache_bytes_per_chip
    return dict(held)


def operation_bytes(model: ModelConfig, shapes: Mapping[str, tuple[tuple[int, ...], ...]], pad: int) -> dict[str, int]:
    """Count the bytes of each operation of a layer in bfloat16, of the head with `pad` more tokens, and of what stays
    on the host. Attention over the cache, rotation, activation and the sum of parallel branches have no weights.

    shapes: the shapes of the parameters of layer 0, by operation ("mlp.up_proj"), and of the "host".
    """
    has_activation = not model.num_experts and model.hidden_act != "xielu"  # xIELU has weights of its own
    own = {
        f"attention.{ATTEND}": True,
        "attention.rotary": model.rope is not None,
        "mlp.activation": has_activation,
        "attention.add": model.num_parallel_norms > 0,
    }
    found = {name: 0 for name, there in own.items() if there}
    found |= {name: WEIGHT_BYTES * sum(_size(shape) for shape in held) for name, held in shapes.items()}
    return found | {"lm_head": WEIGHT_BYTES * (model.vocab_size + pad) * model.hidden_size}


def _size(shape: Sequence[int]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def load_placement(text: str) -> Placement:
    """Load a placement by its name or from a YAML file.

    Raises:
        InvalidRequestError: there is no such file, or one of its fields is unknown, missing or out of range.
    """
    known = names_in(FOLDER)
    path = FOLDER / f"{text}.yaml" if text in known else Path(text)
    return load("placement", text, path, read_placement, f"names are {', '.join(known)}")


def read_placement(found: Any) -> Placement:
    """Read the placement that a mapping describes. Raise InvalidRequestError if it is invalid."""
    if not isinstance(found, Mapping):
        raise InvalidRequestError("the file must be a mapping")
    values = dict(found)
    given = {name: values.pop(name, None) for name in OPERATIONS}
    chips = {name: _operation(name, value) for name, value in given.items() if value is not None}
    overrides = values.pop("overrides", None) or []
    if not isinstance(overrides, list) or not all(map(_is_override, overrides)):
        raise InvalidRequestError("overrides must be a list of {pattern, chips}, the pattern a text like layers.3.*")
    own = {item.name for item in fields(Placement)} - {"chips_of", "overrides", "head_pad"}
    if unknown := [str(name) for name in values if name not in own]:
        raise InvalidRequestError(f"unknown field {', '.join(unknown)}; known are {', '.join(sorted(own))}")
    if missing := [name for name in ("attention", "mlp") if name not in chips]:
        raise InvalidRequestError(f"{', '.join(missing)} must be given, like {{chips: 0-15}}")
    for name, high in COUNTS.items():
        if values.get(name) is not None:
            values[name] = whole(name, values[name], 0 if name in OPTIONAL_COUNTS else 1, high)
        elif name not in OPTIONAL_COUNTS:
            raise InvalidRequestError(f"{name} must be given")
    check_choice("weights", values.get("weights", STREAMED), (STREAMED, RESIDENT))
    check_choice("cache_type", values.setdefault("cache_type", "bfloat16"), tuple(ELEMENT_BYTES))
    return Placement(
        **values,
        chips_of={name: numbers for name, (numbers, _) in chips.items()},
        head_pad=chips["lm_head"][1] if "lm_head" in chips else 0,
        overrides=tuple((item["pattern"], _chips("overrides", item["chips"])) for item in overrides),
    )


def _operation(name: str, found: Any) -> tuple[tuple[int, ...], int]:
    """Read the chips of an operation, and the padding of the head."""
    allowed = {"chips", "pad"} if name == "lm_head" else {"chips"}
    if not isinstance(found, Mapping) or not set(found) <= allowed:
        raise fail(name, found, f"a mapping of {', '.join(sorted(allowed))}")
    pad = whole("lm_head.pad", found["pad"], 0, MAX_TOKENS) if found.get("pad") is not None else 0
    return _chips(name, found.get("chips")), pad


def _is_override(found: Any) -> bool:
    return isinstance(found, Mapping) and set(found) == {"pattern", "chips"} and isinstance(found["pattern"], str)


def _chips(name: str, found: Any) -> tuple[int, ...]:
    """Parse chip numbers such as 0-15 or 3,5-7."""
    numbers: set[int] = set()
    for word in str(found).split(","):
        match = RANGE.fullmatch(word.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < MAX_CHIPS:
            raise fail(f"{name}.chips", found, f"chips like 0-15 or 3,5-7, each below {MAX_CHIPS}")
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))
