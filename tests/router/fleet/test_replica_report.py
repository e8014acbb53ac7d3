"""Workers with SGLang and with an unknown kind of engine, and the load times that workers report."""

import json
from dataclasses import replace

import pytest
from starlette.responses import JSONResponse, Response

from lorafleet.identity import engine_name
from router.http.error_shapes import enveloped
from tests.patience import patience
from tests.router.doubles import BASE, CHAT, DIGEST, AgentDouble, EngineDouble, fleet, with_sql
from workers.wire import Metadata


def speaking(control: AgentDouble, **dialects: str) -> AgentDouble:
    """A control plane double whose workers have these kinds of engines."""
    plain = control.metadata

    def metadata(worker: str) -> Metadata:
        told = plain(worker)
        kind = dialects.get(worker, "vllm")
        return told.model_copy(update={"transport": told.transport.model_copy(update={"dialect": kind})})

    control.metadata = metadata
    return control


async def test_an_unknown_engine_kind_serves_the_base_model():
    engines = [EngineDouble("w0"), EngineDouble("w1")]
    async with fleet(*engines, control=speaking(with_sql("w0", "w1"), w0="mlx")) as (client, _, parts):
        assert {replica.dialect for replica in parts.discovery.fleet.replicas.values()} == {"mlx", "vllm"}
        for _ in range(8):
            assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
            assert (await client.post("/v1/chat/completions", json={**CHAT, "model": "sql/v1"})).status_code == 200
    assert {body["model"] for body in engines[0].bodies} <= {BASE}
    assert engine_name("sql/v1", DIGEST) in {body["model"] for body in engines[1].bodies}


async def test_an_adapter_on_an_unknown_engine_kind_alone_is_refused():
    async def nowhere(_control, _lora_id):
        return JSONResponse({"error": {"message": "no room", "type": "x", "param": None, "code": "no_capacity"}}, 503)

    engine, control = EngineDouble("w0"), speaking(with_sql("w0"), w0="mlx")
    control.ensure = nowhere
    async with fleet(engine, control=control, cold_start_timeout_s=patience(0.1)) as (client, _, _):
        answer = await client.post("/v1/chat/completions", json={**CHAT, "model": "sql/v1"})
    assert answer.status_code == 503, answer.text
    assert engine.bodies == []


async def test_sglang_gets_its_own_names_and_the_client_sees_its_own():
    engine = EngineDouble("w0")
    async with fleet(engine, control=speaking(with_sql("w0"), w0="sglang")) as (client, _, _):
        for stream in (False, True):
            body = {**CHAT, "model": "sql/v1", "stream": stream}
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200
            assert b'"model":"sql/v1"' in answer.content
            assert b"@" not in answer.content
    assert {body["model"] for body in engine.bodies} == {f"{BASE}:{engine_name('sql/v1', DIGEST)}"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "x"}),
        ("/v1/responses", {"input": "x", "stream": True}),
        ("/v1/score", {"query": "x", "items": ["y"]}),
        ("/v1/rerank", {"query": "x", "documents": ["y"]}),
        ("/classify", {"input": "x"}),
        ("/v1/systemone", {"state": "x", "questions": []}),
        ("/v1/decisions", {"input": "x", "questions": []}),
    ],
)
async def test_sglang_gets_no_adapter_request_it_would_answer_from_the_base_model(path, body):
    engine = EngineDouble("w0")
    async with fleet(engine, control=speaking(with_sql("w0"), w0="sglang")) as (client, _, parts):
        refused = await client.post(path, json={**body, "model": "sql/v1"})
        assert refused.status_code == 400, refused.text
        assert f"sglang, which runs no adapter at {path}" in refused.json()["error"]["message"]
        assert (await client.post("/v1/chat/completions", json={**CHAT, "model": "sql/v1"})).status_code == 200
        assert parts.scheduler.load.in_flight_tokens(BASE) == 0
    assert [body["model"] for body in engine.bodies] == [f"{BASE}:{engine_name('sql/v1', DIGEST)}"]


async def test_sglangs_own_errors_reach_the_client_in_the_routes_envelope():
    async def refuses(engine, body):
        told = {"object": "error", "message": "too long", "type": "BadRequestError", "param": None, "code": 400}
        return JSONResponse(told, 400)

    engine = EngineDouble("w0")
    engine.answer = refuses
    async with fleet(engine, control=speaking(with_sql("w0"), w0="sglang")) as (client, _, _):
        chat = await client.post("/v1/chat/completions", json=CHAT)
        message = await client.post("/v1/messages", json={**CHAT, "max_tokens": 4})
    error = {"message": "too long", "type": "BadRequestError", "param": None, "code": 400}
    assert (chat.status_code, chat.json()) == (400, {"error": error})
    of_messages = {"type": "error", "error": error | {"type": "invalid_request_error"}}
    assert (message.status_code, message.json()) == (400, of_messages)


@pytest.mark.parametrize(
    "body",
    [
        b'{"type": "error", "error": {"message": "m"}}',
        b'{"error": "m"}',
        b"plain words",
        b'["m"]',
        b'{"status": "odd"}',
        b'{"message": "\xff"}',
        b"",
    ],
)
def test_an_error_in_the_envelope_or_an_unknown_form_is_unchanged(body):
    assert enveloped(400, body, "openai") == enveloped(400, body, "anthropic") == body


async def test_a_message_that_vllm_refuses_in_openais_form_is_refused_in_anthropics():
    error = {"message": "max_tokens: Field required", "type": "Bad Request", "param": "max_tokens", "code": 400}

    async def refuses(_engine, _body):
        return JSONResponse({"error": error}, 400)

    engine = EngineDouble("w0", refuses)
    async with fleet(engine, control=with_sql("w0")) as (client, _, _):
        chat = await client.post("/v1/chat/completions", json=CHAT)
        message = await client.post("/v1/messages", json=CHAT)
    assert (chat.status_code, chat.json()) == (400, {"error": error})
    of_messages = {"type": "error", "error": error | {"type": "invalid_request_error"}}
    assert (message.status_code, message.json()) == (400, of_messages)


async def test_an_engines_error_with_bytes_outside_utf8_reaches_the_client():
    body = b'{"message": "\xff"}'

    async def refuses(engine, _body):
        return Response(body, 422, media_type="application/json")

    engine = EngineDouble("w0", refuses)
    async with fleet(engine, control=with_sql("w0")) as (client, _, _):
        answer = await client.post("/v1/chat/completions", json=CHAT)
    assert (answer.status_code, answer.content) == (422, body)


def test_fastapis_own_errors_are_enveloped():
    told = json.loads(enveloped(422, b'{"detail": [{"loc": ["body"]}]}', "openai"))
    wanted = {"message": '[{"loc":["body"]}]', "type": "invalid_request_error", "param": None, "code": 422}
    assert told == {"error": wanted}


@pytest.mark.parametrize(
    ("dialect", "message"),
    [
        ("sglang", "Got LoRA adapter that has never been loaded: sql@1\nAll loaded adapters: dict_keys([])."),
        ("vllm", "LoRA adapter 'sql@1' was found but could not be loaded."),
    ],
)
async def test_a_400_for_an_adapter_that_the_engine_cannot_load_is_answered_by_another_replica(dialect, message):
    async def forgot(engine, body):
        return JSONResponse({"object": "error", "message": message, "code": 400}, 400)

    engines = [EngineDouble("w0", forgot), EngineDouble("w1")]
    control = speaking(with_sql("w0", "w1"), w0=dialect, w1=dialect)
    async with fleet(*engines, control=control) as (client, _, _):
        for n in range(8):
            said = [{"role": "user", "content": f"conversation {n}"}]
            answer = await client.post("/v1/chat/completions", json={"messages": said, "model": "sql/v1"})
            assert answer.status_code == 200
    assert engines[0].bodies  # it was tried


async def test_an_adapters_last_load_on_a_worker_is_what_its_load_there_is_priced_by():
    control = with_sql("w0", "w1")
    plain = control.metadata

    def metadata(worker: str) -> Metadata:
        report = plain(worker)
        loras = tuple(replace(lora, load_seconds=2.5 if worker == "w0" else None) for lora in report.lora.loaded_loras)
        return report.model_copy(update={"lora": report.lora.model_copy(update={"loaded_loras": loras})})

    control.metadata = metadata
    async with fleet(EngineDouble("w0"), EngineDouble("w1"), control=control) as (_, _, parts):
        replicas = parts.discovery.fleet.replicas
        found = {id_: [held.load_s for held in replica.residents.values()] for id_, replica in replicas.items()}
    assert found == {"w0": [2.5], "w1": [0.0]}
