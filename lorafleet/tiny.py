"""The old name of `python -m lorafleet.local.tiny_model`, which earlier charts run. Goes with the next release."""

import sys

from lorafleet.local.tiny_model import main

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
