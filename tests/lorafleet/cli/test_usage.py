"""`lorafleet usage`."""

import asyncio
import csv
import io
import json
from collections.abc import Iterator

import pytest

from orchestrator.app import build
from orchestrator.config import OrchestratorSettings
from orchestrator.model.ledger import UsageBatch, UsageKey, UsageSums
from orchestrator.store.sqlite import SqliteBackend
from tests.logs import no_logs
from tests.lorafleet.cli.conftest import Run
from tests.serving import serving_in_thread

HOUR = 1_794_996_000  # 2026-11-18T10:00:00Z
YEAR = ("--since", "2026-01-01", "--until", "2027-01-01")


@pytest.fixture(scope="module")
def orchestrator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An orchestrator with prices, and rows of two tenants."""
    folder = tmp_path_factory.mktemp("orchestrator")
    prices = folder / "prices.yaml"
    prices.write_text("currency: EUR\ndefault: {per_million_completion_tokens: 2000000}\n")
    sums = UsageSums(requests=3, succeeded=2, failed=1, prompt_tokens=10, completion_tokens=4, decode_s=0.5)
    rows = {UsageKey(HOUR, tenant, "k1", "sql/v1", "d1", "tiny"): sums for tenant in ("acme", "globex")}
    backend = SqliteBackend(folder / "store.db")
    asyncio.run(backend.add_usage([UsageBatch(source="r0", number=1, rows=rows)], float(HOUR)))
    backend.close()
    settings = OrchestratorSettings(store=folder / "store.db", price_file=prices, usage_kept_days=10_000)
    with no_logs(), serving_in_thread(lambda: build(settings).app) as url:
        yield url


def test_usage_is_a_table_by_tenant_with_costs(ask: Run) -> None:
    table = ask("usage", *YEAR).out
    assert "cost (EUR)" in table
    assert [line.split()[:2] for line in table.splitlines() if "acme" in line or "globex" in line] == [
        ["acme", "3"],
        ["globex", "3"],
    ]


def test_usage_is_grouped_and_filtered_as_flags_say(ask: Run) -> None:
    found = json.loads(ask("usage", "--by", "hour,base-model", "--by", "key", "--tenant", "acme", *YEAR, "--json").out)
    (item,) = found["data"]
    assert item["group"] == {"hour": "2026-11-18T10:00:00Z", "base_model": "tiny", "key": "k1"}
    assert (item["usage"]["requests"], item["cost"]) == (3, 8)
    assert json.loads(ask("usage", "--since", "2026-11-19", "--until", "2026-11-20", "--json").out)["data"] == []
    assert ask("usage", "--by", "tenant", "--by", "adapter", *YEAR, "-o", "name").out == (
        "acme\tsql/v1\nglobex\tsql/v1\n"
    )


def test_a_table_that_is_cut_says_how_to_get_the_rest_and_csv_has_all(ask: Run) -> None:
    cut = ask("usage", *YEAR, "--limit", "1", "-o", "name")
    assert cut.out == "acme\n"
    assert "--limit" in cut.err
    lines = list(csv.DictReader(io.StringIO(ask("usage", *YEAR, "--limit", "1", "--csv").out)))
    assert [(line["tenant"], line["cost"], line["currency"]) for line in lines] == [
        ("acme", "8.0", "EUR"),
        ("globex", "8.0", "EUR"),
    ]


def test_an_unknown_field_is_refused_with_the_known_ones(run: Run, orchestrator: str) -> None:
    result = run("--orchestrator-url", orchestrator, "usage", "--by", "colour")
    assert result.status == 1
    assert "base_model" in result.err
