"""Calls of routes that a fleet does not have: what to call instead, in the form that the route's clients know."""

import pytest

from tests.router.doubles import AgentDouble, EngineDouble, fleet


@pytest.fixture
async def router():
    async with fleet(EngineDouble("w0"), control=AgentDouble()) as (client, _, _):
        yield client


@pytest.mark.parametrize(
    ("method", "path", "code", "named"),
    [
        ("POST", "/update_weights", "not_offered", "POST /v1/load_lora_adapter"),
        ("POST", "/v1/update_weights", "not_offered", "POST /v1/load_lora_adapter"),
        ("POST", "/set_lora_adapter/", "not_offered", "POST /v1/load_lora_adapter"),
        ("GET", "/skyrl/v1/get_world_size", "not_offered", "POST /v1/load_lora_adapter"),
        ("POST", "/api/chat", "not_offered", "OpenAI's API"),
        ("POST", "/v1/audio/speech", "not_offered", "POST /v1/chat/completions"),
        ("GET", "/v1/realtime", "not_offered", "POST /v1/responses"),
        ("GET", "/v1/files/file-1/content", "not_offered", "POST /v1/chat/completions"),
        ("POST", "/chat/completions", "not_found", "call /v1/chat/completions"),
        ("POST", "/openai/v1/chat/completions", "not_found", "call /v1/chat/completions"),
        ("GET", "/v1/v1/models", "not_found", "call /v1/models"),
        ("GET", "/asleep", "not_found", "GET /docs"),
        ("GET", "/v1/nowhere", "not_found", "GET /docs"),
    ],
)
async def test_a_call_that_is_not_offered_says_what_to_call_instead(router, method, path, code, named):
    answer = await router.request(method, path, json={} if method == "POST" else None)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, code)
    assert named in error["message"]
    assert "type" not in answer.json()


@pytest.mark.parametrize("path", ["/v1/messages/batches", "/v1/messages/unknown", "/anthropic/v1/messages"])
async def test_clients_of_anthropics_routes_get_its_errors(router, path):
    answer = await router.post(path, json={})
    assert (answer.status_code, answer.json()["type"]) == (404, "error")
    assert answer.json()["error"]["type"] == "not_found_error"
    assert "/v1/messages" in answer.json()["error"]["message"]


async def test_the_tokenizer_of_a_base_model_is_told_by_an_engine_that_does(router):
    known = await router.get("/v1/models")
    name = known.json()["data"][0]["id"]
    refused = await router.get("/tokenizer_info", params={"model": name})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_offered")
    assert "--enable-tokenizer-info-endpoint" in refused.json()["error"]["message"]
    assert (await router.get("/tokenizer_info", params={"model": "absent"})).status_code == 404
