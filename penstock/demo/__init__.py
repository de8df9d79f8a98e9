"""The small model that ships with Penstock, and everything that made it.

Gives two paths and imports nothing heavy. Knows nothing of the engine: it is a directory in Hugging Face format
like any other.
"""

from pathlib import Path

MODEL_DIR: Path = Path(__file__).parent / "model"
HELDOUT_FILE: Path = Path(__file__).parent / "heldout.txt"

__all__ = ["HELDOUT_FILE", "MODEL_DIR"]
