"""Cached prompts are their tenant's own: which salt each engine gets, on every route."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as Path

from lorafleet.identity import OWN_SALT, own_salt
from lorafleet.keys.key_files import hash_key
from lorafleet.keys.roles import ANYONE, Caller
from router.api.openapi import EXAMPLES
from router.core.errors import BadBody, ReplicaUnreachable
from router.protocols import sglang_generate
from router.protocols.routes import ROUTES
from router.request.cache_salt import cache_owner, cache_salt_of, is_own_salt, refuse_media_names
from router.request.engine_body import DIALECTS, dialect_of, require_salt
from tests.patience import until
from tests.properties import examples
from tests.router.doubles import BASE, CHAT, EngineDouble, error_of, fleet, with_sql

COMPLETION = ROUTES["POST", "/v1/completions"]
COHERE = ROUTES["POST", "/v2/embed"]
ACME = Caller(tenant="acme", scopes=frozenset({"infer"}), key_id="k1")
# Routes that compute, and whose bodies take no salt at vLLM 0.32. A further one is a hole: read its source first.
UNSALTED = {"/v2/embed"}
COMPUTING = sorted({route.path for route in ROUTES.values() if route.computes and route.has_body} | {"/generate"})


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.tuples(st.text(max_size=4), st.text(max_size=4), st.text(max_size=6)), unique=True, max_size=20))
def test_no_two_owners_and_client_salts_have_one_salt(parts):
    salts = [own_salt(tenant, key, salt) for tenant, key, salt in parts]
    assert len(set(salts)) == len(parts)
    # A client that sends a salt which it has seen or computed stays within its own.
    nested = [own_salt("mallory", "", salt) for salt in salts]
    assert not {*nested} & {*salts}
    # vLLM 0.32 entrypoints/generate/base/protocol.py validate_cache_salt
    assert all(len(salt) <= 128 and not {*"@/\\\0"} & {*salt} for salt in salts)


def test_engines_learn_no_tenants_name():
    assert "acme" not in cache_salt_of(COMPLETION, ACME, "tenant", "pepper")
    assert "pepper" not in cache_salt_of(COMPLETION, ACME, "tenant", "pepper")


def test_owner_is_the_tenant_or_the_key_or_nobody():
    assert cache_owner(ACME, "tenant") == ("acme", "")
    assert cache_owner(ACME, "key") == ("acme", "k1")
    assert cache_owner(ACME, "shared") == ("", "")
    operator = replace(ACME, tenant=None)
    assert cache_owner(operator, "tenant") == ("", "")
    assert cache_owner(operator, "key") == ("", "k1")
    assert cache_owner(ANYONE, "key") == ("", "")


def test_shared_cache_leaves_a_clients_salt_but_one_that_looks_like_ours():
    acmes = cache_salt_of(COMPLETION, ACME, "tenant", None)
    for caller, cache in ((ANYONE, "tenant"), (ACME, "shared")):
        assert cache_salt_of(COMPLETION, caller, cache, "pepper") == "pepper"
        assert cache_salt_of(COMPLETION, caller, cache, None) == ""
        assert cache_salt_of(COMPLETION, caller, cache, 7) == "", "for the engine to refuse"
        forged = cache_salt_of(COMPLETION, caller, cache, acmes)
        assert forged not in {acmes, ""}
        assert forged.startswith(OWN_SALT)


@pytest.mark.parametrize("wrong", ["", 7, ["a"]])
def test_wrong_salt_is_refused_where_it_would_be_hashed(wrong):
    with pytest.raises(BadBody, match="cache_salt"):
        cache_salt_of(COMPLETION, ACME, "tenant", wrong)


def test_route_without_a_salt_is_refused_to_callers_with_a_cache_of_their_own():
    with pytest.raises(BadBody, match="/v2/embed cannot keep"):
        cache_salt_of(COHERE, ACME, "tenant", None)
    assert cache_salt_of(COHERE, ACME, "shared", None) == "" == cache_salt_of(COHERE, ANYONE, "tenant", None)


def test_engine_that_knows_no_salt_gets_no_request_whose_cache_is_its_callers_own():
    for kind in DIALECTS:
        require_salt(kind, dialect_of(kind, ""), "/v1/chat/completions")
    require_salt("vllm", dialect_of("vllm", ""), "/v1/embeddings")
    with pytest.raises(BadBody, match="sglang cannot do at /v1/embeddings"):
        require_salt("sglang", dialect_of("sglang", ""), "/v1/embeddings")
    with pytest.raises(ReplicaUnreachable, match="cache: shared"):
        require_salt("llamacpp", dialect_of("llamacpp", ""), "/v1/chat/completions")


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
NAMED = PICTURE | {"uuid": "theirs"}


@pytest.mark.parametrize(
    ("decoded", "param"),
    [
        ({"messages": [{"role": "user", "content": ["see", NAMED]}]}, "messages"),
        ({"messages": [[{"role": "user", "content": [NAMED]}]]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [NAMED]}]}]}, "messages"),
        ({"input": [{"role": "user", "content": [NAMED]}]}, "input"),
        ({"token_ids": [1], "content_parts": [{"type": "image_url", "url": None, "uuid": "theirs"}]}, "content_parts"),
        ({"token_ids": [1], "features": {"mm_hashes": {"image": ["theirs"]}}}, "features"),
    ],
)
def test_media_that_a_client_names_is_refused(decoded, param):
    with pytest.raises(BadBody) as refused:
        refuse_media_names(decoded)
    assert refused.value.param == param


def test_media_without_a_name_and_everything_else_is_taken():
    for decoded in (
        {"messages": [{"role": "user", "content": ["see", PICTURE, PICTURE | {"uuid": None}]}], "features": None},
        {"messages": [{"role": "user", "content": "uuid", "uuid": "a message's own"}]},
        {"input": [1, 2, 3]},
        {"input": "text", "messages": 7, "content_parts": {}},
        {"input": [[1, 2], [3]]},
    ):
        refuse_media_names(decoded)


class AnyRoute(EngineDouble):
    """An engine that answers every POST."""

    @property
    def app(self):
        async def answer(request: Request):
            if request.url.path == "/tokenize":
                return Response(status_code=400)
            self.bodies.append(await request.json())
            return await self.answer(self, self.bodies[-1])

        return Starlette(routes=[Path("/health", lambda _: Response()), Path("/{path:path}", answer, methods=["POST"])])


@pytest.fixture
def opened(tmp_path):
    """Settings with keys a1 and a2 of tenant acme, b1 of tenant rival, and nobody's."""
    path = tmp_path / "keys.yaml"
    rows = [("a1", "acme"), ("a2", "acme"), ("b1", "rival")]
    lines = [f"- {{sha256: {hash_key(key)}, tenant: {tenant}, scopes: [infer]}}\n" for key, tenant in rows]
    path.write_text(f"keys:\n{''.join(lines)}- {{sha256: {hash_key('nobodys')}, scopes: [infer]}}\n")
    return {"key_files": (path,)}


async def salts_of(client, engine, path, body, key):
    """(the answer, the salts of the bodies that the engine got for it)."""
    before = len(engine.bodies)
    answer = await client.post(path, json=body, headers={"authorization": f"Bearer {key}"})
    return answer, [sent.get("cache_salt") for sent in engine.bodies[before:]]


async def test_every_route_that_computes_has_the_tenants_salt_or_is_refused(opened):
    engine = AnyRoute("w0")
    async with fleet(engine, control=with_sql("w0"), **opened) as (client, _, _):
        refused = set()
        for path in COMPUTING:
            body = EXAMPLES[path][0] | ({} if path == sglang_generate.PATH else {"model": BASE})
            found = {}
            for key in ("a1", "a2", "b1"):
                answer, salts = await salts_of(client, engine, path, body, key)
                if answer.status_code == 400:
                    assert "takes no cache_salt" in answer.text, (path, answer.text)
                    refused.add(path)
                assert bool(salts) == (path not in refused), path
                found[key] = set(salts)
            if path not in refused:
                assert found["a1"] == found["a2"] == {own_salt("acme", "")}, path
                assert found["b1"] == {own_salt("rival", "")}, path
        assert refused == UNSALTED


async def test_clients_salt_and_items_of_batches_nest_within_the_tenants(opened):
    engine = AnyRoute("w0")
    async with fleet(engine, control=with_sql("w0"), **opened) as (client, _, _):
        forged = own_salt("acme", "")
        for body in (
            {"model": BASE, "prompt": "a", "cache_salt": forged},
            {"model": BASE, "prompt": "a", "extra_body": {"cache_salt": forged}},
            {"prompt": ["a", "b"], "lora_id": ["sql/v1", ""], "cache_salt": forged},
        ):
            _, salts = await salts_of(client, engine, "/v1/completions", body, "b1")
            assert {*salts} == {own_salt("rival", "", forged)}, body
        generate = {"text": ["a", "b"], "lora_path": ["sql/v1", None], "cache_salt": forged}
        _, salts = await salts_of(client, engine, "/generate", generate, "b1")
        assert {*salts} == {own_salt("rival", "", forged)}
        answer, _ = await salts_of(
            client, engine, "/v1/completions", {"model": BASE, "prompt": "a", "extra_key": "x"}, "b1"
        )
        assert error_of(answer) == (400, "invalid_request_body")
        _, salts = await salts_of(client, engine, "/v1/completions", {"model": BASE, "prompt": "a"}, "nobodys")
        assert salts == [None]


async def test_policy_and_the_adapters_own_decide_and_a_change_is_followed(opened):
    engine, control = AnyRoute("w0"), with_sql("w0")
    control.add_adapter("open/v1", on=["w0"], cache="shared")
    control.add_adapter("strict/v1", on=["w0"], cache="key")
    async with fleet(engine, control=control, **opened) as (client, _, parts):

        async def owned(lora_id):
            found = {}
            for key in ("a1", "a2", "b1"):
                _, (salt,) = await salts_of(client, engine, "/v1/chat/completions", CHAT | {"model": lora_id}, key)
                found[key] = salt
            return found

        assert await owned("open/v1") == {"a1": None, "a2": None, "b1": None}
        assert len({*(await owned("strict/v1")).values()}) == 3
        assert len({*(await owned("sql/v1")).values()}) == 2 == len({*(await owned(BASE)).values()})
        control.cache = "shared"
        control.tell()
        await until(lambda: parts.discovery.fleet.cache == "shared")
        assert await owned(BASE) == {"a1": None, "a2": None, "b1": None} == await owned("sql/v1")
        assert len({*(await owned("strict/v1")).values()}) == 3


async def test_engine_whose_connector_needs_a_salt_gets_one_of_adapter_and_tenant(opened):
    engine, control = AnyRoute("w0"), with_sql("w0")
    control.salted = frozenset({"w0"})
    async with fleet(engine, control=control, **opened) as (client, _, _):
        found = set()
        for key in ("a1", "a2", "b1"):
            for model in (BASE, "sql/v1"):
                _, (salt,) = await salts_of(client, engine, "/v1/chat/completions", CHAT | {"model": model}, key)
                found.add(salt)
        assert len(found) == 4
        assert not any(is_own_salt(salt) for salt in found)
