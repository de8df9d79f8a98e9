"""The libraries of the web page, as their authors published them: `python -m tools.vendor_page` fetches them again.

`vendor.json`, beside them, has the version, licence and origin of each, and the size and SHA-256 of every file. To take
a new version, change it there and run this with `--update`, which writes the new sizes and hashes; without it, a file
that differs is an error. Needs npm; installing Penstock needs neither.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

VENDOR = Path(__file__).parent.parent / "penstock" / "server" / "static" / "vendor"
TABLE = VENDOR / "vendor.json"


def read_table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


def entry_of(content: bytes) -> dict[str, Any]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def fetch(library: dict[str, Any]) -> dict[str, bytes]:
    """Fetch a package from npm and return the files that the table names, by their name here."""
    with tempfile.TemporaryDirectory() as folder:
        package = f"{library['package']}@{library['version']}"
        command = ["npm", "pack", "--silent", "--pack-destination", folder, package]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (archive,) = Path(folder).iterdir()
        with tarfile.open(archive) as opened:
            members = {name: opened.extractfile(f"package/{file['from']}") for name, file in library["files"].items()}
            return {name: member.read() for name, member in members.items() if member is not None}


def main() -> int:
    parser = argparse.ArgumentParser(description="Fetch the web page's libraries again.")
    parser.add_argument("--update", action="store_true", help="write the sizes and hashes of the fetched files")
    update = parser.parse_args().update
    table, differing = read_table(), []
    for folder, library in table.items():
        for name, content in fetch(library).items():
            known = library["files"][name]
            found = {"from": known["from"], **entry_of(content)}
            if not update and found != known:
                differing.append(f"{folder}/{name}")
                continue
            library["files"][name] = found
            target = VENDOR / folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
    if differing:
        print("not what vendor.json says: " + ", ".join(differing), file=sys.stderr)
        return 1
    TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
