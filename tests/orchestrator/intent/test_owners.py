"""Every write asks one rule whose the name is: each write route, with each kind of key, for each kind of owner."""

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import yaml
from fastapi.routing import APIRoute
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.keys.key_files import hash_key
from lorafleet.keys.roles import TENANT_SCOPES, Caller
from orchestrator.core.errors import OrchestratorError
from orchestrator.intent import owners
from orchestrator.model.adapters import RegisteredAdapter
from orchestrator.model.served_names import AliasTarget, NameVersion, Publication, PublishedSpec, ServedName
from orchestrator.store.store import IntentStore
from tests.registered import registered

_WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_TENANTS_OF: Mapping[str, tuple[str, ...] | None] = {
    "operator": None,
    "acme": ("acme",),
    "globex": ("globex",),
    "shared": ("acme", "globex"),
}
FOLDERS = ("acme/", "globex/", "plain-", "team/")
OWNERS = (*_TENANTS_OF, "nobody")


@dataclass(frozen=True)
class Named:
    """A route that writes under a name: of which kind, with which scope, and its body."""

    kind: Literal["adapter", "alias", "published"]
    act: Literal["give", "change"]
    scope: str
    body: Any = None


# A scope check alone decides: what the route writes is the whole fleet's.
FLEET = "fleet"
# It writes nothing, or the caller's own pause or unfinished upload alone, or demand for what the caller may use.
OWN = "own"
SPEC = {"lora_id": "{name}", "source": "file:///x"}
ROUTES: dict[tuple[str, str], Named | str] = {
    ("POST", "/v1/adapters"): Named("adapter", "give", "tenant-admin", SPEC),
    ("POST", "/v1/adapters:batch"): Named("adapter", "give", "tenant-admin", {"adapters": [SPEC]}),
    ("PUT", "/v1/adapters/{lora_id:path}"): Named("adapter", "give", "register"),
    ("PATCH", "/v1/adapters/{lora_id:path}"): Named("adapter", "change", "tenant-admin", {"policy": {"weight": 2}}),
    ("DELETE", "/v1/adapters/{lora_id:path}"): Named("adapter", "change", "tenant-admin"),
    ("POST", "/v1/adapters/{lora_id:path}/retry"): Named("adapter", "change", "tenant-admin"),
    ("POST", "/v1/adapters/{lora_id:path}/check"): Named("adapter", "change", "register"),
    ("PUT", "/v1/aliases/{name:path}"): Named("alias", "give", "tenant-admin", {"targets": [{"lora_id": "{own}"}]}),
    ("DELETE", "/v1/aliases/{name:path}"): Named("alias", "change", "tenant-admin"),
    ("POST", "/v1/aliases/{name:path}/rollout"): Named(
        "alias", "change", "tenant-admin", {"to": "{own}", "steps": [{"weight": 1.0}]}
    ),
    ("PATCH", "/v1/aliases/{name:path}/rollout"): Named("alias", "change", "tenant-admin", {"paused": True}),
    ("DELETE", "/v1/aliases/{name:path}/rollout"): Named("alias", "change", "tenant-admin"),
    ("POST", "/v1/published/{name:path}"): Named("published", "give", "register", {"source": "/x", "timeout_s": 1}),
    ("DELETE", "/v1/published/{name:path}"): Named("published", "change", "register"),
    ("POST", "/v1/adapters/{lora_id:path}/ensure"): OWN,
    ("DELETE", "/v1/uploads/{lora_id:path}"): OWN,
    ("POST", "/v1/pauses"): OWN,
    ("DELETE", "/v1/pauses"): OWN,
    ("POST", "/v1/placements/plan"): OWN,
    ("POST", "/v1/route"): OWN,
    ("POST", "/v1/decisions/replay"): OWN,
    ("POST", "/v1/ask"): OWN,
    ("POST", "/v1/routers/answers"): FLEET,
    ("POST", "/v1/usage"): FLEET,
    ("POST", "/v1/workers/register"): FLEET,
    ("POST", "/v1/workers/{worker_id}/cordon"): FLEET,
    ("POST", "/v1/workers/{worker_id}/uncordon"): FLEET,
    ("POST", "/v1/workers/{worker_id}/drain"): FLEET,
    ("DELETE", "/v1/workers/{worker_id}/adapters/{lora_id:path}"): FLEET,
    ("POST", "/v1/workers/{worker_id}/adapters/{lora_id:path}"): FLEET,
    ("PUT", "/v1/policy"): FLEET,
    ("PATCH", "/v1/policy"): FLEET,
    ("POST", "/v1/rebalance"): FLEET,
    ("POST", "/v1/orphans/adopt"): FLEET,
    ("POST", "/v1/import"): FLEET,
    ("POST", "/v1/apply"): FLEET,
}
# Outcomes of the rule. Any other answer means that the rule let the call pass.
REFUSALS = {
    "scope_missing": "scope",
    "fleet_key_needed": "scope",
    "name_not_yours": "name",
    "not_yours": "owner",
    "name_taken": "taken",
    "adapter_not_found": "missing",
    "alias_not_found": "missing",
    "name_not_found": "missing",
}


@dataclass(frozen=True)
class Role:
    """A key of the test: its tenant, scopes, and which names it may give."""

    tenant: str | None
    scopes: tuple[str, ...]
    naming: Literal["", "namespace", "any"] = ""

    @property
    def key(self) -> str:
        return f"{self.tenant}.{'+'.join(self.scopes)}.{self.naming}"

    @property
    def entry(self) -> dict[str, Any]:
        naming = {"namespace": {"namespace": "team"}, "any": {"lora_ids": ["*"]}}.get(self.naming, {})
        return (
            {"sha256": hash_key(self.key), "scopes": list(self.scopes)}
            | naming
            | ({} if self.tenant is None else {"tenant": self.tenant})
        )

    @property
    def caller(self) -> Caller:
        namespace = "team" if self.naming == "namespace" else ""
        return Caller(
            self.tenant,
            frozenset(self.scopes),
            namespace=namespace,
            lora_ids=("*",) if self.naming == "any" else (),
        )


ROLES = [
    *(
        Role("acme", scopes, naming)
        for scopes in (("tenant-admin",), ("register",), ("load", "tenant-admin"))
        for naming in ("", "namespace", "any")
    ),
    Role("globex", ("tenant-admin",)),
    Role("acme", ("admin",)),
    Role(None, ("admin",)),
    Role(None, ("register",)),
    Role(None, ("register",), "namespace"),
]


def name_of(kind: str, folder: str, owner: str) -> str:
    return f"{folder}{kind}-{owner}"


def objects() -> tuple[dict[str, RegisteredAdapter], dict[str, ServedName]]:
    """An object of each kind for each owner in each folder: adapters, aliases and published names."""
    adapters, names = {}, {}
    for tenant, tenants in _TENANTS_OF.items():
        for lora_id in (f"target/{tenant}", *(name_of("adapter", folder, tenant) for folder in FOLDERS)):
            adapters[lora_id] = registered(lora_id, source="file:///x", tenants=tenants)
        for folder in FOLDERS:
            alias = name_of("alias", folder, tenant)
            names[alias] = ServedName(name=alias, targets=(AliasTarget(f"target/{tenant}", 1.0),))
            if tenant != "shared":  # a published name has one tenant, or none
                name = name_of("published", folder, tenant)
                version = NameVersion(lora_id=f"{name}/v1", number=1, digest="a" * 64, registered_at=0.0)
                owner = tenants[0] if tenants else None
                published = Publication(spec=PublishedSpec(tenant=owner), versions=(version,))
                names[name] = ServedName(name=name, published=published)
    return adapters, names


OBJECTS = objects()


def fill(store: IntentStore) -> None:
    """Give the store these objects, and nothing else."""
    adapters, names = OBJECTS
    with store.together():
        for lora_id in store.adapters.keys() - adapters.keys():
            store.drop_adapter(lora_id)
        for name in store.names.keys() - names.keys():
            store.drop_name(name)
        for lora_id, adapter in adapters.items():
            if store.adapters.get(lora_id) != adapter:
                store.put_adapter(adapter)
        for name, served in names.items():
            if store.names.get(name) != served:
                store.put_name(served)


def expected(role: Role, route: Named, folder: str, owner: str) -> str:
    """What the rule says, in words of its own: "" if the call passes."""
    satisfied = {"tenant-admin", "register"} if "tenant-admin" in role.scopes else set(role.scopes)
    is_admin = "admin" in role.scopes
    if not is_admin and route.scope not in satisfied:
        return "scope"
    sees_all = is_admin or "load" in role.scopes or (role.tenant is None and route.kind != "published")
    is_there = owner != "nobody"
    is_seen = is_there and (sees_all or owner in {role.tenant, "operator", "shared"})
    if route.kind == "alias" and is_there:
        is_seen |= folder == f"{role.tenant}/" or (role.naming == "namespace" and folder == "team/")
    if route.act == "change" and not is_seen:
        return "missing"
    confined = None if is_admin else role.tenant
    if role.naming == "namespace":
        gives = folder == "team/" or route.kind == "published" or (route.body is None and route.act == "give")
    else:
        gives = role.naming == "any" or confined is None or folder == f"{confined}/"
    if not gives:
        return "name"
    if not is_there or owner == confined:
        return ""
    in_own_folder = folder == f"{confined}/" or (role.naming == "namespace" and folder == "team/")
    if route.kind == "alias" and owner in {"operator", "shared"} and in_own_folder:
        return ""
    if not is_seen:
        return "taken"
    return "" if confined is None else "owner"


@pytest.fixture
async def fleet(open_service, tmp_path):
    path = tmp_path / "keys.yaml"
    confined = [Role("acme", (scope,)) for scope in TENANT_SCOPES]
    entries = {role.key: role.entry for role in (*ROLES, *confined)}
    path.write_text(yaml.safe_dump({"keys": list(entries.values())}))
    service = open_service(key_files=(path,))
    fill(service.store)
    return service


def filled(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: filled(each, names) for key, each in value.items()}
    if isinstance(value, list):
        return [filled(each, names) for each in value]
    return value.format(**names) if isinstance(value, str) else value


async def outcome(fleet, role: Role, call: tuple[str, str], route: Named, name: str) -> str:
    """The rule's outcome of one call; "" if it passes."""
    method, path = call
    own = "target/acme" if role.tenant is None else f"target/{role.tenant}"
    body = None if route.body is None else filled(route.body, {"name": name, "own": own})
    answer = await fleet.http.request(
        method,
        path.replace("{lora_id:path}", name).replace("{name:path}", name),
        headers={"authorization": f"Bearer {role.key}"},
        **({} if body is None else {"json": body}),
    )
    if answer.is_success:
        found = answer.json() if answer.content else {}
        codes = [item["code"] for item in found["data"]] if "data" in found else [None]
    else:
        codes = [answer.json()["error"]["code"]]
    (code,) = codes
    return REFUSALS.get(code, "")


def test_every_write_route_has_a_row_in_the_table_of_owners(fleet):
    found = {
        (method, route.path)
        for route in fleet.built.app.routes
        if isinstance(route, APIRoute)
        for method in route.methods & _WRITES
    }
    assert found == ROUTES.keys()


NAMED = {call: route for call, route in ROUTES.items() if isinstance(route, Named)}


@pytest.mark.parametrize("call", NAMED, ids=lambda call: f"{call[0]} {call[1]}")
async def test_a_write_passes_exactly_where_the_name_is_the_callers(fleet, call):
    route, wrong = NAMED[call], []
    for role, folder, owner in itertools.product(ROLES, FOLDERS, OWNERS):
        if owner == "shared" and route.kind == "published":
            continue
        # In its namespace a key's `x` is `team/x`, where a publish or an upload writes.
        is_short = role.naming == "namespace" and folder != "team/"
        if is_short and (route.kind == "published" or (call[0] == "PUT" and route.kind == "adapter")):
            continue
        said = await outcome(fleet, role, call, route, name_of(route.kind, folder, owner))
        if said != (due := expected(role, route, folder, owner)):
            wrong.append((role.key, folder, owner, f"is {said!r}, and is to be {due!r}"))
        if not said:
            fill(fleet.store)
    assert wrong == []


@pytest.mark.parametrize("call", [call for call, row in ROUTES.items() if row == FLEET], ids=" ".join)
async def test_what_is_the_fleets_is_written_by_no_scope_of_a_tenant(fleet, call):
    for scope in TENANT_SCOPES:
        answer = await fleet.http.request(
            call[0],
            call[1].replace("{worker_id}", "w0"),
            headers={"authorization": f"Bearer {Role('acme', (scope,)).key}"},
            json={},
        )
        assert answer.status_code == 403, (scope, answer.text)
        assert REFUSALS[answer.json()["error"]["code"]] == "scope"


async def as_key(fleet, role: Role, method: str, path: str, **body: Any) -> tuple[int, str]:
    answer = await fleet.http.request(
        method, path, headers={"authorization": f"Bearer {role.key}"}, **({"json": body} if body else {})
    )
    return answer.status_code, "" if answer.is_success else answer.json()["error"]["code"]


TRAINER = Role("acme", ("register",))
MANAGER = Role("acme", ("tenant-admin",), "any")


async def test_a_tenants_key_takes_over_no_published_name_of_operators(fleet):
    with fleet.store.together():
        fleet.store.put_name(ServedName(name="sql", published=Publication()))
        targets = (AliasTarget("target/operator", 1.0),)
        fleet.store.put_name(ServedName(name="acme/sql", targets=targets, published=Publication()))
    for role in (TRAINER, Role("acme", ("tenant-admin",)), MANAGER):
        for name in ("sql", "acme/sql"):
            status, code = await as_key(fleet, role, "POST", f"/v1/published/{name}", source="/run/1")
            assert (status, code in {"not_yours", "name_not_yours"}) == (403, True), (role, name)
            status, code = await as_key(fleet, role, "DELETE", f"/v1/published/{name}")
            assert (status, code in {"not_yours", "name_not_yours"}) == (403, True), (role, name)
    to_mine = {"targets": [{"lora_id": "target/acme"}]}
    assert await as_key(fleet, MANAGER, "PUT", "/v1/aliases/acme/sql", **to_mine) == (403, "not_yours")
    assert fleet.store.targets_of("acme/sql") == (AliasTarget("target/operator", 1.0),)
    assert fleet.store.publication_of("sql").deleted_at is None


@pytest.mark.parametrize("name", ["globex/policy", "policy", "acmepolicy"])
async def test_a_tenants_key_publishes_and_uploads_nothing_outside_its_own_folder(fleet, name):
    for method, path in (("POST", f"/v1/published/{name}"), ("PUT", f"/v1/adapters/{name}?publish=true")):
        body = {"source": "/run/1"} if method == "POST" else {}
        assert await as_key(fleet, TRAINER, method, path, **body) == (403, "name_not_yours")


async def test_a_tenant_beside_a_fleet_wide_scope_still_writes_its_own_alone(fleet):
    router = Role("acme", ("load", "tenant-admin"), "any")
    assert await as_key(fleet, router, "DELETE", "/v1/adapters/globex/adapter-globex") == (403, "not_yours")
    assert await as_key(fleet, router, "POST", "/v1/published/sql", source="/run/1") == (503, "no_worker")
    spec = {"lora_id": "new", "source": "file:///x", "tenants": ["globex"]}
    assert await as_key(fleet, router, "POST", "/v1/adapters", **spec) == (403, "not_yours")


async def test_a_free_lora_id_that_reads_as_a_version_is_the_published_names_owners(fleet):
    spec = {"lora_id": "plain-published-operator/v7", "source": "file:///x"}
    assert await as_key(fleet, MANAGER, "POST", "/v1/adapters", **spec) == (409, "name_taken")
    assert (await as_key(fleet, MANAGER, "POST", "/v1/adapters", **spec | {"lora_id": "plain-published-acme/v7"}))[
        0
    ] == 201


async def test_an_alias_that_its_maker_could_not_change_afterwards_is_refused(fleet):
    shared = {"targets": [{"lora_id": "target/shared"}]}
    assert await as_key(fleet, MANAGER, "PUT", "/v1/aliases/prod", **shared) == (403, "name_not_yours")
    assert (await as_key(fleet, MANAGER, "PUT", "/v1/aliases/acme/prod", **shared))[0] == 201
    assert (await as_key(fleet, MANAGER, "DELETE", "/v1/aliases/acme/prod"))[0] == 204


HIDDEN = "globexzq"


@pytest.fixture
async def entangled(open_service, tmp_path):
    """acme's adapters and names, each of which something of another tenant or of the operators' points at."""
    path = tmp_path / "keys.yaml"
    roles = [Role(None, ("admin",)), Role("acme", ("tenant-admin",))]
    path.write_text(yaml.safe_dump({"keys": [role.entry for role in roles]}))
    service = open_service(key_files=(path,))
    store = service.store
    with store.together():
        for lora_id, tenants in (
            ("acme/mine", ("acme",)),
            ("acme/next", ("acme",)),
            ("acme/policy/v1", ("acme",)),
            (f"{HIDDEN}/theirs", (HIDDEN,)),
        ):
            adapter = registered(lora_id, source="file:///x", tenants=tenants, digest="a" * 64)
            store.put_adapter(adapter)
        version = NameVersion(lora_id="acme/policy/v1", number=1, digest="a" * 64, registered_at=0.0, pointed_at=1.0)
        published = Publication(spec=PublishedSpec(tenant="acme"), versions=(version,))
        store.put_name(
            ServedName(name="acme/policy", targets=(AliasTarget("acme/policy/v1", 1.0),), published=published)
        )
        store.put_name(ServedName(name=f"{HIDDEN}/run", published=Publication(spec=PublishedSpec(tenant=HIDDEN))))
        store.put_name(ServedName(name=f"{HIDDEN}/own", targets=(AliasTarget(f"{HIDDEN}/theirs", 1.0),)))
        store.put_name(ServedName(name="acme/alias", targets=(AliasTarget("acme/mine", 1.0),)))
        for number, lora_id in enumerate(("acme/mine", "acme/next", "acme/policy/v1")):
            store.put_name(
                ServedName(
                    name=f"{HIDDEN}/alias-{number}",
                    targets=(AliasTarget(lora_id, 1.0), AliasTarget(f"{HIDDEN}/theirs", 1.0)),
                )
            )
    return service


@pytest.mark.parametrize("call", NAMED, ids=lambda call: f"{call[0]} {call[1]}")
async def test_no_error_of_a_write_names_what_its_caller_neither_sees_nor_has_written(entangled, call):
    route, seen = NAMED[call], []
    names = {
        "adapter": ("acme/mine", "acme/next", "acme/policy/v1", "acme/policy", "acme/alias"),
        "alias": ("acme/alias", "acme/policy", "acme/mine", "acme/new"),
        "published": ("acme/policy", "acme/mine", "acme/alias", "acme/new"),
    }[route.kind]
    for name in names:
        for own in ("acme/mine", "acme/next"):
            body = None if route.body is None else filled(route.body, {"name": name, "own": own})
            answer = await entangled.http.request(
                call[0],
                call[1].replace("{lora_id:path}", name).replace("{name:path}", name),
                headers={"authorization": f"Bearer {Role('acme', ('tenant-admin',)).key}"},
                **({} if body is None else {"json": body}),
            )
            seen.append(answer.text)
    assert HIDDEN not in "".join(seen), seen


async def test_a_refused_delete_hides_who_uses_the_object_and_tells_an_operator(entangled):
    tenant, operator = Role("acme", ("tenant-admin",)), Role(None, ("admin",))
    for path in ("/v1/adapters/acme/next", "/v1/published/acme/policy"):
        said = {}
        for role in (tenant, operator):
            headers = {"authorization": f"Bearer {role.key}"}
            answer = await entangled.http.delete(path, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "in_use"), answer.text
            said[role] = answer.json()["error"]["message"]
        assert ("another tenant" in said[tenant], HIDDEN in said[tenant], HIDDEN in said[operator]) == (
            True,
            False,
            True,
        )


async def test_an_error_says_the_same_of_a_hidden_name_as_of_one_that_nothing_has(entangled):
    headers = {"authorization": f"Bearer {Role('acme', ('tenant-admin',)).key}"}
    free = f"{HIDDEN}/nobody"
    for name in (f"{HIDDEN}/theirs", f"{HIDDEN}/own", f"{HIDDEN}/run"):
        for method, path, body in (
            ("DELETE", "/v1/adapters/{}", None),
            ("DELETE", "/v1/aliases/{}", None),
            ("DELETE", "/v1/published/{}", None),
            ("PUT", "/v1/aliases/acme/new", {"targets": [{"lora_id": "{}"}]}),
            ("POST", "/v1/adapters", {"lora_id": "{}", "source": "file:///x"}),
            ("POST", "/v1/adapters:batch", {"adapters": [{"lora_id": "{}", "source": "file:///x"}]}),
            ("POST", "/v1/aliases/acme/alias/rollout", {"to": "{}", "steps": [{"weight": 1.0}]}),
        ):
            texts = []
            for each in (name, free):
                sent = {} if body is None else {"content": json.dumps(body).replace("{}", each)}
                more = {} if body is None else {"content-type": "application/json"}
                answer = await entangled.http.request(method, path.format(each), headers=headers | more, **sent)
                texts.append((answer.status_code, answer.text.replace(each, "it")))
            assert texts[0] == texts[1], (method, path)


async def test_a_guess_in_a_body_that_no_route_reads_is_not_confirmed(entangled):
    answer = await entangled.http.request(
        "DELETE",
        f"/v1/adapters/acme/next?x={HIDDEN}/alias-1",
        headers={"authorization": f"Bearer {Role('acme', ('tenant-admin',)).key}"},
        json=[f"{HIDDEN}/alias-1"],
    )
    assert (answer.status_code, HIDDEN in answer.text) == (409, False)


KINDS: tuple[owners.Kind, ...] = ("adapter", "alias", "published name")
_TEXT = st.sampled_from(["x", "acme/x", "team/x", "globex/x", "x/v1", "acme/x/v2"])


@given(
    objects=st.dictionaries(_TEXT, st.tuples(st.sampled_from(KINDS), st.sampled_from(sorted(_TENANTS_OF)))),
    role=st.sampled_from(ROLES),
    kind=st.sampled_from(KINDS),
    name=_TEXT,
    act=st.sampled_from(["give", "change"]),
)
def test_no_tenants_key_passes_for_what_another_tenant_or_operators_own(objects, role, kind, name, act):
    store = IntentStore(":memory:")
    try:
        with store.together():
            for tenant, tenants in _TENANTS_OF.items():
                store.put_adapter(registered(f"target/{tenant}", source="s", tenants=tenants))
            for each, (kind_there, owner) in objects.items():
                tenants = _TENANTS_OF[owner]
                match kind_there:
                    case "adapter":
                        store.put_adapter(registered(each, source="s", tenants=tenants))
                    case "alias":
                        store.put_name(ServedName(name=each, targets=(AliasTarget(f"target/{owner}", 1.0),)))
                    case _:
                        tenant = tenants[0] if tenants is not None and len(tenants) == 1 else None
                        store.put_name(ServedName(name=each, published=Publication(spec=PublishedSpec(tenant=tenant))))
        try:
            owners.require_write(store, role.caller, kind, name, act)
        except OrchestratorError:
            return
        confined = role.caller.writes_for
        if confined is None or name not in objects or objects[name][0] != kind:
            return
        owner = objects[name][1]
        in_own_folder = name.startswith(f"{confined}/") or (role.naming == "namespace" and name.startswith("team/"))
        assert owner == confined or (kind == "alias" and owner in {"operator", "shared"} and in_own_folder)
    finally:
        store.close()
