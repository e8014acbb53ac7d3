"""A fleet with a key file: no service answers without a key, beyond its scope, or about other tenants."""

import asyncio
import json

import httpx

from lorafleet.keys.key_edits import add_key
from tests.simulation.fleet import until
from workers.wire import WORKER_PROOF_PATH

SQL = "sql-expert/v1"
SCOPES = {
    "acme": ("acme", ["infer"]), "other": ("other", ["infer"]), "trainer": ("acme", ["infer", "register"]),
    "pipeline": (None, ["register"]), "agents": (None, ["worker", "drain"]),
}  # fmt: skip


async def guarded(simulation):
    """A fleet with keys of many kinds. sql-expert/v1 is acme's alone."""
    fleet = await simulation.fleet()
    fleet.keys |= {name: add_key(fleet.paths.key_file, *whose) for name, whose in SCOPES.items()}
    await fleet.register(SQL, simulation.adapter(SQL), tenants=["acme"])

    async def knows_all():
        answers = [await fleet.routers[0].get("/v1/whoami", headers=fleet.as_(name)) for name in ("acme", "other")]
        answers += [await fleet.http.get("/v1/whoami", headers=fleet.as_(name)) for name in SCOPES]
        return all(answer.is_success for answer in answers)

    await until(knows_all, what="the services have read the key file")
    return fleet


async def models(fleet, who):
    answer = await fleet.routers[0].get("/v1/models", headers=fleet.as_(who))
    return {item["id"] for item in answer.json()["data"]}


def code(answer):
    return answer.status_code, answer.json()["error"]["code"]


async def test_without_a_key_every_service_answers_401(simulation):
    fleet = await guarded(simulation)
    for client, path in ((fleet.routers[0], "/v1/models"), (fleet.http, "/v1/adapters")):
        assert code(await client.get(path, headers=fleet.as_(""))) == (401, "invalid_api_key")
    wrong = {"authorization": "Bearer lf-wrong"}
    assert code(await fleet.ask("tiny-qwen", headers=wrong)) == (401, "invalid_api_key")


async def test_no_service_reads_an_unauthorised_body(simulation):
    fleet = await guarded(simulation)
    for client, path in (
        (fleet.routers[0], "/v1/decisions/replay"),
        (fleet.http, "/v1/adapters:batch"),
        (fleet.agents["w0"], "/v1/admin/load_lora"),
    ):
        assert await status_before_the_body(client.base_url, path, "lf-wrong") == 401, path
        assert await status_before_the_body(client.base_url, path, fleet.keys["acme"]) == 403, path


async def status_before_the_body(url, path, key):
    """The answer to a request's head without its body."""
    reader, writer = await asyncio.open_connection(url.host, url.port)
    head = f"POST {path} HTTP/1.1\r\nhost: {url.netloc.decode()}\r\nauthorization: Bearer {key}\r\n"
    writer.write(f"{head}content-type: application/json\r\ncontent-length: 1000000\r\n\r\n".encode())
    status = int((await reader.read(64)).split()[1])
    writer.close()
    return status


async def test_a_key_without_the_scope_is_refused(simulation):
    fleet = await guarded(simulation)
    spec = {"lora_id": "mine/v1", "source": "file:///mine"}
    assert (await fleet.http.post("/v1/adapters", json=spec, headers=fleet.as_("acme"))).status_code == 403
    asked = {"model": "tiny-qwen", "messages": [{"role": "user", "content": "hello"}]}
    assert (await fleet.routers[0].post("/v1/route", json=asked, headers=fleet.as_("acme"))).status_code == 403


async def test_a_tenants_adapter_is_not_there_for_another(simulation):
    fleet = await guarded(simulation)
    assert (await fleet.ask(SQL, headers=fleet.as_("acme"))).is_success
    assert SQL in await models(fleet, "acme")
    assert SQL not in await models(fleet, "other")
    refused = await fleet.ask(SQL, headers=fleet.as_("other"))
    assert code(refused) == (404, "model_not_found")
    # The same message as for an unknown name, so that other tenants learn nothing.
    absent = await fleet.ask("sql-expert/v9", headers=fleet.as_("other"))
    assert json.dumps(refused.json()).replace(SQL, "") == json.dumps(absent.json()).replace("sql-expert/v9", "")


class FakeWorker:
    """A worker of a trainer's own: keeps all that it receives, and answers what routers ask.

    It reports as the real one does, but with its own name, start and address. A request for a proof is passed on to the
    real agent, as the best that a liar can do.
    """

    def __init__(self, simulation, fleet, report):
        self.seen = []
        self._fleet = fleet

        async def app(scope, receive, send):
            await self._answer(scope, receive, send)

        self.url = simulation.serve("evil", "10.0.4.1", app)
        own = {"instance_id": "evil", "agent_url": self.url, "agent_boot_id": "evil", "engine_boot_id": "evil"}
        self.report = report | own | {"transport": report["transport"] | {"engine_url": self.url}}

    async def _answer(self, scope, receive, send):
        if scope["type"] == "lifespan":
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.seen.append((scope["path"], headers.get("authorization"), body.decode()))
        said = json.dumps(self.report).encode()
        if scope["path"] == WORKER_PROOF_PATH:
            async with httpx.AsyncClient(base_url=self._fleet.agents["w0"].base_url, trust_env=False) as real:
                said = (await real.post(scope["path"], content=body)).content
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": said})

    async def heartbeat(self, who, **changed):
        """Send a heartbeat with this key; the status and code of its answer."""
        body = {"metadata": self.report | changed, "files": {"disk_id": "evil", "since": 0, "upto": 0}}
        answer = await self._fleet.http.post("/v1/workers/register", json=body, headers=self._fleet.as_(who))
        return answer.status_code, answer.json().get("error", {}).get("code", "")


async def with_fake_worker(simulation):
    fleet = await guarded(simulation)
    return fleet, FakeWorker(simulation, fleet, (await fleet.agents["w0"].get("/metadata")).json())


async def test_a_publishers_own_worker_gets_no_key_and_no_prompt(simulation):
    fleet, fake = await with_fake_worker(simulation)
    for who in ("trainer", "pipeline"):
        for number in range(10):
            assert await fake.heartbeat(who) == (403, "scope_missing")
            asked = await fleet.ask("tiny-qwen", prompt=f"{who} {number}", headers=fleet.as_("acme"))
            assert asked.status_code == 200, asked.text
    assert fake.seen == []
    assert fake.url not in (await fleet.http.get("/v1/catalog")).text


async def test_an_address_that_does_not_prove_itself_gets_no_key_and_no_prompt_even_with_a_workers_key(simulation):
    fleet, fake = await with_fake_worker(simulation)
    real = (await fleet.agents["w0"].get("/metadata")).json()
    for number in range(10):
        assert await fake.heartbeat("agents") == (409, "worker_unproved")
        # As the real worker, at its address and at ours.
        others = {"instance_id": real["instance_id"], "agent_boot_id": real["agent_boot_id"]}
        assert (await fake.heartbeat("agents", **others))[0] == 409
        assert await fake.heartbeat("agents", **others, agent_url=real["agent_url"]) == (409, "worker_unproved")
        asked = await fleet.ask("tiny-qwen", prompt=f"proof {number}", headers=fleet.as_("acme"))
        assert asked.status_code == 200, asked.text
    assert {(path, key) for path, key, _ in fake.seen} == {(WORKER_PROOF_PATH, None)}
    assert fake.url not in (await fleet.http.get("/v1/catalog")).text
    workers = (await fleet.http.get("/v1/workers")).json()["data"]
    assert [worker["id"] for worker in workers] == [real["instance_id"]]
