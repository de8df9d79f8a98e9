"""Write docs/which_model.md: the precision, memory and speed of common models on four machines, as planned.

    python tools/model_table.py          compare the page with what it should be
    python tools/model_table.py --write  write it

The shapes of the models are in tools/common_models.yaml, the machines in penstock_lab/planner/hardware. For each pair,
the first of bfloat16, int8 and int4 is taken that fits, as `penstock run` does, and planned as by `penstock plan`.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from penstock import EngineConfig  # noqa: E402
from penstock_lab.cli.hardware import ENGINE_RUNTIME  # noqa: E402
from penstock_lab.planner.fit import Budget  # noqa: E402
from penstock_lab.planner.forecast import Forecaster, Load, as_json  # noqa: E402
from penstock_lab.planner.machines import Hardware, load_hardware  # noqa: E402
from penstock_lab.planner.planned import PlannedModel  # noqa: E402
from penstock_lab.planner.report import fitter_of  # noqa: E402
from tools import written_page  # noqa: E402

MODELS = ROOT / "tools" / "common_models.yaml"
PAGE = ROOT / "docs" / "which_model.md"
MACHINES = ("laptop-7840u", "desktop-7950x", "zen4-epyc-9654", "sapphire-rapids-8480")
PRECISIONS = (None, "int8", "int4")
CONTEXT, FILLED = 8192, 1024  # tokens of the cache, and of a conversation whose next token is timed
THREADS = 8  # only the size of small buffers depends on it
GIB = 2**30
HEAD = f"""\
# Which model on which machine

What `penstock plan` predicts for one conversation: the first of bfloat16, int8 and int4 that fits, the memory of the
whole engine with a context of {CONTEXT:,} tokens (or all that the model has), and the tokens per second with
{FILLED:,} tokens in the context. `tools/model_table.py` writes this page from the shapes of the models
(`tools/common_models.yaml`) and the data sheets of the machines.

The speeds are those of the memory: each token reads the weights once. They are upper limits from published peak rates;
[Performance](performance.md) has what was measured, and `penstock bench machine` measures your own machine, for
`penstock plan`. Where bfloat16 fits, int8 and int4 are still about twice and four times as fast.

"""
TAIL = """
"-" does not fit. The system and other programs keep some of the memory: a model may have 12 GB of the laptop's 16 and
56 GB of the desktop's 64.

<!-- not run: needs the hub -->
```console
$ penstock run qwen3:8b --quantization int4        # smaller and faster than what would be chosen
$ penstock plan Qwen/Qwen3-8B --hardware desktop-7950x --batch 1 8 --quantization int8
```
"""


def models() -> list[dict[str, Any]]:
    """Read the models, each with its name and its config.json."""
    return list(yaml.safe_load(MODELS.read_text(encoding="utf-8"))["models"])


def plans(config: dict[str, Any], machines: list[Hardware]) -> Iterator[dict[str, Any] | None]:
    """Yield the best plan of a model on each machine: precision, bytes and tokens_per_s; None if none fits."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        length = min(CONTEXT, config["max_position_embeddings"])
        options = {"model": folder, "max_num_seqs": 1, "max_model_len": length, "threads": THREADS}
        planned = {
            precision: PlannedModel.read(EngineConfig.from_options(**options, quantization=precision))
            for precision in PRECISIONS
        }
        for machine in machines:
            found = ((precision, _plan(model, machine)) for precision, model in planned.items())
            yield next((plan | {"precision": precision or "bfloat16"} for precision, plan in found if plan), None)


def _plan(model: PlannedModel, machine: Hardware) -> dict[str, Any] | None:
    """Plan a model at one precision; None if it does not fit."""
    fit = fitter_of(model, Budget(int(machine.memory_bytes), ENGINE_RUNTIME)).fit()
    if not fit.fits:
        return None
    forecaster = Forecaster(model.model, model.sizes, machine, model.formats)
    rows = as_json(forecaster.predict(fit, Load((1,), (FILLED,), (FILLED,))))
    decode = next(item for item in rows if item["phase"] == "decode")
    return {"bytes": fit.devices[0].total_bytes, "tokens_per_s": decode["tokens_per_s"]}


def row(model: dict[str, Any], machines: list[Hardware]) -> str:
    """Write the line of one model."""
    cells = [
        "-" if plan is None else f"{plan['precision']}, {plan['bytes'] / GIB:.1f} GiB, {_speed(plan['tokens_per_s'])}/s"
        for plan in plans(model["config"], machines)
    ]
    return f"| {model['name']} | {' | '.join(cells)} |\n"


def _speed(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f}" if tokens_per_s >= 10 else f"{tokens_per_s:.1f}"


def head(machines: list[Hardware]) -> str:
    names = " | ".join(f"`{machine.name}`" for machine in machines)
    return f"{HEAD}| model | {names} |\n|---{'|---' * len(machines)}|\n"


def page() -> str:
    """Write the whole page."""
    machines = [load_hardware(name) for name in MACHINES]
    return head(machines) + "".join(row(model, machines) for model in models()) + TAIL


if __name__ == "__main__":
    sys.exit(written_page.main(__doc__, PAGE, page))
