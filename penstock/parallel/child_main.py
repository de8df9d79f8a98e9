"""The first lines of a child process: its life is tied to its client's before anything else is imported.

    python -m penstock.parallel.child_main CLIENT_PID MODULE WORD ...      runs MODULE.main([WORD, ...])

The end of its connection ends a child that runs (engine_process.py, text_process.py). One that is stopped,
or hangs in native code that never lets Python run, cannot notice that end: the kernel kills it when the thread that
started it ends.
"""

import ctypes
import importlib
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
EXIT_CLIENT_GONE = 0


def die_with(client_pid: int) -> None:
    """Have this process killed when the client ends, as far as the system can: Linux can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != client_pid:  # it has ended already, so no signal will come
        os._exit(EXIT_CLIENT_GONE)


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    module = importlib.import_module(sys.argv[2])  # not at the top: it takes most of the time of a start
    os._exit(module.main(sys.argv[3:]))  # no clean-up: the client holds all state that matters
