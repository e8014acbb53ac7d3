"""The one error of the client."""


class FleetError(Exception):
    """A call failed. The message is the server's own; it says what to do.

    status  HTTP status; None: no server answered, or the folder is no adapter
    code    the server's error code, see docs/protocol.md; "" without one
    """

    def __init__(self, message: str, *, status: int | None = None, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code
