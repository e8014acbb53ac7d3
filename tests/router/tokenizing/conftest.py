"""A tiny model, a worker that serves and tokenizes with it, and tokenizers that have learned it."""

import pytest

from lorafleet.local.tiny_model import make_model
from lorafleet.tokenizer.chat import ChatTokenizer, read_files
from router.telemetry.metrics import RouterMetrics
from router.tokenizing.tokenizers import Tokenizers
from tests.router.tokenizing.tokenizing_worker import BASE, TokenizingWorker
from tests.serving import client_of, serving


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("tokens") / "tiny-qwen")


@pytest.fixture(scope="module")
def chat(model) -> ChatTokenizer:
    return ChatTokenizer.from_dir(model)


@pytest.fixture
async def client():
    async with client_of() as client:
        yield client


@pytest.fixture
def worker(chat, model) -> TokenizingWorker:
    return TokenizingWorker(chat, read_files(model))


@pytest.fixture
def metrics() -> RouterMetrics:
    return RouterMetrics()


@pytest.fixture
async def tokens(client, worker, metrics):
    """Tokenizers that have learned the tiny model."""
    tokenizers = Tokenizers(client, metrics=metrics)
    async with serving(worker.app) as url:
        await tokenizers.load_or_probe(BASE, agent_url=url, engine_url=url)
    assert tokenizers.knows(BASE)
    yield tokenizers
    tokenizers.close()
