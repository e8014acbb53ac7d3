"""Adapters at `https://`: a `.tar.gz`, `.tgz` or `.zip`, or a URL below which the adapter's two files are."""

import asyncio
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from lorafleet.service.tasks import finish_even_if_cancelled
from workers.core.errors import SourceError
from workers.core.references import is_archive, parse_reference, redacted
from workers.sources.archive import unpack
from workers.sources.base import (
    Limits,
    Transfer,
    TransientSourceError,
    clear_folder,
    too_big_error,
    with_retries,
)
from workers.verification.adapter_files import PICKLES, WEIGHTS_NAME
from workers.verification.beside import ASKED_NAMES, MOST_TEXT_BYTES, notes_on_files, read_names
from workers.verification.peft import CONFIG_NAME, MAX_CONFIG_BYTES

_CHUNK_BYTES = 1 << 20
_REDIRECTS = 5
_NO_NAME = "no-file-of-an-adapter.safetensors"
RETRIED_STATUSES = {408, 425, 429, 500, 502, 503, 504}


class WebSource:
    """The source for `https://`. Resumes a download if the server has an ETag and ranges, else starts over.

    The ETag is stored beside the file, so that a later fetch can resume, too.
    """

    resumes = True

    def __init__(
        self, limits: Limits, *, transport: Callable[[], httpx.AsyncBaseTransport], netrc: Path | None = None
    ) -> None:
        """`transport` creates the transport of a fetch. `netrc`: file with users and passwords, read for each fetch."""
        self._limits = limits
        self._transport = transport
        self._netrc = netrc

    async def fetch(self, ref: str, into: Path, transfer: Transfer) -> None:
        """Download and unpack an archive, or download the adapter's two files. See `Source.fetch`.

        Clears the folder first, but for a download to resume. Without safetensors takes a pickle, if allowed. Raises
        SourceError.
        """
        parts = parse_reference(ref)
        if not parts.hostname:
            raise SourceError("source_invalid", f"source {redacted(ref)}: expected https://host/path")
        client = httpx.AsyncClient(
            transport=self._transport(),
            auth=None if transfer.credential else self._netrc_auth(ref),
            timeout=self._limits.timeout_s,
            follow_redirects=True,
            max_redirects=_REDIRECTS,
            # No compression: Content-Length and ranges then are about the file, and there is no decompression bomb.
            headers={"accept-encoding": "identity", "user-agent": "lorafleet"}
            | _authorization_header(transfer.credential),
            trust_env=False,
        )
        packed, weights = into / ".packed", into / WEIGHTS_NAME
        resumed = packed if is_archive(parts.path) else weights
        await asyncio.to_thread(clear_folder, into, {resumed.name, tag_file_of(resumed).name})
        async with client:
            if is_archive(parts.path):
                await self._download_file(client, ref, ref, packed, self._limits.max_bytes, transfer)
                await self._unpack_in_thread(ref, packed, into, transfer)
            else:
                base = ref.rstrip("/")
                await self._download_file(
                    client, ref, f"{base}/{CONFIG_NAME}", into / CONFIG_NAME, MAX_CONFIG_BYTES, transfer
                )
                names = await self._named_beside(client, base)
                transfer.notes = notes_on_files(names)
                for name in read_names(names):
                    transfer.texts[name] = await self._read_text(client, ref, f"{base}/{name}")
                left = self._limits.max_bytes - (into / CONFIG_NAME).stat().st_size
                try:
                    await self._download_file(client, ref, f"{base}/{WEIGHTS_NAME}", weights, left, transfer)
                except SourceError as exc:
                    if exc.code != "source_not_found" or not self._limits.allow_pickle:
                        raise
                    weights.unlink()
                    await self._download_file(client, ref, f"{base}/{PICKLES[0]}", into / PICKLES[0], left, transfer)

    async def _named_beside(self, client: httpx.AsyncClient, base: str) -> list[str]:
        """Those of `ASKED_NAMES` that the server has beside an adapter; it has no list of its files to ask for.

        None of a server that also has a name that nobody uses: it answers alike for every name.
        """
        asked = await asyncio.gather(*(self._has_file(client, f"{base}/{name}") for name in (*ASKED_NAMES, _NO_NAME)))
        *found, is_alike = asked
        return [] if is_alike else [name for name, is_there in zip(ASKED_NAMES, found, strict=True) if is_there]

    @staticmethod
    async def _has_file(client: httpx.AsyncClient, url: str) -> bool:
        """Whether the server has a file; False where it does not answer, or takes no HEAD."""
        try:
            return (await client.head(url)).status_code == httpx.codes.OK
        except (httpx.HTTPError, httpx.InvalidURL):
            return False

    async def _read_text(self, client: httpx.AsyncClient, ref: str, url: str) -> bytes:
        """The beginning of a text beside the adapter. Raises SourceError `source_failed` if it breaks off."""

        async def attempt() -> bytes:
            """Read it once. Raises TransientSourceError."""
            head = b""
            try:
                async with client.stream("GET", url, headers={"range": f"bytes=0-{MOST_TEXT_BYTES - 1}"}) as answer:
                    async for chunk in answer.aiter_bytes(_CHUNK_BYTES):
                        head += chunk
                        if len(head) >= MOST_TEXT_BYTES:
                            break
            except (httpx.HTTPError, httpx.InvalidURL) as exc:
                raise TransientSourceError(type(exc).__name__) from None
            return head[:MOST_TEXT_BYTES] if answer.is_success else b""

        return await with_retries(attempt, ref, self._limits)

    def _netrc_auth(self, ref: str) -> httpx.Auth | None:
        """Read the credentials in `source_netrc`; None without that setting. Raises SourceError."""
        if self._netrc is None:
            return None
        try:
            return httpx.NetRCAuth(str(self._netrc))
        except (OSError, SyntaxError):  # netrc.NetrcParseError is a SyntaxError; its message quotes the file
            message = f"source {redacted(ref)}: source_netrc {str(self._netrc)!r} cannot be read as a netrc file"
            raise SourceError("source_unauthorized", message) from None

    async def _unpack_in_thread(self, ref: str, packed: Path, into: Path, transfer: Transfer) -> None:
        """Unpack the archive into `into` and delete it, in a thread. Raises SourceError."""
        limits = self._limits
        unpacking = asyncio.to_thread(
            unpack, packed, into, ref, limits.max_bytes, transfer, allow_pickle=limits.allow_pickle
        )
        await finish_even_if_cancelled(unpacking, on_cancel=transfer.cancel)

    async def _download_file(
        self, client: httpx.AsyncClient, ref: str, url: str, target_path: Path, limit: int, transfer: Transfer
    ) -> None:
        """As `download_file`, with this source's limits."""
        await download_file(client, ref, url, target_path, limit, transfer, self._limits)


async def download_file(  # noqa: PLR0917  (the six parts of one download)
    client: httpx.AsyncClient, ref: str, url: str, target_path: Path, limit: int, transfer: Transfer, limits: Limits
) -> None:
    """Download a file of at most `limit` bytes, resuming a partial one, with retries. Raises SourceError."""
    tag_file = tag_file_of(target_path)
    tag = await asyncio.to_thread(_read_tag, target_path)
    with target_path.open("ab" if tag else "wb") as target:
        transfer.advance(target.tell())
        download = _Download(ref, url, target, limit, limits, transfer, tag_file, tag)
        await with_retries(lambda: download.attempt(client), ref, limits)
    tag_file.unlink(missing_ok=True)


def _authorization_header(credential: str) -> dict[str, str]:
    """The Authorization header of a credential: a whole value (`Basic …`) or a token; none without a credential.

    httpx drops the header on redirects to another host.
    """
    if not credential:
        return {}
    is_whole = credential.partition(" ")[0].lower() in {"basic", "bearer"}
    return {"authorization": credential if is_whole else f"Bearer {credential}"}


@dataclass(slots=True)
class _Download:
    """The download of one file; `tag` is the ETag of the version that `target` has the beginning of."""

    ref: str
    url: str
    target: io.BufferedWriter
    limit: int
    limits: Limits
    transfer: Transfer
    tag_file: Path
    tag: str = ""

    async def attempt(self, client: httpx.AsyncClient) -> None:
        """Download the rest of the file and append it to `target`; nothing if it is whole already.

        raises  TransientSourceError if another attempt may resume it, SourceError if none can succeed
        """
        start = self.target.tell()
        headers = {"range": f"bytes={start}-", "if-range": self.tag} if start and self.tag else {}
        try:
            async with client.stream("GET", self.url, headers=headers) as answer:
                is_ours = answer.headers.get("etag", self.tag) == self.tag  # not every server heeds If-Range
                if answer.status_code == 416 and is_ours and answer.headers.get("content-range") == f"bytes */{start}":
                    return  # an earlier fetch had received the whole file
                self._check_status(answer)
                self._prepare_target(answer, start)
                async for chunk in answer.aiter_bytes(_CHUNK_BYTES):
                    self._check_size(self.target.tell() + len(chunk))
                    await asyncio.to_thread(self.target.write, chunk)
                    self.transfer.advance(len(chunk))
                self._check_whole(answer, start)
        except httpx.DecodingError:
            message = f"source {redacted(self.ref)}: its bytes are not in the Content-Encoding that its server names"
            raise SourceError("source_invalid", message) from None
        except httpx.TooManyRedirects:
            message = f"source {redacted(self.ref)}: more than {_REDIRECTS} redirects"
            raise SourceError("source_invalid", message) from None
        # `from None`: the foreign error's message may contain a signed URL.
        except (httpx.TransportError, httpx.InvalidURL) as exc:
            # httpcore 1.0 keeps only the message of the ssl module's error.
            reason = ": its certificate is not accepted" if "CERTIFICATE_VERIFY_FAILED" in str(exc) else ""
            raise TransientSourceError(f"{type(exc).__name__}{reason}", has_moved=self.target.tell() > start) from None

    def _check_status(self, answer: httpx.Response) -> None:
        """Raises TransientSourceError or SourceError for an answer without content; a 416 truncates the file."""
        status = answer.status_code
        subject = f"source {redacted(self.ref)}: {Path(self.url).name}: HTTP {status}"
        if status in {200, 206}:
            return
        if status in RETRIED_STATUSES:
            raise TransientSourceError(f"HTTP {status}", wait_s=retry_after_s(answer.headers.get("retry-after", "")))
        if status == 416:
            self._start_over()
            raise TransientSourceError("HTTP 416: the file is shorter than it was")
        if status in {401, 403, 407}:
            raise SourceError("source_unauthorized", f"{subject}; give this worker credentials for it: source_netrc")
        if status in {404, 410}:
            raise SourceError("source_not_found", f"{subject}; expected an archive's address or that of a folder")
        raise SourceError("source_invalid", f"{subject}; expected 200")

    def _prepare_target(self, answer: httpx.Response, start: int) -> None:
        """Prepare to append this answer, or to start over if the server sends the whole file or a new version.

        Stores a new ETag and the expected total. Raises TransientSourceError, SourceError.
        """
        # Some servers send what they keep compressed, whatever we ask for. Their lengths and ranges are not the file's.
        is_encoded = answer.headers.get("content-encoding", "identity") != "identity"
        if answer.status_code == 206:
            range_start = answer.headers.get("content-range", "").removeprefix("bytes ").partition("-")[0]
            if range_start != str(start) or is_encoded:
                self._start_over()
                raise TransientSourceError("the server sent another range than requested")
            if start and answer.headers.get("etag", self.tag) != self.tag:
                self._start_over()
                raise TransientSourceError("the server sent a range of another version")
        else:
            self._start_over()
            tag = answer.headers.get("etag", "")
            # A weak ETag does not guarantee the same bytes.
            self.tag = "" if is_encoded or tag.startswith("W/") else tag
            self.tag_file.write_text(self.tag)
        length = _byte_count(answer.headers.get("content-length", ""))
        if length is not None and not is_encoded:
            self._check_size(self.target.tell() + length)
            self.transfer.expect(self.transfer.progress.done_bytes + length)

    def _check_whole(self, answer: httpx.Response, start: int) -> None:
        """Raises TransientSourceError if the file goes on behind the range in this answer: servers may shorten it."""
        total = _byte_count(answer.headers.get("content-range", "").rpartition("/")[2])
        if answer.status_code == 206 and total is not None and self.target.tell() < total:
            has_moved = bool(self.tag) and self.target.tell() > start  # without a tag each attempt begins anew
            raise TransientSourceError("the server sent only a part of the file", has_moved=has_moved)

    def _check_size(self, size_bytes: int) -> None:
        """Raises SourceError `source_too_big` beyond the limit."""
        if size_bytes <= self.limit:
            return
        if self.limit == MAX_CONFIG_BYTES:
            name = f"source {redacted(self.ref)}: {CONFIG_NAME}"
            raise SourceError("source_too_big", f"{name}: {size_bytes} bytes or more, at most {self.limit} are allowed")
        raise too_big_error(self.ref, size_bytes, self.limits)

    def _start_over(self) -> None:
        """Truncate the file and take its bytes off the progress."""
        if received_bytes := self.target.tell():
            self.transfer.advance(-received_bytes)
            self.target.seek(0)
            self.target.truncate()


def tag_file_of(path: Path) -> Path:
    """The file beside a download in which its ETag is stored."""
    return path.with_name(f".{path.name}.tag")


def _read_tag(path: Path) -> str:
    """Read the stored ETag of a partial file; "" without one."""
    tag_file = tag_file_of(path)
    return tag_file.read_text() if path.exists() and tag_file.exists() else ""


def _byte_count(text: str) -> int | None:
    """The number of bytes in a header; None for anything else."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def retry_after_s(text: str) -> float:
    """The seconds in a Retry-After header; 0 without a number."""
    return float(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0.0
