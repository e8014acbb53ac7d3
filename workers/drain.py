"""`python -m workers.drain --deadline-s 300`: drain the agent on this host, and exit when its engine is idle.

A pod's preStop hook: Kubernetes sends SIGTERM when it ends. The exit status is 0 except for a wrong flag, because the
worker stops either way. Requests that still run are reported on standard error.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from lorafleet.service.network.tls import Tls, TlsFiles
from lorafleet.service.network.urls import checked_key

# Routers receive news of a drain within a second; requests that they had already sent arrive within this time.
_ROUTERS_REACT_S = 2.0


def main(argv: list[str]) -> int:
    """Drain the agent whose port and key are in the environment, and report it on stderr; always returns 0.

    A drain takes at least two seconds, in which requests that routers had already sent arrive.
    """
    parser = argparse.ArgumentParser(prog="python -m workers.drain", description=__doc__)
    parser.add_argument("--deadline-s", type=float, default=300.0, help="how long requests in flight may still take")
    deadline_s = parser.parse_args(argv).deadline_s
    began_at = time.monotonic()
    try:
        answer = _request_drain(deadline_s)
    except (OSError, ValueError, httpx.HTTPError) as exc:
        sys.stderr.write(f"not drained: {exc}\n")
        return 0
    result = "drained" if answer["is_drained"] else f"not drained: {answer['running']} run, {answer['waiting']} wait"
    sys.stderr.write(f"{result}\n")
    time.sleep(max(0.0, _ROUTERS_REACT_S - (time.monotonic() - began_at)))
    return 0


def _request_drain(deadline_s: float) -> Any:
    """Send POST /v1/admin/drain to the agent, and return its answer. Raises OSError, ValueError, httpx.HTTPError."""
    port = os.environ.get("LORAFLEET_WORKERS_PORT", "8090")
    token_file = os.environ.get("LORAFLEET_WORKERS_TOKEN_FILE", "")
    token = checked_key(Path(token_file).read_text() if token_file else os.environ.get("LORAFLEET_WORKERS_TOKEN", ""))
    host = os.environ.get("LORAFLEET_WORKERS_HOST", "")
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)  # noqa: S104  (a client, nothing is bound)
    tls = Tls.of_service(TlsFiles(**{name: _file(f"TLS_{name.upper()}") for name in ("cert", "key", "ca")}))
    is_https = tls is not None and tls.files.cert is not None
    with httpx.Client(
        # Without an authority to check it by, the server on this host is taken for the agent that it is.
        verify=(tls and tls.client_context) or False,
        trust_env=False,
        timeout=deadline_s + 10,
    ) as client:
        answer = client.post(
            f"{'https' if is_https else 'http'}://{host}:{port}/v1/admin/drain",
            json={"deadline_s": deadline_s},
            headers={"authorization": f"Bearer {token}"} if token else {},
            extensions={"sni_hostname": tls.server_name(host.strip("[]"), int(port))} if tls is not None else {},
        )
    if answer.is_error:
        raise ValueError(f"HTTP Error {answer.status_code}: {answer.reason_phrase}")
    return answer.json()


def _file(setting: str) -> Path | None:
    """The file that the environment names for an agent's setting; None without one."""
    name = os.environ.get(f"LORAFLEET_WORKERS_{setting}", "")
    return Path(name) if name else None


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
