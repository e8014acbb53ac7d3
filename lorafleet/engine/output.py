"""The cause of a failure in an engine's output."""

import re
from collections.abc import Iterable

_MOST_CHARACTERS = 500
# The last line of a traceback, plain or behind a logger's prefix, and argparse's own line.
_ERROR = re.compile(r"(?:^|\] )((?:\w+\.)*\w*(?:Error|Exception): .*\S)")
_USAGE = re.compile(r"^[^:]{1,100}: (error: .*\S)")
# vLLM's server and workers repeat a core's failure in words such as "See root cause above".
_REFERENCE = re.compile(r"root cause|stack trace", re.IGNORECASE)


def error_in(line: str) -> str:
    """The error in a line of output, at most 500 characters; "" without one, or for a reference to an earlier error."""
    found = _ERROR.search(line) or _USAGE.search(line)
    return "" if found is None or _REFERENCE.search(line) else found[1][:_MOST_CHARACTERS]


def last_error(lines: Iterable[str]) -> str:
    """The last error in an engine's output, without references to it; "" without one."""
    found = ""
    for line in lines:
        found = error_in(line) or found
    return found
