"""The map of docs/ARCHITECTURE.md: who may import whom, what must never bring torch in, and how large things may grow.

Read from the source by tools/structure.py, so that an import inside a function counts as much as one at the top.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import structure

# What each room may import. Nothing points up, because the rooms are listed from the ground up and a room may name only
# rooms above its own line. Whoever needs a new arrow writes it here, and first asks whether it can be done without.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "interface": {"errors"},
    "kernels": {"errors"},
    "engine": {"errors", "interface"},
    "spec": {"errors", "interface"},
    "tokenizer": {"errors", "interface", "spec"},
    "config": {"errors", "interface", "kernels", "spec"},
    "layers": {"errors", "kernels", "spec"},
    "models": {"errors", "interface", "layers", "spec"},
    "runner": {"config", "errors", "interface", "kernels", "layers", "spec"},
    "weights": {"config", "errors", "kernels", "layers", "models", "spec"},
    "ranks": {"config", "errors", "interface", "kernels", "layers", "runner", "spec", "tokenizer", "weights"},
    "assembly": {"config", "engine", "errors", "interface", "kernels", "layers", "models", "ranks", "runner",
                 "spec", "tokenizer", "weights"},
    "client": {"assembly", "config", "engine", "errors", "interface", "ranks", "runner", "spec", "tokenizer",
               "weights"},
    "__init__": {"client", "config", "errors", "interface", "models", "tokenizer"},
    "server": {"__init__", "client", "errors", "interface", "tokenizer"},
    "cli": {"__init__", "assembly", "client", "config", "errors", "interface", "kernels", "models", "server", "spec",
            "tokenizer", "weights"},
    "__main__": {"cli"},
}  # fmt: skip
# The laboratory's rooms, in the same way, and the modules of the engine that they may import. Whoever opens another one
# writes it here, and first asks whether a public name, a seam or a listed module will do.
LAB_ALLOWED: dict[str, set[str]] = {
    "__init__": set(),
    "convert": set(),
    "mock": set(),
    "planner": set(),
    "ray_app": set(),
    "training": set(),
    "check": {"convert"},
    "chips": {"planner"},
    "conventions": {"chips", "planner"},
    "compat": {"conventions", "planner"},
    "bench": {"chips", "mock", "planner", "training"},
    "prove": {"bench", "convert", "mock", "ray_app", "training"},
    "simulator": {"bench", "planner"},
    "cli": {"bench", "check", "convert", "planner", "prove", "simulator"},
}  # fmt: skip
LAB_USES: set[str] = {
    "penstock",
    "penstock.assembly", "penstock.assembly.memory", "penstock.assembly.streaming",
    "penstock.cli.options", "penstock.cli.terminal",
    "penstock.client.adapters", "penstock.client.admission", "penstock.client.engine_client",
    "penstock.client.engine_handle", "penstock.client.frames", "penstock.client.input_processor",
    "penstock.client.open_requests",
    "penstock.client.process", "penstock.client.prompts", "penstock.client.recorder", "penstock.client.records",
    "penstock.client.step_client", "penstock.client.text", "penstock.client.turns",
    "penstock.config",
    "penstock.engine.adapters", "penstock.engine.block_pool", "penstock.engine.draft_policy",
    "penstock.engine.engine",
    "penstock.engine.kv_cache_manager", "penstock.engine.observer", "penstock.engine.policies",
    "penstock.engine.speculation",
    "penstock.errors",
    "penstock.interface.messages", "penstock.interface.plugins", "penstock.interface.step",
    "penstock.kernels.attention.items", "penstock.kernels.attention.plan", "penstock.kernels.backends",
    "penstock.kernels.coding", "penstock.kernels.cpu.calls", "penstock.kernels.cpu.host",
    "penstock.kernels.cpu.library",
    "penstock.kernels.cpu.ops", "penstock.kernels.cpu.packed", "penstock.kernels.metadata", "penstock.kernels.ops",
    "penstock.kernels.reference.attention", "penstock.kernels.reference.quantized_kv",
    "penstock.kernels.reference.quantized_weights", "penstock.kernels.sampling", "penstock.kernels.scheme",
    "penstock.kernels.tensors", "penstock.kernels.triton.device", "penstock.kernels.triton.sizes",
    "penstock.layers.decoder", "penstock.layers.factory", "penstock.layers.lora", "penstock.layers.module",
    "penstock.layers.swap",
    "penstock.layers.weights",
    "penstock.models.certificate", "penstock.models.config_json", "penstock.models.falcon.model",
    "penstock.models.registry",
    "penstock.ranks.build", "penstock.ranks.children", "penstock.ranks.group", "penstock.ranks.launcher",
    "penstock.ranks.layers", "penstock.ranks.links", "penstock.ranks.pipeline", "penstock.ranks.process",
    "penstock.ranks.sharding", "penstock.ranks.sharding_map", "penstock.ranks.stage",
    "penstock.runner.block_store", "penstock.runner.model_runner", "penstock.runner.sampler",
    "penstock.runner.structured",
    "penstock.server.app", "penstock.server.embeddings", "penstock.server.llama_cpp", "penstock.server.messages",
    "penstock.server.models", "penstock.server.ollama",
    "penstock.server.client_fields", "penstock.server.openai_requests",
    "penstock.server.options", "penstock.server.responses", "penstock.server.serve", "penstock.server.tokens",
    "penstock.spec.config_file", "penstock.spec.config_reader", "penstock.spec.generation_config",
    "penstock.spec.gguf", "penstock.spec.gguf_config",
    "penstock.spec.model_config", "penstock.spec.param_table", "penstock.spec.pooler",
    "penstock.tokenizer.answer_formats", "penstock.tokenizer.answers", "penstock.tokenizer.gguf",
    "penstock.tokenizer.hf",
    "penstock.tokenizer.tokenizer",
    "penstock.weights.adapters",
    "penstock.weights.hub", "penstock.weights.kv_scales", "penstock.weights.loader", "penstock.weights.packed",
    "penstock.weights.rows", "penstock.weights.safetensors", "penstock.weights.sources",
}  # fmt: skip
MOST = {"rooms": 18, "arrows": 100, "Python files": 270, "lines of code": 45_300}
OF_A_DOCUMENT = "penstock_lab/conventions/"  # argument lists that other projects' documents prescribe
TRITON = "penstock/kernels/triton/"  # a kernel gets every pointer, size and constant as an argument
STANDARD_LIBRARY_ONLY = ("errors", "interface", "config", "engine", "kernels/scheme.py")
TORCH_FREE = ("assembly/memory.py", "client", "cli", "config", "engine", "interface", "server", "spec", "tokenizer")
LAB_TORCH_FREE = ("cli", "planner", "simulator")
IMPORTED_WITHOUT_TORCH = [
    "penstock",
    "penstock.config",
    "penstock.models.config_json",
    "penstock.models.registry",
    "penstock.models.certificate",
    "penstock.spec.param_table",
    "penstock_lab.planner.table_template",
    "penstock.engine.engine",
    "penstock.client.engine_process",
    "penstock.client.async_llm",
    "penstock.server.serve",
    "penstock.cli.main",
    "penstock.cli.serve",
    "penstock.assembly",
    "penstock.kernels.cpu.ops",
    "penstock.models.llama.model",
    "penstock.runner.model_runner",
    "penstock_lab.cli.check",
    "penstock_lab.cli.plan",
    "penstock_lab.planner.report",
    "penstock_lab.simulator.report",
    "penstock_lab.simulator.run",
]
PAGES = [structure.ROOT / "README.md", structure.ROOT / "CONTRIBUTING.md", *(structure.ROOT / "docs").glob("*.md")]
NAMED_FILE = re.compile(r"`((?:[a-z0-9_]+/)+[a-z0-9_]+\.(?:py|h|cpp|yaml))`")
WHERE_FILES_ARE = ("", "penstock", "penstock_lab", "penstock/kernels", "penstock/kernels/cpu",
                   "penstock/kernels/cpu/native")  # fmt: skip


def foreign_packages(place: str, package: Path = structure.PACKAGE) -> dict[Path, set[str]]:
    """Top-level packages other than our own that each file of a room, or one file, imports."""
    target = package / place
    if not target.exists():
        target = package / f"{place}.py"
    files = target.rglob("*.py") if target.is_dir() else [target]
    return {file: {name.split(".")[0] for name in structure.imported_names(file)} - {"penstock"} for file in files}


@pytest.mark.parametrize(
    ("package", "allowed"), [(structure.PACKAGE, ALLOWED), (structure.LAB, LAB_ALLOWED)], ids=["penstock", "lab"]
)
def test_arrows_are_on_the_map_and_point_down(package: Path, allowed: dict[str, set[str]]) -> None:
    """Guards against an import that nobody decided on, and against circles. An arrow that is gone is struck from the
    map too."""
    arrows = structure.find_arrows(package)
    drawn: dict[str, set[str]] = {}
    for room, target in arrows:
        drawn.setdefault(room, set()).add(target)
    assert drawn == {room: targets for room, targets in allowed.items() if targets}
    below: set[str] = set()
    for room, targets in allowed.items():
        assert targets <= below, f"{room} points up to {targets - below}"
        below.add(room)
    assert structure.find_circles(arrows) == []
    assert structure.find_circles(structure.find_file_arrows(package)) == []


def test_the_engine_never_imports_the_laboratory() -> None:
    """Guards against a measurement or proof that serving would need; the engine finds them through entry points."""
    guilty = [
        (path, name)
        for path in structure.PACKAGE.rglob("*.py")
        for name in structure.imported_names(path)
        if name.partition(".")[0] in ("penstock_lab", "tests", "tools", "benchmarks")
    ]
    assert guilty == []


def test_the_laboratory_uses_a_stated_part_of_the_engine() -> None:
    """Guards against a laboratory that reaches into ever more of the engine, and against a list of yesterday's
    imports."""
    used = structure.modules_used_by(structure.LAB)
    assert used - LAB_USES == set(), "the laboratory imports modules that are not stated"
    assert LAB_USES - used == set(), "modules are stated that the laboratory does not import any more"


def test_the_package_stays_small() -> None:
    """Guards against slow growth: `make structure` prints the figures."""
    figures = structure.measure()
    assert {name: figures[name] for name, most in MOST.items() if figures[name] > most} == {}
    for package in (figures, structure.measure(structure.LAB)):
        assert package[f"functions over {structure.LONG_FUNCTION} lines"] == {}
        assert package[f"files over {structure.LONG_FILE} lines"] == {}
        wide = package[f"signatures over {structure.WIDE_SIGNATURE} parameters"]
        assert [place for place in wide if not place.startswith((OF_A_DOCUMENT, TRITON))] == []


def test_a_completion_passes_few_files() -> None:
    """Guards against relays: a new file on the way of a request replaces another one."""
    script = "from tools import request_path as path; print(sum(map(len, path.measure().values())))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=structure.ROOT)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 50


@pytest.mark.parametrize("place", STANDARD_LIBRARY_ONLY)
def test_the_core_needs_the_standard_library_only(place: str) -> None:
    for file, names in foreign_packages(place).items():
        assert names <= set(sys.stdlib_module_names), file


@pytest.mark.parametrize(
    ("package", "room"),
    [(structure.PACKAGE, room) for room in TORCH_FREE] + [(structure.LAB, room) for room in LAB_TORCH_FREE],
    ids=str,
)
def test_no_torch_above_the_runner(package: Path, room: str) -> None:
    for file, names in foreign_packages(room, package).items():
        assert not names & {"torch", "transformers"}, file


def test_only_the_fallback_the_check_and_the_demos_training_import_transformers() -> None:
    for file, names in foreign_packages(".").items():
        assert "transformers" not in names or file.parent.name == "transformers", file
    files = [file for file, names in foreign_packages(".", structure.LAB).items() if "transformers" in names]
    assert {file.relative_to(structure.LAB).parts[0] for file in files} == {"check", "training"}


WITHOUT_TORCH = """
import importlib, sys

sys.modules["torch"] = sys.modules["transformers"] = None
for module in sys.argv[1:]:
    for name in [name for name in sys.modules if name.startswith("penstock")]:
        del sys.modules[name]  # each module is the first of ours that is imported
    importlib.import_module(module)
"""


def test_imports_with_torch_blocked() -> None:
    """In a process of their own, where importing torch or transformers raises."""
    command = [sys.executable, "-c", WITHOUT_TORCH, *IMPORTED_WITHOUT_TORCH]
    done = subprocess.run(command, capture_output=True, text=True, cwd=structure.ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_the_pages_name_exist(page: Path) -> None:
    """Guards against pages that describe yesterday's files."""
    named = NAMED_FILE.findall(page.read_text(encoding="utf-8"))
    missing = [name for name in named if not any((structure.ROOT / place / name).exists() for place in WHERE_FILES_ARE)]
    assert missing == []


def test_the_public_names_are_exactly_the_surface() -> None:
    """Every name of __all__ exists, and nothing else is promised."""
    import penstock

    for name in penstock.__all__:
        assert getattr(penstock, name) is not None
    assert set(penstock._HOMES) | {"__version__"} == set(penstock.__all__)
    with pytest.raises(AttributeError):
        penstock.nothing  # noqa: B018
