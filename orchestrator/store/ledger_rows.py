"""The ledger's two tables as SQL, which SQLite and PostgreSQL have alike: rows by hour, and the numbers of sources.

A number is stored in the transaction of its batch's rows, so a batch that comes again adds nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from operator import attrgetter
from typing import Any, NamedTuple

from orchestrator.core.errors import OrchestratorRequestError
from orchestrator.model.ledger import HOUR_S, SUMS, UsageKey, UsageQuery, UsageRows, UsageSums

SOURCES_KEPT_S = 30 * 86_400.0
"""A router or agent that was cut off for longer sends what it holds as one that nobody knows. A guess, above any
outage that a process survives."""
USAGE_KEPT_DAYS = 400
"""The setting's default: a year, and the month in which it is billed."""
MOST_GROUPS = 100_000
"""Rows of one answer."""
_DAY_S = 86_400.0
_KINDS = tuple((name, type(getattr(UsageSums(), name))) for name in SUMS)
_values_of = attrgetter(*SUMS)


class LedgerText(NamedTuple):
    """What a store's ledger holds, as the columns of its rows: one store hands it to another."""

    rows: tuple[tuple[Any, ...], ...] = ()
    sources: tuple[tuple[Any, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class LedgerTables:
    """The statements of one kind of database.

    prefix  of the tables' names; `mark`: of an argument
    whole, real, text  types of columns
    """

    prefix: str
    mark: str
    whole: str
    real: str
    text: str = "TEXT"
    suffix: str = ""

    @property
    def create(self) -> tuple[str, ...]:
        """Statements that create the tables."""
        names = [f"{name} {self.whole if name == 'hour' else self.text} NOT NULL" for name in UsageKey._fields]
        sums = [f"{name} {self.real if kind is float else self.whole} NOT NULL" for name, kind in _KINDS]
        return (
            f"CREATE TABLE {self.prefix}usage ({', '.join(names + sums)},"
            f" PRIMARY KEY ({', '.join(UsageKey._fields)})){self.suffix}",
            f"CREATE TABLE {self.prefix}usage_sources (source {self.text} PRIMARY KEY, number {self.whole} NOT NULL,"
            f" at {self.real} NOT NULL){self.suffix}",
        )

    @property
    def hold_source(self) -> str:
        """Lock a source's row, made where there is none, and return its number: (source, at) -> (number,)."""
        return (
            f"INSERT INTO {self.prefix}usage_sources (source, number, at)"  # noqa: S608
            f" VALUES ({self.mark}, -1, {self.mark})"
            " ON CONFLICT (source) DO UPDATE SET at = EXCLUDED.at RETURNING number"
        )

    @property
    def set_number(self) -> str:
        """Store a source's number: (number, source)."""
        return f"UPDATE {self.prefix}usage_sources SET number = {self.mark} WHERE source = {self.mark}"  # noqa: S608

    @property
    def add_row(self) -> str:
        """Add sums to a row, made where there is none: the values of `row_values`."""
        table = f"{self.prefix}usage"
        sums = ", ".join(f"{name} = {table}.{name} + EXCLUDED.{name}" for name in SUMS)
        return f"{self._insert} ON CONFLICT ({', '.join(UsageKey._fields)}) DO UPDATE SET {sums}"

    @property
    def _insert(self) -> str:
        """Insert a row: the values of `row_values`."""
        columns = (*UsageKey._fields, *SUMS)
        marks = ", ".join([self.mark] * len(columns))
        return f"INSERT INTO {self.prefix}usage ({', '.join(columns)}) VALUES ({marks})"  # noqa: S608  (our own names)

    @property
    def copy_source(self) -> str:
        """Insert a source of another store."""
        marks = ", ".join([self.mark] * 3)
        return f"INSERT INTO {self.prefix}usage_sources (source, number, at) VALUES ({marks})"  # noqa: S608

    def copied(self) -> tuple[str, str]:
        """Queries of all rows and all sources, as `LedgerText` has them."""
        columns = ", ".join((*UsageKey._fields, *SUMS))
        return (
            f"SELECT {columns} FROM {self.prefix}usage",  # noqa: S608
            f"SELECT source, number, at FROM {self.prefix}usage_sources",  # noqa: S608
        )

    def trims(self, now: float, kept_days: int) -> tuple[tuple[str, float], ...]:
        """Statements that drop rows and sources that are too old, each with its argument."""
        return (
            (f"DELETE FROM {self.prefix}usage WHERE hour < {self.mark}", now - kept_days * _DAY_S),  # noqa: S608
            (f"DELETE FROM {self.prefix}usage_sources WHERE at < {self.mark}", now - SOURCES_KEPT_S),  # noqa: S608
        )

    def read(self, query: UsageQuery) -> tuple[str, list[Any]]:
        """The query's rows, as `read_rows` reads them; with its arguments."""
        groups = ", ".join(query.group_by)
        sums = ", ".join(f"SUM({name})" for name in SUMS)
        wanted: dict[str, str | None] = {
            "tenant": query.tenant,
            "key": query.key,
            "adapter": query.adapter,
            "base_model": query.base_model,
        }
        names = {name: value for name, value in wanted.items() if value is not None}
        wheres = [f"hour >= {self.mark}", f"hour < {self.mark}", *(f"{name} = {self.mark}" for name in names)]
        values = [first_hour(query.since), ceil(query.until), *names.values()]
        for group, sign in ((query.after, ">"), (query.up_to, "<=")):
            if group:
                columns = ", ".join(query.group_by[: len(group)])
                wheres.append(f"({columns}) {sign} ({', '.join([self.mark] * len(group))})")
                values += group
        text = f"SELECT {groups}{', ' if groups else ''}{sums} FROM {self.prefix}usage WHERE {' AND '.join(wheres)}"  # noqa: S608
        text += f" GROUP BY {groups} ORDER BY {groups}" if groups else ""
        return f"{text} LIMIT {MOST_GROUPS + 1 if query.limit is None else query.limit}", values


def first_hour(since: float) -> int:
    """The beginning of the first hour that begins at this time or later."""
    return ceil(since / HOUR_S) * HOUR_S


def row_values(rows: Mapping[UsageKey, UsageSums]) -> list[tuple[Any, ...]]:
    """The columns of each row."""
    return [(*key, *_values_of(sums)) for key, sums in rows.items()]


def read_rows(found: Sequence[tuple[Any, ...]], query: UsageQuery) -> UsageRows:
    """The rows that a store has found for a query. Raises OrchestratorRequestError for more than `MOST_GROUPS`."""
    if len(found) > MOST_GROUPS:
        raise OrchestratorRequestError(
            f"more than {MOST_GROUPS} rows: ask for a shorter range, one tenant, or fewer fields in group_by",
            param="group_by",
        )
    rows: UsageRows = {}
    width = len(query.group_by)
    for row in found:
        if row[width] is not None:  # the sums of no rows
            key = UsageKey()._replace(**dict(zip(query.group_by, row, strict=False)))
            # PostgreSQL adds up 64-bit integers as decimals.
            rows[key] = UsageSums(
                **{name: kind(value) for (name, kind), value in zip(_KINDS, row[width:], strict=True)}
            )
    return rows
