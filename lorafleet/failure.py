"""What ends a command: one line for the person who typed it."""


class Failure(Exception):
    """A command cannot go on. The message says what was wrong and what to do; status 2 is a wrong flag, else 1."""

    def __init__(self, message: str, *, status: int = 1) -> None:
        super().__init__(message)
        self.status = status
