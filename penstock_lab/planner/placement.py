"""Placement: which chips compute which part of a model, in epochs, and whether their memory suffices. No torch.

Each layer is an epoch (Tenstorrent's Falcon-40B: 60 layers in 60 consecutive epochs); the head, if it is on the device,
is the last epoch. In an epoch, a chip's SRAM holds its part of the layer's cache and either its part of the weights
(`resident`) or a buffer that they pass through (`streamed`, from the chip's DRAM, which holds the weights of all
epochs). `load_placement` reads a placement from a YAML file; docs/planning.md has its fields.
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
        overrides: pattern of an operation's name ("layers.3.mlp") -> its chips; the last match counts.
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
        kind = name.rpartition(".")[2]
        found = self.chips_of.get(kind, ())
        for pattern, chips in self.overrides:
            if fnmatch.fnmatchcase(name, pattern):
                found = chips
        return found


def operation_of(parameter: str) -> str | None:
    """Find the operation to which a parameter belongs, by its name; None for the embedding and the final norm."""
    if parameter.startswith("lm_head."):
        return "lm_head"
    found = LAYER.search(parameter)
    branch = "mlp" if ".mlp." in parameter else "attention"
    return None if found is None else f"layers.{found[1]}.{branch}"


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
                kind, chips = operation.name.rpartition(".")[2], list(operation.chips)
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

    weights: bytes of one layer's attention, of its mlp, of the padded head, and of what stays on the host (see
        `operation_bytes`).
    """
    element = ELEMENT_BYTES[placement.cache_type]
    key = placement.rows * placement.context * model.num_key_value_heads * model.head_dim * element
    epochs: list[tuple[Operation, ...]] = []
    for layer in range(model.num_hidden_layers):
        name = f"layers.{layer}"
        attention, mlp = placement.where(f"{name}.attention"), placement.where(f"{name}.mlp")
        epochs.append(
            (
                Operation(f"{name}.attention", attention, weights["attention"], 2 * key),
                Operation(f"{name}.mlp", mlp, weights["mlp"]),
            )
        )
    if head := placement.where("lm_head"):
        epochs.append((Operation("lm_head", head, weights["lm_head"]),))
    known = tuple(tuple(operation for operation in epoch if operation.chips) for epoch in epochs)
    problems = tuple(_problems(placement, epochs, known))
    return PlacementPlan(placement, known, key, model.num_hidden_layers, problems, weights.get("host", 0))


def _problems(
    placement: Placement, epochs: Sequence[tuple[Operation, ...]], known: tuple[tuple[Operation, ...], ...]
) -> Iterator[str]:
    """Yield why a placement is not possible: the first problem of each kind, with the operation and the chip."""
    operations = [operation for epoch in epochs for operation in epoch]
    for pattern, _ in placement.overrides:
        if not any(fnmatch.fnmatchcase(operation.name, pattern) for operation in operations):
            known_names = f"{operations[0].name} to {operations[-1].name}"
            yield f"overrides: the pattern {pattern} matches no operation; they are {known_names}"
    for operation in operations:
        if not operation.chips:
            yield f"{operation.name} is on no chip"
            break
        if (high := max(operation.chips)) >= placement.chips:
            yield f"{operation.name}: there is no chip {high}, only 0 to {placement.chips - 1}"
            return
    for epoch in known:
        counts = Counter(chip for operation in epoch for chip in operation.chips)
        if shared := [chip for chip, count in counts.items() if count > 1]:
            names = [operation.name for operation in epoch if shared[0] in operation.chips]
            yield f"{' and '.join(names)} overlap on chip {shared[0]}"
            break
    yield from _over_budget(placement, known)


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
    """Count the bytes of a layer's attention and mlp in bfloat16, of the head with `pad` more tokens, and of what stays
    on the host.

    shapes: the shapes of the parameters of layer 0, by operation, and of the "host".
    """
    found = {name: WEIGHT_BYTES * sum(_size(shape) for shape in own) for name, own in shapes.items()}
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
