"""The command `penstock`, also as `python -m penstock`."""

import signal
import sys


def main() -> int:
    """Run the command line of this process, and return the exit code."""
    # Until a command handles it, Ctrl-C simply ends the process, without the traceback of what is being imported.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from penstock.cli.main import main as run

    return run()


if __name__ == "__main__":  # a spawned process imports this file again, under another name
    sys.exit(main())
