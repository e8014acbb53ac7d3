"""The table of vLLM's KV connectors, and the verdicts on configurations, running engines and the setting."""

import importlib.util
import re
from itertools import product
from pathlib import Path

import pytest

from lorafleet.engine.metrics_page import parse_metrics, transfer_config
from lorafleet.identity import adapter_salt
from lorafleet.kv.connectors import (
    CONNECTORS,
    NO_CONNECTOR,
    OTHER_PACKAGES,
    KvConnector,
    apply_setting,
    connector_verdict,
    verdict_of_running_engine,
)

SPEC = importlib.util.find_spec("vllm")
PACKAGE = Path(SPEC.origin).parent if SPEC is not None and SPEC.origin else None
V1 = "distributed/kv_transfer/kv_connector/v1"
# Names that vLLM 0.32 has no more.
OLDER = {"SharedStorageConnector"}

needs_vllm = pytest.mark.skipif(PACKAGE is None, reason="vLLM is not installed")


@needs_vllm
def test_table_has_each_connector_that_vllm_registers():
    factory = (PACKAGE / V1).parent / "factory.py"
    registered = set(re.findall(r'register_connector\(\s*"(\w+)"', factory.read_text()))
    assert len(registered) > 10
    assert registered - CONNECTORS.keys() == set(), "read what is in their keys, and add them"
    assert CONNECTORS.keys() - registered == OLDER


@needs_vllm
@pytest.mark.parametrize("name", CONNECTORS)
def test_source_of_each_row_is_in_vllm(name):
    file, _, function = CONNECTORS[name].source.partition(",")[0].partition(" ")
    text = (PACKAGE / V1 / file).read_text()
    if function:
        assert f"def {function}(" in text or f"{function}(" in text


def of(name: str, **more) -> dict:
    return {"kv_connector": name, "kv_role": "kv_both", **more}


def multi(*parts: dict) -> dict:
    return of("MultiConnector", kv_connector_extra_config={"connectors": list(parts)})


@pytest.mark.parametrize(
    ("config", "separation", "said"),
    [
        ({}, "safe", ""),
        ({"kv_connector": None}, "safe", ""),
        (of("OffloadingConnector"), "safe", "OffloadingConnector"),
        (of("NixlConnector"), "safe", "NixlConnector"),
        (of("LMCacheMPConnector"), "salted", "tokens and `cache_salt`"),
        (of("LMCacheConnectorV1"), "refused", "its key: tokens"),
        (of("ExampleConnector"), "refused", "tokens and images"),
        (of("SharedStorageConnector"), "refused", "tokens and images"),
        (of("MyConnector"), "refused", "it is not known how KV connector MyConnector keeps adapters apart"),
        # A module comes before vLLM's own registry, so the name alone decides nothing.
        (of("OffloadingConnector", kv_connector_module_path="mine.kv"), "refused", "OffloadingConnector of mine.kv"),
        (
            of("LMCacheMPConnector", kv_connector_module_path="lmcache.integration.vllm.lmcache_mp_connector"),
            "salted",
            "LMCacheMPConnector",
        ),
        (of("MultiConnector", kv_connector_module_path="mine.kv"), "refused", "MultiConnector of mine.kv"),
        (multi(of("OffloadingConnector"), of("NixlConnector")), "safe", "MultiConnector"),
        (multi(of("OffloadingConnector"), of("LMCacheMPConnector")), "salted", "LMCacheMPConnector"),
        (multi(of("LMCacheMPConnector"), of("ExampleConnector")), "refused", "ExampleConnector"),
        (multi(of("OffloadingConnector"), of("Mine")), "refused", "Mine"),
        (multi(of("OffloadingConnector"), multi(of("HF3FSKVConnector"))), "refused", "HF3FSKVConnector"),
        (multi(), "refused", "must be a list of connectors"),
        (of("MultiConnector"), "refused", "must be a list of connectors"),
        (of("MultiConnector", kv_connector_extra_config={"connectors": ["Nixl"]}), "refused", "found"),
    ],
)
def test_configuration_is_judged_by_its_worst_part(config, separation, said):
    found = connector_verdict(config)
    assert (found.separation, bool(found.refusal)) == (separation, separation == "refused")
    assert said in found.reason


@pytest.mark.parametrize(
    ("setting", "name", "separation"),
    [
        ("auto", "LMCacheMPConnector", "salted"),
        ("auto", "Mine", "refused"),
        ("always", "OffloadingConnector", "salted"),
        ("always", "Mine", "salted"),
        ("always", "ExampleConnector", "refused"),  # it takes no notice of salts
        ("never", "LMCacheMPConnector", "safe"),
        ("never", "ExampleConnector", "safe"),
        ("no_adapters", "OffloadingConnector", "refused"),
    ],
)
def test_setting_decides_but_salts_no_connector_that_ignores_salts(setting, name, separation):
    assert apply_setting(setting, connector_verdict(of(name))).separation == separation
    assert apply_setting("no_adapters", NO_CONNECTOR).refusal == "engine_salt is no_adapters"
    assert apply_setting("auto", NO_CONNECTOR) == NO_CONNECTOR


PLAIN = 'vllm:cache_config_info{block_size="16",kv_offloading_backend="native",kv_offloading_size="None"} 1.0\n'
NOT_ASKED = 'vllm:external_prefix_cache_queries_total{engine="0",model_name="m"} 0.0\n'
ASKED = 'vllm:external_prefix_cache_queries_total{engine="0",model_name="m"} 512.0\n'
FETCHES = 'vllm:num_requests_kv_fetch_by_stage{engine="0",model_name="m",stage="in_progress"} 0.0\n'


@pytest.mark.parametrize(
    ("page", "separation"),
    [
        ("", "safe"),
        (PLAIN + NOT_ASKED, "safe"),
        (PLAIN + NOT_ASKED + FETCHES, "refused"),
        (PLAIN + ASKED, "refused"),
        (PLAIN.replace("None", "4.0") + FETCHES, "safe"),
        (PLAIN.replace("None", "4.0").replace("native", "lmcache") + FETCHES, "salted"),
        (PLAIN.replace("None", "4.0").replace("native", "other") + FETCHES, "refused"),
    ],
)
def test_a_running_engines_metrics_show_its_connector(page, separation):
    scrape = parse_metrics(page)
    found = verdict_of_running_engine(None, offloading=scrape.offloading, has_connector=scrape.has_connector)
    assert found.separation == separation
    if found.refusal:
        assert "engine_salt" in found.refusal or "other" in found.refusal


def test_engines_own_configuration_comes_before_its_metrics():
    def told(body: bytes) -> str:
        return verdict_of_running_engine(transfer_config(body), offloading="", has_connector=True).separation

    assert told(b'{"vllm_config": {"kv_transfer_config": {"kv_connector": "NixlConnector"}}}') == "safe"
    assert told(b'{"vllm_config": {"kv_transfer_config": null}}') == "safe"
    for other in (
        b"",
        b"[]",
        b'{"vllm_config": "a text"}',
        b'{"vllm_config": {}}',
        b'{"vllm_config": {"kv_transfer_config": 1}}',
    ):
        assert told(other) == "refused"


def test_salts_are_different_wherever_adapter_or_clients_salt_are():
    names = ("", "a@1", "a@12", "b/c@1", "team/sql-expert/v1@3f9a1c2b77aa")
    salts = ("", "1", "pepper", "a@1", "é" * 100)
    found = {adapter_salt(name, salt) for name, salt in product(names, salts)}
    assert len(found) == len(names) * len(salts)
    assert adapter_salt("") == ""
    # vLLM 0.32 and LMCache 0.5.6 take no longer ones, and neither of these.
    assert all(len(salt) <= 128 and not set(salt) & set("@/\\\0") for salt in found)
    # A salt of a base model's prompt is changed, too: a client cannot send what adapters have.
    assert all(adapter_salt("", salt) != salt for salt in found if salt)
    # All routers of a fleet make the same.
    assert adapter_salt("a@1", "s") == "77f02b5caa30944bd382cfbc9072929ddfea4df7ceadc0f86baaedf4d1963d46"


def test_each_connectors_separation_matches_its_key():
    rows: list[KvConnector] = [
        *CONNECTORS.values(),
        *(row for rows in OTHER_PACKAGES.values() for row in rows.values()),
    ]
    assert all(row.key and row.source for row in rows)
    assert all(
        "adapter" in row.key or row.key.startswith(("none", "the block ids"))
        for row in rows
        if row.separation == "safe"
    )
