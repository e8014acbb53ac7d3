"""Times as text."""

from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from lorafleet.service.times import unix_text, utc_text


@given(st.datetimes(min_value=datetime(1970, 1, 1), max_value=datetime(2200, 1, 1)))  # noqa: DTZ001  (made UTC below)
def test_a_time_is_read_back_to_the_millisecond(at):
    text = utc_text(at.replace(tzinfo=UTC))
    assert text.endswith("Z")
    cut = at.replace(microsecond=at.microsecond // 1000 * 1000, tzinfo=UTC)
    assert datetime.fromisoformat(text) == cut


def test_unix_seconds_are_utc_with_milliseconds():
    assert unix_text(0) == "1970-01-01T00:00:00.000Z"
    assert unix_text(1_800_000_000.5) == "2027-01-15T08:00:00.500Z"
