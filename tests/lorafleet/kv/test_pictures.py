"""Ids of pictures, and the extra bytes that they add to blocks, against vLLM's own rules."""

import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorafleet.kv.extra_keys import extra_hash_inputs, media_key
from lorafleet.kv.pictures import PlacedPicture, has_rgb_header, picture_blocks, picture_id
from tests.properties import examples

MODEL = "org/tiny-vlm"


def png(color_type: int, *, depth: int = 8) -> bytes:
    """A PNG file's header for one pixel."""
    head = struct.pack(">IIBBBBB", 1, 1, depth, color_type, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", len(head)) + b"IHDR" + head + struct.pack(">I", zlib.crc32(head))


def jpeg(components: int, *, before: bytes = b"") -> bytes:
    """A JPEG file's headers up to its frame."""
    frame = b"\xff\xc0" + struct.pack(">HBHHB", 8 + 3 * components, 8, 1, 1, components) + b"\x01\x11\x00" * components
    return b"\xff\xd8\xff\xe0\x00\x10JFIF\x00" + bytes(9) + before + frame


@pytest.mark.parametrize(
    ("data", "is_rgb"),
    [
        (png(2), True),
        (png(6), False),
        (png(3), False),
        (png(0), False),
        (png(4), False),
        (jpeg(3), True),
        (jpeg(1), False),
        (jpeg(4), False),
        (jpeg(3, before=b"\xff\xff\xfe\x00\x04hi"), True),
        (jpeg(3)[:12], None),
        (png(2)[:20], None),
        (b"\xff\xd8" + b"\xff" * 40, None),
        (b"GIF89a", None),
        (b"RIFF\x00\x00\x00\x00WEBPVP8 ", None),
        (b"", None),
    ],
)
def test_color_mode_is_known_from_png_and_jpeg_headers_alone(data, is_rgb):
    assert has_rgb_header(data) is is_rgb
    assert (picture_id(data, MODEL) is None) == (is_rgb is None)


@given(st.binary(max_size=60))
@settings(max_examples=examples(200))
def test_no_bytes_after_a_jpeg_start_break_the_header_reader(data):
    assert has_rgb_header(b"\xff\xd8\xff" + data) in (True, False, None)


def test_an_id_depends_on_file_and_model_path():
    ids = {picture_id(data, model) for data in (png(2), png(6), jpeg(3)) for model in (MODEL, "/models/tiny-vlm")}
    assert len(ids) == 6


@st.composite
def placed_pictures(draw: st.DrawFn) -> tuple[int, list[PlacedPicture], int]:
    """A block size, pictures in order without overlap, and the prompt's length."""
    block_size, at, pictures = draw(st.sampled_from([1, 4, 16])), 0, []
    for name in draw(st.lists(st.sampled_from("abc"), max_size=5)):
        at += draw(st.integers(0, 20))
        length = draw(st.integers(1, 40))
        pictures.append(PlacedPicture(name, at, length))
        at += length
    return block_size, pictures, at + draw(st.integers(0, 20))


@given(placed_pictures())
@settings(max_examples=examples(200))
def test_a_block_has_the_keys_of_every_picture_with_a_token_in_it(case):
    block_size, pictures, length = case
    found = picture_blocks(pictures, block_size)
    for number in range(-(-length // block_size)):
        start, end = number * block_size, (number + 1) * block_size
        keys = [(p.id, p.offset - start) for p in pictures if p.offset < end and p.offset + p.length > start]
        assert found.get(number) == (media_key(keys) if keys else None)


def test_an_adapter_before_a_pictures_id_is_left_out_of_its_own_blocks():
    plain = extra_hash_inputs([["sql", ["abc", 3]]], "sql", is_start=True)
    assert extra_hash_inputs([["sql", ["sql:abc", 3]]], "sql", is_start=True) == plain
    assert extra_hash_inputs([["sql", ["other:abc", 3]]], "sql", is_start=True) != plain
    assert plain == ("", {0: media_key([("abc", 3)])})
