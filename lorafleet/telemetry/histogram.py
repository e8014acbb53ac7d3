"""Histograms of seconds that can be added: the same buckets in every service, each a fifth wider than the one before.

Counts of one bucket add up over routers, adapters and time, so a percentile of the whole is as exact as one of a part.
"""

from collections.abc import Mapping
from math import ceil, log2
from typing import Final

_BUCKETS_PER_OCTAVE: Final = 4
_FIRST_S: Final = 0.001
LAST_BUCKET: Final = 80
"""Everything above 17 minutes."""


def bucket_of(seconds: float) -> int:
    """The bucket of a duration: 0 up to a millisecond, then four for each doubling."""
    if seconds <= _FIRST_S:
        return 0
    return min(LAST_BUCKET, ceil(log2(seconds / _FIRST_S) * _BUCKETS_PER_OCTAVE))


def upper_bound_s(bucket: int) -> float:
    """The longest duration of a bucket, in seconds."""
    return float(_FIRST_S * 2.0 ** (bucket / _BUCKETS_PER_OCTAVE))


def percentile_s(counts: Mapping[int, int], share: float) -> float | None:
    """The duration that a share of the counted ones does not exceed; None without any.

    At most a fifth above the true one: the upper bound of its bucket, or a point in the bucket by its rank there.
    """
    total = sum(counts.values())
    if not total:
        return None
    rank, before = share * total, 0
    for bucket in sorted(counts):
        count = counts[bucket]
        if count and before + count >= rank:
            low_s = upper_bound_s(bucket - 1) if bucket else 0.0
            return low_s + (upper_bound_s(bucket) - low_s) * max(0.0, rank - before) / count
        before += count
    return upper_bound_s(max(counts))
