"""A small app in several processes, as `router.processes.supervisor` runs a router: for tests of its parent alone.

It starts in a third of a router's time. Its streams end once there is a file `go-on` in the folder of its port file.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path

for _unneeded in ("pygments", "rich", "watchfiles"):
    sys.modules[_unneeded] = None

from prometheus_client import CollectorRegistry  # noqa: E402

from lorafleet.http_server import serve  # noqa: E402
from router.processes import supervisor  # noqa: E402
from router.processes.aggregate import WorkerProcesses  # noqa: E402
from router.telemetry.adapter_series import AdapterSeries  # noqa: E402
from tests.router.variables import REFUSES_TO_START  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("processes", type=int)
    parser.add_argument("--port", type=int)
    parser.add_argument("--port-file", type=Path)
    parser.add_argument("--router-id")
    for name in ("--drain-s", "--grace-s", "--forced-s"):
        parser.add_argument(name, type=float, default=0.1)
    flags = parser.parse_args()
    if supervisor.ENVIRONMENT not in os.environ:
        sys.exit(parent(flags))
    if os.environ.get(REFUSES_TO_START):
        sys.exit(7)
    me = supervisor.read_membership()
    sock = me.bind()
    app = AppInProcess(me, flags)

    async def synced(_within_s: float) -> None: ...

    joining = supervisor.JoiningApp(app, me, sock, wait_until_synced=synced)
    within = {"drain_s": flags.drain_s, "grace_s": flags.grace_s}
    serve.run(lambda: serve.serve(joining, sock, **within))


def parent(flags: argparse.Namespace) -> int | str:
    within = {"drain_s": flags.drain_s, "stop_s": flags.drain_s + flags.grace_s, "forced_s": flags.forced_s}
    command = [sys.executable, "-P", "-m", "tests.router.app_in_processes", *sys.argv[1:]]
    where = {"host": "127.0.0.1", "port": flags.port, "port_file": flags.port_file}
    try:
        return supervisor.run(command, flags.processes, **where, **within)
    except OSError as exc:
        return f"app_in_processes: {exc}"


class AppInProcess:
    """An app that reports its slot, asks the other processes, streams, and hangs."""

    def __init__(self, me: supervisor.ProcessMember, flags: argparse.Namespace) -> None:
        self.me, self.flags = me, flags
        self.processes = WorkerProcesses(
            Path(me.folder),
            me.slot,
            metrics=bytes,
            adapters=AdapterSeries(CollectorRegistry(), most_labels=0),
            answers={"who": self.told},
        )

    async def told(self, question: bytes) -> bytes:
        return json.dumps({"slot": self.me.slot, "question": question.decode()}).encode()

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            await self.live(receive, send)
        elif scope["path"] == "/stream":
            await self.stream(send)
        else:
            body = json.dumps(await self.answer(scope["path"])).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    async def live(self, receive, send) -> None:
        await receive()
        await self.processes.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.processes.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def answer(self, path: str):
        if path == "/ask":
            return [json.loads(said) for said in (await self.processes.ask("who", b"hello")).values() if said]
        if path == "/hang":
            (self.flags.port_file.parent / "hangs").touch()
            time.sleep(3600)  # noqa: ASYNC251  (the fault that is wanted)
        return {"pid": os.getpid(), "slot": self.me.slot, "id": self.me.router_id(self.flags.router_id or "")}

    async def stream(self, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        while not (self.flags.port_file.parent / "go-on").exists():
            await asyncio.sleep(0.01)
        await send({"type": "http.response.body", "body": b"two"})


if __name__ == "__main__":
    main()
