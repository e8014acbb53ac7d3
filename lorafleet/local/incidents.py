"""`lorafleet up` prints what happens to its workers and engines, as the orchestrator has it in its history."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import httpx

from lorafleet.service.failure import printable
from lorafleet.service.loops import backoff_s

_NEWEST = 50
_FIRST_BACKOFF_S, _MOST_BACKOFF_S = 0.2, 5.0
# The stream has a comment at least so often: `keep_alive_s` of the orchestrator, with time to spare.
_SILENCE_S = 60.0


class IncidentPrinter:
    """Follows the orchestrator's events, and prints each incident once, oldest first."""

    def __init__(self, url: str, headers: Mapping[str, str], say: Callable[[str], None], *, since: datetime) -> None:
        """`since`: incidents before this time are not printed."""
        self._url = url
        self._headers = dict(headers)
        self._say = say
        self._since = since
        self._last_id = 0

    async def run(self) -> None:
        """Print incidents until cancelled; an orchestrator that is away is asked again."""
        failures = 0
        timeout = httpx.Timeout(10, read=_SILENCE_S)
        async with httpx.AsyncClient(timeout=timeout, trust_env=False, headers=self._headers) as client:
            while True:
                with contextlib.suppress(httpx.HTTPError, ValueError, KeyError):
                    async for _ in self._news(client):
                        await self._print_new(client)
                        failures = 0
                failures += 1
                await asyncio.sleep(backoff_s(failures, _FIRST_BACKOFF_S, _MOST_BACKOFF_S))

    async def _news(self, client: httpx.AsyncClient) -> AsyncIterator[None]:
        """One item once the orchestrator's events are followed, and one after each incident. Raises httpx.HTTPError."""
        async with client.stream("GET", f"{self._url}/v1/events") as events:
            events.raise_for_status()
            yield None
            async for line in events.aiter_lines():
                if line == "event: incident":
                    yield None

    async def _print_new(self, client: httpx.AsyncClient) -> None:
        """Print the incidents that have not been. Raises httpx.HTTPError, ValueError, KeyError."""
        asked: dict[str, str | int] = {"kind": "incident", "limit": _NEWEST, "since": self._since.isoformat()}
        answer = await client.get(f"{self._url}/v1/history", params=asked)
        answer.raise_for_status()
        new = [item for item in answer.json()["data"] if item["id"] > self._last_id]
        for item in sorted(new, key=lambda item: item["id"]):
            self._last_id = item["id"]
            for line in incident_lines(item):
                self._say(line)


def incident_lines(item: Mapping[str, Any]) -> list[str]:
    """An incident in a line, and the next step in another if there is one. A cause may hold an engine's own words."""
    at = datetime.fromisoformat(item["at"]).astimezone(UTC)
    what = item["kind"].replace("_", " ")
    cause = printable(str(item["body"].get("cause", "")).partition("\n")[0])
    lines = [f"{at:%H:%M:%S} {printable(item['subject'] or 'fleet')}: {what}{f': {cause}' if cause else ''}"]
    return lines + ([f"         next: {item['next_step']}"] if item["next_step"] else [])
