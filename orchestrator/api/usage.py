"""The route that reads the ledger, as JSON by pages or as one CSV file; and the price file."""

import asyncio
import csv
import io
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Depends, Header, Query
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field, ValidationError

from lorafleet.keys.auth import ApiKeys, requires
from lorafleet.service import yamls
from lorafleet.service.http import validation_message
from lorafleet.service.times import unix_text, unix_time, utc_text
from orchestrator.api.tenancy import Cursor, Limit, TenantView, tenant_view_of
from orchestrator.core.errors import Forbidden, OrchestratorRequestError, OrchestratorUnavailable
from orchestrator.model.changes import reader_of
from orchestrator.model.ledger import (
    SUMS,
    PriceList,
    UsageField,
    UsageGroup,
    UsageItem,
    UsageKey,
    UsageList,
    UsageQuery,
    UsageSums,
)
from orchestrator.store.ledger import Ledger, UsagePage
from orchestrator.store.store import IntentStore

CSV_TYPE = "text/csv"
_CSV_GROUPS = 2000  # read at a time
_LATEST = float(1 << 37)  # the year 6325


def read_prices(path: Path) -> PriceList:
    """The prices in a file. Raises OrchestratorUnavailable for a file that is not there, or no price list."""
    try:
        found: PriceList = reader_of(PriceList).validate_python(yamls.read_yaml(path))
    except ValidationError as exc:
        raise _price_file_error(path, validation_message(exc.errors())) from exc
    except (OSError, ValueError) as exc:
        raise _price_file_error(path, str(exc)) from exc
    return found


def _price_file_error(path: Path, problem: str) -> OrchestratorUnavailable:
    """The error for a price file that cannot be used."""
    expected = "expected `currency: <name>`, `default: {per_million_prompt_tokens: <price>, ...}` and `base_models`"
    return OrchestratorUnavailable(f"price file {path}: {problem}; {expected}", code="price_file_invalid")


class UsageQuestion(BaseModel):
    """The rows that a caller asks for, and by what they are added up."""

    group_by: tuple[UsageField, ...] = Field(
        default=(), description="may be repeated; without it the answer is one sum"
    )
    since: datetime | None = Field(default=None, description="default: the beginning of this month, in UTC")
    until: datetime | None = Field(default=None, description="default: now")
    tenant: str | None = Field(default=None, description="rows of this tenant; empty: of keys without a tenant")
    key: str | None = Field(default=None, description="rows of the key with this id")
    adapter: str | None = Field(default=None, description="rows of this lora_id; empty: of base models")
    base_model: str | None = Field(default=None, description="rows of this base model and its adapters")
    limit: Limit = 100
    cursor: Cursor = None
    format: Literal["json", "csv"] | None = Field(
        default=None, description="`csv`: all rows as one file, without pages; default: as Accept says, else json"
    )

    def asked(self, now: datetime) -> UsageQuery:
        """The question as the ledger takes it. Raises OrchestratorRequestError for a cursor of another question."""
        month = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
        group_by = tuple(dict.fromkeys(self.group_by))
        return UsageQuery(
            since=_bounded_time(self.since or month),
            until=_bounded_time(self.until or now),
            group_by=group_by,
            tenant=self.tenant,
            key=self.key,
            adapter=self.adapter,
            base_model=self.base_model,
            after=None if self.cursor is None else _read_cursor(self.cursor, group_by),
        )


def _bounded_time(at: datetime) -> float:
    """Unix seconds of a time, at most those that are a date in any zone."""
    return min(max(0.0, unix_time(at)), _LATEST)


def _read_cursor(cursor: str, group_by: tuple[UsageField, ...]) -> UsageGroup:
    """The group that a cursor names. Raises OrchestratorRequestError."""
    kinds = [int if name == "hour" else str for name in group_by]
    try:
        found = msgspec.json.decode(cursor, type=tuple[int | str, ...])
    except msgspec.DecodeError:
        found = ()
    if not found or [type(value) for value in found] != kinds or not all(map(_is_storable, found)):
        raise OrchestratorRequestError("cursor is not the `next` of an answer with this group_by", param="cursor")
    return found


def _is_storable(value: int | str) -> bool:
    """Whether a value may be one of a store's: SQLite's integers have 64 bits, PostgreSQL's texts no NUL."""
    return "\0" not in value if isinstance(value, str) else abs(value) < 1 << 62


def usage_routes(
    keys: ApiKeys, store: IntentStore, ledger: Ledger, price_file: Path | None, wall: Callable[[], float]
) -> APIRouter:
    """The route that reads the ledger. It needs scope `view`.

    Raises OrchestratorUnavailable for a price file that cannot be used.
    """
    if price_file is not None:
        read_prices(price_file)
    api = APIRouter(tags=["usage"])
    seen_by = Annotated[TenantView, Depends(tenant_view_of(store))]

    @api.get(
        "/v1/usage",
        dependencies=[Depends(requires(keys, "view"))],
        response_model=UsageList,
        responses={200: {"content": {CSV_TYPE: {}}, "description": "with `format=csv` one file, a row a group"}},
    )
    async def usage(
        asked: Annotated[UsageQuestion, Query()], seen: seen_by, accept: Annotated[str, Header()] = ""
    ) -> UsageList | StreamingResponse:
        """What was used, added up by hour, tenant, key, adapter, version or base model; see docs/usage.md.

        A tenant's key reads its tenant's rows alone. 409 `no_ledger` with ConfigMaps as the store.
        """
        if seen.tenant is not None and asked.tenant not in {None, seen.tenant}:
            raise Forbidden(
                f"a key of tenant {seen.tenant!r} reads its own tenant's usage", code="fleet_key_needed", param="tenant"
            )
        query = asked.asked(datetime.fromtimestamp(wall(), UTC))
        if seen.tenant is not None:
            query = replace(query, tenant=seen.tenant)
        prices = None if price_file is None else await asyncio.to_thread(read_prices, price_file)
        if asked.format == "csv" or (asked.format is None and CSV_TYPE in accept):
            query = replace(query, after=None)
            first = await ledger.page(query, _CSV_GROUPS, prices)  # what fails here has a status
            name = f"usage-{unix_text(query.since)[:10]}.csv"
            return StreamingResponse(
                _csv_parts(ledger, query, first, prices),
                media_type=CSV_TYPE,
                headers={"content-disposition": f'attachment; filename="{name}"'},
            )
        page = await ledger.page(query, asked.limit, prices)
        return UsageList(
            since=unix_text(query.since),
            until=unix_text(query.until),
            currency=None if prices is None else prices.currency,
            data=tuple(
                UsageItem(group=_group(key, query), usage=sums.rounded(), cost=_rounded_cost(page, key))
                for key, sums in page.rows.items()
            ),
            next=None if page.last is None else msgspec.json.encode(page.last).decode(),
        )

    return api


def _group(key: UsageKey, query: UsageQuery) -> dict[UsageField, str]:
    """The fields by which a query groups, as text."""
    return {name: _field_text(key, name) for name in query.group_by}


def _field_text(key: UsageKey, name: UsageField) -> str:
    """One field of a row; the hour's beginning as ISO 8601."""
    return utc_text(datetime.fromtimestamp(key.hour, UTC), "seconds") if name == "hour" else getattr(key, name)


def _rounded_cost(page: UsagePage, key: UsageKey) -> float | None:
    """A group's cost with six digits after the point; None without prices."""
    cost = page.costs.get(key)
    return None if cost is None else round(cost, 6)


async def _csv_parts(
    ledger: Ledger, query: UsageQuery, page: UsagePage, prices: PriceList | None
) -> AsyncIterator[str]:
    """A CSV file of all groups of a query from this page on: a line of names, then a line a group."""
    costs = () if prices is None else ("cost", "currency")
    yield _csv_text([(*query.group_by, *SUMS, *costs)])
    while True:
        yield _csv_text(_csv_lines(query, page, prices))
        if page.last is None:
            return
        page = await ledger.page(replace(query, after=page.last), _CSV_GROUPS, prices)


def _csv_lines(query: UsageQuery, page: UsagePage, prices: PriceList | None) -> Iterator[tuple[object, ...]]:
    """The values of each group of a page."""
    for key, found in page.rows.items():
        sums: UsageSums = found.rounded()
        values = (*_group(key, query).values(), *(getattr(sums, name) for name in SUMS))
        yield values if prices is None else (*values, _rounded_cost(page, key), prices.currency)


def _csv_text(lines: Iterator[tuple[object, ...]] | list[tuple[str, ...]]) -> str:
    """Lines of a CSV file (RFC 4180)."""
    text = io.StringIO()
    csv.writer(text).writerows(lines)
    return text.getvalue()
