"""Counts the values of a JSON body without parsing the body, so that a body with too many is refused cheaply."""

import re
from functools import cache
from itertools import islice

# ITEMS: the first byte of each string, object and list. VALUES: these and commas, so that numbers in lists count, too.
ITEMS = b'"{['
VALUES = b'"{[,'


def has_more(body: bytes, most: int, marks: bytes = ITEMS) -> bool:
    """Whether a body has more than `most` marks outside of strings. A string counts once, a field's name included.

    marks  ITEMS or VALUES; a body that is not JSON is counted in the same way

    Parsing one marked value may take a hundred bytes of memory and a microsecond of the event loop; reporting an error
    in it takes several. So a body of many values costs a thousand times as much as one long string of its size.
    """
    # A quick upper bound first: each string has two quotes, and marks inside of strings are counted, too.
    others = sum(body.count(mark) for mark in marks.replace(b'"', b""))
    if body.count(b'"') // 2 + others <= most:
        return False
    return next(islice(_mark_pattern(marks).finditer(body), most, None), None) is not None


@cache
def _mark_pattern(marks: bytes) -> re.Pattern[bytes]:
    """A pattern for one whole string, or one of the other marks."""
    others = re.escape(marks.replace(b'"', b""))
    return re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[%b]' % others, re.DOTALL)
