"""Adapters by digest: from other workers of this fleet, or through its orchestrator from another fleet's workers.

`fleet+https://orchestrator.example/<digest>` names the other fleet's orchestrator. Ours fetches from it with its own
key for that fleet (`peer_fleets`), so workers need neither a way there nor a key.
"""

import asyncio
import contextlib
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from lorafleet.identity import fleet_digest, rendezvous_score
from lorafleet.keys.own_key import OwnKey
from lorafleet.service.network.transport import DirectTransport
from workers.core.errors import SourceError
from workers.core.references import parse_reference, redacted, scheme
from workers.sources.base import (
    Limits,
    Transfer,
    TransientSourceError,
    clear_folder,
    too_big_error,
    with_retries,
)
from workers.sources.fleet_agents import FleetAgents
from workers.sources.web import RETRIED_STATUSES, download_file, retry_after_s, tag_file_of
from workers.verification.adapter_files import WEIGHTS_NAME, is_stored_file
from workers.verification.peft import CONFIG_NAME, MAX_CONFIG_BYTES
from workers.wire import AdapterFiles

FLEET_SCHEMES = ("fleet+http", "fleet+https")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MOST_FILES = 64
_SILENT_S = 10.0
"""A worker that sends nothing for this long is passed over for the next; a guess: an upload makes no long pauses."""
_ENOUGH = 4
"""Workers with the files are enough."""
_PROBES = 16
"""Workers asked at a time whether they have a digest."""


class FleetSource:
    """The source for `fleet+https://`, and for the files of a digest that other workers of this fleet have.

    Own files come from the workers' agents, then through the orchestrators, which may reach agents that this one does
    not. Resumes a download: the ETag is the digest, whichever worker sends the bytes.
    """

    resumes = True

    def __init__(
        self,
        limits: Limits,
        *,
        orchestrator_urls: Sequence[str],
        own_key: OwnKey,
        agents: FleetAgents,
    ) -> None:
        self.agents = agents
        self._limits = limits
        self._urls = tuple(orchestrator_urls)
        self._own_key = own_key

    def at(self, urls: Sequence[str]) -> "NeighbourSource":
        """The source of own files at these agents alone."""
        return NeighbourSource(self, urls)

    async def fetch(self, ref: str, into: Path, transfer: Transfer) -> None:
        """Download the files of a digest. See `Source.fetch`."""
        fleet, digest = fleet_and_digest(ref)
        if not self._urls:
            message = f"source {redacted(ref)}: this worker has no orchestrator to fetch it through: orchestrator_url"
            raise SourceError("source_unsupported", message)
        async with self._client() as client:
            places = [] if fleet else await self._agents_with(client, digest)
            places += self._urls
            await _Fetch(client, ref, digest, fleet, places, into, transfer, self._limits).run()

    async def fetch_from(self, urls: Sequence[str], ref: str, into: Path, transfer: Transfer) -> None:
        """Download the files of a digest from these agents, each in turn. See `Source.fetch`."""
        _, digest = fleet_and_digest(ref)
        async with self._client() as client:
            await _Fetch(client, ref, digest, "", urls, into, transfer, self._limits).run()

    async def recheck(self, url: str, digest: str) -> None:
        """Have an agent read its files of a digest again, because it sent wrong bytes. Failures are ignored."""
        async with self._client() as client:
            with contextlib.suppress(httpx.HTTPError, httpx.InvalidURL):
                await client.get(f"{url.rstrip('/')}/v1/files/{digest}", params={"recheck": "true"})

    def _client(self) -> httpx.AsyncClient:
        """A client for one fetch, with this worker's key."""
        return httpx.AsyncClient(
            transport=DirectTransport(),
            auth=self._own_key,
            timeout=min(self._limits.timeout_s, _SILENT_S),
            headers={"accept-encoding": "identity"},
            trust_env=False,
        )

    async def _agents_with(self, client: httpx.AsyncClient, digest: str) -> list[str]:
        """URLs of known agents that have the digest: the first few that say so, or none."""
        limit, found = asyncio.Semaphore(_PROBES), list[str]()

        async def probe(url: str) -> None:
            """Ask one agent, unless enough have said that they have it."""
            async with limit:
                if len(found) < _ENOUGH:
                    with contextlib.suppress(httpx.HTTPError, httpx.InvalidURL):
                        if (await client.get(f"{url}/v1/files/{digest}")).is_success:
                            found.append(url)

        # In another order for each digest, so that the first agent of the list is not everybody's first choice.
        urls = sorted(self.agents.urls, key=lambda url: -rendezvous_score(digest, url))
        await asyncio.gather(*map(probe, urls))
        return found


class NeighbourSource:
    """The source of own files at the agents that a request names."""

    resumes = True

    def __init__(self, fleet: FleetSource, urls: Sequence[str]) -> None:
        self._fleet = fleet
        self._urls = tuple(urls)

    async def fetch(self, ref: str, into: Path, transfer: Transfer) -> None:
        """Download the files of a digest. See `Source.fetch`."""
        await self._fleet.fetch_from(self._urls, ref, into, transfer)


class _Fetch:
    """One download of a digest's files from several places, each in turn.

    A file that breaks off goes on at the next place. The rounds over all places end when one of them brought no byte as
    often as the limits allow attempts.
    """

    def __init__(  # noqa: PLR0917  (the parts of one download)
        self,
        client: httpx.AsyncClient,
        ref: str,
        digest: str,
        fleet: str,
        places: Sequence[str],
        into: Path,
        transfer: Transfer,
        limits: Limits,
    ) -> None:
        self._client = client
        self._ref = ref
        self._digest = digest
        self._query = f"?fleet={quote(fleet, safe='')}" if fleet else ""
        self._places = tuple(url.rstrip("/") for url in places)
        self._into = into
        self._transfer = transfer
        self._limits = limits
        # One attempt a place: the next place is the better second attempt.
        self._once = replace(limits, retry=replace(limits.retry, attempts=1))
        self._done: set[str] = set()
        self._lists: dict[str, AdapterFiles] = {}

    async def run(self) -> None:
        """Fetch all files. Raises SourceError: that of a place that refuses, `source_failed` if one is silent."""
        weights = self._into / WEIGHTS_NAME
        await asyncio.to_thread(clear_folder, self._into, {weights.name, tag_file_of(weights).name})
        await with_retries(self._try_all, self._ref, self._limits)

    async def _try_all(self) -> None:
        """One round over the places. Raises TransientSourceError if a place may still answer, else SourceError."""
        began_bytes = await asyncio.to_thread(self._received_bytes)
        refused: SourceError | None = None
        failed: TransientSourceError | None = None
        for place in self._places:
            try:
                await self._fetch_from(place)
            except TransientSourceError as exc:
                failed = exc
            except SourceError as exc:
                if exc.code == "source_failed":
                    failed = TransientSourceError(f"{place}: {exc}", wait_s=exc.retry_after_s or 0.0)
                elif len(self._places) == 1:
                    raise
                else:
                    refused = exc
            else:
                return
        if failed is not None:
            failed.has_moved = await asyncio.to_thread(self._received_bytes) > began_bytes
            raise failed
        raise refused or SourceError("source_not_found", f"source {redacted(self._ref)}: no worker to fetch it from")

    async def _fetch_from(self, place: str) -> None:
        """Fetch what is missing from one place. Raises TransientSourceError, SourceError."""
        base = f"{place}/v1/files/{self._digest}"
        files = self._lists.get(place) or _checked_files(self._ref, await self._answer(place, base))
        self._lists[place] = files
        left = self._limits.max_bytes
        if (total := sum(file.size_bytes for file in files.files)) > left:
            raise too_big_error(self._ref, total, self._limits)
        for file in sorted(files.files, key=lambda file: file.name):
            limit = min(left, MAX_CONFIG_BYTES) if file.name == CONFIG_NAME else left
            left -= file.size_bytes
            if file.name in self._done:
                continue
            url = f"{base}/{quote(file.name)}{self._query}"
            self._transfer.served_by.add(place)
            counted = self._transfer.progress.done_bytes
            try:
                await download_file(
                    self._client, self._ref, url, self._into / file.name, limit, self._transfer, self._once
                )
            except SourceError:
                # The next place goes on with this file, and counts what is here of it.
                self._transfer.advance(counted - self._transfer.progress.done_bytes)
                raise
            self._done.add(file.name)

    def _received_bytes(self) -> int:
        """Bytes of the files in the folder. Blocking."""
        return sum(path.stat().st_size for path in self._into.iterdir())

    async def _answer(self, place: str, base: str) -> httpx.Response:
        """The place's answer to the list of files. Raises TransientSourceError."""
        try:
            answer = await self._client.get(base + self._query)
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise TransientSourceError(f"{place} does not answer: {type(exc).__name__}") from exc
        if answer.status_code in RETRIED_STATUSES:
            raise TransientSourceError(
                f"{place} answers: {_reason(answer)}", wait_s=retry_after_s(answer.headers.get("retry-after", ""))
            )
        return answer


def fleet_and_digest(ref: str) -> tuple[str, str]:
    """URL of the other fleet's orchestrator ("" for our own fleet) and digest in a reference. Raises SourceError."""
    if (own := fleet_digest(ref)) is not None:
        return "", own
    parts = parse_reference(ref)
    path, _, digest = parts.path.rpartition("/")
    if scheme(ref) not in FLEET_SCHEMES or not _DIGEST.fullmatch(digest) or not parts.netloc:
        message = f"source {redacted(ref)}: expected fleet+https://orchestrator.example/<digest of 64 hex digits>"
        raise SourceError("source_invalid", message)
    return f"{parts.scheme.removeprefix('fleet+')}://{parts.netloc}{path}", digest


def _checked_files(ref: str, answer: httpx.Response) -> AdapterFiles:
    """The list of files in an answer. Raises SourceError."""
    if not answer.is_success:
        # 400: our orchestrator does not know that fleet, or its key is refused there.
        code = {400: "source_forbidden", 401: "source_unauthorized", 403: "source_forbidden"}.get(
            answer.status_code, "source_not_found"
        )
        raise SourceError(code, f"source {redacted(ref)}: {answer.request.url.host} answers: {_reason(answer)}")
    try:
        files = AdapterFiles.model_validate_json(answer.content)
    except ValidationError as exc:
        raise SourceError(
            "source_invalid", f"source {redacted(ref)}: {answer.request.url.host} sends no list of files"
        ) from exc
    names = [file.name for file in files.files]
    is_plain = all(is_stored_file(name) and "/" not in name and not name.startswith(".") for name in names)
    if not is_plain or len(set(names)) < len(names) or not 0 < len(names) <= _MOST_FILES:
        raise SourceError("source_unsafe", f"source {redacted(ref)}: its list has names that are no adapter's files")
    return files


class _ErrorDetail(BaseModel):
    message: str = ""


class _ErrorEnvelope(BaseModel):
    error: _ErrorDetail = _ErrorDetail()


def _reason(answer: httpx.Response) -> str:
    """The status and the error message of an answer."""
    try:
        return f"HTTP {answer.status_code}: {_ErrorEnvelope.model_validate_json(answer.content).error.message}"
    except ValidationError:
        return f"HTTP {answer.status_code}"
