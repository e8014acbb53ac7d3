"""What the errors of engines say: messages about the engine's state, and the cause of a failure in its output."""

import re
from collections.abc import Iterable

ENGINE_DEAD = ("EngineCore encountered an issue", "The server had an error while processing your request.")
"""v1/engine/exceptions.py EngineDeadError: its message, and from 0.33 on CLIENT_MESSAGE; used for nothing else."""
SHUTTING_DOWN = "cannot schedule new futures after shutdown"
"""With 500, while SIGTERM waits for requests in flight (seen running)."""
_STOPPING = (
    *ENGINE_DEAD,
    SHUTTING_DOWN,
    "Server shutting down",
)  # the last: v1/engine/core.py, to a load after SIGTERM


def is_engine_stopping(text: str) -> bool:
    """Whether an error text means that the engine died or is stopping, so another one can serve the request."""
    return any(words in text for words in _STOPPING)


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
