"""The start of a child process: ties its life to its client's, and ignores a terminal's signals, before other imports.

    python -m penstock.ranks.child_main CLIENT_PID MODULE WORD ...      runs MODULE.main([WORD, ...])

A running child ends when its connection is closed (engine_process.py, text.py). A child that is stopped, or
hangs in native code that never lets Python run, cannot notice that; the kernel kills it when the thread that started it
ends.
"""

import ctypes
import importlib
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
EXIT_CLIENT_GONE = 0


def die_with(client_pid: int) -> None:
    """Have this process killed when the client ends. Only Linux supports this."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != client_pid:  # the client has already ended, so no signal will come
        os._exit(EXIT_CLIENT_GONE)


def ignore_signals() -> None:
    """Ignore what a terminal or a service manager sends to the whole process group: the client decides when to end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    ignore_signals()
    die_with(int(sys.argv[1]))
    module = importlib.import_module(sys.argv[2])  # here, because it takes most of the start-up time
    os._exit(module.main(sys.argv[3:]))  # without clean-up, because the client holds all state that matters
