"""Memory: the budget for logits, the peak of this process, returning freed memory to the system."""

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import Any

LOGITS = 2**23  # logits held at a time: 32 MB in float32


def rows_at_once(d_vocab: int) -> int:
    """How many rows of logits fit the budget; results do not depend on it."""
    return max(1, LOGITS // d_vocab)


def peak_memory() -> float | None:
    """The peak memory of this process in MiB; None if the system does not report it."""
    status = Path("/proc/self/status")
    if status.exists():
        # Unlike this, ru_maxrss of a child starts at the size of the process it was forked from.
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return round(int(line.split()[1]) / 1024, 1)
    try:
        import resource
    except ImportError:  # not Unix
        return None
    per_mib = 2**20 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / per_mib, 1)


def give_back() -> None:
    """Return freed memory to the system.

    The C library keeps freed memory for reuse. When tensors of many sizes come and go between
    small ones that stay, as in scoring, it keeps more and more: a study grew to more than twice
    what it used. The call takes a few milliseconds and does nothing without glibc.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
