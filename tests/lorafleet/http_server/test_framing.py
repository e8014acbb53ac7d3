"""Request smuggling: bytes that two parsers might cut apart differently are refused, and nothing behind them is served.

The corpus follows the known families: CL.TE, TE.CL and TE.TE with the header obfuscated (PortSwigger's research), odd
Content-Lengths, chunk sizes and extensions, line endings, targets, Host, and what comes after a message.
"""

import asyncio

import pytest

from lorafleet.http_server.batches import leave_batch
from tests.patience import until
from tests.wires import COLD, HOT, error_of, length, listening, parsed_head, post

SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"
TE = b"Transfer-Encoding: chunked\r\n"
HOST = b"Host: a\r\n"
EMPTY = b"0\r\n\r\n"
# As Java's client begins, unasked.
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"


def chunked(raw: bytes, *, te: bytes = TE) -> bytes:
    return HOST + te + b"\r\n" + raw


# What follows the request line -> refused, whoever would have answered.
REFUSED = {
    "CL.TE": HOST + b"Content-Length: 5\r\n" + TE + b"\r\n" + EMPTY + SMUGGLED,
    "TE.CL": HOST + TE + b"Content-Length: 4\r\n\r\n5c\r\n" + SMUGGLED + EMPTY,
    "CL.TE of another case": HOST + b"content-LENGTH: 5\r\ntransfer-ENCODING: Chunked\r\n\r\n" + EMPTY,
    "CL 0 and TE": HOST + b"Content-Length: 0\r\n" + TE + b"\r\n" + EMPTY,
    "two Content-Lengths, equal": HOST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
    "two Content-Lengths, differing": HOST + b"Content-Length: 3\r\nContent-Length: 0\r\n\r\nabc",
    "a list of Content-Lengths": HOST + b"Content-Length: 3, 3\r\n\r\nabc",
    "CL with plus": HOST + b"Content-Length: +3\r\n\r\nabc",
    "CL with minus": HOST + b"Content-Length: -3\r\n\r\nabc",
    "CL in hex": HOST + b"Content-Length: 0x3\r\n\r\nabc",
    "CL with a space within": HOST + b"Content-Length: 1 0\r\n\r\nabc",
    "CL with a space behind": HOST + b"Content-Length: 3 \r\n\r\nabc",
    "CL with a tab behind": HOST + b"Content-Length: 3\t\r\n\r\nabc",
    "CL with a vertical tab": HOST + b"Content-Length: \x0b3\r\n\r\nabc",
    "CL with an underscore": HOST + b"Content-Length: 1_0\r\n\r\nabc",
    "CL empty": HOST + b"Content-Length: \r\n\r\nabc",
    "CL that overflows": HOST + b"Content-Length: 18446744073709551619\r\n\r\nabc",
    "CL of more digits than Python reads": HOST + b"Content-Length: %b3\r\n\r\nabc" % (b"0" * 5000),
    "CL with a decimal point": HOST + b"Content-Length: 3.0\r\n\r\nabc",
    "CL in other digits": HOST + b"Content-Length: \xd9\xa3\r\n\r\nabc",
    "TE twice": chunked(EMPTY, te=TE + TE),
    "TE twice, one unknown": chunked(EMPTY, te=TE + b"Transfer-Encoding: cow\r\n"),
    "TE unknown first": chunked(EMPTY, te=b"Transfer-Encoding: cow\r\n" + TE),
    "TE unknown": chunked(EMPTY, te=b"Transfer-Encoding: xchunked\r\n"),
    "TE identity": HOST + b"Transfer-Encoding: identity\r\nContent-Length: 3\r\n\r\nabc",
    "TE identity alone": HOST + b"Transfer-Encoding: identity\r\n\r\n",
    "TE gzip, chunked": chunked(EMPTY, te=b"Transfer-Encoding: gzip, chunked\r\n"),
    "TE chunked, identity": chunked(EMPTY, te=b"Transfer-Encoding: chunked, identity\r\n"),
    "TE chunked twice in a list": chunked(EMPTY, te=b"Transfer-Encoding: chunked, chunked\r\n"),
    "TE with an empty element": chunked(EMPTY, te=b"Transfer-Encoding: , chunked\r\n"),
    "TE with a trailing comma": chunked(EMPTY, te=b"Transfer-Encoding: chunked,\r\n"),
    "TE empty": chunked(EMPTY, te=b"Transfer-Encoding: \r\n"),
    "TE quoted": chunked(EMPTY, te=b'Transfer-Encoding: "chunked"\r\n'),
    "TE with a parameter": chunked(EMPTY, te=b"Transfer-Encoding: chunked;a=b\r\n"),
    "TE with a space behind": chunked(EMPTY, te=b"Transfer-Encoding: chunked \r\n"),
    "TE with a tab behind": chunked(EMPTY, te=b"Transfer-Encoding: chunked\t\r\n"),
    "TE with a vertical tab": chunked(EMPTY, te=b"Transfer-Encoding: \x0bchunked\r\n"),
    "TE with a vertical tab behind": chunked(EMPTY, te=b"Transfer-Encoding: chunked\x0b\r\n"),
    "TE with a form feed": chunked(EMPTY, te=b"Transfer-Encoding: \x0cchunked\r\n"),
    "TE with NUL": chunked(EMPTY, te=b"Transfer-Encoding: chunked\x00\r\n"),
    "TE with a no-break space": chunked(EMPTY, te=b"Transfer-Encoding: \xa0chunked\r\n"),
    "space before the colon": chunked(EMPTY, te=b"Transfer-Encoding : chunked\r\n"),
    "tab before the colon": chunked(EMPTY, te=b"Transfer-Encoding\t: chunked\r\n"),
    "space before the colon of CL": HOST + b"Content-Length : 3\r\n\r\nabc",
    "space before the name": chunked(EMPTY, te=b" Transfer-Encoding: chunked\r\n"),
    "NUL in the name": chunked(EMPTY, te=b"Transfer-Encoding\x00: chunked\r\n"),
    "NUL before the name": chunked(EMPTY, te=b"\x00Transfer-Encoding: chunked\r\n"),
    "a folded header": HOST + b"X: a\r\n Transfer-Encoding: chunked\r\n\r\n" + EMPTY,
    "a folded TE": chunked(EMPTY, te=b"Transfer-Encoding:\r\n chunked\r\n"),
    "a folded TE, with a tab": chunked(EMPTY, te=b"Transfer-Encoding:\r\n\tchunked\r\n"),
    "a folded CL": HOST + b"Content-Length:\r\n 3\r\n\r\nabc",
    "TE behind a bare LF": HOST + b"X: a\nTransfer-Encoding: chunked\r\n\r\n" + EMPTY,
    "TE behind a bare CR": HOST + b"X: a\rTransfer-Encoding: chunked\r\n\r\n" + EMPTY,
    "TE behind CR CR LF": HOST + b"X: a\r\r\nTransfer-Encoding: chunked\r\n\r\n" + EMPTY,
    "lines end in LF": b"Host: a\nContent-Length: 3\n\nabc",
    "the head ends in LF": HOST + b"Content-Length: 3\r\n\nabc",
    "the head ends in CR": HOST + b"Content-Length: 3\r\n\rabc",
    "a header without a colon": HOST + b"Transfer-Encoding chunked\r\n\r\n",
    "a header without a name": HOST + b": chunked\r\n\r\n",
    "a name with a letter outside ASCII": HOST + b"X\xc3\xa9: a\r\n\r\n",
    "a name in brackets": HOST + b"X[1]: a\r\n\r\n",
    "a value with NUL": HOST + b"X: a\x00b\r\n\r\n",
    "a value with ESC": HOST + b"X: a\x1bb\r\n\r\n",
    "a value with DEL": HOST + b"X: a\x7fb\r\n\r\n",
    "chunk size empty": chunked(b"\r\nabc\r\n" + EMPTY),
    "chunk size in 0x": chunked(b"0x3\r\nabc\r\n" + EMPTY),
    "chunk size with minus": chunked(b"-3\r\nabc\r\n" + EMPTY),
    "chunk size with plus": chunked(b"+3\r\nabc\r\n" + EMPTY),
    "chunk size with a space before": chunked(b" 3\r\nabc\r\n" + EMPTY),
    "chunk size with a space behind": chunked(b"3 \r\nabc\r\n" + EMPTY),
    "chunk size with a tab behind": chunked(b"3\t\r\nabc\r\n" + EMPTY),
    "chunk size that overflows": chunked(b"10000000000000003\r\nabc\r\n" + EMPTY),
    "chunk size not hex": chunked(b"g\r\nabc\r\n" + EMPTY),
    "chunk size ends in LF": chunked(b"3\nabc\r\n" + EMPTY),
    "chunk size ends in CR": chunked(b"3\rabc\r\n" + EMPTY),
    "chunk data too long": chunked(b"3\r\nabcd\r\n" + EMPTY),
    "chunk data without an end": chunked(b"3\r\nabc" + EMPTY),
    "chunk data ends in LF": chunked(b"3\r\nabc\n" + EMPTY),
    "chunk data ends in two other bytes": chunked(b"3\r\nabcXX0\r\n\r\n"),
    "chunk extension ends in LF": chunked(b"3;\nabc\r\n" + EMPTY),
    "chunk extension with a bare LF": chunked(b"3;a\nb\r\nabc\r\n" + EMPTY),
    "chunk extension with a bare CR": chunked(b"3;a\rb\r\nabc\r\n" + EMPTY),
    "chunk extension with an open quote": chunked(b'3;a="\r\nabc\r\n' + EMPTY),
    "the last chunk ends in LF": chunked(b"3\r\nabc\r\n0\n\n" + SMUGGLED),
    "trailer with a bare LF": chunked(b"0\r\nA: b\nC: d\r\n\r\n"),
    "trailer that is folded": chunked(b"0\r\nA: b\r\n c\r\n\r\n"),
    "trailer with Content-Length": chunked(b"0\r\nContent-Length: 3\r\n\r\n"),
    "no Host": b"Content-Length: 3\r\n\r\nabc",
    "two Hosts": HOST + b"Host: b\r\n\r\n",
    "two equal Hosts": HOST + HOST + b"\r\n",
    "Host with a space": b"Host: a b\r\n\r\n",
    "Host with a comma": b"Host: a, b\r\n\r\n",
    "Host with a path": b"Host: a/b\r\n\r\n",
    "Host with a user": b"Host: a@b\r\n\r\n",
    "Expect of something else": HOST + b"Expect: 200-ok\r\nContent-Length: 3\r\n\r\nabc",
    "Upgrade and two lengths": HOST + H2C + b"Content-Length: 5\r\n" + TE + b"\r\n" + EMPTY,
    "Upgrade and a length with a space behind": HOST + H2C + b"Content-Length: 3 \r\n\r\nabc",
    "Upgrade without Host": H2C + b"Content-Length: 3\r\n\r\nabc",
    "Upgrade with bad chunks": HOST + H2C + TE + b"\r\n3\nabc\r\n" + EMPTY,
}

# Whole messages that no path is served for.
REFUSED_WHOLE = {
    "CONNECT": b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n",
    "CONNECT with Upgrade": b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
    "OPTIONS of everything": b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
    "HTTP/0.9": b"GET /hot\r\n\r\n",
    "HTTP/0.9, said": b"GET /hot HTTP/0.9\r\n\r\n",
    "HTTP/1.2": b"POST /hot HTTP/1.2\r\nHost: a\r\n\r\n",
    "HTTP/2.0": b"POST /hot HTTP/2.0\r\nHost: a\r\n\r\n",
    "HTTP/2's preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no version": b"POST /hot\r\nHost: a\r\n\r\n",
    "a method of its own": b"SMUGGLE /hot HTTP/1.1\r\nHost: a\r\n\r\n",
    "a method in lower case": b"post /hot HTTP/1.1\r\nHost: a\r\n\r\n",
    "a space in the target": b"POST /hot /cold HTTP/1.1\r\nHost: a\r\n\r\n",
    "a space behind the version": b"POST /hot HTTP/1.1 \r\nHost: a\r\n\r\n",
    "a tab for a space": b"POST\t/hot HTTP/1.1\r\nHost: a\r\n\r\n",
    "NUL in the target": b"POST /hot\x00 HTTP/1.1\r\nHost: a\r\n\r\n",
    "CR in the target": b"POST /hot\rX: y HTTP/1.1\r\nHost: a\r\n\r\n",
    "a target outside ASCII": b"POST /h\xc3\xb6t HTTP/1.1\r\nHost: a\r\n\r\n",
    "a target without a slash": b"POST hot HTTP/1.1\r\nHost: a\r\n\r\n",
    "an absolute target without a path": b"POST http://a HTTP/1.1\r\nHost: a\r\n\r\n",
    "an absolute target without a host": b"POST http:///hot HTTP/1.1\r\nHost: a\r\n\r\n",
    "an absolute target, of two users": b"POST http://a@b@c/hot HTTP/1.1\r\nHost: a\r\n\r\n",
    "an absolute target, of a port that is none": b"POST http://a:99999/hot HTTP/1.1\r\nHost: a\r\n\r\n",
    "an absolute target, of an open bracket": b"POST http://[::1/hot HTTP/1.1\r\nHost: a\r\n\r\n",
    "a request line ending in LF": b"POST /hot HTTP/1.1\nHost: a\r\n\r\n",
    "a request line ending in CR": b"POST /hot HTTP/1.1\rHost: a\r\n\r\n",
    "chunked in HTTP/1.0, hot": b"POST /hot HTTP/1.0\r\n" + TE + b"\r\n" + EMPTY,
    "chunked in HTTP/1.0, cold": b"POST /cold HTTP/1.0\r\n" + TE + b"\r\n" + EMPTY,
    "garbage": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "a proxy's preface": b"PROXY TCP4 1.1.1.1 2.2.2.2 1 2\r\n" + SMUGGLED,
}

# What follows the request line -> the one body that is served; a second request behind it is not refused with it.
SERVED = {
    "no body": (HOST + b"\r\n", b""),
    "CL": (HOST + b"Content-Length: 3\r\n\r\nabc", b"abc"),
    "CL with leading zeros": (HOST + b"Content-Length: 003\r\n\r\nabc", b"abc"),
    "CL with a tab before": (HOST + b"Content-Length:\t3\r\n\r\nabc", b"abc"),
    "chunked": (chunked(b"3\r\nabc\r\n2\r\nde\r\n" + EMPTY), b"abcde"),
    "chunked of another case": (chunked(b"3\r\nabc\r\n" + EMPTY, te=b"tRANSFER-eNCODING: CHUNKED\r\n"), b"abc"),
    "chunk sizes with leading zeros": (chunked(b"0003\r\nabc\r\n00\r\n\r\n"), b"abc"),
    "chunk extensions": (chunked(b'3;a=b;c="d;e"\r\nabc\r\n0;last\r\n\r\n'), b"abc"),
    "trailers": (chunked(b"3\r\nabc\r\n0\r\nA: b\r\n\r\n"), b"abc"),
    # A name of its own, which no parser here takes for the real one.
    "Transfer_Encoding": (HOST + b"Transfer_Encoding: chunked\r\nContent-Length: 3\r\n\r\nabc", b"abc"),
    "X-Transfer-Encoding": (HOST + b"X-Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\nabc", b"abc"),
    "a request for a body": (HOST + b"Content-Length: %d\r\n\r\n" % len(SMUGGLED) + SMUGGLED, SMUGGLED),
    "Upgrade to HTTP/2": (HOST + H2C + b"\r\n", b""),
    "Upgrade with a body": (HOST + H2C + b"Content-Length: 3\r\n\r\nabc", b"abc"),
    "Upgrade behind a body's length": (HOST + b"Content-Length: 3\r\n" + H2C + b"\r\nabc", b"abc"),
    "Upgrade with chunks": (HOST + H2C + TE + b"\r\n3\r\nabc\r\n2\r\nde\r\n0\r\nA: b\r\n\r\n", b"abcde"),
    "Upgrade with a request for a body": (
        HOST + H2C + b"Content-Length: %d\r\n\r\n" % len(SMUGGLED) + SMUGGLED,
        SMUGGLED,
    ),
    "Upgrade to an unknown protocol": (HOST + b"Connection: upgrade\r\nUpgrade: x\r\n\r\n", b""),
    "an IPv6 Host": (b"Host: [::1]:8000\r\nContent-Length: 3\r\n\r\nabc", b"abc"),
    "an empty Host": (b"Host:\r\nContent-Length: 3\r\n\r\nabc", b"abc"),
}


@pytest.mark.parametrize("path", [HOT, COLD])
async def test_ambiguous_message_is_refused_and_nothing_behind_it_is_served(path):
    async with listening() as served:
        for name, rest in REFUSED.items():
            said = await served.response_to(b"POST %b HTTP/1.1\r\n%b%b" % (path.encode(), rest, SMUGGLED))
            status, code = error_of(said)
            assert (status, code) in {(400, "invalid_http"), (417, "expectation_failed")}, (name, said)
            assert all(seen == (path, b"") for seen in served.seen), (name, served.seen)
            # An app may have been asked before its body turned out to be bad; it got no whole body.
            assert not served.seen, (name, served.seen)


async def test_messages_that_are_no_request_here_are_refused():
    async with listening() as served:
        for name, raw in REFUSED_WHOLE.items():
            said = await served.response_to(raw + SMUGGLED)
            assert not served.seen, (name, said, served.seen)
            status, code = error_of(said)
            assert (status, code) in {(400, "invalid_http"), (505, "http_version_not_supported")}, name
            assert not served.seen, name


@pytest.mark.parametrize("path", [HOT, COLD])
@pytest.mark.parametrize("cut", [None, 1])
async def test_unambiguous_message_is_served_and_its_connection_stays_open(path, cut):
    async with listening() as served:
        for name, (rest, body) in SERVED.items():
            async with await served.client() as client:
                raw = b"POST %b HTTP/1.1\r\n%b" % (path.encode(), rest)
                for piece in [raw] if cut is None else [raw[at : at + cut] for at in range(0, len(raw), cut)]:
                    client.send(piece)
                    await asyncio.sleep(0)
                status, _, said = await client.answer()
                assert (status, said) == (200, str(len(body)).encode()), name
                assert served.seen == [(path, body)], name
                client.send(post(path, b"next"))
                assert (await client.answer())[2] == b"4", name
                served.seen.clear()


async def test_an_upgrade_that_is_not_taken_up_hides_nothing_that_follows_it():
    upgrade = b"POST /hot HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    async with listening() as served, await served.client() as client:
        client.send((upgrade + post(HOT, b"abc")) * 3)
        assert [(await client.answer())[2] for _ in range(6)] == [b"0", b"3"] * 3
        client.send(upgrade + b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert (await client.answer())[2] == b"0"
        assert error_of(await client.rest()) == (400, "invalid_http")


@pytest.mark.parametrize(
    ("behind", "last"),
    [
        (b"POST /hot HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", (400, "invalid_http")),
        (post(HOT, b"x" * 1001), (413, "body_too_large")),
        (post(COLD, b"abc"), None),
    ],
    ids=["no host", "too large", "the app's"],
)
@pytest.mark.parametrize("at_once", [True, False])
async def test_messages_behind_an_ignored_upgrade_are_read_as_usual(behind, last, at_once):
    def quick(exchange):
        exchange.respond(200, b"", b"0")

    async def slow(exchange):
        await leave_batch()
        await asyncio.sleep(0.01)
        quick(exchange)

    upgrade = b"POST /hot HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    async with listening(quick if at_once else slow, body_bytes=1000) as served, await served.client() as client:
        client.send(upgrade + behind)
        assert (await client.answer())[::2] == (200, b"0")
        if last:
            assert error_of(await client.rest()) == last
        else:
            assert await client.rest() == b""
        assert served.listener.intake.refusals == ({last[1]: 1} if last else {})


@pytest.mark.parametrize("target", ["http://a/hot", "http://a:80/hot?x=1", "/hot?x=1", "/hot?", "/hot#x"])
async def test_absolute_target_is_split_into_path_and_query(target):
    async with listening() as served, await served.client() as client:
        client.send(post(target, b"abc"))
        assert (await client.answer())[0] == 200
        assert served.seen == [("/hot", b"abc")]


@pytest.mark.parametrize("path", ["/%68ot", "/hot/", "//hot", "/./hot", "/x/../hot", "/HOT", "/hot;x"])
async def test_path_spelled_otherwise_than_a_hot_route_goes_to_the_app(path):
    async with listening() as served, await served.client() as client:
        client.send(post(path, b"abc"))
        await client.answer()
        assert served.seen  # by the app
        assert served.listener.intake.refusals == {}


@pytest.mark.parametrize("path", [HOT, COLD])
async def test_what_follows_a_message_that_said_close_is_not_served(path):
    async with listening() as served:
        said = await served.response_to(post(path, b"abc", b"Connection: close") + SMUGGLED)
        status, headers = parsed_head(said.partition(b"\r\n\r\n")[0])
        assert (status, headers[b"connection"]) == (200, b"close")
        assert said.endswith(b"\r\n\r\n3")
        assert served.seen == [(path, b"abc")]


@pytest.mark.parametrize("path", [HOT, COLD])
async def test_trailer_saying_close_ends_the_connection_behind_its_message(path):
    whole = b"POST %b HTTP/1.1\r\nHost: a\r\n%b\r\n" % (path.encode(), TE)
    async with listening() as served:
        said = await served.response_to(whole + b"3\r\nabc\r\n0\r\nConnection: close\r\n\r\n" + SMUGGLED)
        status, headers = parsed_head(said.partition(b"\r\n\r\n")[0])
        assert (status, headers.get(b"connection")) == (200, b"close")
        assert said.endswith(b"\r\n\r\n3")
        assert served.seen == [(path, b"abc")]


async def test_a_trailer_is_no_header_to_the_app():
    async with listening() as served, await served.client() as client:
        client.send(b"POST %b HTTP/1.1\r\nHost: a\r\n%b\r\n0\r\nAuthorization: Bearer a\r\n\r\n" % (COLD.encode(), TE))
        assert (await client.answer())[0] == 200
        assert dict(served.app.headers).keys() == {b"host", b"transfer-encoding", b"x-request-id"}


async def test_a_trailer_is_no_header_of_the_request_behind_it():
    headers = []

    async def keep(exchange) -> None:
        headers.append(exchange.headers)
        await length(exchange)

    async with listening(keep) as served, await served.client() as client:
        client.send(b"POST %b HTTP/1.1\r\nHost: a\r\n%b\r\n0\r\nAuthorization: Bearer a\r\n\r\n" % (HOT.encode(), TE))
        await client.answer()
        client.send(b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n" % HOT.encode())
        await client.answer()
    assert headers == [{b"host": b"a", b"transfer-encoding": b"chunked"}, {b"host": b"a"}]


async def test_trailer_saying_close_ends_a_connection_that_is_answered_already():
    async with listening() as served, await served.client() as client:
        served.app.read_body = False
        client.send(b"POST %b HTTP/1.1\r\nHost: a\r\n%b\r\n3\r\nabc\r\n" % (COLD.encode(), TE))
        await client.answer()
        client.send(b"0\r\nConnection: close\r\n\r\n")
        assert await client.rest() == b""


@pytest.mark.parametrize("path", [HOT, COLD])
async def test_http_1_0_is_not_asked_for_its_body(path):
    async with listening() as served:
        raw = b"POST %b HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n" % path.encode()
        async with await served.client() as client:
            client.send(raw)
            await until(lambda: [each for each in served.listener.connections if each.phase])
            client.send(b"abc")
            assert (await client.rest()).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("behind", [SMUGGLED, b""])
@pytest.mark.parametrize("path", [HOT, COLD])
async def test_http_1_0_is_answered_plainly_and_closed(path, behind):
    async with listening() as served:
        raw = b"POST %b HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 3\r\n\r\nabc" % path.encode()
        said = await served.response_to(raw + behind)
        status, headers = parsed_head(said.partition(b"\r\n\r\n")[0])
        assert (status, headers[b"connection"]) == (200, b"close")
        assert served.seen == [(path, b"abc")]
