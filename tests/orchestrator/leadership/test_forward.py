"""Request forwarding by a standby, in front of a served leader."""

import asyncio
from contextlib import asynccontextmanager, suppress

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from lorafleet.http_server.guard import TrackRequests
from lorafleet.telemetry.request_log import RequestLog
from orchestrator.core.errors import OrchestratorUnavailable
from orchestrator.core.lease import LeaseRecord
from orchestrator.leadership.forward import FORWARDED, LeaderForwarding, OwnCalls
from orchestrator.metrics import OrchestratorMetrics
from tests.patience import patience, until, within
from tests.serving import client_of, serving


class FakeLeadership:
    """Leadership as `LeaderForwarding` needs it."""

    is_leading = False
    is_late = False
    is_stopping = False
    holder = "standby"
    other_holder = None
    trouble = ""

    def __init__(self):
        self.own_calls = OwnCalls()
        self.slow_began, self.slow_ends = asyncio.Event(), asyncio.Event()
        self.has_successor = asyncio.Event()

    async def wait_for_successor(self, within_s):
        if self.other_holder is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await self.has_successor.wait()


class FakeLeader:
    def __init__(self):
        self.seen, self.scopes = [], []
        self.left = asyncio.Event()
        self.hang = asyncio.Event()
        self.app = FastAPI()

        @self.app.api_route("/{path:path}", methods=["GET", "POST"])
        async def anything(path: str, request: Request):
            self.scopes.append(request.scope)
            self.seen.append((request.method, str(request.url).partition("//")[2].partition("/")[2], request.headers))
            if path == "v1/events":
                return StreamingResponse(self._events(), media_type="text/event-stream")
            if path == "hang":
                await self.hang.wait()
            return JSONResponse({"body": (await request.body()).decode()}, 418, {"etag": '"7"'})

    async def _events(self):
        try:
            yield b"data: one\n\n"
            await asyncio.Event().wait()
        finally:
            self.left.set()


@pytest.fixture
async def leader():
    it = FakeLeader()
    async with serving(it.app) as it.url:
        yield it


@asynccontextmanager
async def forwarding(leadership, refresh=None):
    local, refreshed = FastAPI(), []

    @local.get("/{path:path}")
    async def read(path: str):
        return {"answered": "here"}

    @local.post("/slow")
    async def slow():
        leadership.slow_began.set()
        await leadership.slow_ends.wait()
        return {"answered": "here"}

    async with client_of() as upstream:
        app = LeaderForwarding(
            local,
            leadership=leadership,
            own_calls=leadership.own_calls,
            client=upstream,
            metrics=OrchestratorMetrics(),
            refresh=refresh or (lambda: refreshed.append(1)),
            is_stopping=lambda: leadership.is_stopping,
            connect_timeout_s=patience(0.5),
            retry_after_s=1.0,
        )
        tracked = TrackRequests(app, requests=RequestLog("test"))
        async with serving(tracked) as url, httpx.AsyncClient(base_url=url, timeout=patience(10)) as client:
            client.refreshed = refreshed
            yield client


def standby(url):
    it = FakeLeadership()
    it.other_holder = LeaseRecord(holder="leader", url=url, duration_s=5.0)
    return it


async def test_requests_and_responses_are_forwarded_unchanged(leader):
    async with forwarding(standby(leader.url)) as client:
        answer = await client.post("/v1/adapters?dry_run=1", content=b"{}", headers={"authorization": "Bearer k"})
    assert (answer.status_code, answer.json(), answer.headers["etag"]) == (418, {"body": "{}"}, '"7"')
    ((method, target, headers),) = leader.seen
    assert (method, target, headers["authorization"]) == ("POST", "v1/adapters?dry_run=1", "Bearer k")
    assert headers[FORWARDED] == "standby"
    assert [headers["x-request-id"]] == answer.headers.get_list("x-request-id")


@pytest.mark.parametrize(
    "target",
    [
        "/v1/aliases/acme/x%0dy",
        "/v1/adapters/a%00b",
        "/v1/x%2Fy%25",
        "/v1/a%20b?q=%0A%20&r=%E2%82%AC",
        "/v1/€",
        "/v1/x//y/",
    ],
)
async def test_a_path_is_forwarded_byte_for_byte(leader, target):
    async with forwarding(standby(leader.url)) as client:
        answer = await client.get(target)
    assert answer.status_code == 418
    wire = httpx.URL(f"http://x{target}").raw_path
    assert [
        scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"") for scope in leader.scopes
    ] == [wire]


async def test_an_error_of_forwarding_names_no_address_of_the_leader():
    async with forwarding(standby("http://127.0.0.1:9")) as client:
        answer = await client.post("/v1/adapters", content=b"{}")
    assert (answer.status_code, "127.0.0.1" in answer.text) == (503, False)
    assert "does not answer; ask again" in answer.json()["error"]["message"]


async def test_forwarded_events_are_live_and_a_leaving_reader_ends_the_stream(leader):
    async with forwarding(standby(leader.url)) as client, client.stream("GET", "/v1/events") as answer:
        assert await anext(answer.aiter_bytes()) == b"data: one\n\n"
    await asyncio.wait_for(leader.left.wait(), patience(5))


@pytest.mark.parametrize("end", [{"is_stopping": True}, {"other_holder": None}], ids=["we stop", "it leads no longer"])
async def test_a_forwarded_event_stream_ends_with_its_forwarder_or_its_term(leader, end):
    leadership = standby(leader.url)
    async with forwarding(leadership) as client, client.stream("GET", "/v1/events") as answer:
        pieces = answer.aiter_bytes()
        assert await anext(pieces) == b"data: one\n\n"
        vars(leadership).update(end)
        async with within(5):
            assert [piece async for piece in pieces] == []
        await asyncio.wait_for(leader.left.wait(), patience(5))


async def test_a_forwarded_event_stream_ends_in_order_when_the_leader_dies():
    async def die(_reader, writer):
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head + b"b\r\ndata: one\n\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(die, "127.0.0.1", 0) as leader:
        url = f"http://127.0.0.1:{leader.sockets[0].getsockname()[1]}"
        async with forwarding(standby(url)) as client:
            assert (await client.get("/v1/events")).content == b"data: one\n\n"


async def test_a_forwarded_request_is_not_forwarded_again(leader):
    async with forwarding(standby(leader.url)) as client:
        for method in ("GET", "POST"):
            answer = await client.request(method, "/v1/adapters", headers={FORWARDED: "another"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_leading")
            assert answer.headers["retry-after"] == "1"
            assert answer.headers["connection"] == "close"  # behind a Service another one may know the leader
    assert leader.seen == []


@pytest.mark.parametrize("url", [None, "http://127.0.0.1:9"])
async def test_without_a_leader_only_reads_are_answered_from_the_store(url):
    async with forwarding(standby(url) if url else FakeLeadership()) as client:
        assert (await client.get("/v1/adapters")).json() == {"answered": "here"}
        assert client.refreshed == [1]
        for method, path in (("POST", "/v1/adapters"), ("GET", "/v1/catalog"), ("GET", "/v1/events")):
            answer = await client.request(method, path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_leading")


async def test_a_refusal_says_why_no_process_leads():
    leadership = FakeLeadership()
    leadership.trouble = "lease /srv/store.db.lease: no space left in /srv: make room"
    async with forwarding(leadership) as client:
        message = (await client.post("/v1/adapters")).json()["error"]["message"]
    assert message == f"this orchestrator does not lead, and knows of none that does: {leadership.trouble}"


async def asked(client, leader):
    """A forwarded call that waits at the leader."""
    waiting = asyncio.create_task(client.post("/hang"))
    await until(lambda: leader.seen)
    return waiting


async def test_a_waiting_call_ends_when_the_leader_changes(leader):
    leadership = standby(leader.url)
    async with forwarding(leadership) as client:
        waiting = await asked(client, leader)
        leadership.other_holder = LeaseRecord(holder="another", url="http://127.0.0.1:9", duration_s=5.0)
        answer = await asyncio.wait_for(waiting, patience(5))
        assert answer.json()["error"]["code"] == "not_leading"
        leader.hang.set()


async def test_a_waiting_call_ends_with_an_error_when_its_forwarder_stops(leader):
    leadership = standby(leader.url)
    async with forwarding(leadership) as client:
        waiting = await asked(client, leader)
        leadership.is_stopping = True
        answer = await asyncio.wait_for(waiting, patience(5))
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "not_leading"
        assert "stops" in answer.json()["error"]["message"]
        assert int(answer.headers["retry-after"]) >= 1
        # What is answered soon still is.
        assert (await client.post("/v1/adapters", content=b"{}")).json() == {"body": "{}"}
        leader.hang.set()


async def test_a_leader_that_stops_ends_its_calls_and_forwards_those_that_come(leader):
    leadership = FakeLeadership()
    leadership.is_leading = True
    async with forwarding(leadership) as client:
        began = asyncio.create_task(client.post("/slow"))
        await asyncio.wait_for(leadership.slow_began.wait(), patience(5))
        leadership.is_stopping = True
        coming = asyncio.create_task(client.post("/v1/adapters", content=b"{}"))
        await leadership.own_calls.wait_for_end(0.01)
        assert not began.done()
        leadership.is_leading = False
        # The next leader begins its term.
        leadership.other_holder = LeaseRecord(holder="next", url=leader.url, duration_s=5.0)
        leadership.has_successor.set()
        assert (await asyncio.wait_for(coming, patience(5))).json() == {"body": "{}"}
        leadership.slow_ends.set()
        await asyncio.wait_for(leadership.own_calls.wait_for_end(patience(5)), patience(5))
        assert (await began).json() == {"answered": "here"}
    assert [target for _, target, _ in leader.seen] == ["v1/adapters"]


async def test_local_routes_and_the_leaders_own_requests_are_not_forwarded(leader):
    leadership = standby(leader.url)
    async with forwarding(leadership) as client:
        assert (await client.get("/health")).json() == {"answered": "here"}
        leadership.is_leading = True
        assert (await client.get("/v1/catalog")).json() == {"answered": "here"}
    assert leader.seen == []


class LateLeadership(FakeLeadership):
    """Leads again after one check of the lease."""

    is_late = True

    async def wait_for_check(self):
        self.is_late, self.is_leading = False, True


async def test_a_request_waits_for_a_late_check_of_the_lease():
    async with forwarding(LateLeadership()) as client:
        assert (await client.get("/v1/adapters")).json() == {"answered": "here"}
        assert client.refreshed == []


async def test_reads_without_a_leader_are_refused_for_as_long_as_the_store_cannot_be_read():
    is_read = False

    def refresh():
        if not is_read:
            raise OrchestratorUnavailable("the store has not been read yet", code="starting")

    async with forwarding(FakeLeadership(), refresh) as client:
        for _ in range(3):
            answer = await client.get("/v1/adapters")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "starting")
        is_read = True
        assert (await client.get("/v1/adapters")).json() == {"answered": "here"}
