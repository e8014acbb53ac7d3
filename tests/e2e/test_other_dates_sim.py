"""A router in one time zone, engines in others: a chat template that shows the date, and conversations that stay."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lorafleet.local.tiny_model import CHAT_TEMPLATE, make_model
from router.app import build
from router.config import RouterSettings
from tests.engines import start_engine
from tests.patience import patience, until
from tests.serving import client_of, serving

pytestmark = pytest.mark.fleet

BASE = "tiny-qwen"
RULES = "Answer briefly, and name the table that you would read for it. " * 12
# A whole day ahead of UTC, so at no hour is it the same date there.
ELSEWHERE = "<EAST>-24"
HERE = "UTC0"
TURNS, CONVERSATIONS = 3, 16


@pytest.fixture(scope="module")
def dated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose prompts begin with the date, as those of Llama 3.2 do."""
    folder = make_model(tmp_path_factory.mktemp("dated") / "model")
    shown = "{{- '<|im_start|>system\\nToday: ' + strftime_now('%d %b %Y') + '<|im_end|>\\n' }}\n"
    (folder / "chat_template.jinja").write_text(shown + CHAT_TEMPLATE.lstrip())
    return folder


@contextlib.asynccontextmanager
async def dated_fleet(model: Path, *zones: str) -> AsyncIterator:
    """A router in front of a sim engine in each of these time zones, once their KV events are followed."""
    with contextlib.ExitStack() as stack:
        engines = [start_engine("sim", model, environment={"TZ": zone}) for zone in zones]
        for engine in engines:
            stack.callback(engine.stop)
        urls = tuple(f"w{number}={engine.url}" for number, engine in enumerate(engines))
        app, parts = build(RouterSettings(engines=urls, tokenizer_paths={BASE: model}, metadata_poll_s=0.1))
        async with serving(app, http=app.state.http) as url, client_of(url, timeout=patience(20)) as client:
            names = [f"w{number}" for number in range(len(zones))]
            await until(lambda: all(parts.accuracy.state(name) == "exact" for name in names))
            replicas = parts.discovery.fleet.replicas
            await until(lambda: all(parts.tokenizers.has_probed(BASE, replicas[name].incarnation) for name in names))
            yield client, parts


async def conversations(client, parts) -> list[list[dict]]:
    """Each turn of each conversation: its worker, its source of tokens, and predicted and real cached tokens."""
    histories = [[{"role": "system", "content": f"{n}. {RULES}"}] for n in range(CONVERSATIONS)]
    turns: list[list[dict]] = [[] for _ in histories]
    for turn in range(TURNS):
        for number, history in enumerate(histories):
            history.append({"role": "user", "content": f"Question {turn}: how many are there?"})
            body = {"model": BASE, "messages": history, "max_tokens": 8, "temperature": 0}
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            history.append(answer.json()["choices"][0]["message"] | {"role": "assistant"})
            record = parts.decisions[-1]
            assert record.request_id == answer.headers["x-request-id"]
            turns[number].append(
                {
                    "worker": record.decision.replica.id,
                    "from": record.tokens_from,
                    "predicted": record.decision.score.cached_tokens,
                    "cached": answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"],
                }
            )
    return turns


def moved(turns: list[list[dict]]) -> int:
    return sum(len({turn["worker"] for turn in conversation}) > 1 for conversation in turns)


async def test_no_conversation_moves_and_each_prediction_is_exact_where_the_engines_have_another_date(dated):
    async with dated_fleet(dated, ELSEWHERE, ELSEWHERE) as (client, parts):
        turns = await conversations(client, parts)
    assert {turn["from"] for conversation in turns for turn in conversation} == {"local"}
    assert moved(turns) == 0
    assert [t for conversation in turns for t in conversation[1:] if not 0 < t["predicted"] == t["cached"]] == []


async def test_no_conversation_moves_between_engines_whose_dates_differ(dated):
    async with dated_fleet(dated, HERE, ELSEWHERE) as (client, parts):
        turns = await conversations(client, parts)
        body = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}
        explained = (await client.post("/v1/route", json=body)).json()
    assert {turn["from"] for conversation in turns for turn in conversation} == {"approximate"}
    assert moved(turns) == 0
    assert all(turn["cached"] > 0 for conversation in turns for turn in conversation[1:])
    assert "dates differ" in explained["note"]
