"""The measurements of speed, memory and start-up."""

from penstock.kernels.cpu.host import Machine


def available_threads() -> int:
    """Count the threads that this process should compute with: one per core, within its affinity and its quota."""
    return Machine.read().default_threads()[0]
