"""What a worker's agent costs: verification of an adapter before any engine sees it.

python -m benchmarks.agent [--quick] [--json FILE]
"""

import tempfile
from pathlib import Path

from benchmarks.agent import verification
from benchmarks.report import arguments, show


def main() -> None:
    args = arguments(__doc__ or "")
    with tempfile.TemporaryDirectory() as folder:
        rows = verification.rows(Path(folder), quick=args.quick)
    show("A worker's agent", rows, args.json)


if __name__ == "__main__":
    main()
