"""A bounded log of numbered entries: readers follow it from a number on, senders forget what was confirmed."""

from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from itertools import islice, takewhile
from typing import Generic, TypeVar

from lorafleet.service.loops import ChangeSignal

T = TypeVar("T")


class NumberedLog(Generic[T]):
    """The newest entries, each with a number above those before it. One writer.

    last     number of the newest entry, forgotten ones included
    oldest   every entry after this number is kept
    changed  wakes those that follow the log
    """

    def __init__(self, most: int | None = None, *, last: int = 0) -> None:
        """
        most  entries kept; a full log drops its oldest. None: the writer bounds it with `drop_oldest`
        last  number before that of the first entry
        """
        self.last = self.oldest = last
        self.changed = ChangeSignal()
        self._most = most
        self._kept: deque[tuple[int, T]] = deque()

    def __len__(self) -> int:
        """Entries kept."""
        return len(self._kept)

    @property
    def next_number(self) -> int:
        """The number that the next entry gets, unless the writer gives it a higher one."""
        return self.last + 1

    def add(self, entry: T, number: int | None = None) -> int:
        """Keep an entry and wake the followers; returns its number.

        number  above `last`; None: the next one
        """
        number = self.next_number if number is None else number
        assert number > self.last, f"entry {number} follows entry {self.last}"
        self.last = number
        self._kept.append((number, entry))
        if self._most is not None and len(self._kept) > self._most:
            self.drop_oldest()
        self.changed.notify()
        return number

    def has_all_after(self, number: int) -> bool:
        """Whether every entry after this number is kept, and the number was reached at all."""
        return self.oldest <= number <= self.last

    def after(self, number: int, *, most: int | None = None) -> list[T]:
        """The kept entries after a number, the oldest first; of many the oldest `most`."""
        newer = [entry for _, entry in takewhile(lambda kept: kept[0] > number, reversed(self._kept))]
        return list(islice(reversed(newer), most))

    def drop_oldest(self) -> T:
        """Forget the oldest entry and return it. Raises IndexError without one."""
        self.oldest, entry = self._kept.popleft()
        return entry

    def forget_up_to(self, number: int) -> None:
        """Forget the entries up to a number: they were confirmed."""
        while self._kept and self._kept[0][0] <= number:
            self.drop_oldest()

    def restart(self, last: int) -> None:
        """Forget all entries; the next one has a number above `last`."""
        self._kept.clear()
        self.last = self.oldest = last

    async def follow(
        self, after: int, *, idle_s: float, is_over: Callable[[], bool] = lambda: False
    ) -> AsyncIterator[list[T]]:
        """The entries after a number as they come, several at a time; an empty list after `idle_s` without one.

        Ends once the follower has fallen behind the log, or `is_over` and it has all entries: whoever makes that true
        notifies `changed`.
        """
        while after >= self.oldest:
            if entries := self.after(after):
                after = self.last
                yield entries
            elif is_over():
                return
            elif not await self.changed.until(partial(self._has_news, after, is_over), timeout_s=idle_s):
                yield []

    def _has_news(self, after: int, is_over: Callable[[], bool]) -> bool:
        """Whether a follower that has everything up to a number must wake."""
        return is_over() or self.last > after
