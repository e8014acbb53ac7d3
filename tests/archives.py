"""Archives of adapters' folders, as clients send them."""

import io
import tarfile
from pathlib import Path
from typing import Literal


def tar_of(folder: Path, mode: Literal["w", "w:gz"] = "w:gz") -> bytes:
    """An archive of the folder, as `adapter` in it."""
    into = io.BytesIO()
    with tarfile.open(fileobj=into, mode=mode) as packed:
        packed.add(folder, "adapter")
    return into.getvalue()
