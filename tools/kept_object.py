"""Compile a source of the native library, or copy its object if the same text was compiled before.

CMake puts it before the compiler (CMAKE_CXX_COMPILER_LAUNCHER; tools/install.py asks for that). So a change of one
kernel compiles that kernel, and a wheel for all processors compiles only what the library of this machine lacks.
Objects are kept in the user's cache under a hash of the preprocessed text, the flags and the compiler.

Usage: python kept_object.py FOLDER COMPILER ARGUMENTS..
"""

import glob
import hashlib
import os
import shutil
import subprocess
import sys

KEPT = 300  # objects; a library for all processors has 60
NAMES_A_FILE = ("-o", "-MT", "-MF", "-MQ", "-I", "-isystem", "-D")  # flags whose argument is not hashed


def parse(arguments):
    """Return the object's file ("" if nothing is compiled), the flags that count, and the preprocessor's arguments."""
    target, flags, before, taken = "", [], [], ""
    for word in arguments:
        if taken == "-o":
            target = word
        elif word != "-o":
            before.append("-E" if word == "-c" else word)
            if not taken and word.startswith("-") and not word.startswith(NAMES_A_FILE):
                flags.append(word)
        taken = word if word in NAMES_A_FILE else ""
    return target if "-c" in arguments else "", flags, [*before, "-P"]


def named(key, file):
    """Name an object in the cache: by what it was made of, and by what is in it."""
    with open(file, "rb") as opened:
        return f"{key}-{hashlib.sha256(opened.read()).hexdigest()[:32]}.o"


def main(folder, compiler, *arguments):
    """Return the compiler's exit code."""
    target, flags, before = parse(arguments)
    command = [compiler, *arguments]
    if not target:
        return subprocess.call(command)
    text = subprocess.run([compiler, *before], stdout=subprocess.PIPE, check=False)
    if text.returncode:
        return text.returncode
    version = subprocess.run([compiler, "--version"], stdout=subprocess.PIPE, check=True).stdout
    key = hashlib.sha256(b"\0".join([version, " ".join(flags).encode(), text.stdout])).hexdigest()[:32]
    for kept in glob.glob(os.path.join(folder, key + "-*.o")):
        try:
            if kept.endswith(named(key, kept)):  # otherwise it is damaged
                shutil.copyfile(kept, target)
                os.utime(kept)
                return 0
        except OSError:
            pass
    code = subprocess.call(command)
    if code == 0:
        os.makedirs(folder, exist_ok=True)
        kept = os.path.join(folder, named(key, target))
        part = f"{kept}.{os.getpid()}"
        shutil.copyfile(target, part)
        os.replace(part, kept)
        for old in sorted(glob.glob(os.path.join(folder, "*.o")), key=os.path.getmtime)[:-KEPT]:
            os.remove(old)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
