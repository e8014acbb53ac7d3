"""What a real engine published and answered, in the order in which it happened: one compact file."""

import gzip
from pathlib import Path

import msgspec

VLLM = Path(__file__).parent / "vllm-0.32.0.msgpack.gz"


class RecordedEvent(msgspec.Struct, array_like=True, tag="heard", frozen=True):
    """One message of the engine's KV event socket: its sequence number and its payload, byte for byte."""

    seq: int
    payload: bytes


class RecordedEngineRequest(msgspec.Struct, array_like=True, tag="asked", frozen=True):
    """One request, alone in the engine: all events before it were heard, none of its own was.

    engine_name    the adapter's, or empty for the base model
    cached_tokens  the engine's own word, in its answer
    report_full    it asked for events about reused blocks
    """

    engine_name: str
    cache_salt: str
    ids: list[int]
    cached_tokens: int
    report_full: bool


class Recording(msgspec.Struct, frozen=True):
    """A session with one engine. `parts` are the entries' indexes at which a part begins, by the part's name."""

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
        """Write it, the same bytes for the same recording."""
        path.write_bytes(gzip.compress(msgspec.msgpack.encode(self), 9, mtime=0))


def load(path: Path = VLLM) -> Recording:
    """Read it; raises msgspec.ValidationError when its shape is another."""
    return msgspec.msgpack.decode(gzip.decompress(path.read_bytes()), type=Recording)
