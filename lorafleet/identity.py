"""What router, orchestrator and agents must compute alike: engine and version names, homes, block hashes, tiers.

Each rule stands here once, and every service imports it. A changed block hash needs a new `KV_HASHING`.
"""

import hashlib
import json
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from struct import Struct
from typing import Final, Literal, NewType, Protocol, TypeVar, cast

from xxhash import xxh3_64_intdigest

AdapterLocation = Literal["remote", "disk", "host", "device"]
"""Where a worker has an adapter's weights: nowhere yet, on its disk, in the engine's host memory, on the device."""
Tier = Literal["device", "host", "storage"]
TIERS: Final[tuple[Tier, ...]] = ("device", "host", "storage")
"""Where an engine has a KV block, fastest first."""
CacheScope = Literal["shared", "tenant", "key"]
"""Who shares cached prompts: everyone, the keys of one tenant, or the requests of one key."""
FileMark = Literal["kept", "held", "gone"]
"""An adapter's files on a worker's disk. kept: until they are marked otherwise; held: they may be deleted where room is
needed; gone: no longer there, as a mark: to be deleted once nobody uses them."""
BlockHash = NewType("BlockHash", int)
KV_HASHING: Final = 1
"""Version of `root_hash` and `block_hashes`. Services with the same version hash the same prompt alike."""

PATH_IN_TEXT: Final = (
    # Between quotation marks a path may have any character.
    r"(?<=')/[^'\n]+(?=')|(?<=\")/[^\"\n]+(?=\")"
    r"|(?<![\w.>/-])/[^\s'\"<>,;:)\]}]*[^\s'\"<>,;:)\]}.]"
)
"""A pattern of absolute paths of a host in a message, which concern operators and those who have named them."""

# Token ids travel as unsigned 32-bit integers; no tokenizer has more.
_UINT32 = "I"
DIGEST_DIGITS = 12
_ENGINE_NAME = re.compile(rf"(.+)@([0-9a-f]{{{DIGEST_DIGITS}}})")
_FLEET_SOURCE = re.compile(r"fleet:(?:///)?([0-9a-f]{64})")


class HasId(Protocol):
    """A worker or a replica."""

    @property
    def id(self) -> str:
        """Its id in the fleet."""


W = TypeVar("W", bound=HasId)


def engine_name(lora_id: str, digest: str) -> str:
    """The name under which an engine has an adapter: `lora_id@digest12`.

    The digest is part of the name because vLLM salts its prefix cache with the name, not with the bytes. New bytes
    under an old name would be answered from stale KV (vLLM 0.32, seen running).
    """
    return f"{lora_id}@{digest[:DIGEST_DIGITS]}"


def asked_version(name: str) -> tuple[str, str] | None:
    """(lora_id, first 12 digits of the digest) of a name `lora_id@digest12`; None for a name without a digest."""
    match = _ENGINE_NAME.fullmatch(name)
    return (match[1], match[2]) if match else None


def lora_id_of(engine_name: str) -> str:
    """The lora_id in an engine name; a name that the fleet did not give has no digest and is returned as it is."""
    match = _ENGINE_NAME.fullmatch(engine_name)
    return match[1] if match else engine_name


def version_id(name: str, number: int) -> str:
    """The lora_id of a published name's version: `name/v<number>`."""
    return f"{name}/v{number}"


def split_version_id(lora_id: str) -> tuple[str, int] | None:
    """(name, number) of a version's lora_id `name/v<number>`; None for any other."""
    name, found, number = lora_id.rpartition("/v")
    is_number = number.isascii() and number.isdigit() and number[0] != "0" and len(number) < 10
    return (name, int(number)) if found and name and is_number else None


def fleet_source(digest: str) -> str:
    """The source of an adapter whose bytes are on the fleet's own workers and nowhere else: `fleet:<digest>`."""
    return f"fleet:{digest}"


def fleet_digest(source: str) -> str | None:
    """The digest in a source of `fleet_source`; None for a source outside the fleet."""
    match = _FLEET_SOURCE.fullmatch(source)
    return match[1] if match else None


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of an adapter: its path relative to the folder (with `/`), size, and sha256 as 64 hex digits."""

    path: str
    size_bytes: int
    sha256: str


def files_digest(files: Iterable[FileEntry]) -> str:
    """sha256 over the adapter's files, as 64 hex digits.

    The hashed bytes are compact ASCII JSON (`separators=(",", ":")`, other characters as `\\uXXXX`): one list of
    `[path, size, sha256]` lists in the order of the paths' UTF-8 bytes. Of `adapter_config.json` holding `{}` and
    `adapter_model.safetensors` holding nothing they are (without the line break)

        [["adapter_config.json",2,"44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"],
        ["adapter_model.safetensors",0,"e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"]]

    and the digest is 2ee415dc86b41cb4ebf3b6f39ba9ea4c853fb11a59eb8eb6dc5dc2832de9815e.
    """
    ordered = sorted(files, key=lambda entry: entry.path.encode())
    rows = [[entry.path, entry.size_bytes, entry.sha256] for entry in ordered]
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode("ascii")).hexdigest()


def rendezvous_score(key: str, worker_id: str) -> int:
    """A worker's score for a key, such as a lora_id. The worker with the highest score is the key's home.

    Every service computes the same home without asking. A worker that leaves moves only the keys whose home it was.
    """
    return xxh3_64_intdigest(f"{len(key)}:{key}{worker_id}".encode())


def rendezvous_order(key: str, workers: Iterable[W]) -> list[W]:
    """The workers by their score for a key, highest first: the key's home, then the next choices."""
    return sorted(workers, key=lambda worker: (rendezvous_score(key, worker.id), worker.id), reverse=True)


@lru_cache(maxsize=4096)
def root_hash(base_model: str, engine_name: str = "", cache_salt: str = "") -> BlockHash:
    """The parent of a prompt's first block: the same tokens under another adapter or salt never share a block.

    engine_name  `lora_id@digest12`, or empty for the base model
    source       vLLM 0.32 v1/core/kv_cache_utils.py generate_block_hash_extra_keys: lora name and cache salt
    """
    return BlockHash(xxh3_64_intdigest(_length_prefixed(base_model, engine_name, cache_salt)))


@lru_cache(maxsize=4096)
def adapter_salt(engine_name: str, cache_salt: str = "") -> str:
    """The `cache_salt` of a request at an engine whose KV connector knows a salt and no adapter.

    engine_name  empty for the base model. A client's salt is hashed there, too: it could equal an adapter's
    returns      64 hexadecimal digits; empty for the base model without a salt
    source       vLLM 0.32 entrypoints/generate/base/protocol.py validate_cache_salt: at most 128 characters, no `@`
                 and no `/`, both of which an engine's name for an adapter has; so a digest
    """
    if not engine_name and not cache_salt:
        return ""
    # A salt must not be guessable from another adapter's, so SHA-256. Block hashes only predict: xxh3 will do.
    return hashlib.sha256(_length_prefixed(engine_name, cache_salt)).hexdigest()


OWN_SALT: Final = "lorafleet:"
"""How each salt of `own_salt` begins, and no client's salt at an engine."""


@lru_cache(maxsize=4096)
def own_salt(tenant: str, key_id: str, cache_salt: str = "") -> str:
    """The `cache_salt` of requests whose cached prompts are their tenant's, or their key's, own.

    key_id      empty: all keys of the tenant share their prompts. Both empty: the salt of a client that wrote OWN_SALT
    cache_salt  the client's own, which separates prompts within
    returns     OWN_SALT and 64 hexadecimal digits: no engine gets a tenant's name. No client chooses the outer parts,
                and each has its length before it, so that no client's own salt leads to another tenant's
    """
    return OWN_SALT + hashlib.sha256(_length_prefixed(tenant, key_id, cache_salt)).hexdigest()


def _length_prefixed(*parts: str) -> bytes:
    """The parts as bytes, each with its length before it."""
    joined = bytearray()
    for part in parts:
        data = part.encode()
        # Length first: without it ("ab", "c") and ("a", "bc") would share a cache.
        joined += len(data).to_bytes(4, "big") + data
    return bytes(joined)


def block_hashes(
    tokens: Sequence[int], *, block_size: int, root: BlockHash, extra: Mapping[int, bytes] | None = None
) -> list[BlockHash]:
    """Chain one hash per full block of the prompt.

    tokens   [n] token ids, chat template already applied; quickest as an array("I")
    root     root_hash(...), or the hash of the block before tokens[0]
    extra    block number in `tokens` -> further bytes that identify the block, such as its multimodal items;
             the caller separates several items of one block
    returns  [n // block_size] hashes; the partial tail block is left out
    raises   OverflowError or TypeError for ids that are not unsigned 32-bit integers
    source   vLLM 0.32 v1/core/kv_cache_utils.py hash_block_tokens: only full blocks are cached
    """
    ids = tokens if isinstance(tokens, array) and tokens.typecode == _UINT32 else array(_UINT32, tokens)
    whole = memoryview(ids)[: len(ids) - len(ids) % block_size]
    # Unpacked in one go, in C: a slice per block would cost as much as the hashing.
    blocks = _block_struct(block_size * ids.itemsize).iter_unpack(whole)
    parent: int = root
    if not extra:
        return _as_block_hashes([parent := xxh3_64_intdigest(block, parent) for (block,) in blocks])
    hashes = []
    for number, (block,) in enumerate(blocks):
        further_bytes = extra.get(number)
        # With its length, so that an empty entry differs from no entry.
        data = block if further_bytes is None else block + len(further_bytes).to_bytes(4, "big") + further_bytes
        parent = xxh3_64_intdigest(data, parent)
        hashes.append(parent)
    return _as_block_hashes(hashes)


def _as_block_hashes(hashes: list[int]) -> list[BlockHash]:
    """The same list with the type of block hashes."""
    # One cast a list: `BlockHash(...)` around each hash would nearly double the cost of the loop.
    return cast("list[BlockHash]", hashes)


@lru_cache(maxsize=16)
def _block_struct(size_bytes: int) -> Struct:
    """A struct that unpacks one block of this size as bytes."""
    return Struct(f"{size_bytes}s")
