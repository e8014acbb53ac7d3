"""Parameters that several routes share: the actor, the page, and the ETag."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from fastapi import Depends, Header, Query, Request

from lorafleet.keys.roles import PROGRAM_HEADER, PROGRAMS, Caller


def _caller(request: Request) -> Caller:
    """The request's caller. `requires` has authenticated it before.

    A program that acts by itself names itself in a header, so that the history takes it for no person. Only an
    operator's key may: others could hide their changes.
    """
    found: Caller = request.state.caller
    program = request.headers.get(PROGRAM_HEADER, "")
    return replace(found, program=program) if program in PROGRAMS and found.tenant is None else found


def _actor(request: Request) -> str:
    """The caller's name, for the history."""
    return _caller(request).name


Actor = Annotated[str, Depends(_actor)]
WhoCalls = Annotated[Caller, Depends(_caller)]
Limit = Annotated[int, Query(ge=1, le=10_000, description="most items in one answer")]
Cursor = Annotated[str | None, Query(description="`next` of the answer before")]
IfMatch = Annotated[str | None, Header(description="ETag that this change is based on; * for whatever is there")]


def page_after(rows: Sequence[str], limit: int, cursor: str | None) -> tuple[Sequence[str], str | None]:
    """The next page of sorted rows, and its cursor: its last row, or None at the end.

    A cursor is a row, so pages stay right while rows come and go.
    """
    start = 0 if cursor is None else bisect_right(rows, cursor)
    found = list(rows[start : start + limit])
    return found, found[-1] if found and start + limit < len(rows) else None
