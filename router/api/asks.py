"""A person's question to several models, asked from the console: through this router as with the person's own key.

The console may call its own orchestrator alone, and no service gets a person's key. The orchestrator passes on the id
of the key that it has checked, or what it grants a token. This router, which has the same key files, serves the
question as that caller's request: with its limits, its tenant's sight, a story of its own, and counts in traffic and
metrics.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import msgspec

from lorafleet.http_server.exchange import HttpExchange
from lorafleet.keys.roles import Caller, check_scope
from lorafleet.service.decoding import DECODE_ERRORS
from lorafleet.service.http import HttpError
from orchestrator.model.questions import AskedAnswer, RoutedAsk
from router.api.inference import InferenceHandler
from router.request.services import Services

if TYPE_CHECKING:
    from lorafleet.http_server.connection import ClientConnection

_PATH = "/v1/chat/completions"
# Of one answer; its tokens are bounded, so that a larger one is no chat.
_MOST_BYTES = 2**22
_DONE = b"[DONE]"


class _AnswerReader:
    """The end of an exchange without a client: keeps what would go to the client, and when its first token came.

    It has those methods of a ClientConnection that an exchange calls.
    """

    is_write_paused = False

    def __init__(self, services: Services) -> None:
        self._clock = services.clock
        self._pieces: list[bytes] = []
        self._size = 0
        self.first_token_at: float | None = None
        self.is_over = asyncio.Event()
        self.exchange: HttpExchange | None = None

    @property
    def content(self) -> bytes:
        """All that was written: head and body."""
        return b"".join(self._pieces)

    def write(self, data: bytes) -> None:
        """Keep a part of the answer. One that is too large is cut off."""
        self._size += len(data)
        if self._size > _MOST_BYTES:
            self.hang_up()
            return
        self._pieces.append(data)
        if self.first_token_at is None and b"data: " in data:
            self.first_token_at = self._clock()

    def can_stay_open(self) -> bool:
        """Always: nothing is framed for a client."""
        return True

    def ignore_further_input(self) -> None:
        """There is none."""

    def release(self, exchange: HttpExchange) -> None:
        """End the exchange: what is written later goes nowhere."""
        exchange.connection = None
        self.is_over.set()

    def on_answered(self, exchange: HttpExchange) -> None:
        """The answer is whole."""
        self.release(exchange)

    def hang_up(self) -> None:
        """Cut the answer off."""
        if self.exchange is not None:
            self.release(self.exchange)


async def answer_ask(services: Services, ask: RoutedAsk) -> AskedAnswer:
    """The model's answer, with its first token's time. Raises HttpError where this router does not know the key."""
    caller = (
        services.keys.caller_by_id(ask.key_id) if ask.caller is None else _caller_of_token(ask, ask.caller, services)
    )
    check_scope(caller, "infer")
    body = msgspec.json.encode(
        {
            "model": ask.model,
            "messages": [{"role": "user", "content": ask.prompt}],
            "max_tokens": ask.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    reader, handler = _AnswerReader(services), InferenceHandler(services).find_handler("POST", _PATH)
    assert handler is not None
    began_at = services.clock()
    exchange = HttpExchange(
        method="POST",
        path=_PATH,
        query=b"",
        headers={b"content-type": b"application/json", b"content-length": b"%d" % len(body)},
        connection=cast("ClientConnection", reader),
        handler=handler,
        chunked=False,
        keeps_connection=True,
        caller=caller,
        body=body,
        received_at=began_at,
    )
    reader.exchange = exchange
    try:
        await handler(exchange)
    finally:
        exchange.connection = None
    whole_s = services.clock() - began_at
    head, _, content = reader.content.partition(b"\r\n\r\n")
    found = AskedAnswer(model=ask.model, status=exchange.status or 499, request_id=exchange.request_id, whole_s=whole_s)
    if found.status != 200 or b"event-stream" not in head:
        return found.model_copy(update={"error": _error_in(content)})
    first_s = None if reader.first_token_at is None else reader.first_token_at - began_at
    return found.model_copy(update=_read_stream(content) | {"first_token_s": first_s})


def _caller_of_token(ask: RoutedAsk, caller: Caller, services: Services) -> Caller:
    """The caller of a token that the orchestrator has checked; raises HttpError for an issuer that is not ours."""
    if caller.issuer not in services.keys.issuers:
        message = f"this router takes no tokens of {caller.issuer:.200}: give it the same key files as the orchestrator"
        raise HttpError(403, "key_unknown", message)
    return replace(caller, key_id=ask.key_id)


def _read_stream(content: bytes) -> dict[str, Any]:
    """The text, the token counts and the error in the events of a chat."""
    text: list[str] = []
    found: dict[str, Any] = {}
    for line in content.split(b"\n"):
        if not line.startswith(b"data: ") or line.endswith(_DONE):
            continue
        try:
            event = msgspec.json.decode(line[6:])
        except DECODE_ERRORS:
            continue
        if not isinstance(event, dict):
            continue
        if "error" in event:
            found["error"] = _envelope_message(event)
        text += [str((choice.get("delta") or {}).get("content") or "") for choice in event.get("choices") or ()]
        usage = event.get("usage")
        if isinstance(usage, dict):
            found |= {"prompt_tokens": usage.get("prompt_tokens"), "output_tokens": usage.get("completion_tokens")}
    return {"text": "".join(text), **found}


def _error_in(content: bytes) -> str:
    """The message of an error's body."""
    try:
        return _envelope_message(msgspec.json.decode(content))
    except DECODE_ERRORS:
        return "the answer is no chat"


def _envelope_message(body: Any) -> str:
    """The message of an error in an envelope."""
    error = body.get("error") if isinstance(body, Mapping) else None
    return str(error.get("message", "")) if isinstance(error, Mapping) else str(error)[:500]
