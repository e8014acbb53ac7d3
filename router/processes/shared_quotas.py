"""Quotas of limited keys in memory that all worker processes of a router share, so that each key has one limit.

The parent creates the memory; there is no file and no lock. Each process writes only its own table, with the last state
of each account that it changed, and reads all tables. The newest state of an account counts. If two processes change
one account within the same microseconds, one of the two requests is not counted.
"""

import mmap
import os
import struct
from collections.abc import Iterator
from math import inf

import structlog
import xxhash

from router.core.queue.account import MINUTE_S, AccountState

log = structlog.get_logger()

# Open addressing by the tag. At most three quarters of the cells are used, so that every search ends at an empty cell.
CELLS = 16384
MAX_KEYS = CELLS * 3 // 4
_TAG = struct.Struct("=Q")  # 0: empty
# An AccountState's fields in order. The time is written last: a reader in between takes the state for an older one,
# and reads again.
_FIRST_FIELDS = struct.Struct("=dq")
_OTHER_FIELDS = struct.Struct("=ddqd")
_CELL = struct.Struct("=Qdqddqd")
_PID = struct.Struct("=Q")
_HEAD_BYTES = 64
_FORGET_EVERY_S = 5.0  # of a full table; dropping idle accounts takes about 20 ms
_UNTOUCHED = AccountState(-inf, 0, inf, inf, 0)
TABLE_BYTES = _HEAD_BYTES + CELLS * _CELL.size


def shared_memory(processes: int) -> int:
    """A file descriptor of empty shared memory for this many processes; raises OSError."""
    descriptor = os.memfd_create("lorafleet-accounts")
    try:
        os.ftruncate(descriptor, processes * TABLE_BYTES)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class SharedQuotas:
    """This process's table of account states, and the other processes' tables; used by router/core/queue/account.py."""

    def __init__(self, descriptor: int, slot: int, processes: int, *, pid: int | None = None) -> None:
        """
        descriptor  of `shared_memory`; may be closed afterwards
        slot        the number of this process's own table
        pid         of the process that owns the table; None for this process
        """
        self._memory = mmap.mmap(descriptor, processes * TABLE_BYTES)
        self._own_table = slot * TABLE_BYTES
        self._other_tables = [other * TABLE_BYTES for other in range(processes) if other != slot]
        # Cells of our accounts by tag, and the accounts that only the slot's previous process has changed.
        self._cells: dict[int, int] = {}
        self._inherited: set[int] = set()
        self._forget_at = -inf
        self._has_warned = False
        self._adopt_table()
        _PID.pack_into(self._memory, self._own_table, os.getpid() if pid is None else pid)

    @property
    def processes(self) -> int:
        """Processes that share the memory."""
        return 1 + len(self._other_tables)

    @property
    def accounts(self) -> int:
        """Accounts in this process's own table."""
        return len(self._cells)

    def states(self, key_id: str) -> Iterator[AccountState]:
        """The account's states in the other processes that changed it, and in this slot's previous process.

        A process that has died has no running requests.
        """
        tag = tag_of(key_id)
        if tag in self._inherited:
            yield self._read(self._cells[tag])
        for table in self._other_tables:
            offset = self._find(table, tag)
            found_tag, *fields = _CELL.unpack_from(self._memory, offset)
            if found_tag == tag:
                state = AccountState(*fields)
                if state.running and not _is_alive(_PID.unpack_from(self._memory, table)[0]):
                    state = state._replace(running=0)
                yield state

    def publish(self, key_id: str, state: AccountState) -> None:
        """Write this process's state of an account, for the others to read; a full table drops it."""
        tag = tag_of(key_id)
        self._inherited.discard(tag)
        self._store(tag, state)

    def _adopt_table(self) -> None:
        """Read this slot's table as its previous process left it, with no request running any more."""
        begin = self._own_table + _HEAD_BYTES
        for offset in range(begin, self._own_table + TABLE_BYTES, _CELL.size):
            (tag,) = _TAG.unpack_from(self._memory, offset)
            if tag:
                self._cells[tag] = offset
                self._inherited.add(tag)
                self._write(offset, self._read(offset)._replace(running=0))

    def _store(self, tag: int, state: AccountState) -> None:
        """Write a state into the account's cell, in a new cell if needed; a full table drops it."""
        offset = self._cells.get(tag)
        if offset is None:
            if len(self._cells) >= MAX_KEYS and state.at >= self._forget_at:
                self._forget_idle(state.at)
            offset = self._new_cell(tag)
            if offset is None:
                return
        self._write(offset, state)

    def _new_cell(self, tag: int) -> int | None:
        """Add a cell for a tag and return its offset; None, warned of once, if the table is full."""
        if len(self._cells) >= MAX_KEYS:
            if not self._has_warned:
                self._has_warned = True
                log.warning("too many keys with limits at once; further ones have them in each process", most=MAX_KEYS)
            return None
        offset = self._cells[tag] = self._find(self._own_table, tag)
        self._write(offset, _UNTOUCHED)
        _TAG.pack_into(self._memory, offset, tag)
        return offset

    def _read(self, offset: int) -> AccountState:
        """The account state in the cell at an offset."""
        return AccountState(*_CELL.unpack_from(self._memory, offset)[1:])

    def _write(self, offset: int, state: AccountState) -> None:
        """Write an account state into the cell at an offset, its time last."""
        when = offset + _TAG.size
        _OTHER_FIELDS.pack_into(self._memory, when + _FIRST_FIELDS.size, *state[2:])
        _FIRST_FIELDS.pack_into(self._memory, when, *state[:2])

    def _find(self, table: int, tag: int) -> int:
        """The offset of the tag's cell, or of the empty cell where the tag belongs."""
        memory, cells, cell = self._memory, table + _HEAD_BYTES, tag % CELLS
        for _ in range(CELLS):
            offset = cells + cell * _CELL.size
            if _TAG.unpack_from(memory, offset)[0] in (tag, 0):
                break
            cell = (cell + 1) % CELLS
        return offset

    def _forget_idle(self, now: float) -> None:
        """Drop accounts unused for a minute, since their quota is full again, by rebuilding this table."""
        kept = {}
        for tag, offset in self._cells.items():
            state = self._read(offset)
            if state.running or min(state.requests, state.tokens, state.body_bytes) < 0 or now - state.at < MINUTE_S:
                kept[tag] = state
        self._forget_at = now + _FORGET_EVERY_S
        self._cells.clear()
        self._inherited &= kept.keys()
        self._wipe()
        for tag, state in kept.items():
            self._store(tag, state)

    def _wipe(self) -> None:
        """Empty all cells of this process's table."""
        begin = self._own_table + _HEAD_BYTES
        self._memory[begin : self._own_table + TABLE_BYTES] = bytes(TABLE_BYTES - _HEAD_BYTES)


def tag_of(key_id: str) -> int:
    """The tag of a key's account in a table, which decides its cell."""
    return xxhash.xxh3_64_intdigest(key_id.encode()) or 1


def _is_alive(pid: int) -> bool:
    """Whether a process of ours with this id exists."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):  # the id is unused, or by now another user's process
        return False
    return True
