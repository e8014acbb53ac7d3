"""Servers for sources on loopback: web, hub, Google and Azure storage, and a connection with faults."""

import asyncio
import contextlib
import datetime
import hashlib
import ipaddress
import json
import math
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.serving import close_listeners

SECRET = "hunter2-hunter2"  # secrets that must not be in any message


@dataclass
class SourceRequest:
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]


@dataclass
class SourceAnswer:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    cut_after: int | None = None


Respond = Callable[[SourceRequest], SourceAnswer]


@contextlib.asynccontextmanager
async def listening(handle, context: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """The `host:port` at which `handle(reader, writer)` gets each connection; all are closed afterwards."""
    tasks: set[asyncio.Task] = set()
    writers: set[asyncio.StreamWriter] = set()

    async def joined(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        writers.add(writer)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await handle(reader, writer)
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(joined, "127.0.0.1", 0, ssl=context)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        await close_listeners(server)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in writers:
            # In Python 3.11 a handler that is cancelled while it waits cancels the event for all waiters.
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()


class SourceServer:
    """An HTTP/1.1 server with one handler. `asked` has all requests; `denies`: answer all with that status."""

    def __init__(self, respond: Respond) -> None:
        self.respond = respond
        self.requests: list[SourceRequest] = []
        self.error_status = 0
        self.url = ""

    @contextlib.asynccontextmanager
    async def serving(self, context: ssl.SSLContext | None = None) -> AsyncIterator["SourceServer"]:
        async with listening(self._serve, context) as where:
            self.url = f"{'https' if context else 'http'}://{where}"
            yield self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await self._answer(reader, writer):
            pass

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, target, _ = lines[0].split(" ")
        parts = urlsplit(target)
        pairs = (line.split(": ", 1) for line in lines[1:] if ": " in line)
        request = SourceRequest(
            method,
            unquote(parts.path),
            {key: values[0] for key, values in parse_qs(parts.query).items()},
            {key.lower(): value for key, value in pairs},
        )
        self.requests.append(request)
        await reader.readexactly(int(request.headers.get("content-length", 0)))
        words = f"you said {request.headers.get('authorization')} {SECRET}".encode()
        answer = SourceAnswer(self.error_status, words) if self.error_status else self.respond(request)
        headers = {"content-length": str(len(answer.body))} | answer.headers
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(f"HTTP/1.1 {answer.status} Told\r\n{head}\r\n".encode("latin-1"))
        body = b"" if method == "HEAD" else answer.body
        writer.write(body[: answer.cut_after] if answer.cut_after is not None else body)
        await writer.drain()
        return answer.cut_after is None


class FaultyConnection:
    """A TCP proxy with faults.

    cuts         bytes after which each next connection breaks
    stall_after  bytes after which each connection falls silent; `stall_at`: the same for all together
    """

    def __init__(self) -> None:
        self.cuts: list[int] = []
        self.is_dead = False
        self.stall_after = self.stall_at = math.inf
        self.stalled = asyncio.Event()
        self.carried = 0

    @contextlib.asynccontextmanager
    async def to(self, url: str) -> AsyncIterator[str]:
        parts = urlsplit(url)

        async def joined(reader, writer) -> None:
            if self.is_dead:
                return
            far_reader, far_writer = await asyncio.open_connection(parts.hostname, parts.port)
            up = asyncio.create_task(self._pump(reader, far_writer))
            try:
                await self._down(far_reader, writer)
            finally:
                up.cancel()
                far_writer.transport.abort()

        async with listening(joined) as where:
            yield f"{parts.scheme}://{where}"

    async def _pump(self, reader, writer) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()

    async def _down(self, reader, writer) -> None:
        moved = 0
        while data := await reader.read(65536):
            moved += len(data)
            if self.cuts and moved > self.cuts[0]:
                self.cuts.pop(0)
                return
            if moved > self.stall_after or self.carried + len(data) > self.stall_at:
                self.stalled.set()
                await asyncio.Event().wait()
            self.carried += len(data)
            writer.write(data)
            await writer.drain()


def ranged(request: SourceRequest, body: bytes, headers: dict[str, str] | None = None) -> SourceAnswer:
    """The body or its requested range, with an ETag and `If-Range`."""
    tag = f'"{hashlib.md5(body).hexdigest()}"'
    headers = {"etag": tag, "accept-ranges": "bytes"} | (headers or {})
    wanted = request.headers.get("range") or request.headers.get("x-ms-range")
    if not wanted or request.headers.get("if-range", tag) != tag:
        return SourceAnswer(200, body, headers)
    start, _, end = wanted.removeprefix("bytes=").partition("-")
    first, last = int(start), min(int(end or len(body) - 1), len(body) - 1)
    if first >= len(body):
        return SourceAnswer(416, b"", headers | {"content-range": f"bytes */{len(body)}"})
    part = body[first : last + 1]
    return SourceAnswer(206, part, headers | {"content-range": f"bytes {first}-{last}/{len(body)}"})


def files_of(files: dict[str, bytes]) -> Respond:
    """The handler of a plain web server; `files` may change."""

    def respond(request: SourceRequest) -> SourceAnswer:
        body = files.get(request.path.lstrip("/"))
        return SourceAnswer(404, SECRET.encode()) if body is None else ranged(request, body)

    return respond


class StubHub:
    """A hub as huggingface_hub 2.4 uses it: a revision's files, and `/…/resolve/…` with redirects to signed URLs."""

    def __init__(self) -> None:
        self.commits: dict[tuple[str, str], dict[str, bytes]] = {}
        self.branches: dict[tuple[str, str], str] = {}
        self.url = ""

    def push(self, repo: str, branch: str, files: dict[str, bytes]) -> str:
        commit = hashlib.sha1(json.dumps([repo, branch, len(self.commits), sorted(files)]).encode()).hexdigest()
        self.commits[repo, commit] = files
        self.branches[repo, branch] = commit
        return commit

    def respond(self, request: SourceRequest) -> SourceAnswer:
        parts = request.path.strip("/").split("/")
        if parts[0] == "signed":
            files = self.commits["/".join(parts[1:3]), parts[3]]
            return ranged(request, files["/".join(parts[4:])]) if request.query.get("signature") else SourceAnswer(403)
        if parts[:2] == ["api", "models"]:
            return self._info("/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main")
        if parts[2:3] != ["resolve"]:
            return SourceAnswer(404)
        return self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))

    def _info(self, repo: str, revision: str) -> SourceAnswer:
        commit = self.branches.get((repo, revision), revision)
        if not any(known == repo for known, _ in self.commits):
            return SourceAnswer(404, b"{}", {"x-error-code": "RepoNotFound"})
        if (repo, commit) not in self.commits:
            return SourceAnswer(404, b"{}", {"x-error-code": "RevisionNotFound"})
        siblings = [{"rfilename": name, "size": len(data)} for name, data in self.commits[repo, commit].items()]
        body = json.dumps({"id": repo, "modelId": repo, "sha": commit, "siblings": siblings, "tags": []})
        return SourceAnswer(200, body.encode(), {"content-type": "application/json"})

    def _resolve(self, repo: str, commit: str, name: str) -> SourceAnswer:
        data = self.commits[repo, commit][name]
        headers = {
            "x-repo-commit": commit,
            "x-linked-size": str(len(data)),
            "x-linked-etag": f'"{hashlib.sha256(data).hexdigest()}"',
            "location": f"{self.url}/signed/{repo}/{commit}/{name}?signature={SECRET}",
        }
        return SourceAnswer(302, b"", headers)


def google(objects: dict[str, bytes]) -> Respond:
    """Google's storage as gcsfs uses it: the JSON API's list, metadata and media. Objects are `bucket/path`."""

    def item(name: str) -> dict[str, str]:
        bucket, _, path = name.partition("/")
        tag = hashlib.md5(objects[name]).hexdigest()
        return {"kind": "storage#object", "name": path, "bucket": bucket, "size": str(len(objects[name])), "etag": tag}

    def respond(request: SourceRequest) -> SourceAnswer:
        parts = request.path.strip("/").split("/")
        bucket = parts[parts.index("b") + 1]
        path = "/".join(parts[parts.index("b") + 3 :])
        if path:
            if (name := f"{bucket}/{path}") not in objects:
                return SourceAnswer(404, b"{}")
            if request.query.get("alt") == "media":
                return ranged(request, objects[name])
            return SourceAnswer(200, json.dumps(item(name)).encode(), {"content-type": "application/json"})
        prefix = f"{bucket}/{request.query.get('prefix', '')}"
        here = [name for name in objects if name.startswith(prefix) and "/" not in name[len(prefix) :]]
        body = json.dumps({"kind": "storage#objects", "items": [item(name) for name in here]})
        return SourceAnswer(200, body.encode(), {"content-type": "application/json"})

    return respond


def azure(blobs: dict[str, bytes]) -> Respond:
    """Azure's blob storage as adlfs uses it: a container's list as XML, and blobs `container/path`."""
    common = {"x-ms-version": "2023-11-03", "last-modified": "Mon, 01 Jan 2024 00:00:00 GMT"}

    def respond(request: SourceRequest) -> SourceAnswer:
        _account, container, *rest = request.path.strip("/").split("/")
        if request.query.get("comp") == "list":
            prefix = f"{container}/{request.query.get('prefix', '')}"
            under = [name[len(prefix) :] for name in blobs if name.startswith(prefix)]
            folders = {name.split("/")[0] for name in under if "/" in name} if "delimiter" in request.query else set()
            rows = "".join(
                f"<BlobPrefix><Name>{request.query.get('prefix', '')}{folder}/</Name></BlobPrefix>"
                for folder in folders
            )
            rows += "".join(
                f"<Blob><Name>{name.partition('/')[2]}</Name><Properties><Content-Length>{len(data)}</Content-Length>"
                f"<Last-Modified>{common['last-modified']}</Last-Modified><BlobType>BlockBlob</BlobType>"
                f"<Etag>{hashlib.md5(data).hexdigest()}</Etag></Properties></Blob>"
                for name, data in blobs.items()
                if name.startswith(prefix) and "/" not in name[len(prefix) :]
            )
            body = (
                f'<?xml version="1.0" encoding="utf-8"?><EnumerationResults ContainerName="{container}">'
                f"<Blobs>{rows}</Blobs><NextMarker/></EnumerationResults>"
            )
            return SourceAnswer(200, body.encode(), common | {"content-type": "application/xml"})
        data = blobs.get("/".join([container, *rest]))
        if data is None:
            return SourceAnswer(404, b"", common | {"x-ms-error-code": "BlobNotFound"})
        return ranged(request, data, common | {"x-ms-blob-type": "BlockBlob"})

    return respond


def certificate(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """TLS contexts of a server and a client for `127.0.0.1`, `localhost` and `adapters.test`."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    names = [
        x509.DNSName("localhost"),
        x509.DNSName("adapters.test"),
        x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
    ]
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = folder / "site.pem"
    pem.write_bytes(
        made.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(pem)
    return server, ssl.create_default_context(cafile=str(pem))
