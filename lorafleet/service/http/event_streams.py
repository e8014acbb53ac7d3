"""The events of an OpenAI API's stream, for clients."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx


async def json_events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON events of a streamed answer, without the last one, `[DONE]`.

    Raises httpx.HTTPError, and ValueError for an event that is no JSON object.
    """
    async for line in _answer_lines(answer):
        data = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            event = json.loads(data)
            if not isinstance(event, dict):
                raise ValueError(f"an event of the stream is a {type(event).__name__}, expected a JSON object")
            yield event


async def _answer_lines(answer: httpx.Response) -> AsyncIterator[bytes]:
    """The answer's lines, which end at line feeds alone.

    httpx' `aiter_lines` would also end them at U+0085, U+2028 and their kin, which JSON may hold as they are.
    """
    rest = b""
    async for piece in answer.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line
    yield rest
