"""The arrows of docs/ARCHITECTURE.md: who may import whom, and what must never bring torch in.

Read from the source with ast, so that an import inside a function counts as much as one at the top.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "penstock"

# Who may import what, by top-level part; every part may import itself and BASE. A part not listed is a mistake.
BASE = {
    "errors",
    "validation",
    "architecture",
    "certificate",
    "config",
    "config_reader",
    "sampling_params",
    "outputs",
    "step",
    "model_config",
    "rope_config",
    "user_files",
    "logits_processors",
    "penstock",
}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "validation": set(),
    "outputs": set(),
    "sampling_params": set(),
    "step": set(),
    "user_files": set(),
    "logits_processors": set(),
    "config": {"kernels", "quant"},
    "config_reader": set(),
    "rope_config": set(),
    "generation_config": set(),
    "architecture": {"models"},  # the package, to find the families that register themselves
    "params_json": set(),
    "model_config": {"generation_config", "params_json"},
    "certificate": set(),
    "engine": set(),
    "tokenizer": set(),
    "kernels": {"quant"},
    "quant": set(),
    "weights": {"kernels", "layers", "models", "demo", "quant"},
    "layers": {"kernels", "models", "quant"},
    "models": {"layers", "kernels"},
    "runner": {"kernels", "layers"},
    "planner": {"engine", "kernels", "models"},
    "build": {"engine", "kernels", "layers", "models", "planner", "runner", "weights"},
    "check": {"build", "engine", "kernels", "layers", "models", "planner", "weights"},
    "client": {"build", "engine", "tokenizer", "weights"},
    "engine_process": {"build", "client", "engine"},
    "llm": {"build", "client", "tokenizer"},
    "compat": {"generation_config", "layers", "llm", "models"},
    "async_llm": {"client", "engine", "tokenizer"},
    "server": {"client", "engine", "tokenizer"},
    "bench": {"build", "client", "engine", "kernels", "layers", "llm", "models", "planner", "quant", "weights"},
    "cli": {"async_llm", "bench", "check", "client", "engine", "kernels", "llm", "planner", "server", "weights"},
    "demo": set(),
    "__init__": {"llm", "async_llm", "models"},
    "__main__": {"cli"},
}
# Finer: the one file of a part that may be reached from here, or may not know torch.
ONLY = {
    ("client", "weights"): "weights.hub",
    ("bench", "weights"): "weights.hub",
    ("config", "kernels"): "kernels.cpu.library",
    ("config", "quant"): "quant.scheme",
    ("layers", "models"): "models.param_table",
    ("planner", "kernels"): "kernels.attention.layout",
}
TORCH_FREE = [
    "penstock",
    "penstock.interface.step",
    "penstock.config",
    "penstock.spec.model_config",
    "penstock.spec.param_table",
    "penstock.spec.sharding_map",
    "penstock.weights.table_template",
    "penstock.spec.architecture",
    "penstock.models.certificate",
    "penstock.engine.engine",
    "penstock.planner.memory",
    "penstock.client.process",
    "penstock.entrypoints.async_llm",
    "penstock.server.serve",
    "penstock.cli.main",
    "penstock.cli.serve",
    "penstock.cli.check",
]


def imports(path: Path) -> set[str]:
    """Dotted names below penstock that a file imports, and foreign top-level packages with a leading "!"."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively, which this test does not follow"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            found.add(name.removeprefix("penstock.") if name.startswith("penstock.") else "!" + name.split(".")[0])
    return found


def part_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(PACKAGE)) for path in FILES])
def test_arrows_point_down(path):
    part = part_of(path)
    assert part in ALLOWED, f"{part} is not on the map"
    for name in imports(path):
        if name.startswith("!"):
            continue
        target = name.split(".")[0]
        if target == part or target in BASE or target == "__version__" or part == "__init__":
            continue
        assert target in ALLOWED[part], f"{path.name} of {part} imports {name}"
        only = ONLY.get((part, target))
        assert only is None or name.startswith(only), f"{part} may import only {only} of {target}, not {name}"


@pytest.mark.parametrize("part", ["errors", "validation", "config", "sampling_params", "outputs", "step"])
def test_the_base_needs_the_standard_library_only(part):
    foreign = {name[1:] for name in imports(PACKAGE / f"{part}.py") if name.startswith("!")}
    assert foreign <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("part", ["engine", "client", "server", "tokenizer", "planner", "cli"])
def test_no_torch_above_the_runner(part):
    for path in (PACKAGE / part).rglob("*.py"):
        assert not imports(path) & {"!torch", "!transformers"}, path


def test_nobody_imports_transformers_but_the_demos_training_and_the_check():
    guilty = {path.relative_to(PACKAGE) for path in FILES if "!transformers" in imports(path)}
    assert {path for path in guilty if path.parts[0] != "demo"} <= {Path("check/twin.py")}


@pytest.mark.parametrize("module", TORCH_FREE)
def test_imports_with_torch_blocked(module):
    """In a process of its own, where importing torch or transformers raises."""
    script = (
        "import sys\nsys.modules['torch'] = None\nsys.modules['transformers'] = None\n"
        f"import importlib\nimportlib.import_module({module!r})\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=PACKAGE.parent)


def test_the_public_names_are_exactly_the_surface():
    """Every name of __all__ exists, and nothing else is promised."""
    import penstock

    for name in penstock.__all__:
        assert getattr(penstock, name) is not None
    assert set(penstock._HOMES) <= set(penstock.__all__)
    with pytest.raises(AttributeError):
        penstock.nothing  # noqa: B018
