"""Conversion of pickled weights (`allow_pickle`) to safetensors, before the adapter is verified."""

import asyncio
import contextlib
import os
import sys
from pathlib import Path

from workers.core.errors import SourceError
from workers.verification.adapter_files import PICKLES, WEIGHTS_NAME
from workers.verification.tensors import other_file

_SCRIPT = Path(__file__).with_name("unpickle.py")
_TORCH_MISSING, _NOT_WRITTEN = 3, 4
_PICKLE_BEGINNINGS = (b"PK\x03\x04", b"\x80")


async def convert_pickles(folder: Path) -> None:
    """Replace pickled weights in the folder, if there are any, by safetensors; a process of its own reads them.

    raises  SourceError `weights_corrupt` for another kind of file, `adapter_pickled` if it is no state dict,
            `source_extra_missing` without torch, `source_failed` if the conversion was killed; OSError if the result
            cannot be written
    """
    pickle = next((folder / name for name in PICKLES if (folder / name).exists()), None)
    if pickle is None:
        return
    _check_beginning(pickle)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LORAFLEET_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", str(_SCRIPT), str(pickle), str(folder / WEIGHTS_NAME),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        env=environment,
    )  # fmt: skip
    try:
        _, stderr = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()  # after a cancellation it may still run
    if process.returncode == _TORCH_MISSING:
        message = f"{pickle.name} needs torch and safetensors beside this agent to be converted; install them"
        raise SourceError("source_extra_missing", message)
    if process.returncode == _NOT_WRITTEN:
        number = int(stderr)
        raise OSError(number, os.strerror(number))
    assert process.returncode is not None
    if process.returncode < 0:
        reason = f"its conversion was ended by signal {-process.returncode}, as for a lack of memory"
        raise SourceError("source_failed", f"{pickle.name}: {reason}", retry_after_s=30)
    if process.returncode != 0:
        reason = stderr.decode(errors="replace")[:100] or f"status {process.returncode}"
        message = f"{pickle.name} is no state dict that torch reads with weights_only ({reason}); accepted is one, or"
        raise SourceError("adapter_pickled", f"{message} {WEIGHTS_NAME}")
    pickle.unlink()


def _check_beginning(pickle: Path) -> None:
    """Raises SourceError for a file whose beginning is that of another kind of file."""
    with pickle.open("rb") as file:
        start = file.read(8)
    if not start.startswith(_PICKLE_BEGINNINGS) and (other := other_file(start)):
        raise SourceError("weights_corrupt", f"{pickle.name}: it is {other}; accepted is {WEIGHTS_NAME}")
