"""Accounts of limited keys that all processes of a router share: one limit each, whichever process a request meets.

The memory is the parent's, without a file or a lock. Each process writes a table of its own, of how it left each
account it touched, and reads all others': the account is as the last one left it. Two that touch one account within the
same microseconds do so from the same state, and one of the two requests is not counted: a limit is exceeded by so many.
"""

import mmap
import os
import struct
from collections.abc import Iterator
from math import inf

import structlog
import xxhash

from router.core.queue.quota import MINUTE_S, AccountState

log = structlog.get_logger()

# Open addressing, by the tag. Three quarters of the cells are used at most, so that every search ends at an empty one.
_CELLS = 16384
_MOST = _CELLS * 3 // 4
_TAG = struct.Struct("=Q")  # 0: empty
# A Left, in its order. Its time is written last and read first: who reads in between takes it for older than it is,
# and looks again.
_WHEN = struct.Struct("=dq")
_WHAT = struct.Struct("=ddq")
_CELL = struct.Struct("=Qdqddq")
_PID = struct.Struct("=Q")
_HEAD_BYTES = 64
_FORGET_EVERY_S = 5.0  # of a table that is full; it takes some 20 ms
_NOTHING = AccountState(-inf, 0, inf, inf, 0)
TABLE_BYTES = _HEAD_BYTES + _CELLS * _CELL.size


def shared_memory(processes: int) -> int:
    """A descriptor of memory for so many processes, empty; raises OSError."""
    descriptor = os.memfd_create("lorafleet-accounts")
    try:
        os.ftruncate(descriptor, processes * TABLE_BYTES)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class SharedQuotas:
    """This process's table, and those of the others; see Others in router/core/queue/quota.py."""

    def __init__(self, descriptor: int, slot: int, processes: int) -> None:
        """`descriptor` is one of `shared_memory`, and may be closed afterwards; `slot` says whose table is ours."""
        self._memory = mmap.mmap(descriptor, processes * TABLE_BYTES)
        self._ours = slot * TABLE_BYTES
        self._theirs = [other * TABLE_BYTES for other in range(processes) if other != slot]
        # Where our accounts are, by their tags, and which of them only the process before us has touched.
        self._cells: dict[int, int] = {}
        self._inherited: set[int] = set()
        self._forget_at = -inf
        self._has_said = False
        self._take_over()
        _PID.pack_into(self._memory, self._ours, os.getpid())

    def left(self, key_id: str) -> Iterator[AccountState]:
        """How the others left this key's account, those that have touched it, and who had our place before us. Nothing
        runs where a process died.
        """
        tag = _tag(key_id)
        if tag in self._inherited:
            yield self._read(self._cells[tag])
        for table in self._theirs:
            offset = self._find(table, tag)
            found, *told = _CELL.unpack_from(self._memory, offset)
            if found == tag:
                left = AccountState(*told)
                if left.running and not _is_alive(_PID.unpack_from(self._memory, table)[0]):
                    left = left._replace(running=0)
                yield left

    def leave(self, key_id: str, left: AccountState) -> None:
        """Tell the others how we left it."""
        tag = _tag(key_id)
        self._inherited.discard(tag)
        self._leave(tag, left)

    def _take_over(self) -> None:
        """What the process took that had this slot before stays taken; what it had under way is over."""
        begin = self._ours + _HEAD_BYTES
        for offset in range(begin, self._ours + TABLE_BYTES, _CELL.size):
            (tag,) = _TAG.unpack_from(self._memory, offset)
            if tag:
                self._cells[tag] = offset
                self._inherited.add(tag)
                self._write(offset, self._read(offset)._replace(running=0))

    def _leave(self, tag: int, left: AccountState) -> None:
        offset = self._cells.get(tag)
        if offset is None:
            if len(self._cells) >= _MOST and left.at >= self._forget_at:
                self._forget_idle(left.at)
            offset = self._claimed(tag)
            if offset is None:
                return
        self._write(offset, left)

    def _claimed(self, tag: int) -> int | None:
        if len(self._cells) >= _MOST:
            if not self._has_said:
                self._has_said = True
                log.warning("too many keys with limits at once; further ones have them in each process", most=_MOST)
            return None
        offset = self._cells[tag] = self._find(self._ours, tag)
        self._write(offset, _NOTHING)
        _TAG.pack_into(self._memory, offset, tag)
        return offset

    def _read(self, offset: int) -> AccountState:
        return AccountState(*_CELL.unpack_from(self._memory, offset)[1:])

    def _write(self, offset: int, left: AccountState) -> None:
        when = offset + _TAG.size
        _WHAT.pack_into(self._memory, when + _WHEN.size, *left[2:])
        _WHEN.pack_into(self._memory, when, *left[:2])

    def _find(self, table: int, tag: int) -> int:
        """Where the tag is, or the empty cell where it would be."""
        memory, cells, cell = self._memory, table + _HEAD_BYTES, tag % _CELLS
        for _ in range(_CELLS):
            offset = cells + cell * _CELL.size
            if _TAG.unpack_from(memory, offset)[0] in (tag, 0):
                break
            cell = (cell + 1) % _CELLS
        return offset

    def _forget_idle(self, now: float) -> None:
        """Accounts that are full again are as good as none: those that nothing was taken from for a minute."""
        kept = {}
        for tag, offset in self._cells.items():
            left = self._read(offset)
            if left.running or min(left.requests, left.tokens) < 0 or now - left.at < MINUTE_S:
                kept[tag] = left
        self._forget_at = now + _FORGET_EVERY_S
        self._cells.clear()
        self._inherited &= kept.keys()
        self._wipe()
        for tag, left in kept.items():
            self._leave(tag, left)

    def _wipe(self) -> None:
        begin = self._ours + _HEAD_BYTES
        self._memory[begin : self._ours + TABLE_BYTES] = bytes(TABLE_BYTES - _HEAD_BYTES)


def _tag(key_id: str) -> int:
    return xxhash.xxh3_64_intdigest(key_id.encode()) or 1


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):  # it is nobody's, or by now somebody else's
        return False
    return True
