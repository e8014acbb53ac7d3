"""The leader's epoch in the head of a command to an agent."""

from typing import Annotated

from fastapi import Depends, Request

from workers.core.errors import AgentRequestError

EPOCH_HEADER = "x-lorafleet-epoch"
_EPOCH_DIGITS = 15  # exact in every JSON parser and database


async def _request_epoch(request: Request) -> int | None:
    """The epoch in the request's header; None without one. Raises AgentRequestError `invalid_epoch`."""
    text = request.headers.get(EPOCH_HEADER)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= _EPOCH_DIGITS):
        message = f"header {EPOCH_HEADER}: {text[:100]!r} is not a whole number of at most {_EPOCH_DIGITS} digits"
        raise AgentRequestError("invalid_epoch", message, param=EPOCH_HEADER)
    return int(text)


Epoch = Annotated[int | None, Depends(_request_epoch)]
"""A route's parameter with the epoch; None without the header."""
