"""The map of docs/ARCHITECTURE.md: who may import whom, what must never bring torch in, and how large things may grow.

Read from the source by tools/structure.py, so that an import inside a function counts as much as one at the top.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tools import structure

# What each room may import. Nothing points up, because the rooms are listed from the ground up and a room may name only
# rooms above its own line. Whoever needs a new arrow writes it here, and first asks whether it can be done without.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "demo": set(),
    "interface": {"errors"},
    "plugins": {"errors"},
    "tokenizer": {"errors", "interface"},
    "kernels": {"errors"},
    "engine": {"errors", "interface", "plugins"},
    "spec": {"errors", "interface"},
    "parallel": {"errors", "interface", "kernels", "spec"},
    "config": {"errors", "interface", "kernels", "spec"},
    "recorder": {"config", "engine", "errors", "interface"},
    "layers": {"errors", "kernels", "spec"},
    "conventions": {"errors", "kernels", "layers", "spec"},
    "planner": {"config", "engine", "errors", "interface", "kernels", "spec"},
    "runner": {"config", "errors", "interface", "kernels", "layers", "planner", "plugins", "spec"},
    "models": {"conventions", "errors", "layers", "spec"},
    "weights": {"config", "conventions", "demo", "errors", "kernels", "layers", "models", "planner", "plugins",
                "spec"},
    "assembly": {"config", "engine", "errors", "interface", "kernels", "layers", "models", "parallel", "planner",
                 "plugins", "runner", "spec", "tokenizer", "weights"},
    "client": {"assembly", "config", "engine", "errors", "interface", "parallel", "plugins", "recorder", "runner",
               "tokenizer", "weights"},
    "bench": {"assembly", "client", "config", "demo", "engine", "errors", "interface", "kernels", "layers", "models",
              "planner", "recorder", "runner", "spec", "tokenizer", "weights"},
    "compat": {"client", "config", "conventions", "errors", "interface", "models", "plugins", "spec"},
    "__init__": {"client", "config", "errors", "interface", "models", "plugins"},
    "server": {"__init__", "client", "errors", "interface", "tokenizer"},
    "check": {"__init__", "assembly", "client", "config", "engine", "errors", "interface", "kernels", "layers",
              "models", "planner", "spec", "weights"},
    "ray_app": {"client", "errors", "interface", "parallel", "server"},
    "prove": {"assembly", "client", "config", "demo", "engine", "errors", "interface", "kernels",
              "models", "parallel", "planner", "plugins", "ray_app", "recorder", "runner", "server", "spec",
              "tokenizer", "weights"},
    "cli": {"__init__", "bench", "check", "client", "config", "errors", "interface", "kernels", "planner",
            "plugins", "prove", "ray_app", "recorder", "server", "tokenizer", "weights"},
    "__main__": {"cli"},
}  # fmt: skip
MAX_ROOMS, MAX_ARROWS = 29, 179
OF_A_DOCUMENT = "penstock_lab/conventions/"  # argument lists that other projects' documents prescribe
STANDARD_LIBRARY_ONLY = ("errors", "interface", "config", "engine", "kernels/scheme.py")
TORCH_FREE = ("bench/simulator", "client", "cli", "config", "engine", "interface", "planner", "plugins", "recorder",
              "server", "spec", "tokenizer")  # fmt: skip
IMPORTED_WITHOUT_TORCH = [
    "penstock",
    "penstock.config",
    "penstock.models.config_json",
    "penstock.models.registry",
    "penstock.models.certificate",
    "penstock.spec.param_table",
    "penstock.ranks.sharding_map",
    "penstock.weights.table_template",
    "penstock.engine.engine",
    "penstock.planner.memory",
    "penstock.client.engine_process",
    "penstock.client.async_llm",
    "penstock.server.serve",
    "penstock.cli.main",
    "penstock.cli.serve",
    "penstock_lab.cli.check",
    "penstock_lab.cli.plan",
    "penstock.assembly",
    "penstock.kernels.cpu.ops",
    "penstock.models.llama.model",
    "penstock.runner.model_runner",
    "penstock.weights.convert",
    "penstock_lab.simulator.report",
    "penstock_lab.simulator.run",
]


def foreign_packages(place: str) -> dict[Path, set[str]]:
    """Top-level packages other than our own that each file of a room, or one file, imports."""
    target = structure.PACKAGE / place
    if not target.exists():
        target = structure.PACKAGE / f"{place}.py"
    files = target.rglob("*.py") if target.is_dir() else [target]
    return {file: {name.split(".")[0] for name in structure.imported_names(file)} - {"penstock"} for file in files}


def test_arrows_are_on_the_map() -> None:
    """Guards against an import that nobody decided on. An arrow that is gone is struck from the map too."""
    drawn: dict[str, set[str]] = {}
    for room, target in structure.find_arrows():
        drawn.setdefault(room, set()).add(target)
    assert drawn == {room: targets for room, targets in ALLOWED.items() if targets}


def test_arrows_point_down() -> None:
    """Guards against an arrow up, and so against circles, which the list above could hide."""
    below: set[str] = set()
    for room, targets in ALLOWED.items():
        assert targets <= below, f"{room} points up to {targets - below}"
        below.add(room)
    assert structure.find_circles(structure.find_arrows()) == []


def test_there_are_few_rooms_and_short_functions() -> None:
    """Guards against slow growth: `make structure` prints the figures."""
    figures = structure.measure()
    assert figures["rooms"] <= MAX_ROOMS
    assert figures["arrows"] <= MAX_ARROWS
    assert figures[f"functions over {structure.LONG_FUNCTION} lines"] == {}
    wide = figures[f"signatures over {structure.WIDE_SIGNATURE} parameters"]
    assert [place for place in wide if not place.startswith(OF_A_DOCUMENT)] == []


@pytest.mark.parametrize("place", STANDARD_LIBRARY_ONLY)
def test_the_core_needs_the_standard_library_only(place: str) -> None:
    for file, names in foreign_packages(place).items():
        assert names <= set(sys.stdlib_module_names), file


@pytest.mark.parametrize("room", TORCH_FREE)
def test_no_torch_above_the_runner(room: str) -> None:
    for file, names in foreign_packages(room).items():
        assert not names & {"torch", "transformers"}, file


def test_only_the_check_and_the_demos_training_import_transformers() -> None:
    guilty = {file for file, names in foreign_packages(".").items() if "transformers" in names}
    others = {str(file.relative_to(structure.PACKAGE)) for file in guilty if structure.room_of(file) != "demo"}
    assert others <= {"check/twin.py"}


@pytest.mark.parametrize("module", IMPORTED_WITHOUT_TORCH)
def test_imports_with_torch_blocked(module: str) -> None:
    """In a process of its own, where importing torch or transformers raises."""
    script = (
        "import sys\nsys.modules['torch'] = None\nsys.modules['transformers'] = None\n"
        f"import importlib\nimportlib.import_module({module!r})\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=structure.ROOT)


def test_the_public_names_are_exactly_the_surface() -> None:
    """Every name of __all__ exists, and nothing else is promised."""
    import penstock

    for name in penstock.__all__:
        assert getattr(penstock, name) is not None
    assert set(penstock._HOMES) | {"__version__"} == set(penstock.__all__)
    with pytest.raises(AttributeError):
        penstock.nothing  # noqa: B018
