"""The cost of code, measured as a number of function calls. A busy or slow machine does not change that number."""

import sys
from collections.abc import Callable
from typing import Any


def count_calls(work: Callable[[], Any]) -> int:
    """Run `work`; the number of calls of Python and C functions that it made in this thread."""
    count = 0

    def note(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count
