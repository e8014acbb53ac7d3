"""Adapters behind HTTPS: a `.tar.gz`, `.tgz` or `.zip`, or an address below which the two files of an adapter are."""

import asyncio
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from workers.core.errors import SourceError
from workers.core.manifest import CONFIG_NAME, MAX_CONFIG_BYTES, PICKLES, WEIGHTS_NAME
from workers.core.references import is_archive, shown, split
from workers.sources.archive import unpack
from workers.sources.base import Limits, Transfer, TransientSourceError, clear, retried, settled, too_big

_CHUNK_BYTES = 1 << 20
_REDIRECTS = 5
_AGAIN = {408, 425, 429, 500, 502, 503, 504}


class WebSource:
    """`https://`. What broke off goes on where it stopped when the server has an ETag and ranges, else from 0.

    The tag of a file's version lies beside it, so that a later fetch can go on, too.
    """

    resumes = True

    def __init__(
        self, limits: Limits, *, transport: Callable[[], httpx.AsyncBaseTransport], netrc: Path | None = None
    ) -> None:
        """`transport` makes one for a fetch. `netrc`: users and passwords by host, read anew for each fetch."""
        self._limits = limits
        self._transport = transport
        self._netrc = netrc

    async def fetch(self, ref: str, into: Path, transfer: Transfer) -> None:
        parts = split(ref)
        if not parts.hostname:
            raise SourceError("source_invalid", f"source {shown(ref)}: expected https://host/path")
        client = httpx.AsyncClient(
            transport=self._transport(),
            auth=None if transfer.credential else self._auth(ref),
            timeout=self._limits.timeout_s,
            follow_redirects=True,
            max_redirects=_REDIRECTS,
            # The bytes as they are: a length to hold against, ranges that mean file offsets, and no bomb.
            headers={"accept-encoding": "identity", "user-agent": "lorafleet"} | _authorization(transfer.credential),
            trust_env=False,
        )
        packed, weights = into / ".packed", into / WEIGHTS_NAME
        goes_on = packed if is_archive(parts.path) else weights
        await asyncio.to_thread(clear, into, {goes_on.name, _tag_file(goes_on).name})
        async with client:
            if is_archive(parts.path):
                await self._file(client, ref, ref, packed, self._limits.max_bytes, transfer)
                await self._unpack(ref, packed, into, transfer)
            else:
                base = ref.rstrip("/")
                await self._file(client, ref, f"{base}/{CONFIG_NAME}", into / CONFIG_NAME, MAX_CONFIG_BYTES, transfer)
                left = self._limits.max_bytes - (into / CONFIG_NAME).stat().st_size
                try:
                    await self._file(client, ref, f"{base}/{WEIGHTS_NAME}", weights, left, transfer)
                except SourceError as exc:
                    if exc.code != "source_not_found" or not self._limits.allow_pickle:
                        raise
                    weights.unlink()
                    await self._file(client, ref, f"{base}/{PICKLES[0]}", into / PICKLES[0], left, transfer)

    def _auth(self, ref: str) -> httpx.Auth | None:
        if self._netrc is None:
            return None
        try:
            return httpx.NetRCAuth(str(self._netrc))
        except (OSError, SyntaxError):  # netrc.NetrcParseError is a SyntaxError; its words repeat the file's
            message = f"source {shown(ref)}: source_netrc {str(self._netrc)!r} cannot be read as a netrc file"
            raise SourceError("source_unauthorized", message) from None

    async def _unpack(self, ref: str, packed: Path, into: Path, transfer: Transfer) -> None:
        limits = self._limits
        unpacking = asyncio.to_thread(
            unpack, packed, into, ref, limits.max_bytes, transfer, allow_pickle=limits.allow_pickle
        )
        await settled(unpacking, on_cancel=transfer.cancel)

    async def _file(
        self, client: httpx.AsyncClient, ref: str, url: str, to: Path, limit: int, transfer: Transfer
    ) -> None:
        tag_file = _tag_file(to)
        tag = await asyncio.to_thread(_tag_of, to)
        with to.open("ab" if tag else "wb") as target:
            transfer.advance(target.tell())
            download = _Download(ref, url, target, limit, self._limits, transfer, tag_file, tag)
            await retried(lambda: download.attempt(client), ref, self._limits)
        tag_file.unlink(missing_ok=True)


def _authorization(credential: str) -> dict[str, str]:
    """A whole value (`Basic …`) or a bearer token. httpx leaves this header behind when it is sent to another host."""
    if not credential:
        return {}
    is_whole = credential.partition(" ")[0].lower() in {"basic", "bearer"}
    return {"authorization": credential if is_whole else f"Bearer {credential}"}


@dataclass(slots=True)
class _Download:
    """One file, and how much of which version of it is there."""

    ref: str
    url: str
    target: io.BufferedWriter
    limit: int
    limits: Limits
    transfer: Transfer
    tag_file: Path
    tag: str = ""

    async def attempt(self, client: httpx.AsyncClient) -> None:
        """Raises Transient with what came so far kept, SourceError for what no other attempt can mend."""
        began = self.target.tell()
        headers = {"range": f"bytes={began}-", "if-range": self.tag} if began and self.tag else {}
        try:
            async with client.stream("GET", self.url, headers=headers) as answer:
                if answer.status_code == 416 and answer.headers.get("content-range") == f"bytes */{began}":
                    return  # an earlier fetch had all of it
                self._judge(answer)
                self._place(answer, began)
                async for chunk in answer.aiter_bytes(_CHUNK_BYTES):
                    self._check(self.target.tell() + len(chunk))
                    await asyncio.to_thread(self.target.write, chunk)
                    self.transfer.advance(len(chunk))
        except httpx.TooManyRedirects:
            message = f"source {shown(self.ref)}: more than {_REDIRECTS} redirects"
            raise SourceError("source_invalid", message) from None
        # Without the foreign error: its words, and the addresses in it, may hold a signature.
        except (httpx.TransportError, httpx.InvalidURL) as exc:
            # httpcore keeps of the ssl module's error only the words (1.0).
            why = ": its certificate is not accepted" if "CERTIFICATE_VERIFY_FAILED" in str(exc) else ""
            raise TransientSourceError(f"{type(exc).__name__}{why}", has_moved=self.target.tell() > began) from None

    def _judge(self, answer: httpx.Response) -> None:
        status = answer.status_code
        what = f"source {shown(self.ref)}: {Path(self.url).name}: HTTP {status}"
        if status in {200, 206}:
            return
        if status in _AGAIN:
            raise TransientSourceError(f"HTTP {status}", wait_s=_seconds(answer.headers.get("retry-after", "")))
        if status == 416:
            self._restart()
            raise TransientSourceError("HTTP 416: the file is shorter than it was")
        if status in {401, 403, 407}:
            raise SourceError("source_unauthorized", f"{what}; give this worker credentials for it: source_netrc")
        if status in {404, 410}:
            raise SourceError("source_not_found", f"{what}; expected an archive's address or that of a folder")
        raise SourceError("source_invalid", f"{what}; expected 200")

    def _place(self, answer: httpx.Response, began: int) -> None:
        """Go on where this answer begins: at our end, or at 0 when the server sends all of it (or another version)."""
        if answer.status_code == 206:
            start = answer.headers.get("content-range", "").removeprefix("bytes ").partition("-")[0]
            if start != str(began):
                self._restart()
                raise TransientSourceError("the server sent another range than asked for")
        else:
            self._restart()
            tag = answer.headers.get("etag", "")
            self.tag = "" if tag.startswith("W/") else tag  # a weak one does not promise the same bytes
            self.tag_file.write_text(self.tag)
        length = answer.headers.get("content-length", "")
        if length.isascii() and length.isdigit() and len(length) < 20:
            total = self.target.tell() + int(length)
            self._check(total)
            self.transfer.expect(self.transfer.progress.done_bytes + int(length))

    def _check(self, size_bytes: int) -> None:
        if size_bytes <= self.limit:
            return
        if self.limit == MAX_CONFIG_BYTES:
            name = f"source {shown(self.ref)}: {CONFIG_NAME}"
            raise SourceError("source_too_big", f"{name}: {size_bytes} bytes or more, at most {self.limit} are allowed")
        raise too_big(self.ref, size_bytes, self.limits)

    def _restart(self) -> None:
        if held := self.target.tell():
            self.transfer.advance(-held)
            self.target.seek(0)
            self.target.truncate()


def _tag_file(path: Path) -> Path:
    return path.with_name(f".{path.name}.tag")


def _tag_of(path: Path) -> str:
    """The version that a file's beginning is of; "" where there is none."""
    tag_file = _tag_file(path)
    return tag_file.read_text() if path.exists() and tag_file.exists() else ""


def _seconds(text: str) -> float:
    return float(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0.0
