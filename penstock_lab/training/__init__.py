"""The small model that ships with Penstock, a directory in Hugging Face format, and the scripts that made it."""

from pathlib import Path

MODEL_DIR: Path = Path(__file__).parent / "model"
DRAFT_DIR: Path = Path(__file__).parent / "draft"  # a smaller draft model for it, without a tokenizer
HELDOUT_FILE: Path = Path(__file__).parent / "heldout.txt"
