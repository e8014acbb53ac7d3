"""JSON bodies with very many values are counted and refused before they are parsed."""

import json

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from lorafleet.service.http.json_count import ITEMS, VALUES, has_more
from orchestrator.model.agents import Heartbeat
from orchestrator.model.usage import CountBatch, CountedRow, RequestCounts, UsageReport
from router.fleet.traffic import MOST_SENT_ROWS
from tests.lorafleet.http_server.test_cross_site import agent, orchestrator
from tests.properties import examples
from tests.router.doubles import error_of

TEXTS = st.text(st.sampled_from(['"', "\\", "{", "[", "]", "}", ",", ":", "a", "é", "\n"]), max_size=8)
JSON = st.recursive(
    st.one_of(TEXTS, st.integers(), st.floats(allow_nan=False), st.booleans(), st.none()),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
)


def counted(value) -> int:
    """Strings, objects, lists and the commas in these."""
    if isinstance(value, dict):
        return 1 + max(0, len(value) - 1) + len(value) + sum(map(counted, value.values()))
    if isinstance(value, list):
        return 1 + max(0, len(value) - 1) + sum(map(counted, value))
    return isinstance(value, str)


@settings(max_examples=examples(300))
@given(JSON, st.integers(0, 40), st.booleans())
def test_values_are_counted_exactly_whatever_strings_contain(value, most, is_ascii):
    body = json.dumps(value, ensure_ascii=is_ascii).encode()
    assert has_more(body, most, VALUES) is (counted(value) > most)
    assert has_more(body, most, ITEMS) <= has_more(body, most, VALUES)


USAGE = {"router_id": "r", "boot_id": "b", "seq": 1, "revision_seen": 1}
MANY = {
    "fields": {f"k{number}": 0 for number in range(60_000)},
    "objects": USAGE | {"batches": [{}] * 60_000},
    "numbers": USAGE | {"batches": [0] * 110_000},
    "texts": USAGE | {"batches": [""] * 60_000},
    "empty lists": [[]] * 60_000,
    "entries": USAGE | {"waits_s": {f"w{number}": "x" for number in range(40_000)}},
}


async def refused(app, path, body) -> tuple[int, str]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        return error_of(await client.post(path, content=body, headers={"content-type": "application/json"}))


@pytest.mark.parametrize("path", ["/v1/admin/load_lora", "/v1/admin/drain"])
async def test_an_agent_refuses_bodies_of_many_values_unread(path, tmp_path):
    async with agent(tmp_path) as app:
        for name, value in MANY.items():
            assert await refused(app, path, json.dumps(value)) == (413, "body_too_large"), name
        # One text as large is read in no time.
        large = json.dumps(USAGE | {"router_id": 'x,{["' * 1_000_000})
        assert (await refused(app, "/v1/admin/load_lora", large))[0] == 400


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/adapters", "/v1/adapters:batch", "/v1/workers/register", "/v1/placements/plan"])
async def test_an_orchestrator_refuses_bodies_of_many_values_unread(path, tmp_path):
    async with orchestrator(tmp_path) as app:
        for name, value in MANY.items():
            body = json.dumps([value] * 3)
            assert await refused(app, path, body) == (413, "body_too_large"), name


def test_the_largest_usage_report_is_accepted():
    """What a router that the orchestrator does not answer sends: batches of many adapters and keys."""
    counts = RequestCounts(requests=9, sent=9, prompt_tokens=9, output_tokens=9, waited_s=1.0, work_s=1.0)
    counts.first_token = counts.whole = dict.fromkeys(range(9), 1)
    row = CountedRow(adapter="a/v1", base_model="qwen", worker="w0", tenant="acme", key="k", counts=counts)
    assert (MOST_SENT_ROWS + 5_001) * (counted(msgspec.to_builtins(row, str_keys=True)) + 1) < 3_000_000


@pytest.mark.parametrize(
    ("kind", "body", "faults"),
    [
        (UsageReport, USAGE | {"batches": [{}] * 1000}, 1),
        (UsageReport, USAGE | {"batches": [0] * 1000}, 1),
        (CountBatch, {"number": 1, "rows": [{"counts": {"requests": -1}}] * 1000}, 1),
        (UsageReport, USAGE | {"waits_s": {f"w{number}": "x" for number in range(10_001)}}, 1),
    ],
)
def test_the_first_fault_of_a_list_is_reported(kind, body, faults):
    with pytest.raises(ValidationError) as refused:
        TypeAdapter(kind).validate_python(body)
    assert refused.value.error_count() == faults


def test_a_heartbeat_with_many_faults_reports_the_first():
    with pytest.raises(ValidationError) as refused:
        Heartbeat.model_validate({"metadata": {"lora": {"loaded_loras": [{}] * 1000}}})
    assert refused.value.error_count() < 30
