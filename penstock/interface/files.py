"""Open files that other programs can replace: key files, journals, blocks of the cache."""

import errno
import os
import stat


def open_regular(path: str | os.PathLike[str], flags: int, mode: int = 0o600) -> int:
    """Open a regular file and return its descriptor; usable as the `opener` of `open`.

    A FIFO would hold up its reader until somebody writes, and a device may never end.

    Raises:
        OSError: it cannot be opened, or is not a regular file (EINVAL).
    """
    file = os.open(path, flags | os.O_NONBLOCK, mode)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return file
