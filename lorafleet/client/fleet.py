"""The client itself: `Fleet` for threads, `AsyncFleet` for asyncio. Both run the operations of `calls`."""

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import httpx

from lorafleet.client import calls
from lorafleet.client.calls import Answer, Call, Operation, Pause
from lorafleet.client.results import FleetError
from lorafleet.service.network.transport import why_no_answer

T = TypeVar("T")
P = ParamSpec("P")


def _blocking(operation: Callable[P, Operation[T]]) -> Callable[Concatenate["Fleet", P], T]:
    """The operation as a method of `Fleet`."""

    @functools.wraps(operation)
    def method(self: "Fleet", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.run(operation(*args, **kwargs))

    return method


def _awaitable(operation: Callable[P, Operation[T]]) -> Callable[Concatenate["AsyncFleet", P], Coroutine[Any, Any, T]]:
    """The operation as a method of `AsyncFleet`."""

    @functools.wraps(operation)
    async def method(self: "AsyncFleet", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.run(operation(*args, **kwargs))

    return method


class Fleet:
    """A fleet at the URL of a router or an orchestrator. Use it as a context manager, or call `close`.

    Every method raises FleetError, with the server's own words. Safe for several threads.
    """

    push = _blocking(calls.push)
    publish = _blocking(calls.publish)
    unload = _blocking(calls.unload)
    wait_ready = _blocking(calls.wait_ready)

    def __init__(self, url: str, key: str = "", *, client: httpx.Client | None = None) -> None:
        """`key`: of scope `register`, in a fleet with keys. `client`: for proxies or certificates of your own."""
        self._url = url.rstrip("/")
        self._headers = _headers(key)
        self._client = client or httpx.Client()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        """Close the connections."""
        self.close()

    def run(self, operation: Operation[T]) -> T:
        """Make an operation's calls to its end; returns its result. Raises FleetError."""
        answer: Answer | None = None
        while True:
            step, result = _step(operation, answer)
            if step is None:
                return result  # type: ignore[return-value]  # the operation has ended with it
            if isinstance(step, Pause):
                time.sleep(step.seconds)
                answer = Answer(0)
            else:
                answer = self._call(step)

    def _call(self, call: Call) -> Answer:
        """The answer to one call; status 0 if there is none."""
        try:
            return _answer(self._client.request(**_request(self._url, self._headers, call), content=call.body))
        except (httpx.RequestError, httpx.InvalidURL) as exc:
            return _no_answer(self._url, exc)


class AsyncFleet:
    """`Fleet` for asyncio: the same methods, to be awaited. Use it as an async context manager, or call `close`."""

    push = _awaitable(calls.push)
    publish = _awaitable(calls.publish)
    unload = _awaitable(calls.unload)
    wait_ready = _awaitable(calls.wait_ready)

    def __init__(self, url: str, key: str = "", *, client: httpx.AsyncClient | None = None) -> None:
        """As `Fleet`."""
        self._url = url.rstrip("/")
        self._headers = _headers(key)
        self._client = client or httpx.AsyncClient()

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Close the connections."""
        await self.close()

    async def run(self, operation: Operation[T]) -> T:
        """As `Fleet.run`. An operation reads files between its calls, so that is done in threads."""
        answer: Answer | None = None
        while True:
            step, result = await asyncio.to_thread(_step, operation, answer)
            if step is None:
                return result  # type: ignore[return-value]  # the operation has ended with it
            if isinstance(step, Pause):
                await asyncio.sleep(step.seconds)
                answer = Answer(0)
            else:
                answer = await self._call(step)

    async def _call(self, call: Call) -> Answer:
        """As `Fleet._call`."""
        content = None if call.body is None else _in_threads(call.body)
        try:
            return _answer(await self._client.request(**_request(self._url, self._headers, call), content=content))
        except (httpx.RequestError, httpx.InvalidURL) as exc:
            return _no_answer(self._url, exc)


def _step(operation: Operation[T], answer: Answer | None) -> tuple[Call | Pause | None, T | None]:
    """The operation's next step, or None and its result."""
    try:
        return (next(operation) if answer is None else operation.send(answer)), None
    except StopIteration as end:
        return None, end.value


async def _in_threads(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    """The chunks, each read in a thread."""
    while (chunk := await asyncio.to_thread(next, chunks, b"")) != b"":
        yield chunk


def _headers(key: str) -> dict[str, str]:
    """The headers of every call. Raises FleetError for a key that no header can have."""
    if not key.isascii() or not key.isprintable():
        raise FleetError("the key has characters that no key has; was it copied whole?")
    return {"authorization": f"Bearer {key.strip()}"} if key.strip() else {}


def _request(url: str, headers: dict[str, str], call: Call) -> dict[str, Any]:
    """A call as httpx takes it, without its body in pieces."""
    return {
        "method": call.method,
        "url": url + call.path,
        "params": list(call.params) or None,
        "headers": headers | dict(call.headers),
        "json": call.json,
        "timeout": call.timeout_s,
    }


def _answer(found: httpx.Response) -> Answer:
    """An answer of httpx; None as its JSON where it has none."""
    try:
        parsed = found.json() if found.content else None
    except (ValueError, RecursionError):  # no JSON, or endless nesting
        parsed = None
    return Answer(found.status_code, found.headers, parsed)


def _no_answer(url: str, exc: Exception) -> Answer:
    """The answer of a server that gives none."""
    return Answer(0, error=f"{url} does not answer ({why_no_answer(exc)}): is the fleet up, and the address right?")
