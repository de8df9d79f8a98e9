"""Install Penstock into .venv, editable, for `make demo` and `make test`:  python3 tools/install.py [EXTRA]

It says what it is doing at once and then every few seconds. What is installed already is left alone, unless its native
library is damaged; a .venv whose Python is broken or too old is made anew. Compiling takes minutes, so the native
library is kept in the user's cache (~/.cache/penstock/native) under a hash of its sources and its compiler, and another
checkout takes it from there. What is damaged in the cache is compiled again.

Pythons that are too old to run Penstock have to read this file, so that it can say so.
"""

import glob
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

OLDEST = (3, 11)
HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(HERE, ".venv")
PYTHON = os.path.join(VENV, "bin", "python")
LOG = os.path.join(VENV, "install.log")
STAMP = os.path.join(VENV, ".installed")  # the hash of what was installed, and with which extras
TORCH_FOR_CPUS = "torch==2.13.0+cpu"  # the build without CUDA libraries; most package indexes lack it
CUDA = (
    "pip finds no build of torch for CPUs, so it downloads gigabytes of CUDA libraries, which Penstock does not use. "
    "To avoid them, stop this, set PIP_EXTRA_INDEX_URL to the index that pytorch.org names for pip and CPU, and repeat"
)
SILENCE_S = 5.0  # longest time without a line
KEPT = 8  # native libraries in the cache
HASH = ".sha256"  # added to a library's name: the file that has its hash
LOADS = "from penstock.kernels.cpu.library import load_library; assert load_library()"
STEPS = (  # what a line of pip's output says that it is doing; the last one that matches
    (re.compile(r"^Collecting ([\w.-]+)"), "looking for {0}"),
    (re.compile(r"^ *Downloading ([\w.]+)-\S+ \(([^)]*)\)"), "downloading {0} ({1})"),
    (re.compile(r"^ *Installing build dependencies"), "installing the build tools"),
    (re.compile(r"^ *Building (editable|wheel) for penstock"), "configuring the compiler"),
    (re.compile(r"\[ *(\d+)/(\d+)\] Building"), "compiling: {0} of {1} files"),
    (re.compile(r"\[ *(\d+)%\] Building"), "compiling: {0} % done"),
    (re.compile(r"^Installing collected packages: (.*)"), "installing the packages"),
)


def say(text):
    print("install: " + text, flush=True)


def stop(text):
    say(text)
    sys.exit(2)


def works(python, code):
    """Tell whether a Python is new enough and runs some code."""
    code = f"import sys; assert sys.version_info >= {OLDEST}; {code}"
    try:
        return subprocess.call([python, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0
    except OSError:
        return False


def use_new_python():
    """Go on with another Python of this machine if this one is too old. Say what to do if there is none."""
    if sys.version_info >= OLDEST:
        return
    for name in ("python3.13", "python3.12", "python3.11"):
        if works(name, "import venv, ensurepip"):
            say(f"{sys.executable} is Python {platform.python_version()}; {name} is used instead")
            os.execvp(name, [name, *sys.argv])
    stop(
        "Penstock needs Python {}.{} or newer, and {} is Python {}. Install a newer one (Debian 12 and Ubuntu 24.04: "
        "sudo apt install python3-venv) and name it: make demo PYTHON=/usr/bin/python3".format(
            *OLDEST, sys.executable, platform.python_version()
        )
    )


def run(command, doing, log):
    """Run a command, with its output in a file, and say every few seconds what it is doing. Return its exit code."""
    began, ended = time.time(), threading.Event()

    def report():
        while not ended.wait(SILENCE_S):
            say(f"{time.time() - began:3.0f} s: {doing}")

    thread = threading.Thread(target=report)
    thread.start()
    try:
        with subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            for line in process.stdout:
                text = line.decode("utf-8", "replace")
                log.write(text)
                for pattern, step in STEPS:
                    found = pattern.search(text)
                    doing = step.format(*found.groups()) if found else doing
        return process.returncode
    finally:
        ended.set()
        thread.join()


def make_venv():
    """Make .venv if there is none, or if its Python is broken, too old or without pip."""
    if os.path.exists(VENV):
        if works(PYTHON, "import pip"):
            return
        say(".venv has no Python with pip that is at least {}.{}: it is made anew".format(*OLDEST))
        shutil.rmtree(VENV)
    say("making .venv with Python " + platform.python_version())
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        if run([sys.executable, "-m", "venv", VENV], "making .venv", log):
            shutil.rmtree(VENV, ignore_errors=True)
            stop("this Python has no working module venv (on Debian and Ubuntu: sudo apt install python3-venv)")


# --- the native library ----------------------------------------------------------------------------------------------


def native_hash():
    """Hash the sources of the native library and the compiler's version; "" without a compiler."""
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), "")
    if not compiler:
        return ""
    version = subprocess.run([*compiler.split(), "--version"], stdout=subprocess.PIPE, check=False).stdout
    found = hashlib.sha256(version + os.environ.get("CXXFLAGS", "").encode() + platform.machine().encode())
    folder = os.path.join(HERE, "penstock", "kernels", "cpu", "native")
    files = [os.path.join(place, name) for place, _, names in os.walk(folder) for name in names]
    for file in [os.path.join(HERE, "CMakeLists.txt"), *sorted(files)]:
        with open(file, "rb") as opened:
            found.update(hashlib.sha256(opened.read()).digest())
    return found.hexdigest()[:32]


def kept_library(key, levels):
    """Name the file in the user's cache. levels: those of "all" machines, or only of "this" one."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    if levels == "this":
        with open("/proc/cpuinfo", "rb") as opened:
            flags = re.search(rb"^flags.*", opened.read(), re.MULTILINE)
        levels = hashlib.sha256(flags.group() if flags else b"").hexdigest()[:8]
    return os.path.join(cache, "penstock", "native", f"{key}-{levels}.so")


def keep_library(file, target):
    """Copy a library that was built to its place in the cache, beside its hash, and drop the oldest ones."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with open(target + HASH, "w", encoding="utf-8") as opened:
        opened.write(hash_of(file))
    shutil.copyfile(file, target + ".part")
    os.replace(target + ".part", target)
    kept = sorted(glob.glob(os.path.join(os.path.dirname(target), "*.so")), key=os.path.getmtime)
    for old in kept[:-KEPT]:
        os.remove(old)
        if os.path.exists(old + HASH):
            os.remove(old + HASH)


def hash_of(file):
    with open(file, "rb") as opened:
        return hashlib.sha256(opened.read()).hexdigest()


def is_whole(library):
    """Tell whether a library is in the cache as it was kept; say so if it is damaged."""
    if not os.path.exists(library):
        return False
    try:
        with open(library + HASH, encoding="utf-8") as opened:
            if opened.read() == hash_of(library):
                return True
    except OSError:
        pass
    say(library + " is damaged, and is not used")
    return False


def library_settings(key, levels):
    """Choose the settings of the build, as arguments of pip: a library from the cache, or which levels to compile."""
    kept = filter(is_whole, [kept_library(key, kind) for kind in dict.fromkeys(("all", levels))])
    library = next(kept, None)
    if library is not None:
        os.utime(library)
        return ["--config-settings=cmake.define.PENSTOCK_LIBRARY=" + library]
    objects = os.path.join(os.path.dirname(kept_library(key, "all")), "objects")
    launcher = ";".join((sys.executable, os.path.join(HERE, "tools", "kept_object.py"), objects))
    return [
        "--config-settings=cmake.define.PENSTOCK_THIS_MACHINE=" + ("ON" if levels == "this" else "OFF"),
        "--config-settings=cmake.define.CMAKE_CXX_COMPILER_LAUNCHER=" + launcher,
    ]


# --- packages --------------------------------------------------------------------------------------------------------


def requirements_of(extra):
    """List what an extra of pyproject.toml installs, with the extras that it names."""
    import tomllib

    with open(os.path.join(HERE, "pyproject.toml"), "rb") as opened:
        extras = tomllib.load(opened)["project"]["optional-dependencies"]
    found = []
    for line in extras[extra]:
        own = re.fullmatch(r"penstock\[(.*)\]", line)
        found += [item for name in own[1].split(",") for item in requirements_of(name)] if own else [line]
    return found


def for_cpus(requirements):
    """Add the build of torch for CPUs to the requirements, if torch is among them and pip finds that build."""
    if not any(re.match(r"torch\b", line) for line in requirements):
        return requirements
    say("looking for a build of torch without CUDA")
    words = [PYTHON, "-m", "pip", "install", "--dry-run", "--quiet", "--disable-pip-version-check", "--no-deps"]
    if subprocess.call([*words, TORCH_FOR_CPUS], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0:
        return [*requirements, TORCH_FOR_CPUS]
    say(CUDA)
    return requirements


def run_pip(words):
    """Install packages with pip, which compiles none of their Python: what is imported is compiled then. If pip fails,
    show the end of its output."""
    began = time.time()
    command = [PYTHON, "-m", "pip", "install", "--verbose", "--no-compile", "--disable-pip-version-check", *words]
    with open(LOG, "w+", encoding="utf-8") as log:
        if run(command, "starting pip", log):
            log.seek(0)
            print("".join(log.readlines()[-20:]))
            stop("pip has failed; all of its output is in " + LOG)
    say(f"done in {time.time() - began:.0f} s")


def installed_hash(key):
    with open(os.path.join(HERE, "pyproject.toml"), "rb") as opened:
        return hashlib.sha256(key.encode() + opened.read()).hexdigest()


def install(extra):
    """Install the package and an extra ("" for none), if they are not installed yet."""
    key = native_hash()
    if not key:
        stop("there is no C++ compiler to compile the kernels with (on Debian and Ubuntu: sudo apt install g++)")
    stamp, done = installed_hash(key), []
    if works(PYTHON, LOADS) and os.path.exists(STAMP):
        with open(STAMP, encoding="utf-8") as opened:
            done = opened.read().split("\n")
        if done[0] == stamp and (not extra or extra in done):
            return
    make_venv()
    words, settings = [], []
    if done[:1] != [stamp]:
        done, settings = [stamp], library_settings(key, "this")
        words = ["--editable", ".", *settings]
        if "THIS_MACHINE" in settings[0]:
            say("installing Penstock into .venv, and compiling its kernels: some minutes the first time")
        else:
            say("installing Penstock into .venv; its kernels were compiled before")
    if extra:
        say(f"installing what the extra {extra!r} needs")
        words += for_cpus(requirements_of(extra))
    run_pip(words)
    if settings and "THIS_MACHINE" in settings[0]:
        built = glob.glob(os.path.join(VENV, "lib", "python*", "site-packages", "penstock", "kernels", "cpu", "*.so"))
        keep_library(built[0], kept_library(key, "this"))
    with open(STAMP, "w", encoding="utf-8") as opened:
        opened.write("\n".join(done + ([extra] if extra else [])))


if __name__ == "__main__":
    use_new_python()
    install(sys.argv[1] if len(sys.argv) > 1 else "")
