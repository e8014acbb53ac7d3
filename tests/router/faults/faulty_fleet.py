"""A whole router before engines that say raw bytes; when it is left, nothing may be left in it."""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx

import router
from lorafleet.http_server.listener import HttpListener
from router.app import build
from router.config import RouterSettings
from router.http.engine_connection import Origin
from router.request.services import Services
from router.request.usage_report import usage_report
from tests.patience import patience, until
from tests.router.doubles import BASE, AgentDouble, chunk, with_worker_key
from tests.serving import client_of, serving
from tests.wires import RawClient, RawEngine, reset, tls_of_client, tls_of_server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
DONE = b"data: [DONE]\n\n"
EVENTS = (chunk(BASE, "one"), chunk(BASE, "two"), DONE)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
WHOLE = json.dumps({"id": "1", "model": BASE, "choices": [{"index": 0, "text": "hi"}]}).encode()


def pieces(*parts: bytes) -> bytes:
    """In HTTP's chunks, without the last."""
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)


def answering(body: bytes, *lines: bytes, status: bytes = b"200 OK") -> bytes:
    """A whole answer."""
    head = b"".join(line + b"\r\n" for line in (b"content-type: application/json", *lines))
    return b"HTTP/1.1 %b\r\n%bcontent-length: %d\r\n\r\n%b" % (status, head, len(body), body)


STREAM = STREAM_HEAD + pieces(*EVENTS) + b"0\r\n\r\n"


Act = Callable[[asyncio.StreamWriter, dict], Awaitable[bool | None]]


async def sound(writer: asyncio.StreamWriter, body: dict) -> bool:
    """An engine that is well."""
    writer.write(STREAM if body.get("stream") else answering(WHOLE))
    await writer.drain()
    return True


def saying(raw: bytes, then: str = "stay", *, each: int = 0, pause_s: float = 0.0) -> Act:
    """Says these bytes, `each` at once, and then: stay (for the next request), hang, close, reset or half_close."""

    async def act(writer: asyncio.StreamWriter, body: dict) -> bool:
        for at in range(0, len(raw), each or max(1, len(raw))):
            writer.write(raw[at : at + (each or len(raw))])
            await writer.drain()
            if pause_s:
                await asyncio.sleep(pause_s)
        if then == "reset":
            reset(writer)
        elif then == "half_close":
            writer.write_eof()
        elif then == "hang":
            await asyncio.Event().wait()
        return then not in ("close", "reset")

    return act


class Play:
    """What engines do: to each prompt the acts in turn, whichever engine is asked; then they are well."""

    def __init__(self) -> None:
        self.acts: dict[str, list[Act]] = {}
        self.asked: Counter[str] = Counter()
        self.usual: Act = sound

    async def __call__(self, engine: RawEngine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            body = json.loads(await engine.request(reader) or b"{}")
            name = str(body.get("prompt"))
            self.asked[name] += 1
            acts = self.acts.get(name)
            act = acts.pop(0) if acts else self.usual
            working = asyncio.create_task(act(writer, body))
            # As an engine does: its client has gone, so the work ends.
            gone = asyncio.create_task(_closed(reader))
            try:
                await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
            finally:
                gone.cancel()
            if not working.done():
                working.cancel()
                return
            if not working.result():
                return


async def _closed(reader: asyncio.StreamReader) -> None:
    while not reader.at_eof() and reader.exception() is None:
        await asyncio.sleep(0.01)


@dataclass
class FaultyFleet:
    """A router under test."""

    client: httpx.AsyncClient
    port: int
    parts: Services
    listener: HttpListener
    control: AgentDouble
    engines: list[RawEngine]
    play: Play
    unexpected: list[dict] = field(default_factory=list)
    tasks: frozenset[asyncio.Task] = frozenset()

    async def ask(self, prompt: str, *acts: Act, stream: bool = False, **more) -> httpx.Response:
        """A completion, to which the engines that are tried do this in turn."""
        self.play.acts[prompt] = list(acts)
        headers = more.pop("headers", None)
        body = {"model": BASE, "prompt": prompt, "stream": stream, **more}
        return await self.client.post(COMPLETIONS, json=body, headers=headers)

    async def connect(self) -> None:
        """Have an idle connection to each engine: the next request need not wait for anything but an answer on it."""
        pool = self.parts.pool
        for engine in self.engines:
            origin = Origin.parse(engine.url)
            if not pool.has_idle(origin):
                connection = await pool.connect(origin)
                connection.answers, connection.http_version = 1, "1.1"  # as after one
                pool.release(connection)

    async def raw(self) -> RawClient:
        """A client that sends bytes."""
        return RawClient(*await asyncio.open_connection("127.0.0.1", self.port, **tls_of_client()))

    def left(self) -> dict[str, object]:
        """What is still held, by name; empty when all was given back."""
        parts, room = self.parts, self.parts.scheduler.queue.usage
        metrics = parts.metrics
        found = {
            "clients' connections": len(self.listener.connections),
            "bytes of bodies": self.listener.intake.room.held_bytes,
            "busy connections to engines": parts.pool.connections - parts.pool.idle_connections,
            "requests in flight": len(list(parts.scheduler.load.counts_by_name())),
            "in flight, by the metric": parts.scheduler.load.total_in_flight,
            "requests waiting for room": (len(parts.scheduler.queue), room.requests, room.size_bytes, room.tenants),
            "waiting, by the metric": metrics.waiting.labels().value,
            "requests held for adapters": (
                parts.cold_starts.held.requests,
                parts.cold_starts.held_bytes,
                parts.cold_starts.held.tenants,
            ),
            "loads": (parts.cold_starts.loading, parts.cold_starts.wanted),
            "held, by the metric": metrics.held.labels().value,
            "slots of keys": sum(account.running for account in parts.quotas.accounts.values()),
            "places in the background": parts.background.places,
            "turns": (parts.suspect_locks, parts.suspects_at),
            "in flight, as reported": usage_report(parts, parts.clock()).in_flight,
            "tasks": Counter(_name_of(task) for task in asyncio.all_tasks() - self.tasks if _is_the_routers(task)),
        }
        return {name: what for name, what in found.items() if (any(what) if isinstance(what, tuple) else what)}

    def is_idle(self) -> bool:
        """Nothing is at work; clients' connections may be open."""
        return self.left().keys() <= {"clients' connections"}

    async def nothing_is_left(self) -> None:
        """All that requests held was given back, and no unexpected error was logged or answered."""
        with contextlib.suppress(TimeoutError):  # which says less than what is left
            await until(lambda: not self.left())
        left = self.left()
        assert not left, left
        assert not self.unexpected, self.unexpected
        answered = self.parts.metrics.requests.label_values
        assert not [labels for labels in answered if "internal_error" in labels]
        assert not self.listener.intake.refusals["internal_error"]


_ROUTER = str(Path(router.__file__).parent)


def _is_the_routers(task: asyncio.Task) -> bool:
    code = getattr(task.get_coro(), "cr_code", None)
    return code is not None and code.co_filename.startswith(_ROUTER)


def _name_of(task: asyncio.Task) -> str:
    return getattr(task.get_coro(), "__qualname__", "")


@contextlib.asynccontextmanager
async def faulty_fleet(
    engines: int = 2, *, control: AgentDouble | None = None, play: Play | None = None, **settings
) -> AsyncIterator[FaultyFleet]:
    """A router before so many engines. Its circuits and its budget for retries are out of the way."""
    control, play = control or AgentDouble(), play or Play()
    async with contextlib.AsyncExitStack() as stack:
        made = [await stack.enter_async_context(RawEngine(play)) for _ in range(engines)]
        control.workers |= {f"w{number}": engine.url for number, engine in enumerate(made)}
        control.url = await stack.enter_async_context(serving(control.app))
        usual = {
            # Each connection is looked at: none is opened ahead.
            "spare_connections": 0,
            "orchestrator_url": control.url,
            "metadata_poll_s": 0.2,
            "catalog_poll_s": 0.2,
            "tokenizer": "off",
            "failover_wait_s": 0.2,
            "control_timeout_s": patience(5),
            "connect_timeout_s": patience(2),
            "breaker_failures": 10**6,
            "breaker_eject_share": 0.0,
            "retry_floor_per_s": 10**6,
        }
        app, parts = build(RouterSettings(**usual | with_worker_key(settings)))
        url = await stack.enter_async_context(serving(app, http=app.state.http, tls=tls_of_server()))
        assert await parts.discovery.changes.until(
            lambda: len(parts.discovery.fleet.replicas) == engines, timeout_s=patience(5)
        )
        client = client_of(url)
        found = FaultyFleet(client, int(url.rsplit(":", 1)[1]), parts, app.state.http, control, made, play)
        found.tasks = frozenset(asyncio.all_tasks())
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: found.unexpected.append(context))
        try:
            yield found
        finally:
            await client.aclose()
        await found.nothing_is_left()


def error_of(answer: httpx.Response) -> tuple[int, str]:
    """(status, code) of an error in the envelope."""
    error = answer.json()["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    return answer.status_code, error["code"]


def events_of(text: bytes) -> list[bytes]:
    """A stream's events; fails on half a one."""
    assert text.endswith(b"\n\n"), text[-200:]
    return [part + b"\n\n" for part in text.split(b"\n\n")[:-1]]
