"""The fleet's record as a plain JSON file beside the store, for people to read and to import."""

import asyncio
from pathlib import Path

import msgspec

from lorafleet.service.files import write_atomically, write_error_text
from lorafleet.service.state_files import StateFile
from orchestrator.intent.record import fleet_record
from orchestrator.store.store import IntentStore


class RecordFile:
    """Writes the record when the store has changed, or the file is no longer the one written. Readers never see half.

    trouble  why the last write failed; empty: it did not
    """

    def __init__(self, path: Path, store: IntentStore) -> None:
        self._path = path
        self._store = store
        self._written: tuple[int, StateFile] | None = None
        self.trouble = ""

    async def write_if_changed(self) -> bool:
        """Write the record unless the file has it; whether it was written. Raises OSError."""
        if not self._store.is_read or self._is_written():
            return False
        writes = self._store.writes
        text = record_json(fleet_record(self._store).model_dump_json().encode())
        try:
            await asyncio.to_thread(write_atomically, self._path, text)
            self._written = writes, StateFile.at(self._path)
        except OSError as exc:
            self.trouble = write_error_text(exc, self._path.parent)
            raise
        self.trouble = ""
        return True

    def _is_written(self) -> bool:
        """Whether the file at the path is the one that we wrote after the last change."""
        if self._written is None:
            return False
        writes, file = self._written
        return writes == self._store.writes and file.state() == "there"


def record_json(content: bytes) -> bytes:
    """The record's JSON with one field a line."""
    return msgspec.json.format(content, indent=2) + b"\n"
