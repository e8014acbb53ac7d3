"""vLLM's errors that tell of the engine and not of what it was asked for."""

DEAD = ("EngineCore encountered an issue", "The server had an error while processing your request.")
"""v1/engine/exceptions.py EngineDeadError: its message, and from 0.33 on CLIENT_MESSAGE, told of nothing else."""
SHUTTING_DOWN = "cannot schedule new futures after shutdown"
"""With 500, while SIGTERM waits for requests in flight (seen running)."""
_ENDING = (*DEAD, SHUTTING_DOWN, "Server shutting down")  # the last: v1/engine/core.py, to a load after SIGTERM


def is_ending(text: str) -> bool:
    """Whether the engine has died, or is told to stop: the same question will do at another one. vLLM 0.32 and 0.33."""
    return any(words in text for words in _ENDING)
