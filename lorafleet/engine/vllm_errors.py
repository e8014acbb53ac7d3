"""vLLM's error messages that report the engine's state, not the request's."""

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
