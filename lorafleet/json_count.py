"""How much there is to read in a body of JSON, told without reading it."""

import re
from functools import cache
from itertools import islice

# What each text, object and list begins with; with commas, whatever follows another in one of them.
ITEMS = b'"{['
VALUES = b'"{[,'


def has_more(body: bytes, most: int, marks: bytes = ITEMS) -> bool:
    """Whether a body has more texts (names of fields, too) and others of these marks, outside of texts, than `most`.

    marks  ITEMS or VALUES. What is no JSON is counted as far as it goes

    A byte of them may take a hundred of memory, and a microsecond in which nobody else is served; a fault that is found
    in one takes several. So a body in which they are many costs a thousand times what one long text does.
    """
    # Each text has two quotes. What stands in a text is counted, too, at first.
    others = sum(body.count(mark) for mark in marks.replace(b'"', b""))
    if body.count(b'"') // 2 + others <= most:
        return False
    return next(islice(_mark(marks).finditer(body), most, None), None) is not None


@cache
def _mark(marks: bytes) -> re.Pattern[bytes]:
    """A text, whatever is in it, or one of the other marks."""
    others = re.escape(marks.replace(b'"', b""))
    return re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[%b]' % others, re.DOTALL)
