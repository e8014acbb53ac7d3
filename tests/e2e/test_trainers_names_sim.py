"""Trainers' names in a whole fleet: registered, published, asked for by version, in paths and bodies."""

from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

import pytest
import pytest_asyncio

from lorafleet.local.tiny_model import make_adapter, make_model
from tests.e2e.small_fleets import SmallFleet, small_fleet

pytestmark = [pytest.mark.fleet, pytest.mark.asyncio(loop_scope="module")]

IDS = list(range(300, 340))
NAMES = ("m@3", "m:active", "m:eval@3")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Sources of adapters with other bytes each, in one folder."""
    shelf = tmp_path_factory.mktemp("names") / "shelf"
    for number in range(4):
        make_adapter(shelf, f"step-{number}", rank=8, seed=number)
    return [f"file://{shelf}/step-{number}" for number in range(4)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory, sources: list[str]) -> AsyncIterator[SmallFleet]:
    folder = tmp_path_factory.mktemp("fleet")
    shelf = Path(sources[0].removeprefix("file://")).parent
    async with small_fleet(folder / "fleet", make_model(folder / "model"), shelf=shelf, routers=1) as fleet:
        yield fleet


async def asked(fleet: SmallFleet, model: str, **more: object) -> tuple[int, str]:
    """(status, the adapter that answered, or the error's message) of a completion."""
    body = {"model": model, "prompt": IDS, "max_tokens": 2} | more
    answer = await fleet.routers[0].post("/v1/completions", json=body)
    if answer.status_code != 200:
        return answer.status_code, answer.json()["error"]["message"]
    assert answer.json()["model"] == model
    return 200, answer.headers["x-lorafleet-adapter"]


@pytest.mark.parametrize("name", NAMES)
async def test_a_trainers_name_is_registered_asked_for_shown_and_deleted_like_any(
    fleet: SmallFleet, sources: list[str], name: str
) -> None:
    made = await fleet.http.post("/v1/adapters", json={"lora_id": name, "source": sources[0]})
    assert made.status_code == 201, made.text
    status, engine_name = await asked(fleet, name)
    assert (status, engine_name.rpartition("@")[0]) == (200, name)
    digest = engine_name.rpartition("@")[2]
    (base,) = [name for name in (await fleet.models())[0] if name not in NAMES]
    for form in (f"{base}:{name}", f"{name}@{digest}", f"{base}:{name}@{digest}"):
        assert await asked(fleet, form) == (200, engine_name)
    status, message = await asked(fleet, f"{name}@{'0' * 12}")
    assert (status, engine_name in message) == (404, True)
    for path in (name, quote(name, safe="")):
        assert (await fleet.http.get(f"/v1/adapters/{path}")).json()["lora_id"] == name
        assert (await fleet.routers[0].get(f"/v1/models/{path}")).json()["id"] == name
    status, output = await fleet.cli("adapters", "show", name)
    assert (status, name in output) == (0, True), output
    assert (await fleet.http.delete(f"/v1/adapters/{quote(name, safe='')}")).status_code in (202, 204)
    assert (await asked(fleet, name))[0] == 404


async def test_a_published_versions_bytes_are_asked_for_by_their_digest_while_they_are_kept(
    fleet: SmallFleet, sources: list[str]
) -> None:
    name, digests = "policy:active", []
    for step in (1, 2, 3):
        spec = {"source": sources[step], "keep_versions": 2}
        published = await fleet.http.post(f"/v1/published/{quote(name, safe='')}", json=spec)
        assert published.status_code == 200, published.text
        digests.append(published.json()["status"]["digest"][:12])
    assert await asked(fleet, name) == (200, f"{name}/v3@{digests[2]}")
    assert await asked(fleet, f"{name}@{digests[2]}") == (200, f"{name}/v3@{digests[2]}")
    assert await asked(fleet, f"{name}@{digests[1]}") == (200, f"{name}/v2@{digests[1]}")
    status, message = await asked(fleet, f"{name}@{'0' * 12}")
    assert (status, f"{name}/v3@{digests[2]} now" in message) == (404, True)


async def test_a_name_that_would_be_read_as_a_base_models_adapter_is_not_registered(
    fleet: SmallFleet, sources: list[str]
) -> None:
    (base, *_) = (await fleet.models())[0]
    refused = await fleet.http.post("/v1/adapters", json={"lora_id": f"{base}:x", "source": sources[0]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "name_taken")
    versioned = await fleet.http.post("/v1/adapters", json={"lora_id": f"x@{'0' * 12}", "source": sources[0]})
    assert versioned.status_code in (400, 422)
