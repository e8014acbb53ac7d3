"""The error that ends a command, and text that is safe to print."""


def printable(text: str) -> str:
    """The text as one line without control characters, since names and errors of others may hold escape codes."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class CommandFailed(Exception):
    """A command fails. The message says what is wrong and what to do; status 2 is a wrong flag, else 1."""

    def __init__(self, message: str, *, status: int = 1) -> None:
        super().__init__(message)
        self.status = status
