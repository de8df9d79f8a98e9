"""What a model's windows, prompts and stages mean, as numbers and as pictures made of characters. No torch.

    receptive field   how far the last token sees through the layers so far: N layers of windows W reach N (W - 1) + 1
    masks             prompts packed into one row, chunks of a prompt against the cache, a decoded token
    tiles             what attention computes of a text, and what it skips
    padding           the dot products of prompts that are padded, and of packed ones
    pipeline          which micro-batch each stage computes when, and the share of the time in which stages are idle

Everything is computed by the rules that the engine follows: `first_seen` and `split_layers` are its own.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from penstock.kernels.attention.items import TILE, first_seen
from penstock.kernels.tensors import Array
from penstock.ranks.stage import split_layers
from penstock.spec.model_config import ModelConfig

PROMPT_LENS = (3, 4, 5)
SMALL_WINDOW = 4  # of the masks, if the model's is too wide to draw
WIDEST_WINDOW = 8
CELLS = 32  # the most cells of a picture of tiles on a side
TEXT, LONGEST_TEXT = 1024, 16384  # tokens of that picture: without a window, and at most
SEEN, HIDDEN = "x", "."
WHOLE, PARTLY, SKIPPED = "#", "/", "."
BATCHES = (1, 2, 4, 8, 16, 32)  # micro-batches whose bubbles are compared


@dataclass(frozen=True, slots=True)
class Reach:
    """One line of the table of the receptive field.

    Attributes:
        layer: from 1 on.
        window: the tokens that a token sees in this layer, itself included; None: all.
        reach: the tokens that it sees through this layer and those below, without sink tokens; None: all.
    """

    layer: int
    window: int | None
    reach: int | None


@dataclass(frozen=True, slots=True)
class Example:
    """The prompts, the chunk and the pipeline of which pictures are drawn beside the table.

    Attributes:
        prompt_lens: tokens of each prompt.
        chunk: tokens of a chunk; None: as many as the drawn window has.
        stages, micro_batches: of the pipeline; None: four stages, and as many micro-batches as stages.
    """

    prompt_lens: tuple[int, ...] = PROMPT_LENS
    chunk: int | None = None
    stages: int | None = None
    micro_batches: int | None = None


def receptive_field(windows: Sequence[int | None], *, chunked: bool = False) -> list[Reach]:
    """Compute how far the last token of a text sees, layer by layer. chunked: windows are chunks of the text, which no
    layer leaves, so that it sees at most one."""
    found, reach = [], 1
    everything = False
    for layer, window in enumerate(windows, 1):
        everything = everything or window is None
        if window is not None:
            reach = max(reach, window) if chunked else reach + window - 1
        found.append(Reach(layer, window, None if everything else reach))
    return found


def mask(queries: Array, keys: Array, window: int | None, *, sinks: int = 0, chunked: bool = False) -> Array:
    """Decide which of the query positions [n] sees which of the key positions [S], as [n, S] bool."""
    at, key = queries[:, None], keys[None]
    if window is None:
        return key <= at
    return (key <= at) & ((key >= first_seen(at, window, chunked=chunked)) | (key < sinks))


def explain(model: ModelConfig, example: Example) -> dict[str, Any]:
    """Compute everything, as JSON."""
    windows = sorted({window for window in model.layer_windows if window is not None})
    drawn = None if not windows else windows[0] if windows[0] <= WIDEST_WINDOW else SMALL_WINDOW
    stages = min(example.stages or 4, model.num_hidden_layers)
    rules = {"chunked": model.chunked_windows, "sinks": model.num_sink_tokens}
    return {
        "architecture": model.architecture,
        "layers": model.num_hidden_layers,
        "context": model.context,
        "num_sink_tokens": model.num_sink_tokens,
        "chunked": model.chunked_windows,
        "receptive_field": [asdict(row) for row in receptive_field(model.layer_windows, chunked=model.chunked_windows)],
        "drawn_window": drawn,
        "packed": _packed(example.prompt_lens, drawn, rules),
        "padding": _padding(example.prompt_lens, drawn, rules),
        "chunks": _chunks(example.chunk or drawn or SMALL_WINDOW, drawn, rules),
        "tiles": [_tiles(model, window, rules) for window in dict.fromkeys(model.layer_windows)],
        "pipeline": _pipeline(model.num_hidden_layers, stages, example.micro_batches or stages),
    }


def _drawn(seen: Array) -> list[str]:
    return ["".join(SEEN if item else HIDDEN for item in row) for row in seen]


def _packed(lens: Sequence[int], window: int | None, rules: dict[str, Any]) -> list[str]:
    """Draw the mask of prompts in one row: each token sees its own prompt only."""
    prompt = np.repeat(np.arange(len(lens)), lens)
    at = np.concatenate([np.arange(length) for length in lens])
    return _drawn(mask(at, at, window, **rules) & (prompt[:, None] == prompt[None]))


def _padding(lens: Sequence[int], window: int | None, rules: dict[str, Any]) -> dict[str, int]:
    """Count the dot products of a query and a key: of padded squares, of packed prompts, and of those in a window."""
    packed, seen = ((_packed(lens, item, rules)) for item in (None, window))
    counts = [sum(row.count(SEEN) for row in rows) for rows in (packed, seen)]
    return {"padded": len(lens) * max(lens) ** 2, "packed": counts[0], "in_window": counts[1]}


def _chunks(chunk: int, window: int | None, rules: dict[str, Any]) -> list[dict[str, Any]]:
    """Draw the masks of a prompt in three chunks, the last of which is one token shorter, and of the token after it.

    The keys of a chunk are those that the cache still holds, the last `window` ones, and its own.
    """
    length, found = 3 * chunk - 1, []
    for start in (*range(0, length, chunk), length):
        end = min(start + chunk, length) if start < length else length + 1
        held = start if window is None else min(start, window - (end - start == 1))
        keys = np.arange(start - held, end)
        rows = _drawn(mask(np.arange(start, end), keys, window, **rules))
        found.append({"tokens": [start, end], "cached": held, "mask": rows})
    return found


def _tiles(model: ModelConfig, window: int | None, rules: dict[str, Any]) -> dict[str, Any]:
    """Draw which tiles of a text a layer with this window computes. A cell is one tile, or a square of several."""
    tokens = min(model.context, LONGEST_TEXT, TEXT if window is None else max(TEXT, 2 * window))
    side = -(-tokens // TILE)
    cell = -(-side // CELLS)
    marks = np.array([[_tile(query, key, window, rules) for key in range(side)] for query in range(side)])
    picture = [
        "".join(_cell(marks[row : row + cell, column : column + cell]) for column in range(0, side, cell))
        for row in range(0, side, cell)
    ]
    computed = int((marks != SKIPPED).sum())
    return {"window": window, "tokens": tokens, "cell": cell * TILE, "picture": picture, "computed": computed,
            "all": side * side}  # fmt: skip


def _tile(query: int, key: int, window: int | None, rules: dict[str, Any]) -> str:
    """Decide how much of a tile of queries and a tile of keys is seen. No query is before the one before it, and none
    begins to see earlier than that one."""
    if key > query:
        return SKIPPED
    if window is None or (key + 1) * TILE <= rules["sinks"]:
        return WHOLE if key < query else PARTLY
    first, last = (first_seen(at, window, chunked=rules["chunked"]) for at in (query * TILE, query * TILE + TILE - 1))
    if key < query and last <= key * TILE:
        return WHOLE
    return PARTLY if key == query or first < (key + 1) * TILE or key * TILE < rules["sinks"] else SKIPPED


def _cell(marks: Array) -> str:
    found = {str(item) for item in marks.ravel()}
    return found.pop() if len(found) == 1 else PARTLY


def _pipeline(num_layers: int, stages: int, micro_batches: int) -> dict[str, Any]:
    """Draw which micro-batch each stage computes in each unit of time, when a batch passes through once."""
    units = stages + micro_batches - 1
    lines = []
    for stage, layers in enumerate(split_layers(num_layers, stages)):
        order = [str(unit - stage) if 0 <= unit - stage < micro_batches else "-" for unit in range(units)]
        lines.append({"layers": [layers.start + 1, layers.stop], "micro_batches": order})
    bubbles = {str(count): (stages - 1) / (count + stages - 1) for count in sorted({*BATCHES, micro_batches})}
    return {"stages": lines, "units": units, "bubble": bubbles[str(micro_batches)], "bubbles": bubbles}


def as_text(name: str, found: dict[str, Any]) -> str:
    """Write what `explain` has computed."""
    lines = [f"{name}: {found['architecture']}, {found['layers']} layers, a context of {found['context']} tokens"]
    if found["num_sink_tokens"]:
        lines.append(f"every token also sees the first {found['num_sink_tokens']}")
    lines += ["", "receptive field: the tokens that the last token sees through its layers, itself included"]
    lines += [f"{'layer':>5} {'window':>8} {'reach':>8}"]
    for row in found["receptive_field"]:
        window, reach = (row[key] or "all" for key in ("window", "reach"))
        lines.append(f"{row['layer']:5} {window:>8} {reach:>8}")
    if found["chunked"]:
        lines.append("windows are chunks of the text, which no layer leaves: these are the most that a token sees")
    drawn = found["drawn_window"]
    narrowed = drawn is not None and all(row["window"] != drawn for row in found["receptive_field"])
    of_model = ", as the model's is too wide to draw" if narrowed else ""
    with_window = f"; a window of {drawn}{of_model}" if drawn else ""
    lines += ["", f"prompts packed without padding: {SEEN} is seen, {HIDDEN} is not{with_window}"]
    lines += ["a row is a token, a column a token that it may see", *found["packed"]]
    padding = found["padding"]
    waste = padding["padded"] - padding["packed"]
    lines += ["", f"dot products: {padding['padded']} padded, {padding['packed']} packed, {waste} wasted"]
    if drawn:
        lines.append(f"in the window: {padding['in_window']}")
    length = found["chunks"][-1]["tokens"][0]
    lines += ["", f"a prompt of {length} tokens in chunks, and the next token: columns are cached, then new tokens"]
    for item in found["chunks"]:
        (start, end), cached = item["tokens"], item["cached"]
        what = f"tokens {start} to {end - 1}" if end - start > 1 else f"token {start}"
        size = f"{len(item['mask'])} x {len(item['mask'][0])}"
        lines += ["", f"{what}, with {cached} cached ones: {size}", *item["mask"]]
    for item in found["tiles"]:
        kind = f"a window of {item['window']}" if item["window"] else "no window"
        lines += ["", f"{item['tokens']} tokens and {kind}: {item['computed']} of {item['all']} tiles are computed"]
        marks = f"{WHOLE} seen, {PARTLY} in part, {SKIPPED} skipped"
        lines += [f"a cell has {item['cell']} x {item['cell']} tokens, queries down and keys across: {marks}"]
        lines += item["picture"]
    return "\n".join([*lines, "", *_pipeline_text(found["pipeline"])]) + "\n"


def _pipeline_text(found: dict[str, Any]) -> list[str]:
    width = max(len(word) for line in found["stages"] for word in line["micro_batches"])
    lines = ["pipeline: the micro-batch that each stage computes, unit of time by unit of time; - is idle"]
    for index, line in enumerate(found["stages"], 1):
        first, last = line["layers"]
        words = " ".join(word.rjust(width) for word in line["micro_batches"])
        name = f"layer {first}" if first == last else f"layers {first} to {last}"
        lines.append(f"stage {index}, {name}:".ljust(28) + words)
    lines.append(f"idle: {found['bubble']:.1%} of the time, (P - 1) / (M + P - 1) with P stages and M micro-batches")
    return [*lines, "idle by M: " + ", ".join(f"{count}: {share:.1%}" for count, share in found["bubbles"].items())]
