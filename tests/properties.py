"""How many examples a property gets: fewer in a quick run, all of them in a thorough one."""

import os

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
_QUICK_SHARE = 5
_LEAST = 20


def examples(count: int) -> int:
    """`count` in a thorough run; a fifth, and at least 20, in a quick one."""
    return count if THOROUGH else min(count, max(_LEAST, count // _QUICK_SHARE))
