"""The catalog that routers follow: what a policy says of an adapter is in its entry, and changes with the policy."""

import pytest


async def modes(service, since=None):
    """lora_id -> what a worker is to do with its acceptance file, of the adapters that have changed."""
    answer = await service.http.get("/v1/catalog", params={} if since is None else {"since": since})
    return {each["lora_id"]: each["acceptance"] for each in answer.json()["adapters"]}


@pytest.mark.parametrize("fleets", ["off", "require"])
async def test_change_of_the_fleets_acceptance_changes_the_adapters_without_one_of_their_own(service, fleets):
    await service.register("fleets")
    await service.register("own", policy={"acceptance": "warn"})
    assert await modes(service) == {"fleets": "warn", "own": "warn"}
    before = (await service.catalog())["revision"]
    (await service.http.patch("/v1/policy", json={"acceptance": fleets})).raise_for_status()
    assert await modes(service, since=before) == {"fleets": fleets}
    (await service.http.patch("/v1/adapters/own", json={"policy": {"acceptance": "require"}})).raise_for_status()
    assert await modes(service) == {"fleets": fleets, "own": "require"}


async def test_change_of_another_rule_of_the_fleet_changes_no_adapter(service):
    await service.register("a")
    before = (await service.catalog())["revision"]
    (await service.http.patch("/v1/policy", json={"ttl_s": 5})).raise_for_status()
    assert await modes(service, since=before) == {}


async def test_what_an_adapters_policy_says_of_ignored_modules_is_in_its_entry(service):
    await service.register("a", policy={"ignored_modules": "refuse"})
    (entry,) = (await service.catalog())["adapters"]
    assert entry["ignored_modules"] == "refuse"
