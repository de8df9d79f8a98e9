"""The command line of the tools that write a page of docs/: compare it with what it should be, or --write it."""

import argparse
from collections.abc import Callable
from pathlib import Path


def main(doc: str, file: Path, page: Callable[[], str]) -> int:
    """Write the text of `page` into a file, or compare both. Return the exit code. `doc` is the help."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the page")
    write, text = parser.parse_args().write, page()
    if write:
        file.write_text(text, encoding="utf-8")
    elif file.read_text(encoding="utf-8") != text:
        print(f"{file} is not what {parser.prog} writes")
        return 1
    return 0
