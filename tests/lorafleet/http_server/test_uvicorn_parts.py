"""uvicorn has every part that lorafleet.http_server uses and that may change without notice."""

import asyncio

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from lorafleet.http_server.uvicorn_parts import PARTS


class ParkedTransport(asyncio.Transport):
    """A transport that only says where it comes from."""

    def get_extra_info(self, _name, default=None):
        return default


async def app(_scope, _receive, _send) -> None:
    """An ASGI app that never answers."""
    await asyncio.Event().wait()


async def parts_of_uvicorn():
    """An instance of each class, in the state in which its parts are used."""
    server = uvicorn.Server(uvicorn.Config(app))
    server.config.load()
    protocol = HttpToolsProtocol(server.config, ServerState(), {})
    protocol.connection_made(ParkedTransport())
    protocol.data_received(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    cycle = protocol.cycle
    for task in protocol.tasks:
        task.cancel()
    await asyncio.gather(*protocol.tasks, return_exceptions=True)
    return {
        "HttpToolsProtocol": protocol,
        "FlowControl": protocol.flow,
        "RequestResponseCycle": cycle,
        "Server": server,
    }


@pytest.mark.parametrize("name", PARTS)
async def test_uvicorn_has_every_part_in_use(name):
    part = (await parts_of_uvicorn())[name]
    assert [attribute for attribute in PARTS[name] if not hasattr(part, attribute)] == []


def test_uvicorn_has_a_status_line_for_each_status_of_the_router():
    for status in (200, 204, 304, 400, 401, 403, 404, 405, 408, 409, 413, 417, 429, 431, 500, 503, 504, 505):
        assert STATUS_LINE[status].startswith(b"HTTP/1.1 %d " % status)
        assert STATUS_LINE[status].endswith(b"\r\n")
