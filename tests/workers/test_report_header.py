"""Answers to an orchestrator say as of which report they are."""

import httpx
import pytest
from starlette.responses import Response

from workers.epochs import EPOCH_HEADER
from workers.report_header import ReportHeaderMiddleware
from workers.wire import REPORT_HEADER


@pytest.mark.parametrize(
    ("status", "headers", "has_header"),
    [
        (200, {EPOCH_HEADER: "1"}, True),
        (409, {EPOCH_HEADER: "1"}, True),
        (401, {EPOCH_HEADER: "1"}, False),
        (403, {EPOCH_HEADER: "1"}, False),
        (200, {}, False),
    ],
)
async def test_the_header_is_in_answers_to_a_leader_alone(status, headers, has_header):
    app = ReportHeaderMiddleware(Response(status_code=status), as_of=lambda: "boot:7")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://agent") as client:
        answer = await client.get("/", headers=headers)
    assert answer.headers.get(REPORT_HEADER) == ("boot:7" if has_header else None)


async def test_the_header_is_read_when_the_call_has_had_its_effect():
    done = []

    async def app(scope, receive, send):
        done.append("effect")
        await Response()(scope, receive, send)

    middleware = ReportHeaderMiddleware(app, as_of=lambda: f"after {done}")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(middleware), base_url="http://agent") as client:
        answer = await client.get("/", headers={EPOCH_HEADER: "1"})
    assert answer.headers[REPORT_HEADER] == "after ['effect']"
