"""What a request's head must say, beyond what httptools insists on, so that no two parsers can disagree about it.

httptools 0.9 (llhttp, strict) itself refuses, seen running: Content-Length beside Transfer-Encoding, a second one of
either, a Content-Length with anything but digits before its end, folded lines, bare CR or LF, control characters,
spaces before the colon, odd characters in names, bad or overflowing chunk sizes. What it lets through and is refused
here: any coding besides `chunked`, chunked in HTTP/1.0, blanks after either value, HTTP/0.9 and 2.0, no Host or two,
CONNECT and Upgrade (after which it would not read the body as a body).
"""

import re
from typing import NamedTuple

import httptools

Headers = list[tuple[bytes, bytes]]

_ONCE = (b"host", b"content-length", b"transfer-encoding", b"expect")
_HOST = re.compile(rb"[A-Za-z0-9.\-_~%!$&'()*+;=:\[\]]*")
_METHODS = {name.encode(): name for name in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")}


class Refused(Exception):
    """A message that is answered with an error, and is the last on its connection."""

    def __init__(self, status: int, code: str, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


class Head(NamedTuple):
    """What a head says of its message. `path` as sent, without the query; `content_length` 0 if it has none."""

    method: str
    path: str
    query: bytes
    is_1_1: bool
    content_length: int
    expects: bool


def check_head(
    parser: httptools.HttpRequestParser, target: bytes, headers: Headers, fields: dict[bytes, bytes]
) -> Head:
    """What the head says; raises Refused when it could be read in two ways, or asks for what is not done here.

    fields  dict(headers); where a name came more than once, its first value is put in
    """
    version = parser.get_http_version()
    is_1_1 = version == "1.1"
    if not is_1_1 and version != "1.0":
        raise Refused(505, "http_version_not_supported", f"HTTP/{version}: expected HTTP/1.1")
    if len(fields) != len(headers):
        _take_first(headers, fields)
    host = fields.get(b"host")
    if host is None:
        if is_1_1:
            raise _invalid("no Host header")
    elif not _HOST.fullmatch(host):
        raise _invalid("a Host header that names no host")
    if parser.should_upgrade():
        raise _invalid("Upgrade and CONNECT are not served; send the request without them")
    content_length = 0
    if b"content-length" in fields:
        value = fields[b"content-length"]
        if not value.isdigit():
            raise _invalid("a Content-Length that is not digits only")
        content_length = int(value)
    elif b"transfer-encoding" in fields and (fields[b"transfer-encoding"].lower() != b"chunked" or not is_1_1):
        raise _invalid("a Transfer-Encoding other than `chunked`, or in HTTP/1.0")
    expects = False
    if b"expect" in fields and is_1_1:
        if fields[b"expect"].lower() != b"100-continue":
            raise Refused(417, "expectation_failed", "Expect: only 100-continue is known")
        expects = True
    name = parser.get_method()
    path, query = _split(target)
    return Head(_METHODS.get(name) or name.decode("ascii"), path, query, is_1_1, content_length, expects)


def _split(target: bytes) -> tuple[str, bytes]:
    """(path, query) of a request target; absolute ones (`http://host/path`, as to a proxy) too."""
    if not target.startswith(b"/") or b"#" in target:
        try:
            parts = httptools.parse_url(target)
        except httptools.HttpParserInvalidURLError as exc:
            raise _invalid("a request target that is no path") from exc
        path, query = parts.path, parts.query
        if not path or not path.startswith(b"/"):
            raise _invalid("a request target without a path")
    else:
        path, _, query = target.partition(b"?")
    try:
        return path.decode("ascii"), query or b""
    except UnicodeDecodeError as exc:
        raise _invalid("a request target with characters outside ASCII") from exc


def _take_first(headers: Headers, fields: dict[bytes, bytes]) -> None:
    fields.update(reversed(headers))
    for name in _ONCE:
        if sum(1 for each, _ in headers if each == name) > 1:
            raise _invalid(f"more than one {name.decode()} header")


def _invalid(what: str) -> Refused:
    return Refused(400, "invalid_http", f"the request is refused: {what}")
