"""Memory that the C library keeps for later after it was freed."""

import ctypes
from collections.abc import Callable


def _find_trim() -> Callable[[int], int] | None:
    """glibc's `malloc_trim`; None with another C library."""
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    return trim


_trim = _find_trim()


def release_free_memory() -> None:
    """Give freed memory back to the system, for after work that took much of it. Takes some milliseconds.

    Every thread has a heap of its own, and glibc returns only what is free at a heap's end.
    """
    if _trim is not None:
        _trim(0)
