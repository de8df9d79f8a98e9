"""Run the targets at each instruction level of this machine."""

import sys
import time

from penstock.kernels.cpu.library import LEVELS, load_library
from tools.fuzz_native import attention, caches, context, products, rows, sampling
from tools.fuzz_native.target import Fuzz

TARGETS = {
    name: target
    for part in (rows, products, caches, attention, sampling, context)
    for name, target in part.TARGETS.items()
}


def main(calls: int, names: tuple[str, ...] = tuple(TARGETS)) -> None:
    """Call each of these entry points `calls` times at each level. A failure names the target and the seed.

    Raises:
        AssertionError: a result, a status or the memory next to an operand is wrong.
    """
    library = load_library()
    if library is None:
        raise SystemExit("there is no native library")
    for level in range(library.penstock_best_level() + 1):
        started = time.perf_counter()
        for name in names:
            for seed in range(calls):
                run(Fuzz(library, level, seed), name)
        seconds = time.perf_counter() - started
        print(f"{LEVELS[level]}: {len(names)} entry points, {calls} calls each, {seconds:.0f} s", flush=True)


def run(fuzz: Fuzz, name: str) -> None:
    """Run one target once, and free its context and operands.

    Raises:
        AssertionError: as in `main`.
    """
    try:
        TARGETS[name](fuzz)
    except AssertionError as error:
        error.add_note(f"target {name}, level {LEVELS[fuzz.level]}, seed {fuzz.seed}")
        raise
    finally:
        fuzz.forget()
        fuzz.close()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300, tuple(sys.argv[2:]) or tuple(TARGETS))
