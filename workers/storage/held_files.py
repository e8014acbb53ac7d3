"""Which digests are on a worker's disk, as a log of changes that a reader follows in pieces.

Each digest has the number of its last change. A reader that knows the changes up to a number gets those after it.
"""

from collections.abc import Mapping
from itertools import islice

from workers.wire import HeldFiles

_GONE_KEPT = 20_000
"""Deleted digests remembered for readers; one that is further behind reads everything again."""


class HeldFilesLog:
    """The digests of one disk. One writer; not safe for several threads."""

    def __init__(self) -> None:
        self.revision = 0
        self._known_since = 0
        # digest -> (number of its last change, kept: True, held: False, gone: None), in the order of the numbers
        self._changes: dict[str, tuple[int, bool | None]] = {}
        self._gone = 0

    def is_kept(self, digest: str) -> bool | None:
        """Whether the digest is kept; None if it is not here."""
        return self._changes.get(digest, (0, None))[1]

    @property
    def kept_count(self) -> int:
        """Number of kept digests."""
        return sum(state is True for _, state in self._changes.values())

    def put(self, digest: str, state: bool | None) -> bool:
        """Record that a digest is kept (True), held (False) or gone (None); returns whether that is news."""
        if self.is_kept(digest) is state:
            return False
        had = self._changes.pop(digest, None)
        self._gone += (state is None) - (had is not None and had[1] is None)
        self.revision += 1
        self._changes[digest] = self.revision, state
        if self._gone > _GONE_KEPT:
            self._forget_gone()
        return True

    def replace(self, states: Mapping[str, bool]) -> bool:
        """Record all digests that are here, with whether each is kept; returns whether anything is news."""
        gone = [digest for digest, (_, state) in self._changes.items() if state is not None and digest not in states]
        news = [self.put(digest, None) for digest in gone]
        news += [self.put(digest, state) for digest, state in states.items()]
        return any(news)

    def report_since(self, revision: int, *, disk_id: str, most: int) -> HeldFiles:
        """At most `most` changes after a revision; from nothing where that is unknown, or what is gone is forgotten."""
        since = revision if self._known_since <= revision <= self.revision else 0
        following = [
            (digest, *change)
            for digest, change in self._changes.items()
            if change[0] > since and (since or change[1] is not None)
        ]
        page = list(islice(following, most))
        left = len(following) - len(page)
        return HeldFiles(
            disk_id=disk_id,
            since=since,
            upto=self.revision if not left else page[-1][1] if page else since,
            held=tuple(digest for digest, _, state in page if state is False),
            kept=tuple(digest for digest, _, state in page if state is True),
            gone=tuple(digest for digest, _, state in page if state is None),
            left=left,
        )

    def _forget_gone(self) -> None:
        """Forget what is gone. What is here gets new numbers, so that every reader starts anew, once."""
        states = {digest: state for digest, (_, state) in self._changes.items() if state is not None}
        self._known_since = self.revision + 1
        self._changes, self._gone, self.revision = {}, 0, self._known_since
        for digest, state in states.items():
            self.put(digest, state)
