"""The engines' own load and unload calls at a router, in front of a double of the orchestrator's published names."""

import asyncio
import contextlib

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from lorafleet.keys.key_edits import add_key
from lorafleet.service.http import envelope
from router.app import build
from router.config import RouterSettings
from tests.patience import until
from tests.serving import client_of, serving

LOADS = ("/v1/load_lora_adapter", "/skyrl/v1/load_lora_adapter", "/load_lora_adapter")
BODY = {"lora_name": "policy", "lora_path": "/run/step-1", "load_inplace": True, "is_3d_lora_weight": False}


class PublishingOrchestrator:
    """Answers publishes and deletions with what is in `answers`, the last one again and again."""

    def __init__(self):
        self.calls, self.answers = [], [(200, None)]
        self.revision = 1  # of the catalog that has what was published
        self.catalog = {"revision": 1}
        self.app = FastAPI()
        self.app.add_api_route("/v1/catalog", lambda: self.catalog)
        self.runs = []  # of each call
        for run in ("", "/runs/{run}"):
            self.app.add_api_route(f"{run}/v1/published/{{name:path}}", self._answer, methods=["POST", "DELETE"])
            self.app.add_api_route(f"{run}/v1/pauses", self._pause, methods=["POST", "DELETE"])

    async def _pause(self, request: Request):
        return await self._answer("", request)

    async def _answer(self, name: str, request: Request):
        body = await request.body()
        self.runs.append(request.path_params.get("run", ""))
        self.calls.append((request.method, name, body and await request.json(), request.headers.get("authorization")))
        status, code = self.answers[0] if len(self.answers) == 1 else self.answers.pop(0)
        if code is not None:
            return JSONResponse(envelope(status, code, f"why: {code}"), status)
        if request.method == "DELETE" and name:
            return Response(status_code=204)
        pause = {"scope": "tenant acme", "mode": "keep", "running": 0, "expires_at": "2026-11-26T18:00:00Z"}
        return JSONResponse({"name": name, "status": {"revision": self.revision}, **pause}, status)


@contextlib.asynccontextmanager
async def a_router(**settings):
    app, _ = build(RouterSettings(**settings))
    async with serving(app, http=app.state.http) as url, client_of(url) as client:
        yield client


@pytest.fixture
async def scene():
    """A router and its orchestrator."""
    orchestrator = PublishingOrchestrator()
    async with serving(orchestrator.app) as url, a_router(orchestrator_url=url, publish_timeout_s=2) as router:
        yield router, orchestrator


@pytest.mark.parametrize("path", LOADS)
async def test_load_is_a_publish_and_answers_as_its_engine(scene, path):
    router, orchestrator = scene

    answer = await router.post(path, json=BODY)

    assert answer.status_code == 200
    ((method, name, spec, *_),) = orchestrator.calls
    assert (method, name, spec["source"]) == ("POST", "policy", "/run/step-1")
    assert 0 < spec["timeout_s"] <= 2
    if path.startswith("/load"):
        assert answer.json() == {
            "success": True,
            "error_message": None,
            "loaded_adapters": {"policy": "/run/step-1"},
        }
    else:
        assert answer.text == "Success: LoRA adapter 'policy' added successfully."


@pytest.mark.parametrize("path", ["/v1/unload_lora_adapter", "/unload_lora_adapter"])
async def test_unload_deletes_the_name(scene, path):
    router, orchestrator = scene

    assert (await router.post(path, json={"lora_name": "m@3"})).status_code == 200
    assert [call[:2] for call in orchestrator.calls] == [("DELETE", "m@3")]
    orchestrator.answers = [(404, "name_not_found")]
    answer = await router.post(path, json={"lora_name": "m@3"})

    assert (answer.status_code, answer.json()["error"]["code"]) == (404, 404)
    assert answer.json()["error"]["message"] == "The lora adapter 'm@3' cannot be found."


@pytest.mark.parametrize(
    ("status", "code", "answered"),
    [
        (400, "source_forbidden", 400),
        (403, "name_not_yours", 403),
        (404, "name_not_found", 500),
        (409, "name_taken", 400),
        (422, "adapter_refused", 400),
        (500, "internal_error", 500),
        (503, "no_agent", 500),
        (503, "no_worker", 500),
        (504, "bytes_not_visible", 500),
    ],
)
async def test_load_is_never_answered_404_or_503(scene, status, code, answered):
    router, orchestrator = scene
    orchestrator.answers = [(status, code)]

    for path in LOADS:
        answer = await router.post(path, json=BODY)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (answered, answered)
        assert code in error["message"]
    assert answer.json()["error_message"] == error["message"]


async def test_load_is_answered_when_this_router_goes_by_the_catalog_that_has_it(scene):
    router, orchestrator = scene
    orchestrator.revision = 7
    loading = asyncio.create_task(router.post(LOADS[0], json=BODY))
    await until(lambda: orchestrator.calls, what="the orchestrator is asked")
    orchestrator.catalog = {"revision": 7}
    assert (await loading).status_code == 200
    orchestrator.revision = 8
    late = await router.post(LOADS[0], json=BODY)
    assert (late.status_code, "has not read that" in late.text) == (500, True)


async def test_load_goes_on_with_the_next_leader(scene):
    router, orchestrator = scene
    orchestrator.answers = [(503, "not_leading"), (503, "starting"), (200, None)]

    assert (await router.post(LOADS[0], json=BODY)).status_code == 200
    assert len(orchestrator.calls) == 3


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
@pytest.mark.parametrize("name", ["..", "../adapters/sql", "a/./b"])
async def test_name_never_leads_to_another_route_of_the_orchestrator(scene, path, name):
    router, orchestrator = scene
    answer = await router.post(path, json=BODY | {"lora_name": name})
    assert answer.status_code == 400
    assert name in answer.json()["error"]["message"]
    assert orchestrator.calls == []


@pytest.mark.parametrize("path", ["/v1/adapters/%2e%2e/pauses", "/v1/published/a/%2e%2e/%2e%2e/pauses"])
async def test_call_that_is_passed_on_never_leads_to_another_route_of_the_orchestrator(scene, path):
    router, orchestrator = scene
    answer = await router.delete(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
    assert orchestrator.calls == []


@pytest.mark.parametrize("path", ["/pause?mode=keep", "/resume", "/pause_generation", "/continue_generation"])
async def test_pause_and_resume_go_on_with_the_next_leader(scene, path):
    router, orchestrator = scene
    orchestrator.answers = [(503, "not_leading"), (503, "starting"), (200, None)]
    assert (await router.post(path)).status_code == 200
    assert len(orchestrator.calls) == 3


NOT_BODIES = [
    b"{",
    b"[]",
    b"{}",
    b'{"lora_name": "x"}',
    b'{"lora_name": 7, "lora_path": "/x"}',
    b'{"lora_name": "\xff"}',
]


@pytest.mark.parametrize("body", [*NOT_BODIES, b'{"x":' + b"[" * 30_000 + b"]" * 30_000 + b"}"])
async def test_body_without_name_and_path_is_the_callers_mistake(scene, body):
    router, orchestrator = scene

    for path in LOADS:
        answer = await router.post(path, content=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "InvalidUserInput")
    assert orchestrator.calls == []


@pytest.mark.parametrize("lora_path", ["/a/b", "org/name", "s3://b/x", "./a/b", "~/x", "C:\\runs\\x"])
async def test_workers_say_what_a_path_is(scene, lora_path):
    router, orchestrator = scene

    await router.post(LOADS[0], json=BODY | {"lora_path": lora_path})

    assert [call[2]["source"] for call in orchestrator.calls] == [lora_path]


@pytest.mark.parametrize("path", LOADS)
async def test_a_path_that_a_worker_knows_as_a_repository_is_published_from_the_hub(scene, path):
    router, orchestrator = scene
    orchestrator.answers = [(400, "source_is_repository"), (200, None)]

    answer = await router.post(path, json=BODY | {"lora_path": "org/name"})

    assert answer.status_code == 200
    assert [call[2]["source"] for call in orchestrator.calls] == ["org/name", "hf://org/name"]


async def test_call_has_the_callers_own_key_and_needs_scope_register(tmp_path):
    trainer, client = (add_key(tmp_path / "k", "acme", [scope]) for scope in ("register", "infer"))
    orchestrator = PublishingOrchestrator()
    async with (
        serving(orchestrator.app) as url,
        a_router(orchestrator_url=url, key_files=(tmp_path / "k",), token="routers-own") as router,
    ):
        headers = {"authorization": f"Bearer {trainer}"}
        assert (await router.post(LOADS[0], json=BODY, headers=headers)).status_code == 200
        assert orchestrator.calls[0][3] == f"Bearer {trainer}"
        assert (await router.post(LOADS[0], json=BODY, headers={"x-api-key": trainer})).status_code == 200
        assert orchestrator.calls.pop()[3] == f"Bearer {trainer}"  # and never the router's own
        for key, status in ((client, 403), ("none", 401)):
            answer = await router.post(LOADS[0], json=BODY, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == status
        assert len(orchestrator.calls) == 1


async def test_router_without_an_orchestrator_says_what_is_missing():
    async with a_router(engines=("http://127.0.0.1:9",)) as router:
        answer = await router.post(LOADS[0], json=BODY)

    assert answer.status_code == 500
    assert "--orchestrator-url" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["policy/", "/policy", "a//policy", "../policy", " policy", "pol\nicy", "pol\x00icy"])
async def test_a_name_of_another_form_is_400_and_no_call_is_made_for_the_name_that_it_resembles(scene, name):
    router, orchestrator = scene

    for path in (*LOADS, "/v1/unload_lora_adapter", "/unload_lora_adapter"):
        answer = await router.post(path, json=BODY | {"lora_name": name})
        assert (answer.status_code, "lora_name" in answer.text) == (400, True), answer.text
    assert orchestrator.calls == []


@pytest.mark.parametrize(
    ("path", "load_inplace", "expected"),
    [
        ("/v1/load_lora_adapter", None, 0),
        ("/v1/load_lora_adapter", False, 0),
        ("/v1/load_lora_adapter", True, None),
        ("/skyrl/v1/load_lora_adapter", None, None),
        ("/skyrl/v1/load_lora_adapter", False, 0),
        ("/load_lora_adapter", None, None),
        ("/load_lora_adapter", False, 0),
    ],
)
async def test_a_load_is_of_a_new_name_where_it_says_so_or_its_engine_means_so(scene, path, load_inplace, expected):
    router, orchestrator = scene
    body = {"lora_name": "policy", "lora_path": "/run/step-1", "load_inplace": load_inplace}
    assert (await router.post(path, json=body)).status_code == 200
    assert orchestrator.calls[0][2].get("expected_version") == expected

    orchestrator.answers = [(409, "version_conflict")]
    refused = await router.post(path, json=body)
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "InvalidUserInput")
    assert "The lora adapter 'policy' has already been loaded." in refused.json()["error"]["message"]
    assert "/runs/NAME" in refused.json()["error"]["message"]


async def test_calls_below_a_runs_base_url_reach_the_orchestrator_below_it(scene):
    router, orchestrator = scene
    for method, path in (("POST", LOADS[0]), ("POST", "/unload_lora_adapter"), ("POST", "/pause"), ("POST", "/resume")):
        assert (await router.request(method, f"/runs/r1{path}", json=BODY)).status_code == 200, path
    assert (await router.delete("/runs/r1/v1/published/policy")).status_code == 204
    assert (await router.get("/runs/r1/health")).status_code == 200
    assert (await router.get("/runs/r1/v1/whoami")).json()["spec"]["namespace"] == "r1"
    assert orchestrator.runs == ["r1"] * 5

    for path in ("/runs/%2e%2e/v1/load_lora_adapter", "/runs/a%2fb/v1/load_lora_adapter"):
        refused = await router.post(path, json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_run")
    assert len(orchestrator.runs) == 5
