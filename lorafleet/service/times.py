"""Times as text."""

from datetime import datetime


def utc_text(at: datetime, timespec: str = "milliseconds") -> str:
    """A time in UTC as ISO 8601 text that ends in `Z`. `timespec`: as in `datetime.isoformat`."""
    return at.isoformat(timespec=timespec).replace("+00:00", "Z")
