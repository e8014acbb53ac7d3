"""The OpenAPI documents of the three services are whole: generators make a function of each operation."""

import keyword
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from openapi_spec_validator import validate

from docs.site import openapi_documents
from tests.router.doubles import CHAT, AgentDouble, EngineDouble, fleet

Json = Mapping[str, Any]
METHODS = ("get", "put", "post", "patch", "delete")


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Json]:
    return openapi_documents(tmp_path_factory.mktemp("openapi"))


def operations(document: Json) -> Iterator[tuple[str, str, Json]]:
    """(method, path, operation) of all."""
    for path, item in document["paths"].items():
        yield from ((method, path, item[method]) for method in METHODS if method in item)


def parts(value: Any) -> Iterator[Json]:
    """Every object in a document."""
    if isinstance(value, Mapping):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from parts(each)


@pytest.mark.parametrize("service", ["router", "orchestrator", "worker"])
def test_a_services_document_is_valid_and_each_operation_has_a_name_of_its_own(documents, service):
    document = documents[service]
    validate(document)
    names = Counter(operation.get("operationId", "") for _, _, operation in operations(document))
    assert {name for name, count in names.items() if count > 1} == set()
    assert {name for name in names if not name.isidentifier() or keyword.iskeyword(name)} == set()


@pytest.mark.parametrize("service", ["router", "orchestrator", "worker"])
def test_generators_find_a_schema_for_each_list_and_body(documents, service):
    for method, path, operation in operations(documents[service]):
        body = operation.get("requestBody", {}).get("content", {})
        assert all("schema" in content for content in body.values()), (method, path)
        bare = [part for part in parts(operation) if part.get("type") == "array" and "items" not in part]
        assert not [part for part in bare if "prefixItems" not in part], (method, path)


async def test_each_of_a_routers_operations_is_where_its_document_says():
    async with fleet(EngineDouble("w0"), control=AgentDouble()) as (client, _, _):
        document = (await client.get("/openapi.json")).json()
        for method, path, operation in operations(document):
            found = {each["name"]: "x" for each in operation.get("parameters", ()) if each["in"] == "path"}
            answer = await client.request(method, path.format(**found), json={} if method != "get" else None)
            error = answer.json().get("error", {}) if "json" in answer.headers.get("content-type", "") else {}
            assert error.get("code") not in ("not_found", "method_not_allowed"), (method, path)
        chat = next(path for _, path, one in operations(document) if one["operationId"] == "post_v1_chat_completions")
        assert (await client.post(chat, json=CHAT)).status_code == 200
