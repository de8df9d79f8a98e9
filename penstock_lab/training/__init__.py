"""The scripts that made the small model that ships with Penstock (penstock/demo), and its training text."""

from pathlib import Path

HELDOUT_FILE: Path = Path(__file__).parent / "heldout.txt"
