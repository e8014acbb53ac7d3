"""Times as text."""

from datetime import UTC, datetime


def utc_text(at: datetime, timespec: str = "milliseconds") -> str:
    """A time in UTC as ISO 8601 text that ends in `Z`. `timespec`: as in `datetime.isoformat`."""
    return at.isoformat(timespec=timespec).replace("+00:00", "Z")


def unix_time(at: datetime) -> float:
    """Unix seconds of a time, in UTC where it names no zone."""
    return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()


def unix_text(at: float) -> str:
    """Unix seconds as ISO 8601 text in UTC, with milliseconds."""
    return utc_text(datetime.fromtimestamp(at, UTC))
