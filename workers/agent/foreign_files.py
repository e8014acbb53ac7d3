"""What is known of an adapter's files that another client loaded into the engine."""

import re
from dataclasses import dataclass
from pathlib import Path

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignFiles:
    """The files of an adapter that only the engine knows, as of the last attempt to read them.

    source   reference of the folder that the engine names; "" if it is no reference
    problem  why the files are not known; "" if they are
    """

    path: str
    source: str
    digest: str = ""
    base_model: str = ""
    rank: int = 0
    size_bytes: int = 0
    problem: str = ""
    read_at: float = 0.0


def source_of(path: str) -> str:
    """The reference of the folder or hub repository that an engine names as an adapter's path; "" for any other."""
    if path.startswith("/"):
        return Path(path).as_uri()
    return f"hf://{path}" if _HUB_NAME.fullmatch(path) else ""
