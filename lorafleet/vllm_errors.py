"""vLLM's errors that tell of the engine and not of what it was asked for."""

_ENDING = (
    "EngineCore encountered an issue",  # v1/engine/exceptions.py EngineDeadError
    "Server shutting down",  # v1/engine/core.py, to a load after SIGTERM
    "cannot schedule new futures after shutdown",
)


def is_ending(text: str) -> bool:
    """Whether the engine has died, or is told to stop: the same question will do at another one. vLLM 0.32."""
    return any(words in text for words in _ENDING)
