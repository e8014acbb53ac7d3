"""Tokenizing a long text does not block the sim, as it does not block vLLM."""

import asyncio
import threading

import httpx
import pytest

from lorafleet.local.tiny_model import make_model
from lorafleet.sim.__main__ import handlers_of
from lorafleet.sim.app import make_app
from lorafleet.sim.engine import SimEngine
from lorafleet.sim.metrics import SimMetrics
from lorafleet.sim.settings import parse_settings
from tests.patience import within

CHATS, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"


class HeldTokenizer:
    """A tokenizer whose calls wait for the test."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.begun = threading.Event()
        self.go_on = threading.Event()

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def encode(self, text, *, add_special_tokens):
        self.begun.set()
        assert self.go_on.wait(60), "nobody let it go on"
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def sim(model):
    """(handlers, client) of a sim in this process."""
    settings = parse_settings(["--model", str(model), "--served-model-name", "tiny-qwen", "--max-model-len", "20000"])
    engine = SimEngine(settings, None, SimMetrics(settings), on_death=lambda: None)
    service = handlers_of(settings, engine)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(make_app(service, engine.run)), base_url="http://sim"
    ) as c:
        running = asyncio.create_task(engine.run())
        yield service, c
        running.cancel()


def asking(path: str, text: str) -> dict:
    body = {"model": "tiny-qwen", "max_tokens": 1}
    if path == CHATS:
        return body | {"messages": [{"role": "user", "content": text}]}
    return body | {"prompt": text}


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS, TOKENIZE])
async def test_other_requests_are_answered_while_a_long_text_is_tokenized(sim, path):
    service, client = sim
    service.prompts.tokenizer = held = HeldTokenizer(service.prompts.tokenizer)
    long = asyncio.create_task(client.post(path, json=asking(path, "one two " * 5000)))
    try:
        async with within(30):
            assert await asyncio.to_thread(held.begun.wait, 30)
            assert (await client.get("/health")).status_code == 200
    finally:
        held.go_on.set()
    assert (await long).status_code == 200


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
async def test_too_long_text_is_refused_before_tokenization(sim, path):
    service, client = sim
    service.prompts.tokenizer = held = HeldTokenizer(service.prompts.tokenizer)
    held.go_on.set()
    answer = await client.post(path, json=asking(path, "a" * 2_000_000))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "input_text")
    assert f"more than {20_000 * service.prompts.tokenizer.max_chars_per_token} characters" in error["message"]
    assert not held.begun.is_set()
    assert (await client.post(path, json=asking(path, "one " * 3000))).status_code == 200
