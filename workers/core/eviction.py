"""Which adapters leave a full disk: the least recently used of those that nobody holds."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CachedAdapter:
    """One installed adapter. `used_at`: seconds of the file system's clock; `is_held`: an engine may read it."""

    digest: str
    size_bytes: int
    used_at: float
    is_held: bool


def to_free(
    folders: Iterable[CachedAdapter], *, excess_bytes: int, now: float, grace_s: float
) -> tuple[list[CachedAdapter], int]:
    """Folders whose going frees `excess_bytes`, least recently used first, and the bytes that are missing even then.

    Held ones never go, and none within `grace_s` of its last use: a request that began before the unload, or a load
    that has not been noted yet, may still read it.
    """
    going: list[CachedAdapter] = []
    for folder in sorted(folders, key=lambda folder: (folder.used_at, folder.digest)):
        if excess_bytes <= 0:
            break
        if folder.is_held or now - folder.used_at < grace_s:
            continue
        going.append(folder)
        excess_bytes -= folder.size_bytes
    return going, max(0, excess_bytes)
