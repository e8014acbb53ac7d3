"""Prompts of requests: adapter, chat template, tokens and vocabulary, with vLLM's error answers."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request

from lorafleet.sim import bodies
from lorafleet.sim.adapters import AdapterRefused, NoAdapterFound, SimAdapter
from lorafleet.sim.bodies import ErrorAnswer
from lorafleet.sim.engine import SimEngine
from lorafleet.sim.settings import SimSettings
from lorafleet.tokenizer.chat import ChatTokenizer
from lorafleet.tokenizer.messages import Untokenizable

_LONG_TEXT = 2**14  # characters: 7 ms of work


async def read_json(request: Request) -> Any:
    """Receive the request's body and parse it as JSON. Raises `ErrorAnswer`."""
    return bodies.read_json(await request.body(), request.headers.get("content-type", ""))


@dataclass(slots=True)
class PromptReader:
    """Turns request bodies into token ids, as the API server of vLLM does."""

    settings: SimSettings
    engine: SimEngine
    tokenizer: ChatTokenizer
    vocabulary: int

    def render_chat(self, body: bodies.MessagesBody | bodies.TokenizeChatBody) -> tuple[str, bool]:
        """Apply the chat template: the prompt's text, and whether to add special tokens. Raises `ErrorAnswer`."""
        try:
            return self.tokenizer.prompt_text(body.model_dump(exclude_unset=True))
        except Untokenizable as exc:
            raise ErrorAnswer(str(exc)) from exc

    async def token_ids(self, text: str, *, special: bool, bounded: bool = True) -> list[int]:
        """Token ids of a text. Raises `ErrorAnswer`; with `bounded`, also for a text too long for any context.

        Long texts are tokenized in a thread: 30 MB take ten seconds, in which the engine must answer health checks.
        """
        if bounded:
            bodies.check_characters(text, self.settings.max_model_len, self.tokenizer.max_chars_per_token)
        encode = partial(self.tokenizer.encode, text, add_special_tokens=special)
        try:
            return encode() if len(text) < _LONG_TEXT else await asyncio.to_thread(encode)
        except Untokenizable as exc:
            raise ErrorAnswer(str(exc)) from exc

    def check_vocabulary(self, ids: Sequence[int]) -> None:
        """Raises `ErrorAnswer` if a token id is outside the vocabulary."""
        if unknown := [token for token in ids if token >= self.vocabulary]:
            raise ErrorAnswer(f"Token id {max(unknown)} is out of vocabulary")

    async def adapter_named(self, model: str | None) -> SimAdapter | None:
        """The adapter that `model` names; None for the base model. Raises `ErrorAnswer` with vLLM's 404.

        An adapter that is offered is loaded. An unknown name uses up an adapter number, as in vLLM.
        """
        if not model or model in self.settings.served_model_name:
            return None
        if model in self.engine.adapters:
            return self.engine.adapters[model]
        if self.settings.runtime_loras:
            try:
                if (adapter := await self.engine.resolve(model)) is not None:
                    return adapter
            except (NoAdapterFound, AdapterRefused) as exc:
                message = f"LoRA adapter '{model}' was found but could not be loaded."
                raise ErrorAnswer(message, "BadRequestError", 400, param="model") from exc
        aliases = ", ".join(self.settings.served_model_name)
        message = f"The model `{model}` does not exist. Valid aliases: {aliases}."
        raise ErrorAnswer(message, "NotFoundError", 404, param="model")
