"""The dates that engines' chat templates show (`strftime_now`), read from an engine's own ids.

An engine renders its local time. Its time zone and its clock need not be this router's, so a date is never computed
here: the router renders a probe with every date that may be right now and takes the one with the engine's ids. A date
holds until the engine's clock begins its next minute: no time zone has its midnight at another second.
"""

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

from lorafleet.tokenizer.chat import ChatTokenizer
from lorafleet.tokenizer.messages import Untokenizable
from router.tokenizing.probes import PROBES

# Time zones are from UTC-12 to UTC+14, in quarters of an hour.
_ZONES = tuple(sorted([timedelta(minutes=15 * quarter) for quarter in range(-12 * 4, 14 * 4 + 1)], key=abs))


class DatesDiffer(Untokenizable):
    """The engines of a base model show different dates: ids of one of them are wrong for the others."""


class ShownDate(NamedTuple):
    """What an engine's chat template shows for the date: the text of each form, such as `%d %b %Y`."""

    texts: tuple[tuple[str, str], ...] = ()

    def strftime(self, form: str) -> str:
        """The template's `strftime_now`. Raises Untokenizable for a form whose text was not read."""
        for known, text in self.texts:
            if known == form:
                return text
        raise Untokenizable(f"the chat template shows the time ({form}): only the engine knows its own")


def date_unknown(form: str) -> str:
    """The `strftime_now` before an engine's date was read. Raises Untokenizable."""
    raise Untokenizable(f"the chat template shows the date ({form}), and the engine's is not known yet")


def dates_differ(form: str) -> str:
    """The `strftime_now` while engines show different dates. Raises DatesDiffer."""
    raise DatesDiffer(f"the chat template shows the date ({form}), and the engines' dates differ")


def possible_dates(forms: Iterable[str], utc: datetime) -> Iterator[ShownDate]:
    """Every date that an engine may show whose clock has this UTC time, each once; the likeliest first."""
    coarse = sorted(form for form in forms if not _shows_minutes(form))
    local = utc.replace(tzinfo=None)
    return iter(dict.fromkeys(ShownDate(tuple((f, (local + zone).strftime(f)) for f in coarse)) for zone in _ZONES))


def _shows_minutes(form: str) -> bool:
    """Whether a text of this form changes within an hour: then it is outdated before it is used."""
    hour = datetime(2000, 1, 1)  # noqa: DTZ001  (local time, as templates get it)
    return hour.strftime(form) != (hour + timedelta(minutes=59, seconds=59, microseconds=999_999)).strftime(form)


def date_probes(tokenizer: ChatTokenizer) -> list[Mapping[str, Any]]:
    """The fewest chats whose prompts show every form of the date that some probe's prompt shows."""
    found: list[Mapping[str, Any]] = []
    covered: set[str] = set()
    for body in PROBES:
        shown: set[str] = set()

        def record(form: str, shown: set[str] = shown) -> str:
            """Any text, and the form is noted."""
            shown.add(form)
            return form

        try:
            tokenizer.prompt_text(body, record)
        except Untokenizable:
            continue
        if shown - covered:
            covered |= shown
            found.append(body)
    return found


def common_texts(dates: Iterable[ShownDate]) -> ShownDate | None:
    """The texts that all of these dates share; None without a date."""
    shared = [frozenset(date.texts) for date in dates]
    return ShownDate(tuple(sorted(frozenset.intersection(*shared)))) if shared else None


def clock_of(headers: Mapping[str, str]) -> datetime:
    """An engine's UTC time by the `Date` of its answer; this router's without one."""
    try:
        return parsedate_to_datetime(headers["date"]).astimezone(UTC)
    except (KeyError, ValueError, TypeError):
        return datetime.now(UTC)


def seconds_left(utc: datetime) -> float:
    """Seconds until a clock with this time has begun its next minute, and one: servers write `Date` a little late."""
    return 61.0 - utc.second
