"""Where Unix sockets lie: their paths are short, whatever the folder for temporary files is called."""

import os
import tempfile
from pathlib import Path

# sun_path has 108 bytes on Linux, the last of them zero.
UNIX_PATH_BYTES = 107
_RANDOM_BYTES = 8


def socket_folder(prefix: str, *, name_bytes: int) -> Path:
    """A new private folder for sockets whose names have up to so many bytes: in TMPDIR, or in /tmp where that is too
    long for them."""
    parent = tempfile.gettempdir()
    longest = len(os.fsencode(parent)) + len(f"/{prefix}/") + _RANDOM_BYTES + name_bytes
    if longest > UNIX_PATH_BYTES:
        parent = "/tmp"  # noqa: S108  (mkdtemp makes a new name, for us alone)
    return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
