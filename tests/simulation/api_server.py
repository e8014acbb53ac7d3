"""An API server of Kubernetes as one more simulated process, with the tests' own implementation (`tests/kube`)."""

import asyncio
from random import Random

from aiohttp import web

from lorafleet.kube.access import ApiServerAccess
from lorafleet.kube.client import KubeClient
from tests.kube.kinds import RESOURCES
from tests.kube.server import KubeServer
from tests.simulation.nodes import Node

API_SERVER, API_HOST = "api", "10.0.0.50"
API_TROUBLES = ("hangs", "refuses", "is late", "forgets")
_PORT, _NAMESPACE = 6443, "default"
_LATE_S = 4.0
"""The longest that an answer takes from a server that is late, and an event of a watch."""


class SimulatedApiServer:
    """The server's objects, which outlive its process as etcd's do, and the troubles that it has."""

    def __init__(self) -> None:
        self._server = KubeServer()

    async def main(self, node: Node) -> None:
        """The server's process. Watches that resume from before its start are told to list again."""
        self._server.faults.store.compact(RESOURCES)
        # Cancelled handlers, so that a watch ends with its connection and not with the next thing it has to say.
        runner = web.AppRunner(self._server.app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.0)
        await runner.setup()
        await asyncio.get_running_loop().create_server(runner.server, node.host, _PORT)
        await node.stop.wait()

    async def client(self) -> KubeClient:
        """A client for a process: with every right, and without a token."""
        return KubeClient(source := _Access(), await source.read())

    def begin(self, how: str, chance: Random) -> None:
        """Let the server have one of its troubles, until `end`; `forgets`: its watches, and their history."""
        faults = self._server.faults
        if how == "hangs":
            faults.freeze()
        elif how == "refuses":
            faults.refuse(chance.choice((429, 500, 503, 504)))
        elif how == "is late":
            faults.slow_down(chance, requests_s=_LATE_S, answers_s=_LATE_S, events_s=_LATE_S)
        else:
            faults.compact()
            faults.drop_watches(cleanly=chance.random() < 0.5)

    def end(self) -> None:
        """Let the server work as usual again."""
        faults = self._server.faults
        faults.thaw()
        faults.refuse(None)
        faults.slow_down(Random(0))


class _Access:
    """The address of the simulated server."""

    async def read(self) -> ApiServerAccess:
        return ApiServerAccess(f"http://{API_HOST}:{_PORT}", _NAMESPACE, "")

    def token(self) -> None:
        return None
