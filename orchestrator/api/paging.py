"""Pages of long lists, by a cursor that stays right while others come and go."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Annotated

from fastapi import Query

Limit = Annotated[int, Query(ge=1, le=10_000, description="most items in one answer")]
Cursor = Annotated[str | None, Query(description="`next` of the answer before")]


def page_of(rows: Sequence[str], limit: int, cursor: str | None) -> tuple[Sequence[str], str | None]:
    """Rows after the cursor, which is itself a row: a page stays right while others come and go."""
    start = 0 if cursor is None else bisect_right(rows, cursor)
    found = list(rows[start : start + limit])
    return found, found[-1] if found and start + limit < len(rows) else None
