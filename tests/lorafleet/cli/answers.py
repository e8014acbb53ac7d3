"""Servers that give answers made beforehand, and the workers in them."""

import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from rich.console import Console
from rich.table import Table

from lorafleet.cli import tables
from tests.lorafleet.cli.conftest import CliResult

READY_WORKERS = [
    {"id": f"w{number}", "state": "ready", "zone": "", "node": "", "base_model": "tiny-qwen", "capacity": {}}
    | {"adapters": ["python-expert/v1", "sql-expert/v1", "legal/v2"][: number + 1]}
    | {"agent_url": f"http://127.0.0.1:3750{number}", "engine_url": f"http://127.0.0.1:3349{number}"}
    for number in range(3)
]


def printed(table: Table, width: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines of a table on a terminal of this width."""
    out = io.StringIO()
    terminal = Console(file=out, width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr(tables, "console", lambda: terminal)
    tables.show(table)
    return out.getvalue().splitlines()


def row_of(result: CliResult, word: str) -> list[str]:
    return next(line for line in result.out.splitlines() if word in line).split()


@contextmanager
def answering(*answers: dict[str, object]) -> Iterator[str]:
    """A server that gives these answers in turn, the last one for ever; yields its URL."""
    waiting = list(answers)

    class WorkerHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(waiting.pop(0) if len(waiting) > 1 else waiting[0]).encode()
            self.rfile.read(int(self.headers.get("content-length") or 0))
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_DELETE = do_GET  # noqa: N815  (the base's names)

    with HTTPServer(("127.0.0.1", 0), WorkerHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
