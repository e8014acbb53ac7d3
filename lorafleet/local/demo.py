"""The demo of `lorafleet up`: some chat completions, and a table of their workers and cached tokens.

The tiny model answers with words without sense, so the table shows only where requests went. Of a model that answers in
sentences the answers are shown, too.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from lorafleet.local import smollm2
from lorafleet.service.failure import CommandFailed, printable
from lorafleet.service.http.event_streams import json_events

# Several blocks of 32 tokens, so that a cache hit shows.
_SHOP_TABLES = (
    "We run a small shop with three tables. customers has id, name, city and joined_on; orders has id, customer_id,"
    " ordered_on, due_on, paid_on and total; items has order_id, product, quantity and price. An order is late when it"
    " was paid after its due date, or is past due and not paid at all. Customers who joined this year do not count, and"
    " neither do orders below ten euros. For every city, list the five customers with the most late orders in the last"
    " twelve months, with how many orders each of them placed, how many were late, and how many days late on average."
    " Sort by city, then by the number of late orders, and explain each step so that a new colleague can follow it."
)
_TEA_QUESTION = "How do I make a good cup of tea?"


@dataclass(frozen=True, slots=True)
class DemoScript:
    """What the demo asks.

    messages   of every request
    question   a short one, for the lines to paste
    lora_ids   adapters that are asked, after the base model
    has_sense  the answers are worth reading
    """

    messages: tuple[Mapping[str, str], ...]
    question: str
    max_tokens: int
    lora_ids: tuple[str, ...]
    has_sense: bool = False


TINY_SCRIPT = DemoScript(
    messages=({"role": "user", "content": _SHOP_TABLES},),
    question="Which customers paid late?",
    max_tokens=24,
    lora_ids=("sql-expert/v1", "python-expert/v1"),
)
SMOLLM2_SCRIPT = DemoScript(
    messages=({"role": "user", "content": _TEA_QUESTION},),
    question=_TEA_QUESTION,
    max_tokens=60,
    lora_ids=smollm2.ADAPTERS,
    has_sense=True,
)
_MOST_ADAPTERS = 2
_TEXT_HEADING = "text begins"
_TEXT_WIDTH = 48
_COLUMN_EDGES = 3  # a line, and a space on either side


@dataclass(frozen=True, slots=True)
class DemoRow:
    """One answer. Token counts are the engine's; `predicted` is the router's prediction of cached tokens."""

    adapter: str
    worker: str
    prompt_tokens: int
    cached_tokens: int
    predicted: int
    first_token_ms: float
    text: str


async def run_demo(
    client: httpx.AsyncClient, router_url: str, base_model: str, lora_ids: Sequence[str]
) -> list[DemoRow]:
    """Send the prompt to base model, some adapters and base model again, and print and return the results.

    Raises CommandFailed with the router's message.

    client  has the key, where one is needed
    """
    script = script_for(lora_ids)
    models = [None, *script.lora_ids, None]
    client.base_url, client.timeout = httpx.URL(router_url), httpx.Timeout(300)
    rows = [await send_question(client, base_model, lora_id, script) for lora_id in models]
    _print_result(rows, script)
    return rows


async def send_question(
    client: httpx.AsyncClient, base_model: str, lora_id: str | None, script: DemoScript = TINY_SCRIPT
) -> DemoRow:
    """Send one streamed chat completion at temperature 0 and wait for its end.

    Raises CommandFailed with the router's message, or with what has ended the answer.
    """
    try:
        return await _stream_answer(client, base_model, lora_id, script)
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as exc:
        message = f"demo: the request to {lora_id or base_model} failed: {printable(str(exc) or repr(exc))}"
        raise CommandFailed(message) from exc


async def _stream_answer(
    client: httpx.AsyncClient, base_model: str, lora_id: str | None, script: DemoScript
) -> DemoRow:
    """As `send_question`. Raises httpx.HTTPError, or ValueError, KeyError, TypeError for an answer without a stream."""
    body = {
        "model": base_model,
        "messages": script.messages,
        "temperature": 0,
        "max_tokens": script.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    } | ({"lora_id": lora_id} if lora_id else {})
    began = time.monotonic()
    first_s, text = 0.0, ""
    usage: dict[str, Any] = {}
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.is_error:
            message = (await answer.aread()).decode(errors="replace")
            raise httpx.HTTPStatusError(message, request=answer.request, response=answer)
        async for chunk in json_events(answer):
            if "error" in chunk:
                raise ValueError(chunk["error"]["message"])
            for choice in chunk["choices"]:
                piece = choice["delta"].get("content") or ""
                if piece and not text:
                    first_s = time.monotonic() - began
                text += piece
            usage = chunk.get("usage") or usage
        headers = answer.headers
    return DemoRow(
        adapter=headers["x-lorafleet-adapter"],
        worker=headers["x-lorafleet-worker"],
        prompt_tokens=usage.get("prompt_tokens", 0),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        predicted=int(headers["x-lorafleet-cached-tokens"]),
        first_token_ms=1000 * first_s,
        text=text,
    )


def script_for(lora_ids: Sequence[str]) -> DemoScript:
    """The script whose adapters are registered; without one, that of the tiny model with the first adapters."""
    for script in (SMOLLM2_SCRIPT, TINY_SCRIPT):
        asked = tuple(lora_id for lora_id in script.lora_ids if lora_id in lora_ids)
        if asked:
            return replace(script, lora_ids=asked)
    return replace(TINY_SCRIPT, lora_ids=tuple(lora_ids[:_MOST_ADAPTERS]))


def table(rows: Sequence[DemoRow], text_width: int = 0) -> Table:
    """The results as a table, with `text_width` characters of each text; no text column if its heading does not fit."""
    has_text = text_width >= len(_TEXT_HEADING)
    title = f"The same prompt, {len(rows)} times (prompt and cached: tokens)"
    table = Table(title=title, title_justify="left", expand=False)
    table.add_column("adapter", overflow="fold")  # the only one that a narrow terminal breaks
    for name in ("worker", "prompt", "cached", "first token"):
        table.add_column(name, justify="left" if name == "worker" else "right", no_wrap=True)
    if has_text:
        table.add_column(_TEXT_HEADING, no_wrap=True)
    for row in rows:
        text = [" ".join(row.text.split())[:text_width]] if has_text else []
        cells = (str(row.prompt_tokens), str(row.cached_tokens), f"{row.first_token_ms:.0f} ms")
        table.add_row(row.adapter, row.worker, *cells, *text)
    return table


def show_table(rows: Sequence[DemoRow], console: Console) -> None:
    """Print the table, with as much of each text as fits."""
    left = console.width - console.measure(table(rows)).maximum - _COLUMN_EDGES
    console.print(table(rows, min(left, _TEXT_WIDTH)))


def show_answers(script: DemoScript, rows: Sequence[DemoRow], console: Console) -> None:
    """Print the question, and each model's answer once."""
    console.print(script.question)
    for adapter, text in {row.adapter: row.text for row in rows}.items():
        console.print(Padding(f"{adapter.partition('@')[0]}: {' '.join(text.split())}", (0, 0, 0, 2)))


def _print_result(rows: Sequence[DemoRow], script: DemoScript) -> None:
    """Print the answers where they make sense, the table, and what the repeated request shows."""
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = 140
    if script.has_sense:
        show_answers(script, rows, console)
    show_table(rows, console)
    last, first = rows[-1], rows[0]
    console.print(
        f"The last request repeats the first. It went to {last.worker}"
        f" ({'the same worker' if last.worker == first.worker else 'another worker'}), which had"
        f" {last.cached_tokens} of its {last.prompt_tokens} tokens cached (the router predicted {last.predicted}).\n"
        "An adapter's first answer includes loading it. A prompt cached under another adapter cannot be reused.",
        soft_wrap=True,
    )
