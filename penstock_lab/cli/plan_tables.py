"""Print the figures of `penstock plan` as tables."""

from itertools import accumulate
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock_lab.planner.machines import size_text

MIB = 2**20
TIME_UNITS = ((1, "s"), (1e3, "ms"), (1e6, "µs"))
UNITS = ((2**30, "GiB"), (MIB, "MiB"), (2**10, "KiB"))


def print_plan(model: str, result: dict[str, Any]) -> None:
    """Print the memory and the largest sizes, and the times, placement and operator if the plan has them."""
    console = Console()
    parts, stages = result["tensor_parallel_size"], result["pipeline_parallel_size"]
    verdict = "it fits" if result["fits"] else "it does not fit"
    length = result["max_model_len"]
    split = f", split over {parts}" if parts > 1 else ""
    split += f", in {stages} stages" if stages > 1 else ""
    console.print(f"{model} on {result['hardware']}{split}: {verdict}, max_model_len = {length}", highlight=False)
    if result["smallest_change"]:
        console.print(f"with {result['smallest_change']} it would fit", highlight=False)
    elif any(device["total_bytes"] > device["budget_bytes"] for device in result["devices"]):
        console.print("no single change makes it fit; what would fit is below", highlight=False)
    _print_devices(console, result)
    weights = ", ".join(f"{name} {size_text(size)}" for name, size in result["weights"].items())
    console.print(f"weights: {weights}; cache: {result['cache_bytes_per_token']} bytes per token", highlight=False)
    _print_largest(console, result["largest"])
    if result["predictions"]:
        _print_times(console, result)
    if "placement" in result:
        _print_placement(console, result["placement"])
    if "run" in result:
        _print_run(console, result["run"])
    if "operator" in result:
        _print_operator(console, result["operator"])


def _print_devices(console: Console, result: dict[str, Any]) -> None:
    table = Table("", *(name for name in ("weights", "cache", "workspace", "runtime", "total", "budget")))
    for device in result["devices"]:
        names = ("weights", "cache", "workspace", "runtime", "total", "budget")
        table.add_row(device["name"], *(size_text(device[f"{name}_bytes"]) for name in names))
    console.print(table)


def _print_largest(console: Console, largest: list[dict[str, Any]]) -> None:
    table = Table("weights", "cache", "of weights", "longest context", "rows at max_model_len")
    for item in largest:
        weights = size_text(item["weights_bytes"])
        table.add_row(item["precision"], item["kv_cache_dtype"], weights, f"{item['context']}", f"{item['rows']}")
    console.print(table)


def _print_times(console: Console, result: dict[str, Any]) -> None:
    table = Table("phase", "batch", "tokens", "time", "tokens/s", "bound by")
    for item in result["predictions"]:
        table.add_row(item["phase"], f"{item['batch']}", f"{item['prompt_len'] or item['context']}", *_times(item))
    console.print(table)
    changed = Table("decode, if", "batch", "time", "tokens/s", "bound by")
    for name, found in result["what_if"].items():
        for item in found:
            changed.add_row(name, f"{item['batch']}", *_times(item))
    console.print(changed)


def _times(item: dict[str, Any]) -> tuple[str, str, str]:
    speed = item["tokens_per_s"]
    return _time_text(item["seconds"]), f"{speed:,.0f}" if speed >= 1000 else f"{speed:.4g}", item["bound"]


def _time_text(seconds: float) -> str:
    """Write a time with four significant digits in a suitable unit."""
    factor, unit = next((found for found in TIME_UNITS if seconds * found[0] >= 1), TIME_UNITS[-1])
    return f"{seconds * factor:.4g} {unit}"


def _print_placement(console: Console, found: dict[str, Any]) -> None:
    lines = [
        f"placement: {found['epochs']} epochs, one per layer; head {found['lm_head']}",
        f"cache: {found['key_bytes'] / MIB:g} MiB per K, {found['cache_bytes_per_layer'] / MIB:g} MiB per layer, "
        f"{found['cache_bytes'] / MIB:g} MiB in all",
        f"SRAM of the attention's chips: {found['sram_bytes'] / MIB:g} MiB; at most "
        f"{found['peak_sram_bytes_per_chip'] / MIB:.1f} MiB of a chip in an epoch, "
        f"{size_text(found['peak_dram_bytes_per_chip'])} of its DRAM",
        f"weights: {found['weight_bytes'] / 1e9:.1f} GB, {found['weight_bytes_per_layer'] / 1e9:.2f} GB per layer "
        f"({found['chip_weight_bytes'] / 1e9:.1f} GB on the chips), "
        f"{found['streamed_bytes_per_token'] / 1e9:.1f} GB streamed per token",
    ]
    lines += [f"it is impossible: {problem}" for problem in found["problems"]]
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


def _print_run(console: Console, found: dict[str, Any]) -> None:
    """Print what the simulated chips computed. Chips with equal memory use share a line, which shows their maxima."""
    verdict = "equal to" if found["equal"] else "NOT EQUAL to"
    console.print(
        f"computed at hidden size {found['hidden_size']}, {found['rows']} rows of {found['context']} tokens: "
        f"{found['tokens']} tokens in {found['steps']} steps of {found['epochs']} epochs, {verdict} a run without "
        f"chips; {1e3 * found['seconds']:.3f} ms simulated",
        highlight=False,
        soft_wrap=True,
    )
    counts = ("peak_sram_bytes", "peak_dram_bytes", "streamed", "received", "from_host", "to_host")
    table = Table("chips", "SRAM", "DRAM", "streamed", "received", "from host", "to host", "busy")
    alike: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for chip in found["chips"]:
        alike.setdefault((chip["peak_sram_bytes"], chip["peak_dram_bytes"]), []).append(chip)
    for chips in alike.values():
        most = (_short(max(chip[name] for chip in chips)) for name in counts)
        busy = f"{1e3 * max(chip['busy_seconds'] for chip in chips):.3f} ms"
        table.add_row(_numbers([chip["chip"] for chip in chips]), *most, busy)
    console.print(table)


def _short(size: int) -> str:
    unit, name = next(((unit, name) for unit, name in UNITS if size >= unit), (1, "B"))
    return f"{size / unit:.3g} {name}"


def _numbers(chips: list[int]) -> str:
    """Shorten ascending numbers to a text like 0-15, 20."""
    runs: list[list[int]] = []
    for chip in chips:
        if runs and chip == runs[-1][-1] + 1:
            runs[-1].append(chip)
        else:
            runs.append([chip])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _print_operator(console: Console, found: dict[str, Any]) -> None:
    tiles = found["tiles"]
    console.print(
        f"attention operator: {found['unified_buffer_bytes']} of {found['buffer_bytes']} bytes of unified buffer, "
        f"tiles of {tiles['keys']} keys, {tiles['rows']} rows at once in {tiles['portions']} portions",
        highlight=False,
        soft_wrap=True,
    )
    table = Table("units", "tiles", "matrix us", "vector us", "us of one head")
    for item in found["schedules"]:
        times = (f"{1e6 * item[name]:.2f}" for name in ("matrix_seconds", "vector_seconds", "seconds"))
        table.add_row(item["mode"], f"{item['tiles']}", *times)
    console.print(table)
    table, blocks = Table("block of the unified buffer", "bytes", "ends at"), found["unified_buffer"]
    for name, end in zip(blocks, accumulate(blocks.values()), strict=True):
        table.add_row(name, f"{blocks[name]}", f"{end}")
    console.print(table)
    if found["tilings"]:
        console.print(_tilings(found["tilings"]))


def _tilings(tilings: list[dict[str, Any]]) -> Table:
    """Make the table of what the operator decides for each batch, and of the bytes of its workspace."""
    table = Table("streams", *(f"{item['batch']}" for item in tilings))
    for name in ("key", "perf_mode", "splits", "split_size", "keys"):
        table.add_row(name, *(f"{item[name]}" for item in tilings))
    for name in tilings[0]["workspace"]:
        table.add_row(name, *(f"{item['workspace'][name]}" for item in tilings))
    advice = [item["advice"] for item in tilings]
    if any(advice):
        table.add_row("advice", *advice)
    return table
