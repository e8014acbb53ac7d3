"""Adapters by digest, through this fleet's orchestrator: from another worker here, or from another fleet's workers.

`fleet+https://orchestrator.example/<digest>` names the other fleet's orchestrator. Ours fetches from it with its own
key for that fleet (`peer_fleets`), so workers need neither a way there nor a key.
"""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from lorafleet.service.own_key import OwnKey
from lorafleet.service.transport import DirectTransport
from workers.core.adapter_files import WEIGHTS_NAME, is_stored_file
from workers.core.errors import SourceError
from workers.core.peft import CONFIG_NAME, MAX_CONFIG_BYTES
from workers.core.references import parse_reference, redacted, scheme
from workers.sources.base import (
    Limits,
    Transfer,
    TransientSourceError,
    clear_folder,
    too_big_error,
    with_retries,
)
from workers.sources.web import RETRIED_STATUSES, download_file, tag_file_of
from workers.wire import AdapterFiles

OWN_FLEET = "fleet"
FLEET_SCHEMES = ("fleet+http", "fleet+https")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MOST_FILES = 64


class FleetSource:
    """The source for `fleet+https://`, and for the files of a digest that other workers of this fleet have.

    Resumes a download: the ETag is the digest, whichever worker sends the bytes.
    """

    resumes = True

    def __init__(self, limits: Limits, *, orchestrator_urls: Sequence[str], own_key: OwnKey) -> None:
        self._limits = limits
        self._urls = tuple(orchestrator_urls)
        self._own_key = own_key

    async def fetch(self, ref: str, into: Path, transfer: Transfer) -> None:
        """Download the files of a digest. See `Source.fetch`."""
        fleet, digest = fleet_and_digest(ref)
        if not self._urls:
            message = f"source {redacted(ref)}: this worker has no orchestrator to fetch it through: orchestrator_url"
            raise SourceError("source_unsupported", message)
        weights = into / WEIGHTS_NAME
        await asyncio.to_thread(clear_folder, into, {weights.name, tag_file_of(weights).name})
        client = httpx.AsyncClient(
            transport=DirectTransport(),
            auth=self._own_key,
            timeout=self._limits.timeout_s,
            headers={"accept-encoding": "identity"},
            trust_env=False,
        )
        query = f"?fleet={quote(fleet, safe='')}" if fleet else ""
        async with client:
            base, files = await with_retries(lambda: self._list_files(client, ref, digest, query), ref, self._limits)
            left = self._limits.max_bytes
            if (total := sum(file.size_bytes for file in files.files)) > left:
                raise too_big_error(ref, total, self._limits)
            for file in sorted(files.files, key=lambda file: file.name):
                limit = min(left, MAX_CONFIG_BYTES) if file.name == CONFIG_NAME else left
                url = f"{base}/{quote(file.name)}{query}"
                await download_file(client, ref, url, into / file.name, limit, transfer, self._limits)
                left -= file.size_bytes

    async def _list_files(
        self, client: httpx.AsyncClient, ref: str, digest: str, query: str
    ) -> tuple[str, AdapterFiles]:
        """The base URL of the files, and their list, from the first orchestrator that answers.

        Raises TransientSourceError, SourceError.
        """
        failed: TransientSourceError | None = None
        for url in self._urls:
            base = f"{url}/v1/files/{digest}"
            try:
                answer = await client.get(base + query)
            except httpx.HTTPError as exc:
                failed = TransientSourceError(f"the orchestrator does not answer: {type(exc).__name__}")
                continue
            if answer.status_code in RETRIED_STATUSES:
                failed = TransientSourceError(f"the orchestrator answers: {_reason(answer)}")
                continue
            return base, _checked_files(ref, answer)
        assert failed is not None  # there is at least one URL
        raise failed


def fleet_and_digest(ref: str) -> tuple[str, str]:
    """URL of the other fleet's orchestrator ("" for our own fleet) and digest in a reference. Raises SourceError."""
    parts = parse_reference(ref)
    path, _, digest = parts.path.rpartition("/")
    is_own = scheme(ref) == OWN_FLEET
    if not _DIGEST.fullmatch(digest) or bool(parts.netloc) == is_own or (is_own and path):
        message = f"source {redacted(ref)}: expected fleet+https://orchestrator.example/<digest of 64 hex digits>"
        raise SourceError("source_invalid", message)
    return ("", digest) if is_own else (f"{parts.scheme.removeprefix('fleet+')}://{parts.netloc}{path}", digest)


def own_fleet_reference(digest: str) -> str:
    """The reference of the files of a digest on the workers of this fleet."""
    return f"{OWN_FLEET}:///{digest}"


def _checked_files(ref: str, answer: httpx.Response) -> AdapterFiles:
    """The list of files in an answer. Raises SourceError."""
    if not answer.is_success:
        # 400: our orchestrator does not know that fleet, or its key is refused there.
        code = {400: "source_forbidden", 401: "source_unauthorized", 403: "source_forbidden"}.get(
            answer.status_code, "source_not_found"
        )
        raise SourceError(code, f"source {redacted(ref)}: the orchestrator answers: {_reason(answer)}")
    try:
        files = AdapterFiles.model_validate_json(answer.content)
    except ValidationError as exc:
        raise SourceError("source_invalid", f"source {redacted(ref)}: the orchestrator sends no list of files") from exc
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
