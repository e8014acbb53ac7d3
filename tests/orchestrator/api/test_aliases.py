"""Aliases over REST: their targets exist, add up, and are protected from deletion."""

import pytest

from tests.orchestrator.api.answers import code_of


async def test_an_alias_needs_existing_targets_and_protects_them_from_deletion(service):
    answer = await service.http.put("/v1/aliases/sql", json={"targets": [{"lora_id": "sql/v1"}]})
    assert (answer.status_code, code_of(answer)) == (404, "adapter_not_found")
    await service.register()
    body = {"targets": [{"lora_id": "sql/v1", "weight": 2.0}]}
    assert (await service.http.put("/v1/aliases/sql", json=body)).status_code == 201
    assert (await service.http.put("/v1/aliases/sql", json=body)).status_code == 200
    (item,) = (await service.http.get("/v1/aliases")).json()["data"]
    assert item == {"name": "sql", "spec": body | {"place_s": 300.0}, "status": body | {"pending": None}}
    answer = await service.http.delete("/v1/adapters/sql/v1")
    assert (answer.status_code, code_of(answer)) == (409, "in_use")
    assert (await service.http.delete("/v1/aliases/sql")).status_code == 204
    answer = await service.http.get("/v1/aliases/sql")
    assert (answer.status_code, code_of(answer)) == (404, "alias_not_found")
    assert (await service.http.delete("/v1/adapters/sql/v1")).status_code == 204


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        ([{"lora_id": "sql/v1"}, {"lora_id": "sql/v1", "weight": 3}], "'sql/v1' is named twice"),
        ([{"lora_id": "sql/v1", "weight": 1e308}, {"lora_id": "sql/v2", "weight": 1e308}], "add up"),
    ],
)
async def test_an_alias_whose_targets_do_not_add_up_is_refused(service, targets, says):
    await service.register("sql/v1")
    await service.register("sql/v2")
    answer = await service.http.put("/v1/aliases/sql", json={"targets": targets})
    assert (answer.status_code, code_of(answer)) == (400, "invalid_request")
    assert says in answer.json()["error"]["message"]
