"""Trainers' names in a whole fleet: registered, published, asked for by version, in paths and bodies."""

from urllib.parse import quote

import pytest

from tests.simulation.fleet import MODEL

IDS = list(range(300, 340))
NAMES = ("m@3", "m:active", "m:eval@3")


async def asked(fleet, name):
    """(status, the adapter that answered, or the error's message) of a completion."""
    answer = await fleet.ask(name, prompt=IDS, max_tokens=2)
    if answer.status_code != 200:
        return answer.status_code, answer.json()["error"]["message"]
    assert answer.json()["model"] == name
    return 200, answer.headers["x-lorafleet-adapter"]


@pytest.mark.parametrize("name", NAMES)
async def test_a_trainers_name_is_registered_asked_for_shown_and_deleted_like_any(simulation, name):
    fleet = await simulation.fleet()
    await fleet.register(name, simulation.adapter("step-0"))
    status, engine_name = await asked(fleet, name)
    assert (status, engine_name.rpartition("@")[0]) == (200, name)
    digest = engine_name.rpartition("@")[2]
    for form in (f"{MODEL}:{name}", f"{name}@{digest}", f"{MODEL}:{name}@{digest}"):
        assert await asked(fleet, form) == (200, engine_name)
    status, message = await asked(fleet, f"{name}@{'0' * 12}")
    assert (status, engine_name in message) == (404, True)
    for path in (name, quote(name, safe="")):
        assert (await fleet.http.get(f"/v1/adapters/{path}")).json()["lora_id"] == name
        assert (await fleet.routers[0].get(f"/v1/models/{path}")).json()["id"] == name
    assert (await fleet.http.delete(f"/v1/adapters/{quote(name, safe='')}")).status_code in (202, 204)
    assert (await asked(fleet, name))[0] == 404


async def test_a_published_versions_bytes_are_asked_for_by_their_digest_while_they_are_kept(simulation):
    fleet = await simulation.fleet()
    name, digests = "policy:active", []
    for step in (1, 2, 3):
        spec = {"source": f"file://{simulation.adapter(f'step-{step}', seed=step)}", "keep_versions": 2}
        published = await fleet.http.post(f"/v1/published/{quote(name, safe='')}", json=spec)
        assert published.status_code == 200, published.text
        digests.append(published.json()["status"]["digest"][:12])
    assert await asked(fleet, name) == (200, f"{name}/v3@{digests[2]}")
    assert await asked(fleet, f"{name}@{digests[2]}") == (200, f"{name}/v3@{digests[2]}")
    assert await asked(fleet, f"{name}@{digests[1]}") == (200, f"{name}/v2@{digests[1]}")
    status, message = await asked(fleet, f"{name}@{'0' * 12}")
    assert (status, f"{name}/v3@{digests[2]} now" in message) == (404, True)


async def test_a_name_that_would_be_read_as_a_base_models_adapter_is_not_registered(simulation):
    fleet, source = await simulation.fleet(), f"file://{simulation.adapter('step-0')}"
    refused = await fleet.http.post("/v1/adapters", json={"lora_id": f"{MODEL}:x", "source": source})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "name_taken")
    versioned = await fleet.http.post("/v1/adapters", json={"lora_id": f"x@{'0' * 12}", "source": source})
    assert versioned.status_code in (400, 422)
