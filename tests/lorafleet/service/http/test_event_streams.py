"""A stream's events, whatever their texts hold and however the bytes are cut."""

import json
from collections.abc import AsyncIterator

import httpx
import pytest

from lorafleet.service.http.event_streams import json_events


async def events_of(pieces: list[bytes]) -> list[dict[str, object]]:
    async def body() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    return [event async for event in json_events(httpx.Response(200, content=body()))]


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
async def test_events_are_read_whatever_separators_their_texts_hold(size: int, end: str) -> None:
    texts = ["plain", "a\u2028b\x85c\u2029d", "é", "data: [DONE]"]
    lines = [f"data: {json.dumps({'text': text}, ensure_ascii=False)}" for text in texts]
    whole = (end + end).join([": a comment", *lines, "data:[DONE]", ""]).encode()
    pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
    assert await events_of(pieces) == [{"text": text} for text in texts]


async def test_a_last_line_without_its_end_counts() -> None:
    assert await events_of([b'data: {"a":', b" 1}"]) == [{"a": 1}]


@pytest.mark.parametrize("line", [b"data: {", b"data: [1]", b"data: 1"])
async def test_an_event_that_is_no_object_is_an_error(line: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (json's error, or ours)
        await events_of([line + b"\n"])
