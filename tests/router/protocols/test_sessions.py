"""Sessions by the names that engines, gateways and agents have for them, each within its tenant."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.keys.key_files import hash_key
from router.core.sessions.session import NO_SESSION, Session
from router.protocols.sessions import SESSION_HEADERS, SessionReader, body_session, engine_header, own_session
from tests.router.doubles import BASE, EngineDouble, fleet, with_sql

READER = SessionReader("x-session-id")
NAMES = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=8)


@pytest.mark.parametrize("headers", SESSION_HEADERS, ids=lambda headers: headers.session.decode())
def test_every_clients_header_names_the_session(headers):
    assert READER.read({headers.session: b"one", b"host": b"x"}).name == "one"
    assert READER.read({headers.session: b" "}) == NO_SESSION
    if headers.parent and not headers.agent:
        found = READER.read({headers.session: b"child", headers.parent: b"mother"})
        assert found == Session("child", parent="mother")
        assert READER.read({headers.session: b"one", headers.parent: b"one"}).parent == ""


def test_a_sub_agent_of_claude_code_is_a_session_in_its_program():
    whole = {b"x-claude-code-session-id": b"task"}
    assert READER.read(whole) == Session("task", root="task")
    child = whole | {b"x-claude-code-agent-id": b"a1"}
    assert READER.read(child) == Session("task/a1", parent="task", root="task")
    grandchild = whole | {b"x-claude-code-agent-id": b"a2", b"x-claude-code-parent-agent-id": b"a1"}
    assert READER.read(grandchild) == Session("task/a2", parent="task/a1", root="task")


def test_the_set_header_goes_before_all_others_and_dynamos_before_the_agents():
    both = {b"x-dynamo-session-id": b"d", b"thread-id": b"t", b"x-mine": b"m"}
    assert READER.read(both).name == "d"
    assert SessionReader("X-Mine").read(both).name == "m"
    assert SessionReader("x-session-id").read(both | {b"x-session-id": b"s"}).name == "s"


def test_the_last_request_of_a_session_says_so():
    assert READER.read({b"thread-id": b"t", b"x-dynamo-session-final": b"True"}).is_over
    assert not READER.read({b"thread-id": b"t", b"x-dynamo-session-final": b"0"}).is_over


def test_the_bodys_session_goes_before_a_header_and_its_user_behind():
    named = Session("header", parent="mother")
    assert body_session({"session_id": "own", "user": "u"}, named) == Session("own", parent="mother")
    assert body_session({"vllm_xargs": {"session_id": "x"}, "user": "u"}, named) == named
    assert body_session({"vllm_xargs": {"session_id": "x"}, "user": "u"}, NO_SESSION).name == "x"
    assert body_session({"sampling_params": {"extra_args": {"session_id": "x"}}}, NO_SESSION).name == "x"
    assert body_session({"user": "u", "session_id": 3, "vllm_xargs": [], "sampling_params": ""}, NO_SESSION).name == "u"
    assert body_session({}, NO_SESSION) == NO_SESSION


@given(st.lists(st.tuples(NAMES, NAMES), unique=True, max_size=20))
def test_no_two_tenants_sessions_meet(pairs):
    own = [own_session(tenant, Session(name)).name for tenant, name in pairs]
    assert len(set(own)) == len(pairs)
    assert len(set(map(engine_header, own))) == len(pairs)


@given(st.text(max_size=400), st.text(max_size=400))
def test_an_engines_header_is_one_short_line_of_plain_letters(tenant, name):
    own = own_session(tenant, Session(name, parent=name))
    assert own.name == own.parent
    line = engine_header(own.name)
    assert (line == b"") == (name == "")
    if line:
        told = line.removeprefix(b"x-session-id: ").removesuffix(b"\r\n").decode("ascii")
        assert told.replace("-", "").replace("_", "").isalnum()
        assert len(told) <= 200


async def test_an_engine_gets_the_session_within_its_tenant(tmp_path):
    path = tmp_path / "keys"
    rows = "".join(
        f"- {{sha256: {hash_key(key)}, tenant: {tenant}, scopes: [infer]}}\n" for key, tenant in ("ab", "cd")
    )
    path.write_text(f"keys:\n{rows}- {{sha256: {hash_key('nobodys')}, scopes: [infer]}}\n")
    engine = EngineDouble("w0")
    async with fleet(engine, control=with_sql("w0"), key_files=(path,)) as (client, _, parts):

        async def told(key, headers, **fields):
            body = {"model": BASE, "prompt": "x", **fields}
            head = {"authorization": f"Bearer {key}", **headers}
            assert (await client.post("/v1/completions", json=body, headers=head)).status_code == 200
            assert "session_id" not in engine.bodies[-1]
            assert "session_id" not in engine.bodies[-1].get("vllm_xargs", {})
            return engine.headers[-1].get("x-session-id")

        first = await told("a", {"x-session-id": "s"})
        assert first
        assert first == await told("a", {}, session_id="s") == await told("a", {}, vllm_xargs={"session_id": "s"})
        assert first == await told("a", {"thread-id": "s"})
        assert first not in {"s", await told("c", {"x-session-id": "s"}), await told("nobodys", {"x-session-id": "s"})}
        assert await told("nobodys", {"x-session-id": "run-1"}) == "run-1"
        assert await told("a", {}) is None
        assert parts.decisions[0].decision.request.session == "1:b/s"


def test_callers_without_a_tenant_keep_plain_names():
    named = Session("s", "mother", "task", is_over=True)
    assert own_session("", named) == named
    assert own_session("", NO_SESSION) == NO_SESSION
    assert own_session("lab", NO_SESSION) == Session(tenant="lab")


async def test_a_decision_says_when_the_sessions_next_turn_usually_comes():
    async with fleet(EngineDouble("w0"), control=with_sql("w0")) as (client, _, _):
        body = {"model": BASE, "prompt": "x" * 100, "session_id": "s"}
        assert (await client.post("/v1/route", json=body)).json()["next_turn_s"] is None
        for _ in range(3):
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        assert (await client.post("/v1/route", json=body)).json()["next_turn_s"] == 1.0
        decided = (await client.get("/v1/decisions")).json()["data"]
        assert [row["next_turn_s"] for row in decided] == [1.0] * 3
