"""Adapter files by digest: relayed from a worker of this fleet, or from another fleet's orchestrator."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

import httpx

from lorafleet.keys.own_key import OwnKey
from orchestrator.core.errors import NotFound, OrchestratorRequestError, OrchestratorUnavailable, WorkerFailed
from orchestrator.reconcile.agent_client import AgentClient
from orchestrator.reconcile.worker_reports import WorkerReports

_STREAMS = 16
"""Files relayed at the same time. Each costs the event loop about a tenth of a core at 100 MB/s; a guess."""
_BUSY_RETRY_S = 2.0
_PROBES = 16
_RELAYED = ("range", "if-range")
_HTTP_OK = frozenset({200, 206, 416})


@dataclass(slots=True)
class RelayedFile:
    """An open answer to pass on. It must be closed, also when nobody has read it: it holds one of our streams.

    on_close  called once, when it is closed
    """

    answer: httpx.Response
    on_close: Callable[[], None]
    is_closed: bool = False

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.answer.status_code

    @property
    def headers(self) -> dict[str, str]:
        """The headers about the content."""
        kept = ("content-type", "content-length", "content-range", "accept-ranges", "etag")
        return {key: self.answer.headers[key] for key in kept if key in self.answer.headers}

    def body(self) -> AsyncIterator[bytes]:
        """The bytes as they come. Raises httpx.HTTPError when the place that sends them breaks off."""
        return self.answer.aiter_raw()

    async def close(self) -> None:
        """Close the connection and free the stream; safe to call twice."""
        if not self.is_closed:
            self.is_closed = True
            self.on_close()
            await self.answer.aclose()


class FileRelay:
    """Finds a digest's files and streams them; nothing is stored here."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        reports: WorkerReports,
        *,
        agents: AgentClient,
        peers: Sequence[str],
        peer_key: OwnKey,
        probe_timeout_s: float,
        read_timeout_s: float = 30.0,
    ) -> None:
        """
        agents    prove addresses, and have our key for them
        peers     URLs of other fleets' orchestrators that files may come from
        peer_key  key for them
        """
        self._client = client
        self._reports = reports
        self._agents = agents
        self.peers = tuple(url.rstrip("/") for url in peers)
        self._peer_key = peer_key
        self._probe_timeout_s = probe_timeout_s
        self._timeout = httpx.Timeout(read_timeout_s, connect=probe_timeout_s)
        self._streams = asyncio.Semaphore(_STREAMS)

    def require_peer(self, fleet: str) -> None:
        """Raise OrchestratorRequestError 400 `fleet_unknown` unless `peer_fleets` names this URL."""
        if fleet.rstrip("/") not in self.peers:
            known = ", ".join(self.peers) or "none"
            raise OrchestratorRequestError(
                f"fleet {fleet[:200]!r} is not one that files may come from; peer_fleets names {known}",
                code="fleet_unknown",
                param="fleet",
            )

    async def open_file(self, digest: str, name: str, fleet: str, headers: Mapping[str, str]) -> RelayedFile:
        """The list of a digest's files (`name` ""), or one of them, from the first place that has it.

        fleet    URL of the other fleet's orchestrator that is asked when no worker here has it; "" for none
        headers  of the request: ranges are passed on
        raises   NotFound `files_not_found`, OrchestratorRequestError `fleet_unknown`, OrchestratorUnavailable when too
                 many files are relayed now or no place could be asked
        """
        if fleet:
            self.require_peer(fleet)
        if self._streams.locked():
            raise OrchestratorUnavailable(
                f"{_STREAMS} files are being relayed already; ask again", code="files_busy", retry_after_s=_BUSY_RETRY_S
            )
        await self._streams.acquire()
        try:
            answer = await self._open_any(digest, name, fleet, {k: headers[k] for k in _RELAYED if k in headers})
        except BaseException:
            self._streams.release()
            raise
        return RelayedFile(answer, self._streams.release)

    async def _open_any(self, digest: str, name: str, fleet: str, headers: Mapping[str, str]) -> httpx.Response:
        """The open answer of the first worker that has the file, else of the other fleet. Raises as `open_file`."""
        path = f"/v1/files/{digest}" + (f"/{quote(name, safe='')}" if name else "")
        reported, others = self._holders_first(digest)
        is_silent = False
        for url in reported:
            answer = await self._try_agent(url, path, headers)
            if answer is not None and answer.status_code in _HTTP_OK:
                return answer
            is_silent |= answer is None
        async for url in self._with_files(others, digest):
            answer = await self._try_agent(url, path, headers)
            if answer is not None and answer.status_code in _HTTP_OK:
                return answer
        if fleet:
            answer = await self._try(fleet.rstrip("/") + path, {**headers, **self._peer_key.headers})
            if answer is not None and answer.status_code in _HTTP_OK:
                return answer
            raise self._peer_error(fleet, answer)
        if is_silent:
            raise OrchestratorUnavailable("the workers that have the files do not answer", code="worker_unreachable")
        raise NotFound(f"no worker has the files of digest {digest} on its disk", code="files_not_found")

    @staticmethod
    def _peer_error(fleet: str, answer: httpx.Response | None) -> Exception:
        """The error for a fleet that does not answer (None) or refuses."""
        if answer is None:
            return OrchestratorUnavailable(f"fleet {fleet} does not answer", code="fleet_unreachable")
        if answer.status_code in (401, 403):
            message = f"fleet {fleet} refuses our key (HTTP {answer.status_code}): peer_token_file needs scope `export`"
            return OrchestratorRequestError(message, code="fleet_refused")
        if answer.status_code == httpx.codes.NOT_FOUND:
            return NotFound(f"fleet {fleet} has the files on no worker's disk", code="files_not_found")
        return OrchestratorUnavailable(f"fleet {fleet} answers HTTP {answer.status_code}", code="fleet_unreachable")

    def _holders_first(self, digest: str) -> tuple[list[str], list[str]]:
        """Agent URLs of workers whose report names the digest, and those of all others that can be asked."""
        reported: list[str] = []
        others: list[str] = []
        for entry in self._reports.workers.values():
            lora, url = entry.report.lora, entry.report.agent_url.rstrip("/")
            if entry.reach != "heard" or not url.startswith("http"):
                continue
            has_it = any(digest in (it.digest, it.files_digest) for it in lora.loaded_loras)
            has_it = has_it or any(it.digest == digest for it in lora.available_loras)
            (reported if has_it else others).append(url)
        return reported, others

    async def _with_files(self, urls: Iterable[str], digest: str) -> AsyncIterator[str]:
        """Those of the agents that have the digest, as they answer. A report does not name all that a worker has."""
        limit = asyncio.Semaphore(_PROBES)

        async def probe(url: str) -> str | None:
            """The URL if its agent has the files."""
            async with limit:
                try:
                    headers = await self._agents.key_headers(url)
                    answer = await self._client.get(
                        f"{url}/v1/files/{digest}", headers=headers, timeout=self._probe_timeout_s
                    )
                except (httpx.HTTPError, httpx.InvalidURL, WorkerFailed):
                    return None
                return url if answer.is_success else None

        probes = [asyncio.create_task(probe(url)) for url in urls]
        try:
            for done in asyncio.as_completed(probes):
                if (url := await done) is not None:
                    yield url
        finally:
            for task in probes:
                task.cancel()
            await asyncio.gather(*probes, return_exceptions=True)

    async def _try_agent(self, agent_url: str, path: str, headers: Mapping[str, str]) -> httpx.Response | None:
        """The open answer of an agent that has proved its address; None if there is none."""
        try:
            key = await self._agents.key_headers(agent_url)
        except WorkerFailed:
            return None
        return await self._try(agent_url + path, {**headers, **key})

    async def _try(self, url: str, headers: Mapping[str, str]) -> httpx.Response | None:
        """The open answer to a GET; None if there is none. An error answer is closed."""
        request = self._client.build_request(
            "GET", url, headers={"accept-encoding": "identity", **headers}, timeout=self._timeout
        )
        try:
            answer = await self._client.send(request, stream=True)
        except (httpx.HTTPError, httpx.InvalidURL):
            return None
        if answer.status_code not in _HTTP_OK:
            await answer.aclose()
        return answer
