"""What lies beside an adapter's two files, at each way into a fleet: named in its note, or refused by name."""

import json

import pytest

from lorafleet.client import AsyncFleet, FleetError
from tests.archives import tar_of
from tests.simulation.fleet import URL, until

NOTE = "not served: adapter_model.bin (pickled weights beside adapter_model.safetensors, which wins)"


async def test_files_beside_an_adapter_are_named_or_refused_at_each_way_in(simulation):
    good, bad, other = (simulation.adapter(name) for name in ("good", "bad", "other-tokens"))
    (good / "adapter_model.bin").write_bytes(b"pickled")
    (good / "optimizer.pt").write_bytes(b"a state")
    (bad / "new_embeddings.safetensors").write_bytes(b"trained")
    (other / "added_tokens.json").write_text(json.dumps({"<|sql|>": 999}))
    fleet = await simulation.fleet(workers=2)
    await fleet.register("good/v1", good, policy={"min_replicas": 2})

    async def is_everywhere():
        status = (await fleet.adapter("good/v1"))["status"]
        return status if status["replicas"]["ready"] == 2 else None

    status = await until(is_everywhere, what="good/v1 is on both workers")
    assert status["note"] == status["card"]["files_note"] == NOTE

    for name, folder, word in (("bad/v1", bad, "new_embeddings.safetensors"), ("tok/v1", other, "<|sql|>")):
        await fleet.register(name, folder)

        async def failure(name=name):
            return (await fleet.adapter(name))["status"]["error"]

        error = await until(failure, what=f"{name} is refused")
        assert error.startswith("adapter_file_unsupported")
        assert word in error

    answer = await fleet.http.put("/v1/adapters/packed/v1", content=tar_of(bad))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "adapter_file_unsupported")

    async with AsyncFleet(URL, fleet.keys["admin"]) as client:
        await client.push("pushed/v1", good)
        assert (await fleet.adapter("pushed/v1"))["status"]["note"] == NOTE
        for folder in (bad, other):
            with pytest.raises(FleetError) as refused:
                await client.push("refused/v1", folder)
            assert refused.value.code == "adapter_file_unsupported"
    assert (await fleet.http.get("/v1/adapters/refused/v1")).status_code == 404
