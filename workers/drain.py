"""`python -m workers.drain --deadline-s 300`: the agent of this machine drains, and this ends when its engine is idle.

A pod's preStop hook: Kubernetes sends SIGTERM when it is over. Status 0 in any case but a wrong flag: the worker
stops either way. What was left running is said on standard error.
"""

import argparse
import json
import os
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from lorafleet.service.urls import plain_key

# Routers hear of it at once, and look by themselves every second: what one of them was sending arrives within this.
_HEARD_S = 2.0


def main(argv: list[str]) -> int:
    """Reads the port and the key that the agent itself has, from its environment."""
    parser = argparse.ArgumentParser(prog="python -m workers.drain", description=__doc__)
    parser.add_argument("--deadline-s", type=float, default=300.0, help="how long requests in flight may still take")
    deadline_s = parser.parse_args(argv).deadline_s
    began = time.monotonic()
    try:
        answer = _drain(deadline_s)
    except (OSError, ValueError) as exc:
        sys.stderr.write(f"not drained: {exc}\n")
        return 0
    left = "drained" if answer["is_drained"] else f"not drained: {answer['running']} run, {answer['waiting']} wait"
    sys.stderr.write(f"{left}\n")
    time.sleep(max(0.0, _HEARD_S - (time.monotonic() - began)))
    return 0


def _drain(deadline_s: float) -> Any:
    port = os.environ.get("LORAFLEET_WORKERS_PORT", "8090")
    own = os.environ.get("LORAFLEET_WORKERS_TOKEN_FILE", "")
    token = plain_key(Path(own).read_text() if own else os.environ.get("LORAFLEET_WORKERS_TOKEN", ""))
    host = os.environ.get("LORAFLEET_WORKERS_HOST", "")
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)  # noqa: S104  (not bound, asked)
    request = urllib.request.Request(
        f"http://{host}:{port}/v1/admin/drain",
        data=json.dumps({"deadline_s": deadline_s}).encode(),
        headers={"content-type": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {}),
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=deadline_s + 10) as answer:
        return json.load(answer)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
