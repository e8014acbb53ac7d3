"""What a request's head must say, beyond what httptools insists on, so that no two parsers can disagree about it.

httptools 0.9 (llhttp, strict) itself refuses, seen running: Content-Length beside Transfer-Encoding, a second one of
either, a Content-Length with anything but digits before its end, folded lines, bare CR or LF, control characters,
spaces before the colon, odd characters in names, bad or overflowing chunk sizes. What it lets through and is refused
here: any coding besides `chunked`, chunked in HTTP/1.0, blanks after either value, HTTP/0.9 and 2.0, no Host or two,
and CONNECT.

An Upgrade is ignored, as a server may (RFC 9110, 7.8): Java's own client asks for HTTP/2 so with every request that it
sends in clear text. httptools takes what follows such a head for the other protocol's, so that head is read twice.
"""

import functools
import re

import httptools

Headers = list[tuple[bytes, bytes]]

_ONCE = (b"host", b"content-length", b"transfer-encoding", b"expect")
_HOST = re.compile(rb"[A-Za-z0-9.\-_~%!$&'()*+;=:\[\]]*")
# What asks for another protocol; the tokens of Connection may stay (RFC 9110, 7.6.1 and 7.8).
_UPGRADES = frozenset({b"upgrade", b"http2-settings"})
_MOST_REMEMBERED_BYTES = 256
# Of a number that fits in 64 bits. httptools bounds the number but not its zeros, and Python reads no more than 4,300.
_MOST_DIGITS = 20


class RefusedMessage(Exception):
    """A message that is answered with an error, and is the last on its connection."""

    def __init__(self, status: int, code: str, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


def checked_head(
    parser: httptools.HttpRequestParser, headers: Headers, fields: dict[bytes, bytes]
) -> tuple[bool, int, bool]:
    """(whether it is HTTP/1.1 and not 1.0, Content-Length or 0, whether the client waits to be asked for the body).

    Raises Refused when the head could be read in two ways, or asks for what is not done here.

    fields  dict(headers); where a name came more than once, its first value is put in
    """
    version = parser.get_http_version()
    is_1_1 = version == "1.1"
    if not is_1_1 and version != "1.0":
        raise RefusedMessage(505, "http_version_not_supported", f"HTTP/{version}: expected HTTP/1.1")
    if len(fields) != len(headers):
        _take_first(headers, fields)
    host = fields.get(b"host")
    if host is None:
        if is_1_1:
            raise _invalid("no Host header")
    elif not _HOST.fullmatch(host):
        raise _invalid("a Host header that names no host")
    content_length = 0
    length = fields.get(b"content-length")
    if length is not None:
        if not length.isdigit() or len(length) > _MOST_DIGITS:
            raise _invalid("a Content-Length that is not digits only, or more than any length has")
        content_length = int(length)
    elif b"transfer-encoding" in fields and (fields[b"transfer-encoding"].lower() != b"chunked" or not is_1_1):
        raise _invalid("a Transfer-Encoding other than `chunked`, or in HTTP/1.0")
    return is_1_1, content_length, is_1_1 and b"expect" in fields and _expects(fields[b"expect"])


def parser_of(protocol: object) -> httptools.HttpRequestParser:
    """A parser as uvicorn 0.54 makes its own: what follows a message that said `close` is told, too."""
    parser = httptools.HttpRequestParser(protocol)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def head_without_upgrade(parser: httptools.HttpRequestParser, target: bytes, headers: Headers) -> bytes:
    """The bytes of the head that was read, without what asks for another protocol. Raises Refused for CONNECT.

    target, headers  as the parser gave them: it has found nothing in them that could end a line
    """
    method = parser.get_method()
    if method == b"CONNECT":
        raise _invalid("CONNECT is not served: this is no proxy")
    lines = b"".join([b"%b: %b\r\n" % header for header in headers if header[0] not in _UPGRADES])
    return b"%b %b HTTP/%b\r\n%b\r\n" % (method, target, parser.get_http_version().encode(), lines)


def checked_target(target: bytes) -> tuple[str, bytes]:
    """(path, query) as sent; of absolute targets (`http://host/path`, as to a proxy) too. Raises Refused."""
    return _remembered(target) if len(target) <= _MOST_REMEMBERED_BYTES else _split(target)


@functools.lru_cache(maxsize=1024)
def _remembered(target: bytes) -> tuple[str, bytes]:
    return _split(target)


def _split(target: bytes) -> tuple[str, bytes]:
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


def _expects(value: bytes) -> bool:
    if value.lower() != b"100-continue":
        raise RefusedMessage(417, "expectation_failed", "Expect: only 100-continue is known")
    return True


def _take_first(headers: Headers, fields: dict[bytes, bytes]) -> None:
    fields.update(reversed(headers))
    for name in _ONCE:
        if sum(1 for each, _ in headers if each == name) > 1:
            raise _invalid(f"more than one {name.decode()} header")


def _invalid(what: str) -> RefusedMessage:
    return RefusedMessage(400, "invalid_http", f"the request is refused: {what}")
