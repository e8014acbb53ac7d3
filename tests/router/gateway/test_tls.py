"""TLS between a gateway and its picker."""

import shutil

import grpc
import pytest

from lorafleet.local.authority import Authority
from lorafleet.service.network.tls import TlsFiles
from router.gateway.tls import credentials_of
from tests.router.doubles import CHAT, EngineDouble, fleet_and_app
from tests.router.gateway.envoy_client import gateway_of

PATH = "/v1/chat/completions"


def trusting(authority: Authority) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(authority.ca.read_bytes())


def folder(at):
    at.mkdir()
    return at


async def test_the_routers_own_certificate_is_shown_and_read_again_when_it_changes(tmp_path):
    first, second = [Authority(folder(tmp_path / name)) for name in ("first", "second")]
    files, later = first.issue("router", "localhost"), second.issue("router", "localhost")
    settings = {"ext_proc": 0, "tls_cert": files.cert, "tls_key": files.key}
    async with fleet_and_app(EngineDouble("w0"), **settings) as (_, _, _, app):
        port = app.state.picker.port
        async with gateway_of(port, trusting(first)) as gateway:
            assert (await gateway.ask(PATH, CHAT)).status == 200
        shutil.copy(later.key, files.key)
        shutil.copy(later.cert, files.cert)
        async with gateway_of(port, trusting(second)) as gateway:
            assert (await gateway.ask(PATH, CHAT)).status == 200
        async with gateway_of(port, trusting(first)) as gateway:
            with pytest.raises(grpc.aio.AioRpcError):
                await gateway.ask(PATH, CHAT)


def test_without_files_the_port_is_plain_or_has_a_certificate_made_now():
    assert credentials_of(TlsFiles(), is_self_signed=False) is None
    assert isinstance(credentials_of(TlsFiles(), is_self_signed=True), grpc.ServerCredentials)


async def test_a_certificate_made_now_answers_a_gateway_that_asks_for_tls():
    async with fleet_and_app(EngineDouble("w0"), ext_proc=0, ext_proc_self_signed=True) as (_, _, _, app):
        port = app.state.picker.port
        reader, writer = await tls_connection(port)
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
        writer.close()
        del reader


async def tls_connection(port):
    """A connection that verifies nobody, as gateways do by default."""
    import asyncio
    import ssl

    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return await asyncio.open_connection("127.0.0.1", port, ssl=context)
