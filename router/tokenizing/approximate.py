"""An approximate prompt: the bytes that a prompt is made from, for requests whose token ids only the engine can know.

The bytes are in the order of the prompt, and those of a longer conversation begin with those of the shorter one. So
they can be cut into blocks and hashed in a chain as token ids are, four bytes in place of one id, and what was sent
where can be remembered. They are no ids: keys made of them have a root and an index of their own.

What changes from turn to turn without being part of the prompt is left out, such as `cache_control`. A file counts by
its digest, at a bounded size: a picture of 8 MiB is no 2 million tokens.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from lorafleet.identity import BlockHash, block_hashes

# English text and code have about four bytes a token; one unit of an approximate prompt stands for one token.
_UNIT_BYTES = 4
# A longer beginning tells no more conversations apart, and takes the event loop's time: 4,096 blocks take 1 to 2 ms to
# be hashed and matched, and as long again to be noted. That is as many as the most bytes have at 16 tokens a block.
_MOST_BYTES = 256 * 1024
_MOST_BLOCKS = 4096
# A file counts as a thousand tokens at most, about what models make of a picture. A guess, nothing measured.
_FILE_BYTES = 4096
# How much of a text is looked at for being a file.
_LOOKED_AT_CHARS = 256
# What a conversation begins with, where no answer in it shows that.
_HEAD_BYTES = 1024
# Deeper than anything that is part of a prompt; what is below is taken as it is.
_MOST_DEPTH = 32

# In the order of a prompt: most chat templates show the system's messages first, then the tools, then the turns.
_BEFORE_SYSTEM = ("chat_template", "chat_template_kwargs", "previous_response_id", "system", "instructions")
_AFTER_SYSTEM = ("tools", "previous_input_messages", "query", "queries", "text_1", "data_1", "state")
_TURNS = ("messages", "input", "prompt", "texts", "inputs", "prompt_embeds")
_LAST = ("text_2", "data_2", "documents", "items", "questions")

# Marks of where a client wants its prompt cached: they move with each turn, and no model sees them.
_MARKS = frozenset({"cache_control", "prompt_cache_breakpoint"})
# Claude Code's line: it changes with every request, and vLLM drops it.
_BILLING_HEADER = "x-anthropic-billing-header"
_UNPLAIN = tuple(name.encode() for name in (*_MARKS, _BILLING_HEADER))
_SYSTEM = frozenset({"system", "developer"})
_ASKING = _SYSTEM | {"user"}

Fields = Mapping[str, msgspec.Raw]
# Bytes of the prompt, and whether they may come after the beginning that all turns of a conversation share.
_Piece = tuple[bytes, bool]

_encode = msgspec.json.Encoder(order="sorted").encode
_decode = msgspec.json.Decoder().decode
# What reading a value, or putting it into JSON again, raises: then its bytes are taken as they came.
_NOT_AGAIN = (ValueError, TypeError, RecursionError, OverflowError)


class ApproximatePrompt(msgspec.Struct, frozen=True):
    """An approximate prompt.

    units   its bytes in place of token ids, unsigned 32-bit
    head    so many of the first units are its conversation's beginning, up to the first answer
    tokens  that it has, about
    """

    units: "array[int]"
    head: int
    tokens: int

    def chain(self, block_size: int, root: BlockHash) -> tuple[BlockHash, ...]:
        """A key for each whole block, as of token ids; of as many blocks as take no longer than a long prompt's."""
        return tuple(block_hashes(self.units[: block_size * _MOST_BLOCKS], block_size=block_size, root=root))

    def conversation(self, root: BlockHash) -> int:
        """A hash that all turns of its conversation have in common, under its adapter and salt."""
        return xxh3_64_intdigest(memoryview(self.units)[: self.head], root)


def approximate_root(root: BlockHash) -> BlockHash:
    """The start of approximate keys, where `root` is that of the exact ones: no key is both."""
    return BlockHash(xxh3_64_intdigest(b"approximate", root))


def approximation(fields: Fields, decoded: Mapping[str, Any], size_bytes: int) -> ApproximatePrompt | None:
    """The approximate prompt of a body; None where it has nothing that a prompt could be made from.

    fields      of the body, undecoded; `decoded` those of them that are decoded already
    size_bytes  of the whole body: what a prompt that is cut counts by
    """
    whole, head_bytes = bytearray(), -1
    for piece, is_later in _pieces(fields, decoded):
        if is_later and head_bytes < 0 and whole:
            head_bytes = len(whole)
        whole += piece
        if len(whole) >= _MOST_BYTES:
            break
    if not whole:
        return None
    is_cut = len(whole) >= _MOST_BYTES
    del whole[_MOST_BYTES:]
    del whole[len(whole) - len(whole) % _UNIT_BYTES :]
    units = array("I", bytes(whole))
    head = len(units) if head_bytes < 0 else min(len(units), head_bytes // _UNIT_BYTES)
    return ApproximatePrompt(units, head, max(len(units), size_bytes // _UNIT_BYTES if is_cut else 0))


def _pieces(fields: Fields, decoded: Mapping[str, Any]) -> Iterator[_Piece]:
    """In the order of the prompt."""
    yield from _named(fields, decoded, _BEFORE_SYSTEM)
    system: list[_Piece] = []
    turns: list[_Piece] = []
    for name in _TURNS:
        raw = fields.get(name)
        if raw is not None:
            before, after = _turns(raw, decoded.get(name))
            system += before
            turns += after
    yield from system
    yield from _named(fields, decoded, _AFTER_SYSTEM)
    yield from turns
    for piece, _ in _named(fields, decoded, _LAST):
        yield piece, True


def _named(fields: Fields, decoded: Mapping[str, Any], names: Sequence[str]) -> Iterator[_Piece]:
    for name in names:
        raw = fields.get(name)
        value = b"null" if raw is None else bytes(raw)
        if value == b"null":
            continue
        try:
            given = decoded[name] if name in decoded else _decode(value)
            value = _encode(_plain(given) if any(mark in value for mark in _UNPLAIN) else given)
        except _NOT_AGAIN:
            pass  # as it came
        # JSON has no line feeds outside its texts' escapes: no two lists of pieces are the same bytes.
        yield b"%b:%b\n" % (name.encode(), value), False


def _turns(raw: msgspec.Raw, given: Any) -> tuple[list[_Piece], list[_Piece]]:
    """The system's messages that a field begins with, and the rest of it.

    Nothing stands behind a text, or behind ids: they may go on in the next turn.
    """
    try:
        value = _decode(raw) if given is None else given
        if value is None:
            return [], []
        if isinstance(value, str):
            return [], _begun(_plain_text(value).encode())
        if not isinstance(value, list):
            return [], [(_item(value), False)]
        if set(map(type, value)) == {int}:
            return [], _begun(array("I", value).tobytes())
        first = next((i for i, item in enumerate(value) if _role(item) not in _SYSTEM), len(value))
        asking = next((i for i, item in enumerate(value) if _role(item) not in _ASKING), len(value))
        # What has no roles is no conversation: its first item is what the next one may begin with.
        head = max(1, asking)
        pieces = [(_item(item), i >= head) for i, item in enumerate(value)]
    except _NOT_AGAIN:
        return [], _begun(bytes(raw).rstrip().removesuffix(b"]"))
    return pieces[:first], pieces[first:]


def _begun(text: bytes) -> list[_Piece]:
    return [(text[:_HEAD_BYTES], False), (text[_HEAD_BYTES:_MOST_BYTES], True)]


def _role(item: Any) -> Any:
    return item.get("role") if isinstance(item, dict) else None


def _item(item: Any) -> bytes:
    if isinstance(item, list) and set(map(type, item)) == {int}:
        return array("I", item).tobytes()
    return _encode(_plain(item)) + b"\n"


def _plain(value: Any, depth: int = 0) -> Any:
    """The value without what is no part of a prompt, and with digests in the place of files."""
    if isinstance(value, str):
        return _plain_text(value)
    if depth == _MOST_DEPTH:
        return value
    if isinstance(value, dict):
        return {name: _plain(inner, depth + 1) for name, inner in value.items() if name not in _MARKS}
    if isinstance(value, list):
        return [_plain(inner, depth + 1) for inner in value]
    return value


def _plain_text(text: str) -> str:
    if text.startswith(_BILLING_HEADER):
        return text.partition("\n")[2]
    if len(text) <= _FILE_BYTES or not _is_file(text):
        return text[:_MOST_BYTES]
    digest = xxh3_128_hexdigest(text.encode())
    return digest * (_FILE_BYTES // len(digest))


def _is_file(text: str) -> bool:
    """Whether a long text is a file in base64: a data URL, or one word of ASCII."""
    return text.startswith("data:") or (text.isascii() and len(text[:_LOOKED_AT_CHARS].split()) == 1)
