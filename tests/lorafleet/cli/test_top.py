"""`lorafleet top`: its lines at every width, its keys in a headless terminal, and a real fleet's traffic."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.cli.top.frame import (
    ADAPTER_COLUMNS,
    WORKER_COLUMNS,
    TopColumn,
    TopView,
    explanation,
    fitting,
    frame,
    rows,
)
from lorafleet.cli.top.orders import AdapterOrder, WorkerOrder
from lorafleet.cli.top.screen import TopApp
from lorafleet.cli.top.snapshot import TopSnapshot, snapshot_of
from lorafleet.service.failure import CommandFailed
from orchestrator.model.traffic import TrafficTotal


def total(name: str, **given_fields: Any) -> dict[str, Any]:
    """A total as the orchestrator answers it."""
    return TrafficTotal(name=name, **given_fields).model_dump(mode="json")


def worker(name: str, *adapters: str) -> dict[str, Any]:
    return {"id": name, "state": "ready", "adapters": adapters, "capacity": {"available_slots": 3}}


def adapter(name: str, ready: int = 1, **more: Any) -> dict[str, Any]:
    status = {"state": "ready", "replicas": {"ready": ready, "desired": 2}, "error": None} | more
    return {"lora_id": name, "status": status}


FIRST = {"p50": 0.123, "p95": 0.456, "p99": 1.5}
TRAFFIC = {
    "fleet": {
        "total": total("", requests=600, errors=12, output_tokens=6000, first_token_s=FIRST, hit_real=0.25)
        | {"codes": {"503 no_replica": 12}}
    },
    "worker": {"data": [total("w0", gauges={"kv_usage": 0.2, "running": 1.0}), total("w1", gauges={"running": 7.0})]},
    "adapter": {
        "data": [
            total("sql/v1", requests=120, first_token_s=FIRST, hit_real=0.9),
            total("law/v1", requests=300, errors=6, hit_real=0.1),
            total("old/v1", requests=1),
        ]
    },
    "base": {"data": [total("tiny", requests=60)]},
    "routers": {
        "data": [
            {"state": "live", "now": {"waiting": {"acme": 2}, "held": {"": 1}, "in_flight": 4, "circuits": {}}},
            {"state": "live", "now": {"waiting": {"acme": 1}, "in_flight": 1, "circuits": {"w1": "open"}}},
            {"state": "ended", "now": {"waiting": {"acme": 9}}},
        ]
    },
}
SNAPSHOT = snapshot_of(
    [worker("w0", "sql/v1"), worker("w1")],
    [adapter("sql/v1"), adapter("law/v1"), adapter("broken/v1", ready=0, error="no such file", state="failed")],
    TRAFFIC,
    at=0.0,
    range_s=60.0,
)
DECISION: Mapping[str, Any] = {
    "request_id": "request-7", "adapter": "sql/v1", "worker_id": "w1", "policy": "affinity", "cached_tokens": 96,
    "prompt_tokens": 100, "trust": "exact", "tokens_from": "tokenizer", "kappa": 1.0, "rho": 0.5, "note": "",
    "scores": [
        {"worker_id": name, "winner": name == "w1", "passed_over": False, "trust": "exact", "cached_tokens": 96,
         "depth_blocks": 6, "cost_s": cost, "prefill_s": 0.1, "adapter_s": 0.2, "queue_s": 0.3, "decode_s": 0.4}
        for name, cost in (("w0", 1.5), ("w1", 0.75))
    ],
    "rejected": [{"worker_id": "w2", "reason": "circuit open"}],
}  # fmt: skip


def words(snapshot: TopSnapshot, **view: Any) -> list[str]:
    """The lines of a snapshot, 80 columns wide unless said."""
    return [line.text for line in frame(snapshot, TopView(**({"width": 80} | view)))]


def test_the_fleets_line_has_rates_first_tokens_hit_share_errors_and_who_waits() -> None:
    text = " ".join(words(SNAPSHOT))
    for part in ("requests/s 10", "p50 0.123 s p95 0.456 s", "tokens/s 100 out", "hit share 25%", "errors/s 0.2"):
        assert part in text
    assert "503 no_replica x12" in text
    assert "in flight 5" in text
    assert "acme 3 for room, 0 for an adapter" in text
    assert "no tenant 0 for room, 1 for an adapter" in text
    assert "2 of 2 workers ready  3 adapters  2 routers" in text


def order_of(lines: list[str], *names: str) -> list[str]:
    """These names in the order of their rows."""
    found = [line.split()[0] for line in lines if line.strip()]
    return [name for name in found if name in names]


@pytest.mark.parametrize(
    ("by", "first"),
    [
        (AdapterOrder.requests, ["law/v1", "sql/v1", "broken/v1"]),
        (AdapterOrder.first_token, ["sql/v1", "broken/v1", "law/v1"]),
        (AdapterOrder.errors, ["law/v1", "sql/v1", "broken/v1"]),
        (AdapterOrder.hit_share, ["law/v1", "sql/v1", "broken/v1"]),
        (AdapterOrder.name, ["broken/v1", "law/v1", "sql/v1"]),
    ],
)
def test_adapters_are_sorted_by_the_chosen_figure(by: AdapterOrder, first: list[str]) -> None:
    found = order_of(words(SNAPSHOT, adapters_by=by), *first)
    if by is AdapterOrder.first_token:
        assert found[0] == "sql/v1"
    else:
        assert found == first


def test_workers_are_sorted_by_load_or_kv_use() -> None:
    assert order_of(words(SNAPSHOT), "w0", "w1") == ["w1", "w0"]
    assert order_of(words(SNAPSHOT, workers_by=WorkerOrder.kv), "w0", "w1") == ["w0", "w1"]


def test_an_open_circuit_deleted_adapters_and_the_base_model_are_rows() -> None:
    lines = words(SNAPSHOT, width=200)
    assert any(line.startswith("w1") and " open " in line for line in lines)
    assert any(line.startswith("old/v1") and " gone " in line for line in lines)
    assert any(line.startswith("base:tiny") for line in lines)
    assert any("no such file" in line for line in lines)


@given(st.integers(40, 240), st.sampled_from([WORKER_COLUMNS, ADAPTER_COLUMNS]))
def test_at_every_width_each_value_is_there_and_no_line_is_wider(width: int, columns: Any) -> None:
    items: Any = SNAPSHOT.workers if columns is WORKER_COLUMNS else SNAPSHOT.adapters
    lines = [line.text for line in rows(columns, items, width)]
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    for item in items:
        for column in columns:
            assert column.cell(item) in text or column.cell(item) == "-"


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 99)), min_size=1, max_size=12), st.integers(1, 120))
def test_a_column_leaves_only_after_all_less_important_ones(columns: list[tuple[int, int]], room: int) -> None:
    widths, importance = [width for width, _ in columns], [much for _, much in columns]
    kept = fitting(widths, importance, room)
    left = set(range(len(columns))) - set(kept)
    assert 0 in kept
    assert all(importance[one] >= importance[other] for one in set(kept) - {0} for other in left)
    assert sum(widths[index] + 2 for index in kept) - 2 <= max(room, widths[0])


def test_the_most_important_columns_are_in_the_row_at_80_columns() -> None:
    heads = [line for line in words(SNAPSHOT) if line.startswith(("worker ", "adapter "))]
    assert {"kv", "run", "wait", "free", "circuit"} <= set(heads[0].split())
    assert {"req/s", "err/s", "ready", "state"} <= set(heads[1].split())


def test_a_name_wider_than_the_screen_is_continued_not_cut() -> None:
    name = "team/" + "x" * 70
    lines = [line.text for line in rows([TopColumn("a", 9, str), TopColumn("b", 1, lambda _: "7")], [name], 40)]
    assert "".join(lines[1:]).replace(" ", "") == name + "b7"


def test_without_the_right_to_read_traffic_the_rest_is_shown_with_the_reason() -> None:
    alone = snapshot_of([worker("w0")], [adapter("sql/v1")], {}, at=0.0, range_s=60.0, note="no traffic: needs view")
    lines = words(alone)
    assert "no traffic: needs view" in lines
    assert any(line.startswith("sql/v1") for line in lines)


def test_a_snapshot_is_json() -> None:
    assert json.loads(json.dumps(asdict(SNAPSHOT)))["fleet"]["requests_per_s"] == 10.0


@pytest.mark.parametrize("width", [40, 80, 160])
def test_an_explanation_has_the_winner_first_and_every_term(width: int) -> None:
    lines = [line.text for line in explanation(DECISION, width)]
    assert max(map(len, lines)) <= width
    text = " ".join(lines)
    assert text.index("-> w1") < text.index("0.7500") < text.index("1.5000")
    for part in ("request-7", "prefill s", "0.2000", "queue s", "circuit open: w2"):
        assert part in text


def app_of(*reads: TopSnapshot | CommandFailed, decision: Mapping[str, Any] | None = DECISION) -> TopApp:
    """The screen over these snapshots; it never reads by itself."""
    left = list(reads)

    def read() -> TopSnapshot:
        one = left.pop(0)
        if isinstance(one, CommandFailed):
            raise one
        return one

    return TopApp(SNAPSHOT, read, lambda: decision, every_s=86_400)


def seen(app: TopApp) -> str:
    """The text on the screen."""
    return "\n".join(line.text for line in app.lines())


async def test_keys_sort_pause_and_quit() -> None:
    app = app_of()
    async with app.run_test(size=(80, 40)) as pilot:
        assert "by requests" in seen(app)
        await pilot.press("s")
        assert "by tokens" in seen(app)
        await pilot.press("w")
        assert "by kv" in seen(app)
        await pilot.press("space")
        assert "PAUSED" in seen(app)
        app.action_read()
        await app.workers.wait_for_complete()
        assert app.error == "", "a paused screen reads nothing"
        assert "requests/s 10" in app.screen.query_one("#fleet").render().plain  # type: ignore[attr-defined]
        await pilot.press("q")
    assert app.return_code == 0


async def test_a_failed_read_is_shown_above_the_last_figures_until_the_next() -> None:
    app = app_of(CommandFailed("orchestrator away"), replace(SNAPSHOT, routers=7))
    async with app.run_test(size=(80, 40)):
        app.action_read()
        await app.workers.wait_for_complete()
        assert seen(app).startswith("orchestrator away\n")
        assert "requests/s 10" in seen(app)
        app.action_read()
        await app.workers.wait_for_complete()
        assert "orchestrator away" not in seen(app)
        assert "7 routers" in seen(app)


async def test_one_key_explains_the_last_request_and_escape_goes_back() -> None:
    app = app_of()
    async with app.run_test(size=(80, 40)) as pilot:
        await pilot.press("e")
        assert "-> w1" in seen(app)
        await pilot.press("escape")
        assert "ADAPTERS" in seen(app)
    app = app_of(decision=None)
    async with app.run_test(size=(80, 40)) as pilot:
        await pilot.press("e")
        assert "decided nothing yet" in seen(app)


async def test_the_screen_is_laid_out_anew_for_another_width() -> None:
    app = app_of()
    async with app.run_test(size=(80, 40)) as pilot:
        assert max(map(len, seen(app).splitlines())) <= 79
        await pilot.resize_terminal(120, 40)
        assert app.view.width == 119
