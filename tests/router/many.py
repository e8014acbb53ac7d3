"""A router as `python -m router` starts it, in several processes: the program that test_multi runs."""

import json
import os
import sys
import time

from starlette.responses import Response

from lorafleet import logs, serve
from lorafleet.settings import load_or_exit
from router import multi
from router.app import build
from router.config import RouterSettings
from router.siblings import Siblings


def main() -> None:
    processes, *argv = sys.argv[1:]
    config = load_or_exit(RouterSettings, argv, prog="many")
    logs.configure("router", log_format="console")
    me = multi.member()
    if me is not None:
        serve_as(me, config)
        return
    command = [sys.executable, "-m", "tests.router.many", *sys.argv[1:]]
    where = {"host": config.host, "port": config.port, "port_file": config.port_file}
    within = {"drain_s": config.drain_s, "stop_s": config.drain_s + config.grace_s}
    try:
        sys.exit(multi.run(command, int(processes), **where, **within))
    except OSError as exc:
        sys.exit(f"many: {exc}")


def serve_as(me: multi.Member, config: RouterSettings) -> None:
    if os.environ.get("REFUSES_TO_START"):
        sys.exit(7)
    app, parts = build(config, me)
    sock = me.bind()

    async def told(question: bytes) -> bytes:
        return json.dumps({"slot": me.slot, "question": question.decode()}).encode()

    siblings = app.state.siblings
    siblings._answers["who"] = told
    more_routes(app, me, config, siblings)

    async def synced(within_s: float) -> None:
        await parts.discovery.changes.until(parts.discovery.is_synced, timeout_s=within_s)

    def stopping() -> None:
        parts.stopping = True

    joining = multi.Joining(app, me, sock, synced=synced)
    within = {"drain_s": config.drain_s, "grace_s": config.grace_s}
    serve.run(lambda: serve.serve(joining, sock, http=app.state.http, **within, on_stop=stopping))


def more_routes(app, me: multi.Member, config: RouterSettings, siblings: Siblings) -> None:
    @app.get("/who")
    async def who():
        return {"pid": os.getpid(), "slot": me.slot, "id": me.router_id(config.router_id)}

    @app.get("/hang")
    async def hang():
        time.sleep(3600)  # noqa: ASYNC251  (the fault that is wanted)

    @app.get("/all")
    async def metrics():
        return Response(await siblings.metrics())

    @app.get("/ask")
    async def ask():
        return [json.loads(answer) for answer in (await siblings.ask("who", b"hello")).values() if answer]


if __name__ == "__main__":
    main()
