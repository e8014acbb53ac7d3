"""A run's own base URL: `/runs/NAME` before a path makes NAME the caller's namespace, with or without a key.

So trainers that send no key, and use fixed names, share a fleet: each is given a URL of its own.
"""

from functools import lru_cache
from urllib.parse import quote, unquote

from starlette.types import ASGIApp, Receive, Scope, Send

from lorafleet.keys.roles import Caller, namespace_trouble
from lorafleet.service.http import HttpError, error_response

RUN = "lorafleet.run"
"""The key of an ASGI scope with the run's name; absent: the path has none."""
RUNS = "/runs/"


def split_run(path: str) -> tuple[str, str]:
    """(name of the run, path behind it) of a path, as sent or decoded; ("", the path) without a run.

    Raises HttpError 400 `invalid_run` for a name that cannot be a namespace's part.
    """
    if not path.startswith(RUNS):
        return "", path
    name, slash, rest = path[len(RUNS) :].partition("/")
    run = unquote(name)
    trouble = namespace_trouble(run)
    if trouble is not None or "/" in run:
        raise HttpError(400, "invalid_run", f"the name of a run, in /runs/NAME: {trouble or 'it is one part'}")
    return run, f"{slash}{rest}" or "/"


def path_behind_run(path: str) -> str:
    """The path behind a run; the path as it is without one, and empty where the name is no run's."""
    try:
        return split_run(path)[1]
    except HttpError:
        return ""


def path_in_run(run: str, path: str) -> str:
    """The path below the base URL of a run; the path as it is without a run."""
    return f"{RUNS}{quote(run)}{path}" if run else path


@lru_cache(maxsize=4096)
def caller_in_run(caller: Caller, run: str) -> Caller:
    """The caller at the base URL of a run: what it names is the run's; the caller itself without a run."""
    return caller.in_run(run) if run else caller


class RunPaths:
    """ASGI middleware: the app gets a path without its run, which is in the scope as RUN."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on without its run. Answers 400 for a name that is no run's."""
        if scope["type"] == "http" and scope["path"].startswith(RUNS):
            try:
                run, path = split_run(scope["path"])
                _, raw_path = split_run((scope.get("raw_path") or scope["path"].encode()).decode("latin-1"))
            except HttpError as exc:
                await error_response(exc)(scope, receive, send)
                return
            scope = {**scope, "path": path, "raw_path": raw_path.encode("latin-1"), RUN: run}
        await self._app(scope, receive, send)
