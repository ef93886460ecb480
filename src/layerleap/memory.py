"""Memory of this process: how much it took at most, and giving back what is free."""

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import Any


def peak_memory() -> float | None:
    """The most memory that this process has held so far, in MiB; None where nobody keeps count."""
    status = Path("/proc/self/status")
    if status.exists():
        # ru_maxrss of a child starts at the size of the parent it was forked from; this does not.
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return round(int(line.split()[1]) / 1024, 1)
    try:
        import resource
    except ImportError:  # not a Unix
        return None
    per_mib = 2**20 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / per_mib, 1)


def give_back() -> None:
    """Return freed memory to the system.

    The C library keeps what was freed in case it is wanted again. Where tensors of ever new sizes
    come and go between small ones that stay, as in scoring, it keeps more and more: a study grew
    to more than twice what it used. Takes a few milliseconds; does nothing where it is not glibc.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
