"""A tenant's key sees and changes its own objects alone; nothing of another tenant leaks, not even a name."""

import json
import re
import time

import pytest
import yaml
from fastapi.routing import APIRoute
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.keys.key_files import hash_key
from lorafleet.keys.roles import Caller
from orchestrator.api.routers import EventStream
from orchestrator.api.tenancy import TenantView
from orchestrator.model.pauses import PauseScope
from orchestrator.model.served_names import AliasTarget, ServedName
from orchestrator.store.store import IntentStore
from tests.orchestrator.doubles import digest_of
from tests.patience import patience, within
from tests.registered import registered

# In every name that only globex may know.
MARK = "zq"
KEYS = {
    "root": {"scopes": ["admin"]},
    "acme-view": {"tenant": "acme", "scopes": ["view"]},
    "acme-admin": {"tenant": "acme", "scopes": ["tenant-admin"]},
    "globex-admin": {"tenant": "globexzq", "scopes": ["tenant-admin"]},
    "viewer": {"scopes": ["view"]},
    "operator": {"scopes": ["operate"]},
}


async def load(service, lora_id):
    for _ in range(5):
        await service.ensure(lora_id, replicas=1)
        await service.settle()
        service.clock.now += 100
        if lora_id in service.reconciler.queries.ready_workers_by_adapter():
            return
    raise AssertionError(f"{lora_id} finds no place")


@pytest.fixture
async def fleet(open_service, tmp_path):
    """Two tenants with adapters that displace each other, shared and open ones, aliases of both, and a history."""
    path = tmp_path / "keys.yaml"
    path.write_text(yaml.safe_dump({"keys": [{"sha256": hash_key(key)} | entry for key, entry in KEYS.items()]}))
    service = open_service(key_files=(path,))
    service.http.headers["authorization"] = "Bearer root"
    await service.worker("w0", slots=2)
    for lora_id, tenants in (
        ("acme/mine", ["acme"]),
        ("globexzq/theirs", ["globexzq"]),
        ("globexzq/gone", ["globexzq"]),
        ("shared/both", ["acme", "globexzq"]),
        ("open/all", None),
        ("team-zq", ["globexzq"]),
        ("globexzq/broken", ["globexzq"]),
    ):
        await service.register(lora_id, tenants=tenants)
    await service.settle()
    for lora_id in ("globexzq/theirs", "globexzq/gone", "acme/mine", "team-zq", "globexzq/theirs", "globexzq/gone"):
        await load(service, lora_id)
    both = {"targets": [{"lora_id": "acme/mine"}, {"lora_id": "team-zq"}]}
    assert (await service.http.put("/v1/aliases/mixed", json=both)).is_success
    assert (await service.http.put("/v1/aliases/zq-alias", json={"targets": [{"lora_id": "team-zq"}]})).is_success
    assert (await service.http.put("/v1/aliases/acme/prod", json={"targets": [{"lora_id": "acme/mine"}]})).is_success
    await service.http.delete("/v1/adapters/globexzq/gone")
    await service.settle()
    return service


async def ask(service, key, method, path, **more):
    async with within(20):
        return await service.http.request(method, path, headers={"authorization": f"Bearer {key}"}, **more)


HOST = "/srv/hostpath"
OWN = "/home/acme/runs"


async def test_a_tenant_sees_no_path_of_the_operators_host_and_its_own_ones_stay(open_service, tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text(yaml.safe_dump({"keys": [{"sha256": hash_key(key)} | entry for key, entry in KEYS.items()]}))
    service = open_service(key_files=(path,))
    service.http.headers["authorization"] = "Bearer root"
    agent = await service.worker("w0", slots=3)
    sources = {
        "open/all": (f"file://{HOST}/open", None),
        "shared/both": (f"{HOST}/my shared/lora", ["acme", "globexzq"]),
        "acme/mine": (f"{OWN}/lora", ["acme"]),
    }
    for lora_id, (source, tenants) in sources.items():
        agent.refuse[lora_id] = "adapter_incomplete"
        await service.register(lora_id, source=source, tenants=tenants)
    await service.settle()
    paths = [*readable(service.built.app), "/v1/history?limit=1000", *(f"/v1/adapters/{name}" for name in sources)]

    async def texts(key: str) -> str:
        read = "".join([(await ask(service, key, "GET", each)).text for each in paths])
        ensured = [await ask(service, key, "POST", f"/v1/adapters/{name}/ensure", json={}) for name in sources]
        return read + "".join(answer.text for answer in ensured)

    for key in ("acme-admin", "acme-view"):
        text = await texts(key)
        assert HOST not in text, text
        assert "shared/lora" not in text
        assert text.count(f"{OWN}/lora") > 2
        assert "by the double" in text
    for text in (await texts("globex-admin"), await texts("root")):
        assert (HOST in text) == (OWN in text), "operators alone see all"
    assert f"{HOST}/my shared/lora" in await texts("root")


NAMES = {"lora_id": "acme/mine", "name": "acme/prod", "worker_id": "w0", "digest": "a" * 64}
# Pages about no tenant.
_UNREAD = {"/ui", "/docs", "/redoc", "/openapi.json", "/docs/oauth2-redirect"}


def readable(app) -> list[str]:
    """Every path of a GET route, with the tenant's own names in it."""
    paths = [
        route.path
        for route in app.routes
        if isinstance(route, APIRoute) and "GET" in route.methods
        # Streams do not end by themselves.
        if getattr(route.response_class, "media_type", None) != EventStream.media_type
    ]
    return [re.sub(r"\{(\w+)[^}]*\}", lambda m: NAMES.get(m[1], "w0"), path) for path in paths if path not in _UNREAD]


async def test_nothing_that_a_tenant_can_read_names_another_tenant(fleet):
    paths = readable(fleet.built.app)
    assert len(paths) > 12
    read = 0
    for key in ("acme-view", "acme-admin"):
        for path in [*paths, "/v1/history?limit=1000", "/v1/adapters?tenant=globexzq", "/v1/aliases/mixed"]:
            answer = await ask(fleet, key, "GET", path)
            assert MARK not in answer.text.replace("tenant=globexzq", ""), (path, answer.text)
            read += answer.is_success
        for body in ({}, {"workers_gone": ["w0"]}, {"workers_more": [{"count": 2}]}):
            answer = await ask(fleet, key, "POST", "/v1/placements/plan", json=body or None)
            assert answer.is_success
            assert MARK not in answer.text, answer.text
    assert read > 16
    whole = "".join([(await ask(fleet, "viewer", "GET", path)).text for path in paths])
    for name in ("globexzq/theirs", "team-zq", "acme/mine", "made room for"):
        assert name in whole


async def test_a_tenant_sees_its_own_and_what_it_may_use(fleet):
    listed = (await ask(fleet, "acme-view", "GET", "/v1/adapters")).json()["data"]
    assert {item["lora_id"]: item["spec"]["tenants"] for item in listed} == {
        "acme/mine": ["acme"],
        "shared/both": ["acme"],
        "open/all": None,
    }
    aliases = (await ask(fleet, "acme-view", "GET", "/v1/aliases")).json()["data"]
    assert {item["name"]: [target["lora_id"] for target in item["status"]["targets"]] for item in aliases} == {
        "acme/prod": ["acme/mine"],
        "mixed": ["acme/mine"],
    }
    entries = (await ask(fleet, "acme-view", "GET", "/v1/history?limit=1000")).json()["data"]
    assert {entry["kind"] for entry in entries} >= {"adapter_registered", "load", "unload", "alias_set"}
    assert any("another tenant" in json.dumps(entry["body"]) for entry in entries)


async def test_events_of_a_tenants_stream_are_its_own_and_keep_their_ids(fleet):
    catalog, view = fleet.reconciler.catalog, TenantView(Caller("acme", frozenset({"view"})), fleet.store)
    begin = catalog.revision
    for lora_id in ("globexzq/theirs", "acme/mine", "team-zq"):
        catalog.emit_event("loaded", lora_id=lora_id, message="made room for globexzq/theirs")
    last = catalog.emit_event("loaded", lora_id="open/all")
    stream = catalog.event_stream(begin, keep_alive_s=5, is_stopping=lambda: False, shown=view.event)
    found = []
    async with within(10):
        async for text in stream:
            if text.startswith("id: "):
                found.append(text)
            if f"id: {last}\n" in text:
                break
    assert [json.loads(text.split("data: ")[1])["lora_id"] for text in found] == ["acme/mine", "open/all"]
    assert MARK not in "".join(found)


async def test_history_of_a_mixed_alias_names_no_target_of_others_that_was_deleted(fleet):
    for targets in ([{"lora_id": "acme/mine"}, {"lora_id": "globexzq/theirs"}], [{"lora_id": "acme/mine"}]):
        body = {"targets": targets, "place_s": 0 if len(targets) > 1 else 300}
        assert (await fleet.http.put("/v1/aliases/acme/prod", json=body)).is_success
        await fleet.settle()
    await fleet.http.delete("/v1/adapters/globexzq/theirs")
    await fleet.settle()
    assert "globexzq/theirs" not in fleet.store.adapters
    for path in ("/v1/aliases/acme/prod/history", "/v1/history?limit=1000"):
        answer = await ask(fleet, "acme-view", "GET", path)
        assert "alias_rollout" in {entry["kind"] for entry in answer.json()["data"]}
        assert MARK not in answer.text
        assert "theirs" not in answer.text


async def test_pauses_of_other_tenants_are_no_events_of_a_tenants_stream(fleet):
    catalog, pauses, begin = fleet.reconciler.catalog, fleet.reconciler.pauses, fleet.reconciler.catalog.revision
    scopes = [PauseScope("initechzq", "teamzq"), PauseScope("acme", "team"), PauseScope(None, "")]
    for scope in scopes:
        await pauses.pause(scope, "keep", "somebody", 60.0, lambda: False)
        await pauses.end(scope)
    view = TenantView(Caller("acme", frozenset({"view"})), fleet.store)
    shown = [view.event(event, tenants) for event, tenants, _ in catalog.events_since(begin)]
    found = [(event.type, json.loads(event.message)) for event in shown if event and event.type.startswith("pause_")]
    assert found == [(kind, list(scope)) for scope in scopes[1:] for kind in ("pause_began", "pause_ended")]
    assert MARK not in str(shown)


SPEC = {"source": "hf://org/x"}
NEW = SPEC | {"lora_id": "acme/new"}
TO_MINE = {"targets": [{"lora_id": "acme/mine"}]}
REFUSED = [
    ("POST", "/v1/adapters", NEW | {"tenants": None}, 403, "not_yours"),
    ("POST", "/v1/adapters", NEW | {"tenants": ["acme", "x"]}, 403, "not_yours"),
    ("POST", "/v1/adapters", NEW | {"policy": {"priority": 1}}, 403, "not_yours"),
    ("POST", "/v1/adapters", NEW | {"secret_ref": {"name": "other", "key": "k"}}, 403, "not_yours"),
    ("POST", "/v1/adapters", SPEC | {"lora_id": "new"}, 403, "name_not_yours"),
    ("POST", "/v1/adapters", SPEC | {"lora_id": "acmenew"}, 403, "name_not_yours"),
    ("POST", "/v1/adapters", SPEC | {"lora_id": "team-zq"}, 403, "name_not_yours"),
    ("POST", "/v1/adapters", SPEC | {"lora_id": "acme/theirs"}, 409, "name_taken"),
    ("PATCH", "/v1/adapters/acme/mine", {"tenants": ["acme", "globexzq"]}, 403, "not_yours"),
    ("PATCH", "/v1/adapters/shared/both", {"policy": {"pinned": True}}, 403, "name_not_yours"),
    ("PATCH", "/v1/adapters/acme/theirs", {"policy": {"pinned": True}}, 404, "adapter_not_found"),
    ("DELETE", "/v1/adapters/open/all", None, 403, "name_not_yours"),
    ("DELETE", "/v1/adapters/team-zq", None, 404, "adapter_not_found"),
    ("DELETE", "/v1/adapters/never-there", None, 404, "adapter_not_found"),
    ("DELETE", "/v1/adapters/acme/mine", None, 409, "in_use"),
    ("POST", "/v1/adapters/team-zq/retry", None, 404, "adapter_not_found"),
    ("POST", "/v1/adapters/team-zq/ensure", {}, 404, "adapter_not_found"),
    ("PUT", "/v1/aliases/acme/next", {"targets": [{"lora_id": "team-zq"}]}, 404, "adapter_not_found"),
    ("PUT", "/v1/aliases/mixed", TO_MINE, 403, "name_not_yours"),
    ("DELETE", "/v1/aliases/zq-alias", None, 404, "alias_not_found"),
    ("POST", "/v1/aliases/mixed/rollout", {"to": "acme/mine", "steps": [{"weight": 1.0}]}, 403, "name_not_yours"),
    ("POST", "/v1/workers/w0/cordon", None, 403, "scope_missing"),
    ("POST", "/v1/rebalance", None, 403, "scope_missing"),
    ("PATCH", "/v1/policy", {"loading": "eager"}, 403, "scope_missing"),
    ("GET", "/v1/export", None, 403, "scope_missing"),
    ("GET", "/v1/catalog", None, 403, "fleet_key_needed"),
    ("POST", "/v1/workers/register", {}, 403, "scope_missing"),
]
ALLOWED = [
    ("POST", "/v1/adapters", NEW, 201),
    ("POST", "/v1/adapters", NEW | {"tenants": ["acme"]}, 200),
    ("PATCH", "/v1/adapters/acme/new", {"policy": {"min_replicas": 2}}, 200),
    ("POST", "/v1/adapters/acme/new/retry", None, 200),
    ("POST", "/v1/adapters/acme/mine/ensure", {}, 200),
    ("PUT", "/v1/aliases/acme/next", {"targets": [{"lora_id": "open/all"}]}, 201),
    ("DELETE", "/v1/aliases/acme/next", None, 204),
    ("DELETE", "/v1/adapters/acme/new", None, 204),
]


async def test_a_digest_permits_no_tenant_to_use_the_bytes_of_others(fleet):
    await fleet.register("globexzq/own", source="s3://globexzq/own", tenants=["globexzq"])
    await fleet.settle()
    theirs, mine = (digest_of(fleet.store.adapters[name].source) for name in ("globexzq/own", "acme/mine"))
    far = "https://peer.example/" + theirs
    for source in (f"fleet:{theirs}", f"fleet:///{theirs}", f"FLEET:{theirs}", f"fleet+{far}", f"Fleet+{far}"):
        spec = {"lora_id": "acme/new", "source": source}
        for path in ("/v1/adapters", "/v1/adapters?dry_run=true"):
            answer = await ask(fleet, "acme-admin", "POST", path, json=spec)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (400, "source_forbidden", "source"), source
        answer = await ask(fleet, "acme-admin", "POST", "/v1/adapters:batch", json={"adapters": [spec]})
        assert [item["code"] for item in answer.json()["data"]] == ["source_forbidden"], answer.text
    own = {"lora_id": "acme/again", "source": f"fleet:{mine}"}
    assert (await ask(fleet, "acme-admin", "POST", "/v1/adapters", json=own)).status_code == 201
    operators = {"lora_id": "copy", "source": f"fleet:{theirs}"}
    assert (await ask(fleet, "root", "POST", "/v1/adapters", json=operators)).status_code == 201


async def test_a_tenants_administrator_changes_nothing_of_others(fleet):
    await fleet.register("acme/theirs", tenants=["globexzq"])
    before = sorted(fleet.store.adapters.items()), sorted(fleet.store.names.items())
    for method, path, body, status, code in REFUSED:
        answer = await ask(fleet, "acme-admin", method, path, **({} if body is None else {"json": body}))
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), (path, body, answer.text)
        assert before == (sorted(fleet.store.adapters.items()), sorted(fleet.store.names.items()))
        said = answer.text
        for sent in re.findall(r"[\w-]*zq[\w-]*", f"{path} {json.dumps(body)}"):
            said = said.replace(sent, "")
        assert MARK not in said, said


async def test_a_tenants_administrator_changes_its_own_objects(fleet):
    for method, path, body, status in ALLOWED:
        answer = await ask(fleet, "acme-admin", method, path, **({} if body is None else {"json": body}))
        assert answer.status_code == status, (path, answer.text)
        if status == 201 and path == "/v1/adapters":
            assert fleet.store.adapters["acme/new"].tenants == ("acme",)


async def test_a_batch_registers_what_is_the_tenants_and_refuses_the_rest(fleet):
    specs = [SPEC | {"lora_id": name} for name in ("acme/a", "other/b", "acme/c")]
    answer = (await ask(fleet, "acme-admin", "POST", "/v1/adapters:batch", json={"adapters": specs})).json()
    assert [item["status"] for item in answer["data"]] == [201, 403, 201]


async def test_an_operator_changes_workers_and_policy_and_no_adapters(fleet):
    assert (await ask(fleet, "operator", "POST", "/v1/workers/w0/cordon")).is_success
    assert (await ask(fleet, "operator", "PATCH", "/v1/policy", json={"loading": "eager"})).is_success
    assert (await ask(fleet, "operator", "GET", "/v1/adapters/team-zq")).is_success
    assert (await ask(fleet, "operator", "DELETE", "/v1/adapters/team-zq")).status_code == 403
    assert (await ask(fleet, "viewer", "POST", "/v1/workers/w0/uncordon")).status_code == 403


GONE = "globexzq/gone"
NAMED = st.sampled_from(["acme/a", "globexzq/b", "zq", "zq/v1", "open", "both", "zq-alias", "mixed", GONE])
PATTERNS = st.sampled_from(
    [
        "made room for {}",
        "{} makes room: least asked for there",
        "of {!r}, and {}",
        "{}: {}",
        "[{}]",
        "{}@3f9a1c2b77aa; x",
    ]
)


@given(st.lists(st.tuples(PATTERNS, NAMED, NAMED), max_size=5))
def test_a_text_keeps_its_words_and_loses_hidden_names(parts):
    store = IntentStore(":memory:")
    try:
        for lora_id, tenants in (
            ("acme/a", ("acme",)),
            ("globexzq/b", ("globexzq",)),
            ("zq", ("globexzq",)),
            ("zq/v1", ("globexzq",)),
            ("open", None),
            ("both", ("acme", "globexzq")),
        ):
            store.put_adapter(registered(lora_id, source="s", tenants=tenants))
        store.put_name(ServedName(name="zq-alias", targets=(AliasTarget("zq", 1.0),)))
        store.put_name(ServedName(name="mixed", targets=(AliasTarget("open", 1.0), AliasTarget("zq", 1.0))))
        view, whole = (TenantView(Caller(tenant, frozenset({"view"})), store) for tenant in ("acme", None))
        text = "; ".join(pattern.format(one, other) for pattern, one, other in parts)
        assert whole.text(text) == text
        shown = view.text(text)
        known = [name for _, *names in parts for name in names if name != GONE]
        if len(known) == 2 * len(parts):
            assert MARK not in shown
        for name in ("acme/a", "open", "both", "mixed"):
            assert text.count(name) == shown.count(name)
    finally:
        store.close()


def test_tenants_of_any_name_are_hidden_as_whole_words(tmp_path):
    store = IntentStore(tmp_path / "store.db")
    view = TenantView(Caller("acme", frozenset({"view"})), store)
    text = "acme, zq of zq.x; team zq (zq/eu) and acme-zq"
    assert view.text(text) == text
    with store.together():
        for number, tenant in enumerate(("acme", "zq", "team zq", "zq/eu", "", *(f"t{n}" for n in range(1000)))):
            store.put_adapter(registered(f"a{number}", source="s", tenants=(tenant,)))
    assert view.text(text) == "acme, another tenant of zq.x; another tenant (another tenant) and acme-zq"
    began = time.process_time()
    for _ in range(1000):
        view.text(text)
    assert time.process_time() - began < patience(1), "a thousand tenants, a thousand texts"
    store.close()
