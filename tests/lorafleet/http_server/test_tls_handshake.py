"""TLS at a server's port: handshakes, certificates that change under load, and clients that speak something else."""

import asyncio
import contextlib
import json
import ssl
from datetime import timedelta

import httpx
import pytest

from lorafleet.http_server import tls_handshake
from lorafleet.http_server.intake import ClientLimits
from lorafleet.http_server.listener import listener_for_app
from lorafleet.http_server.serve import bind, uvicorn_config
from lorafleet.http_server.tls_handshake import TlsListener
from lorafleet.local.authority import Authority
from lorafleet.service.network.tls import PEER, Tls, TlsFiles, role_name
from lorafleet.service.network.transport import DirectTransport
from tests.lorafleet.test_serve import length
from tests.patience import patience, until
from tests.serving import serving
from tests.wires import RawClient, error_of

WORKER = role_name("worker")
GET = b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n"


async def names(scope, receive, send):
    """An app that answers with scheme and the names of the client's certificate."""
    if scope["type"] == "lifespan":
        await length(scope, receive, send)
        return
    said = json.dumps([scope["scheme"], str(scope["state"].get(PEER))]).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(said))]})
    await send({"type": "http.response.body", "body": said})


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


@pytest.fixture
def files(authority):
    return authority.issue("agent", WORKER, "localhost")


def server_of(files, **more):
    return Tls(files, clients=ssl.CERT_OPTIONAL, **more)


@contextlib.asynccontextmanager
async def served(files, app=names, *, handshake_s=None, most=1024, **limits):
    """The listener, and its port."""
    sock = bind("127.0.0.1", 0)
    more = {} if handshake_s is None else {"handshake_s": handshake_s}
    front = TlsListener(listener_for_app(ClientLimits(**limits)), server_of(files), most_handshakes=most, **more)
    async with serving(app, http=front, sock=sock):
        try:
            yield front, sock.getsockname()[1]
        finally:
            front.close()


def client_context(files, *, with_certificate=False):
    context = ssl.create_default_context(cafile=files.ca)
    if with_certificate:
        context.load_cert_chain(files.cert, files.key)
    return context


async def connect(port, context, name=WORKER):
    opened = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
    return RawClient(*opened)


def client_of(tls):
    return httpx.AsyncClient(transport=DirectTransport(tls=tls), timeout=patience(10))


async def answer_to(client):
    client.send(GET)
    status, _, body = await client.answer()
    assert status == 200
    return json.loads(body)


async def test_a_client_without_certificate_is_served_and_has_no_names(files):
    async with served(files) as (_, port), await connect(port, client_context(files)) as client:
        assert await answer_to(client) == ["https", "None"]
        assert client.writer.get_extra_info("ssl_object").version() == "TLSv1.3"


async def test_a_clients_certificate_names_it_in_each_request(files):
    context = client_context(files, with_certificate=True)
    async with served(files) as (_, port), await connect(port, context) as client:
        for _ in range(2):
            assert await answer_to(client) == ["https", f"localhost, {WORKER}"]


async def test_a_clients_certificate_of_another_authority_is_refused(files, tmp_path):
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other").issue("agent", WORKER)
    context = client_context(files)
    context.load_cert_chain(other.cert, other.key)
    async with served(files) as (front, port):
        async with await connect(port, context) as client:
            client.send(GET)
            with contextlib.suppress(ssl.SSLError):
                assert await client.rest() == b""
        await until(lambda: not front.handshakes)


async def test_plain_http_at_the_tls_port_is_told_to_speak_tls(files):
    async with served(files) as (front, port):
        async with RawClient(*await asyncio.open_connection("127.0.0.1", port)) as plain:
            plain.send(GET)
            assert error_of(await plain.rest()) == (400, "tls_required")
        assert not front.handshakes


async def test_tls_at_a_plain_port_fails_with_words_that_say_so(files):
    async with serving(names, http=listener_for_app(ClientLimits())) as url:
        tls = Tls(files)
        async with client_of(tls) as client:
            with pytest.raises(httpx.ConnectError, match="it speaks plain HTTP there"):
                await client.get(url.replace("http:", "https:"))


@pytest.mark.parametrize("sent", [b"", b"\x16", b"\x16\x03\x01\x02\x00\x01"])
async def test_a_slow_handshake_is_cut_off(files, sent):
    async with served(files, handshake_s=0.05) as (front, port):
        async with RawClient(*await asyncio.open_connection("127.0.0.1", port)) as slow:
            slow.send(sent)
            assert await slow.rest() == b""
        assert not front.handshakes


async def test_the_oldest_of_too_many_handshakes_is_cut_off_and_clients_are_served(files):
    async with served(files, most=4) as (front, port):
        slow = [RawClient(*await asyncio.open_connection("127.0.0.1", port)) for _ in range(12)]
        await until(lambda: len(front.handshakes) == 4)
        async with await connect(port, client_context(files)) as client:
            assert await answer_to(client) == ["https", "None"]
        assert await slow[0].rest() == b""
        for each in slow:
            each.writer.transport.abort()
        await until(lambda: not front.handshakes)


async def test_a_client_that_leaves_during_its_handshake_leaves_nothing(files):
    async with served(files) as (front, port):
        for sent in (b"", b"\x16\x03\x01", b"\x16\x03\x01\x00\x04abcd"):
            async with RawClient(*await asyncio.open_connection("127.0.0.1", port)) as gone:
                gone.send(sent)
        async with await connect(port, client_context(files)) as client:
            await answer_to(client)
        await until(lambda: not front.handshakes)


async def test_a_body_of_many_records_and_a_long_answer_arrive_whole(files):
    body = bytes(range(256)) * 4096
    head = b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)

    async def echo(scope, receive, send):
        if scope["type"] == "lifespan":
            await length(scope, receive, send)
            return
        pieces, more = [], True
        while more:
            message = await receive()
            pieces.append(message.get("body", b""))
            more = message.get("more_body", False)
        said = b"".join(pieces)
        headers = [(b"content-length", b"%d" % len(said)), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": said})

    async with served(files, echo) as (_, port), await connect(port, client_context(files)) as client:
        client.send(head + body)
        assert (await client.answer())[2] == body
        assert await client.rest() == b""


async def test_a_new_certificate_serves_new_connections_and_loses_no_request_of_the_old_ones(files, authority):
    """Clients ask without a break, each now and then on a new connection, while it is renewed four times."""
    seen, asked = set(), 0
    tls = server_of(files)
    renewed = asyncio.Event()
    async with serving(names, http=TlsListener(listener_for_app(ClientLimits()), tls)) as url:
        port = int(url.rpartition(":")[2])
        context = client_context(files)

        async def ask_on():
            nonlocal asked
            while not renewed.is_set():
                async with await connect(port, context) as client:
                    seen.add(client.writer.get_extra_info("ssl_object").getpeercert()["serialNumber"])
                    for _ in range(5):
                        await answer_to(client)
                        asked += 1

        async with await connect(port, context) as oldest, asyncio.TaskGroup() as tasks:
            await answer_to(oldest)
            clients = [tasks.create_task(ask_on()) for _ in range(3)]
            await until(lambda: seen)
            for number in range(4):
                authority.issue("agent", WORKER, "localhost", valid=timedelta(days=60 + number))
                tls._checked_at = float("-inf")  # the next connection checks, however soon
                await until(lambda number=number: len(seen) >= number + 2)
            renewed.set()
            await asyncio.gather(*clients)
            assert await answer_to(oldest) == ["https", "None"]  # on the first certificate still
    assert len(seen) == 5
    assert asked >= 20


async def test_a_certificate_that_is_broken_meanwhile_changes_nothing_for_clients(files):
    async with served(files) as (front, port):
        good = files.key.read_bytes()
        files.key.write_bytes(good[:40])
        front.tls._checked_at = float("-inf")
        async with await connect(port, client_context(files)) as client:
            await answer_to(client)
        assert "tls_key" in front.tls.trouble
        files.key.write_bytes(good)
        front.tls._checked_at = float("-inf")
        async with await connect(port, client_context(files)) as client:
            await answer_to(client)
        assert not front.tls.trouble


@pytest.mark.parametrize(
    ("names_there", "valid", "dialled", "words"),
    [
        (("agents.example",), timedelta(days=1), "127.0.0.1", f"does not name {WORKER}: issue its --tls-cert"),
        ((WORKER,), timedelta(days=1), "localhost", "does not name localhost"),
        ((WORKER,), timedelta(seconds=-1), "127.0.0.1", "has expired: renew the file"),
    ],
)
async def test_a_certificate_that_is_not_the_servers_is_refused_in_words(
    files, authority, names_there, valid, dialled, words
):
    there = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    other = authority.issue("other", *names_there, valid=valid)
    there.load_cert_chain(other.cert, other.key)
    server = await asyncio.start_server(lambda _r, w: w.close(), "127.0.0.1", 0, ssl=there)
    async with server, client_of(Tls(files)) as client:
        with pytest.raises(httpx.ConnectError) as refused:
            await client.get(f"https://{dialled}:{server.sockets[0].getsockname()[1]}/x")
    assert words in str(refused.value)


async def test_a_server_of_another_authority_is_refused_with_the_file_that_is_trusted_here(files, tmp_path):
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other").issue("agent", WORKER)
    there = Tls(TlsFiles(cert=other.cert, key=other.key))
    async with serving(names, tls=there) as url, client_of(Tls(files)) as client:
        with pytest.raises(httpx.ConnectError, match=rf"signed by none of tls_ca {files.ca}"):
            await client.get(url)


async def test_calls_go_on_after_the_callers_own_certificate_and_authority_have_changed(files, authority):
    tls = Tls(authority.issue("router", role_name("router")))
    async with serving(names, tls=server_of(files)) as url, client_of(tls) as client:
        assert (await client.get(url, headers={"connection": "close"})).json()[1] == role_name("router")
        authority.issue("router", role_name("router"), "second.example")
        tls._checked_at = float("-inf")
        assert "second.example" in (await client.get(url)).json()[1]


def test_a_server_of_ours_has_the_handshakes_bounds():
    front = TlsListener(listener_for_app(ClientLimits()), None)
    assert uvicorn_config(length, grace_s=1.0, http=front).http is front
    assert front.handshake_s == 10.0


def test_tls_itself_never_ends_a_client_that_still_reads_its_last_answer():
    # Its connection ends it: test_connection_over_tls.py.
    assert 100 * ClientLimits().send_stall_s < tls_handshake._CLOSE_S
