"""Request body -> token ids: here when our tokenizer provably agrees with the engine's, else at the engine."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import httpx
import structlog
from jinja2 import TemplateError

from lorafleet.chat import ChatTokenizer, Untokenizable
from workers.wire import ModelFiles

log = structlog.get_logger()

Source = Literal["local", "remote", "given", "none"]

# What /tokenize takes. Source: vLLM 0.32 entrypoints/serve/tokenize/protocol.py.
_TOKENIZE_FIELDS = (
    "messages",
    "prompt",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template_kwargs",
)
# What changes a prompt's ids but /tokenize would not know of (or, a client's own template, is not ours to run).
_ENGINE_ONLY_FIELDS = (
    "chat_template",
    "documents",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "reasoning_effort",
    "truncate_prompt_tokens",
)
# Everything of a body that its ids depend on.
FIELDS = frozenset({*_TOKENIZE_FIELDS, *_ENGINE_ONLY_FIELDS})

# Above this many characters encoding leaves the event loop: about 4 ms of it.
_THREAD_ABOVE_CHARS = 16_384

# What our tokenizer must agree on with the engine before it is trusted: one body a trap (see docs/architecture.md).
PROBES: tuple[dict[str, Any], ...] = (
    {"messages": [{"role": "user", "content": "Hello, world! 12345 x_y  z\n\n"}]},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "naïve café 東京 🙂"}]},
    {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "SELECT *\tFROM t;"},
        ]
    },
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]},
    {"messages": [{"role": "user", "content": ""}], "add_generation_prompt": False},
    {
        "messages": [{"role": "user", "content": "weather?"}],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "weather",
                    "description": "by <city>",
                    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
                },
            }
        ],
    },
    {
        "messages": [
            {"role": "user", "content": "weather?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        ]
    },
    {"prompt": "def f(x):\n    return x"},
    {"prompt": "  leading, <|im_start|> special and trailing  "},
    {"prompt": ""},
)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids of a prompt and who made them; `ids` is None when nobody could: then no KV term."""

    ids: Sequence[int] | None
    source: Source


NO_TOKENS = Tokens(None, "none")


class Tokenizers:
    """One tokenizer a base model, made from the files that an agent of it serves."""

    def __init__(self, client: httpx.AsyncClient, *, mode: str = "auto") -> None:
        self._client = client
        self._mode = mode
        self._local: dict[str, ChatTokenizer | None] = {}
        self._learning: set[str] = set()

    def knows(self, base_model: str) -> bool:
        """Whether it is settled how this base model is tokenized."""
        return self._mode != "auto" or base_model in self._local

    async def learn(self, base_model: str, *, agent_url: str, engine_url: str) -> None:
        """Fetch a base model's tokenizer and hold it against the engine's; safe to repeat and to interrupt.

        raises  httpx.HTTPError when agent or engine cannot be asked now
        """
        if self.knows(base_model) or base_model in self._learning:
            return
        self._learning.add(base_model)
        try:
            self._local[base_model] = await self._agreeing(base_model, agent_url, engine_url)
        finally:
            self._learning.discard(base_model)

    async def ids(self, body: Mapping[str, Any], *, base_model: str, engine_url: str) -> Tokens:
        """The ids that the engine will compute for this chat or completion body.

        body  decoded JSON; `messages` makes it a chat, `prompt` (text or one list of ids) a completion
        """
        given = body.get("prompt")
        if isinstance(given, list):
            return Tokens(given, "given") if given and all(type(i) is int for i in given) else NO_TOKENS
        if self._mode == "off":
            return NO_TOKENS
        local = self._local.get(base_model) if self._mode == "auto" else None
        try:
            if local is not None:
                return Tokens(await _encode(local, body), "local")
        except (Untokenizable, TemplateError, TypeError, ValueError, RecursionError) as exc:
            log.debug("not tokenized here", base_model=base_model, error=str(exc))
        return await self._remote(body, base_model, engine_url)

    async def _agreeing(self, base_model: str, agent_url: str, engine_url: str) -> ChatTokenizer | None:
        answer = await self._client.get(f"{agent_url}/v1/model/files")
        answer.raise_for_status()
        files = ModelFiles.model_validate_json(answer.content).files
        try:
            local = await asyncio.to_thread(ChatTokenizer.from_files, files)
        except (Untokenizable, ValueError, KeyError) as exc:
            log.warning("tokenizing at the engine: its files make no tokenizer", base_model=base_model, error=str(exc))
            return None
        agreed = 0
        for number, probe in enumerate(PROBES):
            theirs = await self._ask(probe, base_model, engine_url)
            if theirs is None:
                continue
            if theirs != await _encode_or_none(local, probe):
                log.warning("tokenizing at the engine: ours differs", base_model=base_model, probe=number)
                return None
            agreed += 1
        if not agreed:
            log.warning("tokenizing at the engine: it answered no probe, so ours is unproven", base_model=base_model)
            return None
        log.info(
            "tokenizing here: equal to the engine on every probe that it took", base_model=base_model, probes=agreed
        )
        return local

    async def _remote(self, body: Mapping[str, Any], base_model: str, engine_url: str) -> Tokens:
        if any(body.get(name) is not None for name in _ENGINE_ONLY_FIELDS):
            return NO_TOKENS
        try:
            ids = await self._ask(body, base_model, engine_url)
        except (httpx.HTTPError, TypeError, ValueError, RecursionError) as exc:
            log.debug("not tokenized at the engine", base_model=base_model, error=str(exc))
            ids = None
        return NO_TOKENS if ids is None else Tokens(ids, "remote")

    async def _ask(self, body: Mapping[str, Any], base_model: str, engine_url: str) -> list[int] | None:
        """The engine's own ids; None when it refuses this body (it will refuse the request as well)."""
        wanted = {name: body[name] for name in _TOKENIZE_FIELDS if name in body}
        answer = await self._client.post(f"{engine_url}/tokenize", json=wanted | {"model": base_model})
        if answer.status_code in (502, 503, 504):
            answer.raise_for_status()  # not now: that says nothing about this body
        if answer.status_code != 200:
            return None
        tokens = answer.json().get("tokens")
        return tokens if isinstance(tokens, list) else None


async def _encode(local: ChatTokenizer, body: Mapping[str, Any]) -> list[int]:
    if "messages" not in body:
        prompt = body.get("prompt")
        if not isinstance(prompt, str):
            raise Untokenizable(f"prompt is {type(prompt).__name__}, not one text")
        special = body.get("add_special_tokens", True) is not False
        if len(prompt) <= _THREAD_ABOVE_CHARS:
            return local.completion_ids(prompt, special)
        return await asyncio.to_thread(local.completion_ids, prompt, special)
    size = sum(len(str(m.get("content") or "")) for m in body["messages"] if isinstance(m, dict))
    if size <= _THREAD_ABOVE_CHARS:
        return local.chat_ids(body)
    return await asyncio.to_thread(local.chat_ids, body)


async def _encode_or_none(local: ChatTokenizer, body: Mapping[str, Any]) -> list[int] | None:
    try:
        return await _encode(local, body)
    except (Untokenizable, TemplateError, TypeError, ValueError):
        return None
