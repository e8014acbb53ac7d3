"""Choice of the adapters to delete from a full disk: the least recently used that are not in use."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class CachedAdapter:
    """One adapter in the cache folder.

    used_at    last use, in seconds of the file system's clock
    is_in_use  an engine may read its files
    """

    digest: str
    size_bytes: int
    used_at: float
    is_in_use: bool


class DeletionPlan(NamedTuple):
    """The adapters to delete, and the bytes that are still missing after that."""

    chosen: list[CachedAdapter]
    missing_bytes: int


def adapters_to_delete(
    folders: Iterable[CachedAdapter], *, excess_bytes: int, now: float, grace_s: float
) -> DeletionPlan:
    """The least recently used adapters with at least `excess_bytes` in all, and the bytes that are still missing.

    Adapters in use are never chosen, nor those used less than `grace_s` ago: a request that began before the unload,
    or a load that is not recorded yet, may still read them.
    """
    chosen: list[CachedAdapter] = []
    for folder in sorted(folders, key=lambda folder: (folder.used_at, folder.digest)):
        if excess_bytes <= 0:
            break
        if folder.is_in_use or now - folder.used_at < grace_s:
            continue
        chosen.append(folder)
        excess_bytes -= folder.size_bytes
    return DeletionPlan(chosen, max(0, excess_bytes))
