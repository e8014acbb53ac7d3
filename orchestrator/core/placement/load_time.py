"""How long a load should take, by the adapter's bytes and by the loads measured.

An adapter of a mixture of experts has gigabytes, a hundred times an ordinary one's. Part of a load takes the same time
for every adapter, so its duration is not in proportion to its bytes.
"""

import statistics
from collections.abc import Sequence

from orchestrator.model.snapshot import LoadFigures

# A load says something of the time a byte takes if it is this multiple of the median size.
_LARGE = 4.0
# Bounds for that time: a local disk's page cache, and a slow link to a hub.
_FASTEST_S_PER_BYTE, _SLOWEST_S_PER_BYTE = 1 / 20e9, 1 / 10e6


def load_s(size_bytes: int | None, figures: LoadFigures) -> float:
    """Expected seconds of a load: the median one, and the time of the bytes that an adapter has beyond its size."""
    return figures.seconds + max(0.0, (size_bytes or 0) - figures.size_bytes) * figures.s_per_byte


def load_figures(measured: Sequence[tuple[float, int]]) -> LoadFigures:
    """The figures of these loads; of none, guesses.

    measured  seconds and bytes of each; 0 bytes where the size is not known
    """
    if not measured:
        return LoadFigures()
    seconds = statistics.median([took_s for took_s, _ in measured])
    sizes = [size_bytes for _, size_bytes in measured if size_bytes]
    size = statistics.median(sizes) if sizes else 0.0
    large = [(took_s, size_bytes) for took_s, size_bytes in measured if size and size_bytes > _LARGE * size]
    slopes = [(took_s - seconds) / (size_bytes - size) for took_s, size_bytes in large]
    if not slopes:
        return LoadFigures(seconds=seconds, size_bytes=size)
    s_per_byte = min(_SLOWEST_S_PER_BYTE, max(_FASTEST_S_PER_BYTE, statistics.median(slopes)))
    return LoadFigures(seconds=seconds, size_bytes=size, s_per_byte=s_per_byte)
