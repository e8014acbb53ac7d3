"""Checks of a request's head beyond those of httptools, so that no two parsers can disagree about it.

httptools 0.9 (llhttp, strict) itself refuses, seen running: Content-Length beside Transfer-Encoding, a second one of
either, a Content-Length with anything but digits before its end, folded lines, bare CR or LF, control characters,
spaces before the colon, odd characters in names, bad or overflowing chunk sizes. httptools accepts, and this module
refuses: any coding besides `chunked`, chunked in HTTP/1.0, blanks after either value, HTTP/0.9 and 2.0, no Host or two,
and CONNECT.

An Upgrade is ignored, as a server may (RFC 9110, 7.8): Java's own client asks for HTTP/2 with every request in clear
text. httptools takes the bytes behind such a head for the other protocol, so the head is read twice. One to WebSocket
is refused with 426, after which clients that also speak HTTP, such as Codex, go on by HTTP at once.
"""

import functools
import re

import httptools

Headers = list[tuple[bytes, bytes]]

_ONCE = (b"host", b"content-length", b"transfer-encoding", b"expect")
_HOST = re.compile(rb"[A-Za-z0-9.\-_~%!$&'()*+;=:\[\]]*")
# Headers that ask for another protocol; the tokens of Connection may stay (RFC 9110, 7.6.1 and 7.8).
_UPGRADES = frozenset({b"upgrade", b"http2-settings"})
_NO_WEBSOCKET = (
    'no WebSocket is served here, on any path: send an HTTP request, with `"stream": true` for events as they come'
)
_MAX_CACHED_TARGET_BYTES = 256
# Digits of a Content-Length that fits in 64 bits. httptools bounds the number but not its zeros, and Python reads at
# most 4,300 digits.
_MAX_LENGTH_DIGITS = 20


class RefusedMessage(Exception):
    """A message that gets an error, and is the last on its connection."""

    def __init__(self, status: int, code: str, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


def body_too_large(most_bytes: int) -> RefusedMessage:
    """The refusal of a larger body."""
    return RefusedMessage(413, "body_too_large", f"the request's body is larger than {most_bytes} bytes")


def body_too_slow(within_s: float) -> RefusedMessage:
    """The refusal of a body that was not whole in time."""
    return RefusedMessage(408, "request_timeout", f"no whole body within {within_s:g} s")


def checked_head(
    parser: httptools.HttpRequestParser, headers: Headers, fields: dict[bytes, bytes]
) -> tuple[bool, int, bool]:
    """(whether it is HTTP/1.1 and not 1.0, Content-Length or 0, whether the client waits for `100 Continue`).

    Raises RefusedMessage for a head that could be read in two ways, or that asks for something unknown.

    fields  dict(headers); gets the first value of a name that came more than once
    """
    version = parser.get_http_version()
    is_1_1 = version == "1.1"
    if not is_1_1 and version != "1.0":
        raise RefusedMessage(505, "http_version_not_supported", f"HTTP/{version}: expected HTTP/1.1")
    if len(fields) != len(headers):
        _put_first_values(headers, fields)
    host = fields.get(b"host")
    if host is None:
        if is_1_1:
            raise _invalid_request("no Host header")
    elif not _HOST.fullmatch(host):
        raise _invalid_request("a Host header that names no host")
    content_length = 0
    length = fields.get(b"content-length")
    if length is not None:
        if not length.isdigit() or len(length) > _MAX_LENGTH_DIGITS:
            raise _invalid_request("a Content-Length that is not digits only, or more than any length has")
        content_length = int(length)
    elif b"transfer-encoding" in fields and (fields[b"transfer-encoding"].lower() != b"chunked" or not is_1_1):
        raise _invalid_request("a Transfer-Encoding other than `chunked`, or in HTTP/1.0")
    return is_1_1, content_length, is_1_1 and b"expect" in fields and _is_continue_expected(fields[b"expect"])


def parser_of(protocol: object) -> httptools.HttpRequestParser:
    """A parser that calls `protocol`, as uvicorn 0.54 makes one: it reads on after a message that said `close`."""
    parser = httptools.HttpRequestParser(protocol)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def head_without_upgrade(parser: httptools.HttpRequestParser, target: bytes, headers: Headers) -> bytes:
    """The bytes of the head just parsed, without Upgrade headers, to parse again.

    Raises RefusedMessage for CONNECT, and for an upgrade to WebSocket.

    target, headers  from the parser, which lets nothing through that could end a line
    """
    method = parser.get_method()
    if method == b"CONNECT":
        raise _invalid_request("CONNECT is not served: this is no proxy")
    if any(name == b"upgrade" and b"websocket" in value.lower() for name, value in headers):
        raise RefusedMessage(426, "upgrade_required", _NO_WEBSOCKET)
    lines = b"".join([b"%b: %b\r\n" % header for header in headers if header[0] not in _UPGRADES])
    return b"%b %b HTTP/%b\r\n%b\r\n" % (method, target, parser.get_http_version().encode(), lines)


def checked_target(target: bytes) -> tuple[str, bytes]:
    """(path, query) as sent, also of an absolute target (`http://host/path`). Raises RefusedMessage."""
    return _cached_split(target) if len(target) <= _MAX_CACHED_TARGET_BYTES else _split_target(target)


@functools.lru_cache(maxsize=1024)
def _cached_split(target: bytes) -> tuple[str, bytes]:
    """`_split_target`, cached. Raises RefusedMessage."""
    return _split_target(target)


def _split_target(target: bytes) -> tuple[str, bytes]:
    """(path, query) of a request target. Raises RefusedMessage unless it has an ASCII path that begins with /."""
    if not target.startswith(b"/") or b"#" in target:
        try:
            parts = httptools.parse_url(target)
        except httptools.HttpParserInvalidURLError as exc:
            raise _invalid_request("a request target that is no path") from exc
        path, query = parts.path, parts.query
        if not path or not path.startswith(b"/"):
            raise _invalid_request("a request target without a path")
    else:
        path, _, query = target.partition(b"?")
    try:
        return path.decode("ascii"), query or b""
    except UnicodeDecodeError as exc:
        raise _invalid_request("a request target with characters outside ASCII") from exc


def _is_continue_expected(value: bytes) -> bool:
    """Whether an Expect header asks for `100 Continue`. Raises RefusedMessage for anything else."""
    if value.lower() != b"100-continue":
        raise RefusedMessage(417, "expectation_failed", "Expect: only 100-continue is known")
    return True


def _put_first_values(headers: Headers, fields: dict[bytes, bytes]) -> None:
    """Put the first value of each repeated name into `fields`. Raises RefusedMessage for names that may come once."""
    fields.update(reversed(headers))
    for name in _ONCE:
        if sum(1 for each, _ in headers if each == name) > 1:
            raise _invalid_request(f"more than one {name.decode()} header")


def _invalid_request(why: str) -> RefusedMessage:
    """A RefusedMessage with 400 `invalid_http`."""
    return RefusedMessage(400, "invalid_http", f"the request is refused: {why}")
