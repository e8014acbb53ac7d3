"""`python -m router`."""

import sys

# Libraries look for these and go without where they are not installed. They make terminals colourful and restart what
# was edited; here they would take 4 MB of every process.
for _unneeded in ("pygments", "rich", "watchfiles"):
    sys.modules[_unneeded] = None  # type: ignore[assignment]  # as `import` has it: not to be found

from router.app import main  # noqa: E402

main()
