"""The OpenAPI document is complete, and no call, valid or not, gets a 500."""

import asyncio
import json
import math
import re
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from lorafleet.service.http.known_fields import WIRE_HEADERS
from orchestrator.api.examples import EXAMPLES
from orchestrator.app import build
from orchestrator.config import OrchestratorSettings
from tests.orchestrator.answering_agent import AnsweringAgent
from tests.properties import examples
from tests.serving import serving
from tests.wire.wire_types import classes

JSON = "application/json"


def application(path):
    return build(OrchestratorSettings(store=path / "s.db", settle_s=0, allow_open=True))


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    built = application(tmp_path_factory.mktemp("document"))
    yield built.app.openapi()
    built.store.close()


def operations(document):
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


def resolved(document, schema):
    if "$ref" in schema:
        named = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return named | {name: schema[name] for name in ("examples",) if name in schema}
    for choice in schema.get("anyOf", ()):
        if "$ref" in choice and "examples" not in schema:
            return resolved(document, choice)
    return schema


def test_every_body_and_response_has_an_example(document):
    lacking = []
    for method, path, operation in operations(document):
        contents = [operation.get("requestBody", {}).get("content", {})]
        contents += [answer.get("content", {}) for status, answer in operation["responses"].items() if status < "300"]
        schemas = [content[JSON]["schema"] for content in contents if JSON in content]
        lacking += [(method, path, it) for it in schemas if not resolved(document, it).get("examples")]
    assert lacking == []


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_every_example_is_valid(name):
    by_name = {found.__name__: found for found in classes()}
    TypeAdapter(by_name[name]).validate_json(json.dumps(EXAMPLES[name]))


# --- negative testing --------------------------------------------------------------------------------------------

NAMES = ("sql/v1", "sql", "a", "w0", "nobody", "../x", "ensure", "a/ensure", "x" * 300, "ü", " ", "%00", "a?b", "-1")
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 10**30, 0.5, 1e308, -0.0]),
    st.sampled_from([*NAMES, "lazy", "ready", "file:///x", "a" * 64, "\x00", "\ud800", "NaN"]),
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner))


@st.composite
def spoiled(draw, example):
    """The example with one value replaced, removed or added at any depth."""
    if isinstance(example, dict) and example and draw(st.integers(0, 4)):
        key = draw(st.sampled_from(sorted(example)))
        return {**example, key: draw(spoiled(example[key]))}
    if isinstance(example, list) and example and draw(st.integers(0, 3)):
        return [draw(spoiled(example[0])), *example[1:]]
    kind = draw(st.integers(0, 2))
    if isinstance(example, dict) and example and kind == 0:
        return {name: value for name, value in example.items() if name != draw(st.sampled_from(sorted(example)))}
    if isinstance(example, dict) and kind == 1:
        return {**example, draw(st.sampled_from(("lora_id", "wire", "x", ""))): draw(VALUES)}
    return draw(VALUES)


@st.composite
def calls(draw, document):
    method, path, operation = draw(st.sampled_from(sorted(operations(document), key=lambda o: (o[1], o[0]))))
    names = {"lora_id": NAMES, "name": NAMES, "worker_id": NAMES, "request_id": NAMES, "digest": (*NAMES, "a" * 64)}
    url = path
    query, headers = {}, {}
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "path":
            found = draw(st.sampled_from(names[parameter["name"]]))
            url = url.replace(f"{{{parameter['name']}}}", quote(found, safe="/"))
        elif draw(st.booleans()):
            value = draw(st.sampled_from([*NAMES, "0", "1", "true", "NaN", "1e400", "9" * 40, '"x"', "*", ""]))
            if parameter["in"] == "query":
                query[parameter["name"]] = value
            else:
                headers[parameter["name"]] = value.encode("ascii", "ignore").decode()
    body = None
    content = operation.get("requestBody", {}).get("content", {})
    if content and JSON not in content:
        body = draw(st.sampled_from(["", "text", 7]))  # bytes of an upload
    elif content:
        schema = resolved(document, content[JSON]["schema"])
        example = schema["examples"][0]
        body = example if draw(st.integers(0, 4)) == 0 else draw(spoiled(example))
    # A call that waits, or a stream that does not end, would only be slow.
    if path.endswith("/ensure") and isinstance(body, dict):
        body = {**body, "wait_s": 0}
    return method, url, query, headers, body


def with_hosts(body: str, url: str) -> str:
    """The body with the agents and engines of examples at this URL."""
    return re.sub(r"http://10\.0\.0\.\d+:\d+", url, body)


def test_no_malformed_call_gets_a_500(document, tmp_path):
    built = application(tmp_path)
    built.leadership.lead_until(math.inf)
    transport = httpx.ASGITransport(built.app, raise_app_exceptions=False)
    client = httpx.AsyncClient(transport=transport, base_url="http://orchestrator")
    seen = {}

    @seed(7)
    @settings(max_examples=examples(600), suppress_health_check=list(HealthCheck))
    @given(calls(document))
    def never_500(call):
        method, url, query, headers, body = call
        if url in {"/v1/live", "/v1/routers/questions"} or (url == "/v1/events" and not query and not headers):
            return  # it would follow for ever
        content = None if body is None else with_hosts(json.dumps(body), agent).encode()
        # As from a service: else most bodies would be refused for their unknown fields alone.
        headers |= {"content-type": JSON, **WIRE_HEADERS}
        answer = runner.run(client.request(method, url, params=query, headers=headers, content=content))
        seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
        # A spoiled report may name an agent that does not answer, and a slow machine's agent may be late.
        away = ("no_worker", "no_router", "starting", "agent_unreachable")
        assert answer.status_code < 500 or answer.json()["error"]["code"] in away, answer.text
        if answer.status_code >= 400:
            error = answer.json()["error"]
            assert error["message"]
            assert error["code"]

    with asyncio.Runner() as runner:
        # The worker of the examples, whose agent is called.
        served = serving(AnsweringAgent().app)
        agent = runner.run(served.__aenter__())
        try:
            never_500()
        finally:
            runner.run(client.aclose())
            runner.run(built.client.aclose())
            runner.run(served.__aexit__(None, None, None))
    built.store.close()
    # Otherwise it only knocked at the door.
    least = examples(600) // 16
    assert min(seen[status] for status in (200, 400, 404)) > least


def test_every_schema_that_the_console_reads_is_described(document):
    pages = (Path(__file__).parents[2] / "orchestrator/api/console").rglob("*.js")
    asked = {name for page in pages for name in re.findall(r"components\.schemas\.(\w+)", page.read_text())}
    assert asked
    assert asked <= document["components"]["schemas"].keys()
