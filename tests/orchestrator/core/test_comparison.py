"""The targets of an alias side by side, without a rollout: by the rule that rolls back."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.keys.key_files import hash_key
from lorafleet.telemetry.histogram import bucket_of
from orchestrator.core.comparison import GUARD, baseline_of, worse_targets
from orchestrator.core.rollout import regression_reason, tally_of
from orchestrator.model.served_names import AliasTarget
from orchestrator.model.usage import RequestCounts


def sums(requests, *, errors=0, refusals=0, first_token_s=0.1):
    codes = {"502 engine": errors, "429 saturated max_wait_s": refusals}
    return RequestCounts(
        requests=requests,
        sent=requests - refusals,
        engine_errors=errors,
        codes={code: count for code, count in codes.items() if count},
        first_token={bucket_of(first_token_s): requests},
        engine_first_token_s=first_token_s * requests,
    )


_SUMS = st.builds(
    sums,
    st.integers(0, 400),
    errors=st.integers(0, 100),
    refusals=st.integers(0, 50),
    first_token_s=st.sampled_from([0.05, 0.1, 1.0]),
)


@given(st.lists(_SUMS, min_size=2, max_size=4), st.lists(st.integers(1, 9), min_size=4, max_size=4))
def test_a_target_is_worse_exactly_where_a_rollout_would_go_back(traffic, weights):
    targets = tuple(
        AliasTarget(f"v{n}", float(weight)) for n, weight in zip(range(len(traffic)), weights, strict=False)
    )
    by_name = {target.lora_id: one for target, one in zip(targets, traffic, strict=True)}
    found, baseline = worse_targets(targets, by_name), baseline_of(targets)
    old = tally_of(by_name[baseline])
    for name, one in by_name.items():
        expected = None if name == baseline else regression_reason(GUARD, old, tally_of(one))
        assert found.get(name) == (expected if old.requests >= GUARD.min_requests else None)


def test_refused_requests_are_no_requests_of_a_version():
    tally = tally_of(sums(100, errors=5, refusals=50))
    assert (tally.requests, tally.error_rate) == (50, 0.1)


def report(*rows):
    whole = [{"base_model": "qwen", "worker": "w0", "adapter": name, "counts": counts} for name, counts in rows]
    seen = {"router_id": "r0", "boot_id": "b0", "seq": 1, "revision_seen": 1}
    return seen | {"batches": [{"number": 1, "age_s": 10, "rows": whole}]}


def used(lora_id, requests, first_token_s):
    return lora_id, {
        "requests": requests,
        "sent": requests,
        "first_token": {bucket_of(first_token_s): requests},
        "engine_first_token_s": first_token_s * requests,
        "decode_s": requests * 0.5,
        "decode_tokens": requests * 50,
    }


async def test_an_alias_with_weights_compares_its_targets(service):
    for version in ("sql/v1", "sql/v2"):
        await service.register(version)
    targets = [{"lora_id": "sql/v1", "weight": 9}, {"lora_id": "sql/v2", "weight": 1}]
    await service.http.put("/v1/aliases/sql", json={"targets": targets, "place_s": 0})
    await service.http.post("/v1/usage", json=report(used("sql/v1", 900, 0.1), used("sql/v2", 100, 0.4)))
    answer = await service.http.get("/v1/aliases/sql/comparison?range_s=300")
    found = answer.json()
    assert (found["baseline"], found["needed"]) == ("sql/v1", GUARD.min_requests)
    old, new = found["data"]
    assert (old["share"], new["share"]) == (0.9, 0.1)
    assert (old["worse"], new["worse"]) == ("", "first token after 0.4 s on average, against 0.1 s")
    assert (new["total"]["requests"], new["total"]["token_s"]) == (100, pytest.approx(0.01))
    assert (await service.http.get("/v1/aliases/none/comparison")).status_code == 404


async def test_a_tenant_compares_no_target_that_others_may_use(open_service, tmp_path):
    path = tmp_path / "keys.yaml"
    entries = [
        {"sha256": hash_key("root"), "scopes": ["admin"]},
        {"sha256": hash_key("acme"), "scopes": ["view"], "tenant": "acme"},
    ]
    path.write_text(yaml.safe_dump({"keys": entries}))
    service = open_service(key_files=(path,))
    service.http.headers["authorization"] = "Bearer root"
    await service.register("acme/own", tenants=["acme"])
    await service.register("acme/shared", tenants=["acme", "globex"])
    targets = [{"lora_id": "acme/own"}, {"lora_id": "acme/shared"}]
    await service.http.put("/v1/aliases/acme/sql", json={"targets": targets, "place_s": 0})
    await service.http.post("/v1/usage", json=report(used("acme/own", 60, 0.1), used("acme/shared", 60, 0.9)))
    service.http.headers["authorization"] = "Bearer acme"
    own, shared = (await service.http.get("/v1/aliases/acme/sql/comparison")).json()["data"]
    assert own["total"]["requests"] == 60
    assert shared["total"] is None
    assert shared["worse"] == ""
