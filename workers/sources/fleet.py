"""Adapters by digest: from other workers of this fleet, or through its orchestrator from another fleet's workers.

`fleet+https://orchestrator.example/<digest>` names the other fleet's orchestrator. Ours fetches from it with its own
key for that fleet (`peer_fleets`), so workers need neither a way there nor a key.
"""

import asyncio
import contextlib
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from lorafleet.engine.acceptance import FILE_NAME as ACCEPTANCE_NAME
from lorafleet.identity import fleet_digest, rendezvous_score
from lorafleet.keys.own_key import OwnKey
from lorafleet.service.network.tls import Tls
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
from workers.sources.web import RETRIED_STATUSES, download_file, retry_after_s, tag_file_of
from workers.verification.adapter_files import WEIGHTS_NAME, is_adapter_file
from workers.verification.beside import is_fleet_file
from workers.verification.peft import MAX_CONFIG_BYTES
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


class OtherAgents:
    """The fleet's other agents, as the leading orchestrator last named them: asked for files while it is away.

    Only the leader's answers to heartbeats name them: this worker sends them its key.
    """

    def __init__(self, own_url: str) -> None:
        """`own_url` is left out."""
        self._own_url = own_url
        self._urls: tuple[str, ...] = ()
        self.digest = ""
        """The orchestrator's digest of the list; "" before the first."""

    def replace(self, urls: Iterable[str], digest: str) -> None:
        """Replace the list by the orchestrator's."""
        self._urls = tuple(url for url in urls if url.startswith("http") and url != self._own_url)
        self.digest = digest

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs of the other agents."""
        return self._urls


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
        agents: OtherAgents,
        only: Sequence[str] | None = None,
        tls: Tls | None = None,
    ) -> None:
        """`only`: places that are asked, and no others; None: agents and orchestrators as known."""
        self.agents = agents
        self._limits = limits
        self._urls = tuple(orchestrator_urls)
        self._own_key = own_key
        self._only = only
        self._tls = tls

    def at(self, urls: Sequence[str]) -> "FleetSource":
        """The source of own files at these agents alone."""
        return FleetSource(
            self._limits,
            orchestrator_urls=self._urls,
            own_key=self._own_key,
            agents=self.agents,
            only=tuple(urls),
            tls=self._tls,
        )

    async def fetch(self, ref: str, into: Path, transfer: Transfer) -> None:
        """Download the files of a digest. See `Source.fetch`."""
        fleet, digest = fleet_and_digest(ref)
        async with self._client() as client:
            # Agents know nothing of other fleets.
            query = f"?fleet={quote(fleet, safe='')}" if fleet and self._only is None else ""
            places = self._only
            if places is None:
                places = await self._places(client, ref, digest, is_own=not fleet)
            urls = tuple(url.rstrip("/") for url in places)
            await _Fetch(client, ref, digest, query, urls, into, transfer, self._limits).run()

    async def _places(self, client: httpx.AsyncClient, ref: str, digest: str, *, is_own: bool) -> list[str]:
        """URLs to ask for the files of a digest, the best first. Raises SourceError without an orchestrator."""
        if not self._urls:
            message = f"source {redacted(ref)}: this worker has no orchestrator to fetch it through: orchestrator_url"
            raise SourceError("source_unsupported", message)
        return [*(await self._agents_with(client, digest) if is_own else ()), *self._urls]

    async def recheck(self, url: str, digest: str) -> None:
        """Have an agent read its files of a digest again, because it sent wrong bytes. Failures are ignored."""
        async with self._client() as client:
            with contextlib.suppress(httpx.HTTPError, httpx.InvalidURL):
                await client.get(f"{url.rstrip('/')}/v1/files/{digest}", params={"recheck": "true"})

    async def read_acceptance(self, urls: Sequence[str], digest: str, file: str) -> bytes:
        """The acceptance file with the digest `file` beside an adapter's files at one of these agents; b"" at none."""
        async with self._client() as client:
            for url in urls:
                with contextlib.suppress(httpx.HTTPError, httpx.InvalidURL):
                    answer = await client.get(f"{url.rstrip('/')}/v1/files/{digest}/{ACCEPTANCE_NAME}")
                    if answer.is_success and hashlib.sha256(answer.content).hexdigest() == file:
                        return answer.content
        return b""

    def _client(self) -> httpx.AsyncClient:
        """A client for one fetch, with this worker's key."""
        return httpx.AsyncClient(
            transport=DirectTransport(tls=self._tls),
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


@dataclass(slots=True)
class _Fetch:
    """One download of a digest's files from several places, each in turn.

    A file that breaks off goes on at the next place. The rounds over all places end when one of them brought no byte as
    often as the limits allow attempts.
    """

    client: httpx.AsyncClient
    ref: str
    digest: str
    query: str
    places: tuple[str, ...]
    into: Path
    transfer: Transfer
    limits: Limits
    done: set[str] = field(default_factory=set)
    lists: dict[str, AdapterFiles] = field(default_factory=dict)

    async def run(self) -> None:
        """Fetch all files. Raises SourceError: that of a place that refuses, `source_failed` if one is silent."""
        weights = self.into / WEIGHTS_NAME
        await asyncio.to_thread(clear_folder, self.into, {weights.name, tag_file_of(weights).name})
        await with_retries(self._try_all, self.ref, self.limits)

    async def _try_all(self) -> None:
        """One round over the places. Raises TransientSourceError if a place may still answer, else SourceError."""
        began_bytes = await asyncio.to_thread(self._received_bytes)
        refused: SourceError | None = None
        failed: TransientSourceError | None = None
        for place in self.places:
            try:
                await self._fetch_from(place)
            except TransientSourceError as exc:
                failed = exc
            except SourceError as exc:
                if exc.code == "source_failed":
                    failed = TransientSourceError(f"{place}: {exc}", wait_s=exc.retry_after_s or 0.0)
                elif len(self.places) == 1:
                    raise
                else:
                    refused = exc
            else:
                return
        if failed is not None:
            failed.has_moved = await asyncio.to_thread(self._received_bytes) > began_bytes
            raise failed
        raise refused or SourceError("source_not_found", f"source {redacted(self.ref)}: no worker to fetch it from")

    async def _fetch_from(self, place: str) -> None:
        """Fetch what is missing from one place. Raises TransientSourceError, SourceError."""
        base = f"{place}/v1/files/{self.digest}"
        files = self.lists.get(place) or _checked_files(self.ref, await self._answer(place, base))
        self.lists[place] = files
        # One attempt a place: the next place is the better second attempt.
        once = replace(self.limits, retry=replace(self.limits.retry, attempts=1))
        left = self.limits.max_bytes
        if (total := sum(file.size_bytes for file in files.files)) > left:
            raise too_big_error(self.ref, total, self.limits)
        for file in sorted(files.files, key=lambda file: file.name):
            limit = left if file.name == WEIGHTS_NAME else min(left, MAX_CONFIG_BYTES)
            left -= file.size_bytes
            if file.name in self.done:
                continue
            url = f"{base}/{quote(file.name)}{self.query}"
            self.transfer.served_by.add(place)
            counted = self.transfer.progress.done_bytes
            try:
                await download_file(self.client, self.ref, url, self.into / file.name, limit, self.transfer, once)
            except SourceError:
                # The next place goes on with this file, and counts what is here of it.
                self.transfer.advance(counted - self.transfer.progress.done_bytes)
                raise
            self.done.add(file.name)
            if not is_adapter_file(file.name):
                self.transfer.texts[file.name] = await asyncio.to_thread(_take_file, self.into / file.name)

    def _received_bytes(self) -> int:
        """Bytes of the files in the folder. Blocking."""
        return sum(path.stat().st_size for path in self.into.iterdir())

    async def _answer(self, place: str, base: str) -> httpx.Response:
        """The place's answer to the list of files. Raises TransientSourceError."""
        try:
            answer = await self.client.get(base + self.query)
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise TransientSourceError(f"{place} does not answer: {type(exc).__name__}") from exc
        if answer.status_code in RETRIED_STATUSES:
            raise TransientSourceError(
                f"{place} answers: {_refusal_text(answer)}", wait_s=retry_after_s(answer.headers.get("retry-after", ""))
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
        raise SourceError(code, f"source {redacted(ref)}: {answer.request.url.host} answers: {_refusal_text(answer)}")
    try:
        files = AdapterFiles.model_validate_json(answer.content)
    except ValidationError as exc:
        raise SourceError(
            "source_invalid", f"source {redacted(ref)}: {answer.request.url.host} sends no list of files"
        ) from exc
    names = [file.name for file in files.files]
    is_plain = all(is_fleet_file(name) and "/" not in name and not name.startswith(".") for name in names)
    if not is_plain or len(set(names)) < len(names) or not 0 < len(names) <= _MOST_FILES:
        raise SourceError("source_unsafe", f"source {redacted(ref)}: its list has names that are no adapter's files")
    return files


def _take_file(path: Path) -> bytes:
    """The content of a file, which is deleted. Blocking."""
    content = path.read_bytes()
    clear_folder(path.parent, {each.name for each in path.parent.iterdir()} - {path.name, tag_file_of(path).name})
    return content


class _ErrorDetail(BaseModel):
    message: str = ""


class _ErrorEnvelope(BaseModel):
    error: _ErrorDetail = _ErrorDetail()


def _refusal_text(answer: httpx.Response) -> str:
    """The status and the error message of an answer."""
    try:
        return f"HTTP {answer.status_code}: {_ErrorEnvelope.model_validate_json(answer.content).error.message}"
    except ValidationError:
        return f"HTTP {answer.status_code}"
