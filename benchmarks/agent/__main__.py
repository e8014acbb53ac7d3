"""What a worker's agent costs: verification before any engine sees an adapter, loads, restarts, events, and rest.

python -m benchmarks.agent [--quick] [--json FILE]
"""

import asyncio
import tempfile
from pathlib import Path

from benchmarks.agent import running, verification
from benchmarks.report import arguments, show


def main() -> None:
    args = arguments(__doc__ or "")
    with tempfile.TemporaryDirectory() as folder:
        rows = verification.rows(Path(folder), quick=args.quick)
    with tempfile.TemporaryDirectory() as folder:
        rows += asyncio.run(running.rows(Path(folder), quick=args.quick))
    show("A worker's agent", rows, args.json)


if __name__ == "__main__":
    main()
