"""A recording of a real engine's events and answers, in order, in one compact file."""

import gzip
from pathlib import Path

import msgspec

VLLM = Path(__file__).parent / "vllm-0.32.0.msgpack.gz"


class RecordedEvent(msgspec.Struct, array_like=True, tag="heard", frozen=True):
    """One message of the engine's KV event socket: sequence number and payload."""

    seq: int
    payload: bytes


class RecordedEngineRequest(msgspec.Struct, array_like=True, tag="asked", frozen=True):
    """One request, alone in the engine, after all earlier events and before its own.

    engine_name    the adapter's, or empty for the base model
    cached_tokens  as in the engine's answer
    report_full    it requested events about reused blocks
    """

    engine_name: str
    cache_salt: str
    ids: list[int]
    cached_tokens: int
    report_full: bool


class Recording(msgspec.Struct, frozen=True):
    """A session with one engine. `parts` has the index of each part's first entry, by name."""

    engine: str
    block_size: int
    total_blocks: int
    parts: dict[str, int]
    entries: list[RecordedEvent | RecordedEngineRequest]

    def part(self, name: str) -> list[RecordedEvent | RecordedEngineRequest]:
        """The entries of one part."""
        starts = [*sorted(self.parts.values()), len(self.entries)]
        start = self.parts[name]
        return self.entries[start : starts[starts.index(start) + 1]]

    def save(self, path: Path) -> None:
        """Write the recording; equal recordings give equal bytes."""
        path.write_bytes(gzip.compress(msgspec.msgpack.encode(self), 9, mtime=0))


def load(path: Path = VLLM) -> Recording:
    """Read a recording; raises msgspec.ValidationError for another format."""
    return msgspec.msgpack.decode(gzip.decompress(path.read_bytes()), type=Recording)
