"""`GET /v1/usage`: groups, pages, CSV, costs, and what a tenant's key reads."""

import csv
import io
import json

import pytest

from lorafleet.keys.key_files import hash_key
from orchestrator.api.usage import read_prices
from orchestrator.core.errors import OrchestratorUnavailable
from orchestrator.model.ledger import SUMS, UsageBatch, UsageKey, UsageSums
from tests.orchestrator.api.answers import code_of

NOW = 1_800_001_000  # the conftest's wall clock: 2027-01-15T08:16:40Z
HOUR = NOW // 3600 * 3600
YEAR = {"since": "2026-03-01", "until": "2028-01-01"}
SOURCES = iter(range(1_000_000))


async def add(service, *rows):
    """Rows of the ledger: (hours ago, tenant, key, adapter, base model, sums)."""
    found = {UsageKey(HOUR - 3600 * ago, *names[:3], "d1", names[3]): sums for ago, *names, sums in rows}
    await service.built.ledger.add([UsageBatch(source=f"s{next(SOURCES)}", number=1, rows=found)])


def tokens(count, **more):
    return UsageSums(requests=1, succeeded=1, prompt_tokens=count, cached_tokens=count // 2, **more)


@pytest.fixture
async def used(service):
    await add(
        service,
        (0, "acme", "k1", "sql", "qwen", tokens(100, prefill_s=0.12345)),
        (0, "acme", "k2", "", "llama", tokens(10)),
        (1, "globex", "k3", "sql", "qwen", tokens(1000)),
        (24 * 40, "acme", "k1", "sql", "qwen", tokens(7)),
        (0, "", "k4", "", "qwen", tokens(1)),
    )
    return service


async def read(service, bearer="", **query):
    headers = {"authorization": f"Bearer {bearer}"} if bearer else {}
    answer = await service.http.get("/v1/usage", params=query, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def prompts(service, bearer="", **query):
    """group -> prompt tokens."""
    found = await read(service, bearer, **query)
    return {tuple(item["group"].values()): item["usage"]["prompt_tokens"] for item in found["data"]}


async def test_usage_is_this_months_sum_unless_it_is_asked_otherwise(used):
    found = await read(used)
    assert (found["since"], found["until"]) == ("2027-01-01T00:00:00.000Z", "2027-01-15T08:16:40.000Z")
    (item,) = found["data"]
    assert item["group"] == {}
    assert (item["usage"]["requests"], item["usage"]["prompt_tokens"]) == (4, 1111)
    assert (item["usage"]["prefill_s"], item["cost"], found["currency"], found["next"]) == (0.123, None, None, None)
    assert await prompts(used, **YEAR) == {(): 1118}


async def test_usage_is_grouped_and_filtered_by_each_field(used):
    assert await prompts(used, group_by="tenant", **YEAR) == {("",): 1, ("acme",): 117, ("globex",): 1000}
    assert await prompts(used, group_by=["base_model", "tenant"], adapter="sql", **YEAR) == {
        ("qwen", "acme"): 107,
        ("qwen", "globex"): 1000,
    }
    assert await prompts(used, group_by="hour", tenant="acme", key="k1", **YEAR) == {
        ("2026-12-06T08:00:00Z",): 7,
        ("2027-01-15T08:00:00Z",): 100,
    }
    assert await prompts(used, group_by=["version", "version"], base_model="llama") == {("d1",): 10}
    assert await prompts(used, tenant="", group_by="key") == {("k4",): 1}
    assert await prompts(used, since="2027-01-15T08:00:00Z", until="2027-01-15T08:00:01Z") == {(): 111}
    assert await prompts(used, since="0001-01-01T00:00:00+14:00", until="9999-12-31T23:59:59-12:00") == {(): 1118}


@pytest.mark.parametrize("group_by", [["tenant"], ["hour", "tenant"], ["key", "base_model"]])
async def test_pages_of_any_size_have_each_group_once(used, group_by):
    whole = await prompts(used, group_by=group_by, **YEAR)
    for limit in (1, 2, 3, len(whole)):
        paged, cursor = [], None
        while True:
            page = await read(used, group_by=group_by, limit=limit, **YEAR, **({"cursor": cursor} if cursor else {}))
            assert 0 < len(page["data"]) <= limit
            paged += [(tuple(item["group"].values()), item["usage"]["prompt_tokens"]) for item in page["data"]]
            if (cursor := page["next"]) is None:
                break
        assert paged == list(whole.items())


@pytest.mark.parametrize("cursor", ["x", "[]", "[1]", '["a","b"]', '["\\u0000"]', "{}", '["a", 1]'])
async def test_a_cursor_of_another_question_is_refused(used, cursor):
    answer = await used.http.get("/v1/usage", params={"group_by": "tenant", "cursor": cursor})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "cursor"


async def test_an_hour_beyond_any_store_is_refused_as_a_cursor(used):
    answer = await used.http.get("/v1/usage", params={"group_by": "hour", "cursor": f"[{1 << 63}]"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cursor")


@pytest.mark.parametrize(
    ("query", "accept"), [({"format": "csv"}, "*/*"), ({}, "text/csv"), ({"format": "csv", "limit": 1}, "*/*")]
)
async def test_a_csv_file_has_all_groups_without_pages(used, monkeypatch, query, accept):
    monkeypatch.setattr("orchestrator.api.usage._CSV_GROUPS", 1)
    asked = {"group_by": ["tenant", "key"]} | YEAR | query
    answer = await used.http.get("/v1/usage", params=asked, headers={"accept": accept})
    assert answer.headers["content-type"].startswith("text/csv")
    assert 'filename="usage-2026-03-01.csv"' in answer.headers["content-disposition"]
    lines = list(csv.DictReader(io.StringIO(answer.text)))
    assert [(line["tenant"], line["key"], int(line["prompt_tokens"])) for line in lines] == [
        ("", "k4", 1),
        ("acme", "k1", 107),
        ("acme", "k2", 10),
        ("globex", "k3", 1000),
    ]
    assert lines[1].keys() == {"tenant", "key", *SUMS}


async def test_json_is_answered_where_both_are_accepted_and_json_is_named(used):
    answer = await used.http.get("/v1/usage", params={"format": "json"}, headers={"accept": "text/csv"})
    assert answer.json()["data"]


PRICES = """
currency: EUR
default: {per_million_prompt_tokens: 2000000, per_million_cached_tokens: 1000000}
base_models:
  llama: {per_million_prompt_tokens: 100000000}
"""


@pytest.fixture
async def priced(open_service, tmp_path):
    (tmp_path / "prices.yaml").write_text(PRICES)
    service = open_service(price_file=tmp_path / "prices.yaml")
    await add(
        service,
        (0, "acme", "k1", "sql", "qwen", tokens(100)),
        (0, "acme", "k2", "", "llama", tokens(10)),
        (0, "globex", "k3", "", "qwen", tokens(4)),
    )
    return service


async def test_each_base_models_use_costs_by_its_own_prices_however_it_is_grouped(priced, tmp_path):
    for group_by in (["tenant"], ["tenant", "base_model"], []):
        for limit in (1, 10):
            costs, query = {}, {"group_by": group_by, "limit": limit}
            while True:
                found = await read(priced, **query)
                assert found["currency"] == "EUR"
                costs |= {tuple(item["group"].values()): item["cost"] for item in found["data"]}
                if found["next"] is None:
                    break
                query["cursor"] = found["next"]
            assert sum(costs.values()) == 150 + 500 + 6
            assert group_by != ["tenant"] or costs == {("acme",): 650, ("globex",): 6}
    answer = await priced.http.get("/v1/usage", params={"group_by": "tenant", "format": "csv"})
    lines = list(csv.DictReader(io.StringIO(answer.text)))
    assert [(line["cost"], line["currency"]) for line in lines] == [("650.0", "EUR"), ("6.0", "EUR")]


async def test_a_changed_price_file_holds_from_the_next_question_and_a_broken_one_is_named(priced, tmp_path):
    file = tmp_path / "prices.yaml"
    file.write_text("currency: CHF\ndefault: {per_million_cached_tokens: 1000000}\n")
    found = await read(priced)
    assert (found["currency"], found["data"][0]["cost"]) == ("CHF", 57)
    file.write_text("currency: CHF\nper_token: 3\n")
    answer = await priced.http.get("/v1/usage")
    assert (answer.status_code, code_of(answer)) == (503, "price_file_invalid")
    assert "per_token" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "text", [None, "", "[]", "currency: EUR\ndefault: {per_engine_second: -1}", "currency: [", "default: {}"]
)
def test_a_price_file_that_is_none_is_refused_by_name(tmp_path, text):
    file = tmp_path / "prices.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(OrchestratorUnavailable, match=r"(?s)price file .*prices\.yaml: .*; expected `currency"):
        read_prices(file)


async def test_a_tenants_key_reads_its_tenants_rows_alone(open_service, tmp_path):
    keys = [
        {"sha256": hash_key("boss"), "scopes": ["admin"]},
        {"sha256": hash_key("acme"), "tenant": "acme", "scopes": ["tenant-admin"]},
    ]
    (tmp_path / "keys.yaml").write_text(json.dumps({"keys": keys}))
    service = open_service(key_files=(tmp_path / "keys.yaml",))
    await add(
        service,
        (0, "acme", "k1", "sql", "qwen", tokens(100)),
        (0, "globex", "k3", "sql", "qwen", tokens(1000)),
        (0, "", "k4", "sql", "qwen", tokens(1)),
    )
    by_tenant = {"group_by": "tenant"}
    assert await prompts(service, "boss", **by_tenant) == {("",): 1, ("acme",): 100, ("globex",): 1000}
    assert await prompts(service, "acme", **by_tenant) == {("acme",): 100}
    assert await prompts(service, "acme", group_by="key", tenant="acme") == {("k1",): 100}
    acme = {"authorization": "Bearer acme"}
    for other in ("globex", ""):
        answer = await service.http.get("/v1/usage", params={"tenant": other}, headers=acme)
        assert (answer.status_code, code_of(answer)) == (403, "fleet_key_needed")
    answer = await service.http.get("/v1/usage", params={"format": "csv", **by_tenant}, headers=acme)
    assert "globex" not in answer.text
