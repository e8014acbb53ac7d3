"""The fleet's record as a plain JSON file beside the store, for people to read and to import."""

import asyncio
from pathlib import Path

import msgspec

from lorafleet.service.files import write_atomically
from orchestrator.intent.record import fleet_record
from orchestrator.store.store import IntentStore


class RecordFile:
    """Writes the record when the store has changed. Readers never see half of it."""

    def __init__(self, path: Path, store: IntentStore) -> None:
        self._path = path
        self._store = store
        self._written: int | None = None

    async def write_if_changed(self) -> bool:
        """Write the record if it has changed since the last call that wrote it; whether it was. Raises OSError."""
        if not self._store.is_read or self._store.writes == self._written:
            return False
        writes = self._store.writes
        text = record_json(fleet_record(self._store).model_dump_json().encode())
        await asyncio.to_thread(write_atomically, self._path, text)
        self._written = writes
        return True


def record_json(content: bytes) -> bytes:
    """The record's JSON with one field a line."""
    return msgspec.json.format(content, indent=2) + b"\n"
