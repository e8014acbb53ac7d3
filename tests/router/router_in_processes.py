"""A router as `python -m router` starts it, in several processes, with routes that report the answering process."""

import os
import sys

# As `python -m router` does: they take a fifth of the time to start.
for _unneeded in ("pygments", "rich", "watchfiles"):
    sys.modules[_unneeded] = None

from lorafleet.http_server import serve  # noqa: E402
from lorafleet.service.settings import load_or_exit  # noqa: E402
from lorafleet.telemetry import logs  # noqa: E402
from router.config import RouterSettings  # noqa: E402
from router.processes import supervisor  # noqa: E402
from tests.router.variables import JOIN_WITHIN_S  # noqa: E402


def main() -> None:
    processes, *argv = sys.argv[1:]
    config = load_or_exit(RouterSettings, argv, prog="router_in_processes")
    logs.configure("router", log_format="console")
    me = supervisor.read_membership()
    if me is not None:
        serve_as(me, config)
        return
    command = [sys.executable, "-P", "-m", "tests.router.router_in_processes", *sys.argv[1:]]
    where = {"host": config.host, "port": config.port, "port_file": config.port_file}
    within = {"drain_s": config.drain_s, "stop_s": config.drain_s + config.grace_s}
    try:
        sys.exit(supervisor.run(command, int(processes), **where, **within))
    except OSError as exc:
        sys.exit(f"router_in_processes: {exc}")


def serve_as(me: supervisor.ProcessMember, config: RouterSettings) -> None:
    from router.app import build  # their parent needs none of it

    app, parts = build(config, me)
    sock = me.bind()
    more_routes(app, me)

    async def synced(within_s: float) -> None:
        await parts.discovery.changes.until(parts.discovery.is_synced, timeout_s=within_s)

    def stopping() -> None:
        parts.stopping = True

    within = {"within_s": float(os.environ[JOIN_WITHIN_S])} if JOIN_WITHIN_S in os.environ else {}
    joining = supervisor.JoiningApp(app, me, sock, wait_until_synced=synced, **within)
    within = {"drain_s": config.drain_s, "grace_s": config.grace_s}
    serve.run(lambda: serve.serve(joining, sock, http=app.state.http, **within, on_stop=stopping))


def more_routes(app, me: supervisor.ProcessMember) -> None:
    from starlette.responses import Response

    processes = app.state.processes

    @app.get("/who")
    async def who():
        return {"pid": os.getpid(), "slot": me.slot}

    @app.get("/siblings")
    async def others():
        return [slot for slot, answer in (await processes.ask("recent use")).items() if answer is not None]

    @app.get("/all")
    async def metrics():
        return Response(await processes.metrics())


if __name__ == "__main__":
    main()
