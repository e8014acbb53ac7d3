"""How many examples and cases a test gets: fewer in a quick run, all of them in a thorough one."""

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
_QUICK_SHARE = 5
_LEAST = 20


def examples(count: int) -> int:
    """`count` in a thorough run; a fifth, and at least 20, in a quick one."""
    return count if THOROUGH else min(count, max(_LEAST, count // _QUICK_SHARE))


def sample(cases: Sequence[T], quick: int) -> list[T]:
    """All cases in a thorough run; `quick` of them in a quick one, spread evenly over the list."""
    if THOROUGH or quick >= len(cases):
        return list(cases)
    return [cases[at * len(cases) // quick] for at in range(quick)]
