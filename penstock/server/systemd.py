"""systemd's readiness protocol: datagrams to the socket named in the environment. Does nothing without systemd.

https://www.freedesktop.org/software/systemd/man/latest/sd_notify.html
"""

import contextlib
import os
import socket
import time


def notify(state: str) -> None:
    """Send a state like "READY=1" to the socket in $NOTIFY_SOCKET, if it is set. Errors of the socket are ignored."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.connect("\0" + address[1:] if address[0] == "@" else address)
        sock.send(state.encode())


def notify_reloading() -> None:
    """Report that a reload has begun; READY=1 ends it."""
    notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")


def watchdog_interval_s() -> float | None:
    """Return the interval at which to send WATCHDOG=1, half of $WATCHDOG_USEC; None if there is no watchdog."""
    usec = os.environ.get("WATCHDOG_USEC", "")
    for_us = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return int(usec) / 2e6 if usec.isdigit() and int(usec) and for_us else None
