"""The ids that vLLM gives to pictures, and the extra bytes that pictures add to our hashes of a prompt's blocks.

vLLM hashes a picture's id into each block with one of its tokens. The id is a hash of the file's bytes, of the model's
path, and, where the file must be converted to RGB, of that conversion. A wrong id only misses: no block has it.

Source: vLLM 0.32 multimodal/hasher.py, multimodal/media/image.py, multimodal/processing/inputs.py get_mm_hashes,
v1/core/kv_cache_utils.py _gen_mm_extra_hash_keys. A test compares the ids with vLLM's own for every form of picture.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from blake3 import blake3

from lorafleet.kv.extra_keys import media_key

_SEQUENCE, _MAPPING, _LEAF = b"\x01", b"\x02", b"\x03"
_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG_START = b"\xff\xd8"
# Start-of-frame markers: SOF0 to SOF15 without DHT, JPG and DAC, which share the range.
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_ALONE = frozenset({0x01, *range(0xD0, 0xDA)})
_PNG_RGB = 2


class PlacedPicture(NamedTuple):
    """A picture in a prompt: vLLM's id for it, and its tokens' place, in tokens."""

    id: str
    offset: int
    length: int


def picture_id(data: bytes, model_path: str) -> str | None:
    """vLLM's id for a picture file; None for a file whose color mode is not known from its header.

    model_path  the engine's `--model`
    """
    is_rgb = has_rgb_header(data)
    if is_rgb is None:
        return None
    if is_rgb:
        picture = _LEAF + _with_length(data)
    else:
        white = _SEQUENCE + _encoded_length(3) + (_LEAF + _with_length((255).to_bytes(8, "little"))) * 3
        conversion = _MAPPING + _encoded_length(2) + _with_length(b"image_mode") + _LEAF + _with_length(b"RGB")
        conversion += _with_length(b"rgba_background_color") + white
        picture = (
            _MAPPING
            + _encoded_length(2)
            + _with_length(b"io_config")
            + conversion
            + _with_length(b"data")
            + _LEAF
            + _with_length(data)
        )
    whole = blake3(_with_length(b"image") + _LEAF + _with_length(b"image") + picture)
    whole.update(_with_length(b"model_id") + _LEAF + _with_length(model_path.encode("utf-8", "surrogatepass")))
    return whole.hexdigest()


def has_rgb_header(data: bytes) -> bool | None:
    """Whether Pillow opens a PNG or JPEG file in mode RGB, by its header; None for other files, and broken ones."""
    if data.startswith(_PNG) and data[12:16] == b"IHDR" and len(data) > 25:
        return data[25] == _PNG_RGB
    return _has_rgb_jpeg_frame(data) if data.startswith(_JPEG_START) else None


def _has_rgb_jpeg_frame(data: bytes) -> bool | None:
    """Whether a JPEG file's frame has three components; None without a frame."""
    at = 2
    while at + 10 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF or marker in _JPEG_ALONE:
            at += 1 if marker == 0xFF else 2
        elif marker in _JPEG_FRAMES:
            return data[at + 9] == 3
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return None


def _with_length(chunk: bytes) -> bytes:
    """The bytes with their length before them."""
    return _encoded_length(len(chunk)) + chunk


def _encoded_length(value: int) -> bytes:
    """A length in vLLM's form."""
    return value.to_bytes(8, "little")


def picture_blocks(pictures: Sequence[PlacedPicture], block_size: int) -> dict[int, bytes]:
    """Extra bytes by block number, for `block_hashes`: those of each block that has a token of a picture.

    pictures  in the order of the prompt
    """
    items: dict[int, list[tuple[str, int]]] = {}
    for picture in pictures:
        for number in _picture_block_numbers(picture, block_size):
            items.setdefault(number, []).append((picture.id, picture.offset - number * block_size))
    return {number: packed for number, found in items.items() if (packed := media_key(found)) is not None}


def _picture_block_numbers(picture: PlacedPicture, block_size: int) -> Iterable[int]:
    """The numbers of the blocks that have a token of this picture."""
    return range(picture.offset // block_size, -(-(picture.offset + picture.length) // block_size))
