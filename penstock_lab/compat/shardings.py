"""Write the sharding files of the served families again: `python -m penstock_lab.compat.shardings`.

Each of default_shardings/*.yaml has an axis for every weight of a family, as `penstock table MODEL --sharding` prints
it, with the shapes of the first published size in sizes.yaml, or of the tiny one.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from penstock_lab.planner.table_template import table_text

SIZES_FILE = Path(__file__).parent / "sizes.yaml"
FOLDER = Path(__file__).parent / "default_shardings"


def read_sizes() -> dict[str, dict[str, dict[str, Any]]]:
    """Read sizes.yaml: family -> size -> config.json."""
    found: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load(SIZES_FILE.read_text(encoding="utf-8"))
    return found


def sharding_texts(families: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, str]:
    """Make the sharding files, by file name: one for each value of model_type."""
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "config.json"
        for sizes in families.values():
            config = next((item for size, item in sizes.items() if size != "tiny"), sizes["tiny"])
            file.write_text(json.dumps(config), encoding="utf-8")
            found.setdefault(f"{config['model_type']}.yaml", table_text(file, sharding=True))
    return found


def main() -> None:
    """Write every file, and remove those of families that are not served any more."""
    texts = sharding_texts(read_sizes())
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.yaml"):
        if old.name not in texts:
            old.unlink()
    for name, text in texts.items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
