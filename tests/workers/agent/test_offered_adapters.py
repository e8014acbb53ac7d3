"""An adapter that a request waits for is loaded by that request, where its engine has had it before."""

import shutil
from pathlib import Path

import httpx
import pytest

from tests.patience import patience, until
from tests.workers.running import loaded, metadata_of, post

pytestmark = pytest.mark.fleet

ADAPTER = "sql-expert/v1"


async def offered(client: httpx.AsyncClient) -> dict:
    """The agent's answer to a load that a request waits for, of an adapter that the engine has had before."""
    first = (await post(client, "load_lora", lora_id=ADAPTER, is_awaited=True)).raise_for_status().json()
    assert first["location"] == "device"
    (await post(client, "unload_lora", lora_id=ADAPTER)).raise_for_status()
    again = (await post(client, "load_lora", lora_id=ADAPTER, is_awaited=True)).raise_for_status().json()
    assert (again["state"], again["location"], again["load_seconds"]) == ("ready", "disk", first["load_seconds"])
    return again


async def asked(client: httpx.AsyncClient, name: str) -> int:
    """The status of a request for this engine name."""
    url = (await metadata_of(client)).transport.engine_url
    async with httpx.AsyncClient(timeout=patience(30)) as engine:
        body = {"model": name, "prompt": "hello", "max_tokens": 1}
        return (await engine.post(f"{url}/v1/completions", json=body)).status_code


async def in_engine(client: httpx.AsyncClient) -> set[str]:
    """The adapters of the engine's own list."""
    url = (await metadata_of(client)).transport.engine_url
    async with httpx.AsyncClient(timeout=patience(30)) as engine:
        models = (await engine.get(f"{url}/v1/models")).json()["data"]
    return {model["id"] for model in models if model.get("parent")}


async def until_on_device(client: httpx.AsyncClient) -> None:
    async def is_there() -> bool:
        return [lora.location for lora in (await metadata_of(client)).lora.loaded_loras] == ["device"]

    await until(is_there, what="the agent knows that the engine has the adapter")


async def test_the_request_loads_it_and_an_unload_ends_the_offer(worker):
    async with worker.together(has_reports=True) as client:
        name = (await offered(client))["engine_name"]
        assert await in_engine(client) == set()
        assert await asked(client, name) == 200
        assert await in_engine(client) == {name}
        await until_on_device(client)
        (lora,) = (await metadata_of(client)).lora.loaded_loras
        assert (lora.effect, lora.lora_int_id is None, lora.is_wanted) == ("applied", False, False)
        (await post(client, "unload_lora", lora_id=ADAPTER)).raise_for_status()
        assert await asked(client, name) == 404
        # An offer that nobody has taken ends with its unload, too.
        (await post(client, "load_lora", lora_id=ADAPTER, is_awaited=True)).raise_for_status()
        (await post(client, "unload_lora", lora_id=ADAPTER)).raise_for_status()
        assert await asked(client, name) == 404


async def test_an_offer_that_no_request_takes_is_loaded_by_the_agent(worker):
    async with worker.together(has_reports=True) as client:
        name = (await offered(client))["engine_name"]
        assert await loaded(client) == {ADAPTER}
        await until_on_device(client)
        assert await in_engine(client) == {name}


async def test_an_offer_whose_files_are_lost_ends_as_a_failed_load(worker):
    async with worker.together(has_reports=True) as client:
        adapter = await offered(client)
        shutil.rmtree(Path(adapter["path"]))
        assert await asked(client, adapter["engine_name"]) == 404

        async def has_failed() -> bool:
            return [lora.state for lora in (await metadata_of(client)).lora.loaded_loras] == ["failed"]

        await until(has_failed, what="the agent has found that the engine cannot load it")


async def test_nothing_is_offered_where_no_request_waits_or_the_settings_say_so(worker):
    async with worker.together("--no-offer-loads", has_reports=True) as client:
        for _ in range(2):
            answer = await post(client, "load_lora", lora_id=ADAPTER, is_awaited=True)
            assert answer.raise_for_status().json()["location"] == "device"
            (await post(client, "unload_lora", lora_id=ADAPTER)).raise_for_status()
    async with worker.together(has_reports=True) as client:
        for _ in range(2):
            answer = await post(client, "load_lora", lora_id=ADAPTER)
            assert answer.raise_for_status().json()["location"] == "device"
            (await post(client, "unload_lora", lora_id=ADAPTER)).raise_for_status()
