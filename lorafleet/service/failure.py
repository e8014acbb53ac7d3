"""What ends a command: one line for the person who typed it."""


def printable(text: str) -> str:
    """The text as one line that no terminal obeys: names and errors are others' words, and may hold escape codes."""
    if text.isprintable():
        return text
    return "".join(it if it.isprintable() else it.encode("unicode_escape").decode() for it in text)


class CommandFailed(Exception):
    """A command cannot go on. The message says what was wrong and what to do; status 2 is a wrong flag, else 1."""

    def __init__(self, message: str, *, status: int = 1) -> None:
        super().__init__(message)
        self.status = status
