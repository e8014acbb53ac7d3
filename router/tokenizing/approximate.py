"""Approximate prompts: a body's prompt fields as bytes, for requests whose token ids only the engine can know.

The bytes are in the order of the prompt, and a longer conversation begins with the bytes of the shorter one. So they
are hashed in blocks as token ids are, with four bytes in place of one id, and the router remembers which replica got
them. These block hashes have their own root and index.

Fields that change between turns without being part of the prompt are left out, such as `cache_control`. A file counts
by its digest, at a bounded size: a picture of 8 MiB is not 2 million tokens.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from lorafleet.identity import BlockHash, block_hashes

# English text and code have about four bytes a token; one unit of an approximate prompt stands for one token.
_UNIT_BYTES = 4
# Longer prefixes distinguish no more conversations and take event loop time: hashing and matching 4,096 blocks takes
# 1 to 2 ms, and recording them as long again. At 16 tokens a block, the maximal bytes have as many blocks.
_MAX_BYTES = 256 * 1024
_MAX_BLOCKS = 4096
# A file counts as at most a thousand tokens, about what a picture takes. A guess, nothing measured.
_FILE_BYTES = 4096
# Characters of a text that are tested for being a file.
_FILE_TEST_CHARS = 256
# Bytes that identify a conversation, if it has no answer yet.
_HEAD_BYTES = 1024
# Values nested deeper are taken unchanged.
_MAX_DEPTH = 32

# In the order of a prompt: most chat templates show the system's messages first, then the tools, then the turns.
_FIELDS_BEFORE_SYSTEM = ("chat_template", "chat_template_kwargs", "previous_response_id", "system", "instructions")
_FIELDS_AFTER_SYSTEM = ("tools", "previous_input_messages", "query", "queries", "text_1", "data_1", "state")
_TURN_FIELDS = ("messages", "input", "prompt", "texts", "inputs", "prompt_embeds")
_LAST_FIELDS = ("text_2", "data_2", "documents", "items", "questions")

# Marks of where a client wants its prompt cached. They move with each turn, and no model sees them.
_CACHE_MARKS = frozenset({"cache_control", "prompt_cache_breakpoint"})
# Claude Code's line: it changes with every request, and vLLM drops it.
_BILLING_HEADER = "x-anthropic-billing-header"
_NEEDS_CLEANING = tuple(name.encode() for name in (*_CACHE_MARKS, _BILLING_HEADER))
_SYSTEM_ROLES = frozenset({"system", "developer"})
_OPENING_ROLES = _SYSTEM_ROLES | {"user"}

Fields = Mapping[str, msgspec.Raw]
# Bytes of the prompt, and whether they come after the part that all turns of a conversation share.
_Piece = tuple[bytes, bool]

_encode = msgspec.json.Encoder(order="sorted").encode
_decode = msgspec.json.Decoder().decode
# Errors of decoding or encoding a value; its bytes are then taken unchanged.
_ENCODING_ERRORS = (ValueError, TypeError, RecursionError, OverflowError)


class ApproximatePrompt(msgspec.Struct, frozen=True):
    """An approximate prompt.

    units   the prompt's bytes, four each in an unsigned 32-bit integer, in place of token ids
    head    number of units before the conversation's first answer
    tokens  estimated token count
    """

    units: "array[int]"
    head: int
    tokens: int

    def block_hashes(self, block_size: int, root: BlockHash) -> tuple[BlockHash, ...]:
        """A hash for each whole block, at most _MAX_BLOCKS, as of token ids; `root` holds the adapter and the salt."""
        return tuple(block_hashes(self.units[: block_size * _MAX_BLOCKS], block_size=block_size, root=root))

    def conversation_hash(self, root: BlockHash) -> int:
        """A hash that all turns of the conversation share; `root` holds the adapter and the salt."""
        return xxh3_64_intdigest(memoryview(self.units)[: self.head], root)


def approximate_root(root: BlockHash) -> BlockHash:
    """The root of approximate block hashes, made from the root of exact ones, so that no hash is both."""
    return BlockHash(xxh3_64_intdigest(b"approximate", root))


def approximate_prompt(fields: Fields, decoded: Mapping[str, Any], size_bytes: int) -> ApproximatePrompt | None:
    """The approximate prompt of a body; None if it has no prompt fields.

    fields      of the body, undecoded
    decoded     the fields that are decoded already
    size_bytes  of the whole body, from which a truncated prompt's tokens are estimated
    """
    whole, head_bytes = bytearray(), -1
    for piece, is_later in _prompt_pieces(fields, decoded):
        if is_later and head_bytes < 0 and whole:
            head_bytes = len(whole)
        whole += piece
        if len(whole) >= _MAX_BYTES:
            break
    if not whole:
        return None
    is_cut = len(whole) >= _MAX_BYTES
    del whole[_MAX_BYTES:]
    del whole[len(whole) - len(whole) % _UNIT_BYTES :]
    units = array("I", bytes(whole))
    head = len(units) if head_bytes < 0 else min(len(units), head_bytes // _UNIT_BYTES)
    return ApproximatePrompt(units, head, max(len(units), size_bytes // _UNIT_BYTES if is_cut else 0))


def _prompt_pieces(fields: Fields, decoded: Mapping[str, Any]) -> Iterator[_Piece]:
    """The body's prompt fields as bytes, in the order of the prompt."""
    yield from _named_fields(fields, decoded, _FIELDS_BEFORE_SYSTEM)
    system: list[_Piece] = []
    turns: list[_Piece] = []
    for name in _TURN_FIELDS:
        raw = fields.get(name)
        if raw is not None:
            before, after = _system_and_turns(raw, decoded.get(name))
            system += before
            turns += after
    yield from system
    yield from _named_fields(fields, decoded, _FIELDS_AFTER_SYSTEM)
    yield from turns
    for piece, _ in _named_fields(fields, decoded, _LAST_FIELDS):
        yield piece, True


def _named_fields(fields: Fields, decoded: Mapping[str, Any], names: Sequence[str]) -> Iterator[_Piece]:
    """Fields with these names as bytes, each with its name."""
    for name in names:
        raw = fields.get(name)
        value = b"null" if raw is None else bytes(raw)
        if value == b"null":
            continue
        try:
            decoded_value = decoded[name] if name in decoded else _decode(value)
            value = _encode(
                _prompt_fields(decoded_value) if any(mark in value for mark in _NEEDS_CLEANING) else decoded_value
            )
        except _ENCODING_ERRORS:
            pass  # the bytes unchanged
        # JSON has no raw line feeds, so different lists of pieces have different bytes.
        yield b"%b:%b\n" % (name.encode(), value), False


def _system_and_turns(raw: msgspec.Raw, decoded_value: Any) -> tuple[list[_Piece], list[_Piece]]:
    """A field's leading system messages, and its other messages.

    A text or a list of ids gets no terminator, since it may continue in the next turn.
    """
    try:
        value = _decode(raw) if decoded_value is None else decoded_value
        if value is None:
            return [], []
        if isinstance(value, str):
            return [], _text_pieces(_cleaned_text(value).encode())
        if not isinstance(value, list):
            return [], [(_item_bytes(value), False)]
        if set(map(type, value)) == {int}:
            return [], _text_pieces(array("I", value).tobytes())
        first = next((i for i, item in enumerate(value) if _message_role(item) not in _SYSTEM_ROLES), len(value))
        asking = next((i for i, item in enumerate(value) if _message_role(item) not in _OPENING_ROLES), len(value))
        # Items without roles are no conversation; the first item is then the shared part.
        head = max(1, asking)
        pieces = [(_item_bytes(item), i >= head) for i, item in enumerate(value)]
    except _ENCODING_ERRORS:
        return [], _text_pieces(bytes(raw).rstrip().removesuffix(b"]"))
    return pieces[:first], pieces[first:]


def _text_pieces(text: bytes) -> list[_Piece]:
    """A text's first `_HEAD_BYTES`, which identify its conversation, and the rest up to `_MAX_BYTES`."""
    return [(text[:_HEAD_BYTES], False), (text[_HEAD_BYTES:_MAX_BYTES], True)]


def _message_role(item: Any) -> Any:
    """The role of a message; None for any other item."""
    return item.get("role") if isinstance(item, dict) else None


def _item_bytes(item: Any) -> bytes:
    """An item of a prompt as bytes: token ids as they are, else cleaned JSON with a line feed."""
    if isinstance(item, list) and set(map(type, item)) == {int}:
        return array("I", item).tobytes()
    return _encode(_prompt_fields(item)) + b"\n"


def _prompt_fields(value: Any, depth: int = 0) -> Any:
    """The value without fields that are not part of a prompt, and with digests in place of files."""
    if isinstance(value, str):
        return _cleaned_text(value)
    if depth == _MAX_DEPTH:
        return value
    if isinstance(value, dict):
        return {name: _prompt_fields(inner, depth + 1) for name, inner in value.items() if name not in _CACHE_MARKS}
    if isinstance(value, list):
        return [_prompt_fields(inner, depth + 1) for inner in value]
    return value


def _cleaned_text(text: str) -> str:
    """A text without the billing line, and with a digest in place of a file."""
    if text.startswith(_BILLING_HEADER):
        return text.partition("\n")[2]
    if len(text) <= _FILE_BYTES or not _is_file(text):
        return text[:_MAX_BYTES]
    digest = xxh3_128_hexdigest(text.encode())
    return digest * (_FILE_BYTES // len(digest))


def _is_file(text: str) -> bool:
    """Whether a long text is a base64 file: a data URL, or one word of ASCII."""
    return text.startswith("data:") or (text.isascii() and len(text[:_FILE_TEST_CHARS].split()) == 1)
