"""What lies beside an adapter's two files, at each way into a fleet: named in its note, or refused by name."""

import io
import json
import tarfile
from pathlib import Path

import pytest

from lorafleet.client import AsyncFleet, FleetError
from lorafleet.local.tiny_model import make_adapter, make_model
from tests.e2e.small_fleets import SmallFleet, small_fleet
from tests.patience import until

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(600)]

NOTE = "not served: adapter_model.bin (pickled weights beside adapter_model.safetensors, which wins)"


async def two_are_ready(fleet: SmallFleet) -> bool:
    workers = (await fleet.http.get("/v1/workers")).json()["data"]
    return sum(worker["state"] == "ready" for worker in workers) == 2


async def registered(fleet: SmallFleet, name: str, folder: Path) -> tuple[int, dict]:
    answer = await fleet.http.post("/v1/adapters", json={"lora_id": name, "source": f"file://{folder}"})
    return answer.status_code, answer.json()


async def test_files_beside_an_adapter_are_named_or_refused_at_each_way_in(tmp_path):
    model, shelf = make_model(tmp_path / "model"), tmp_path / "shelf"
    good = make_adapter(shelf, "good", rank=8)
    (good / "adapter_model.bin").write_bytes(b"pickled")
    (good / "optimizer.pt").write_bytes(b"a state")
    bad = make_adapter(shelf, "bad", rank=8)
    (bad / "new_embeddings.safetensors").write_bytes(b"trained")
    other = make_adapter(shelf, "other-tokens", rank=8)
    (other / "added_tokens.json").write_text(json.dumps({"<|sql|>": 999}))
    async with small_fleet(tmp_path / "fleet", model, shelf=shelf, workers=2) as fleet:
        await until(lambda: two_are_ready(fleet), what="both workers are ready")
        spec = {"lora_id": "good/v1", "source": f"file://{good}", "policy": {"min_replicas": 2}}
        (await fleet.http.post("/v1/adapters", json=spec)).raise_for_status()

        async def is_everywhere() -> dict | None:
            item = (await fleet.http.get("/v1/adapters/good/v1")).json()
            return item["status"] if item["status"]["replicas"]["ready"] == 2 else None

        status = await until(is_everywhere, what="good/v1 is on both workers")
        assert status["note"] == status["card"]["files_note"] == NOTE

        for name, folder, word in (("bad/v1", bad, "new_embeddings.safetensors"), ("tok/v1", other, "<|sql|>")):
            await registered(fleet, name, folder)

            async def failure(name=name) -> str | None:
                return (await fleet.http.get(f"/v1/adapters/{name}")).json()["status"]["error"]

            error = await until(failure, what=f"{name} is refused")
            assert error.startswith("adapter_file_unsupported")
            assert word in error

        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            archive.add(bad, "adapter")
        answer = await fleet.http.put("/v1/adapters/packed/v1", content=packed.getvalue())
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "adapter_file_unsupported")

        async with AsyncFleet(fleet.url, fleet.keys["admin"]) as client:
            await client.push("pushed/v1", good)
            pushed = (await fleet.http.get("/v1/adapters/pushed/v1")).json()
            assert pushed["status"]["note"] == NOTE
            for folder in (bad, other):
                with pytest.raises(FleetError) as refused:
                    await client.push("refused/v1", folder)
                assert refused.value.code == "adapter_file_unsupported"
        assert (await fleet.http.get("/v1/adapters/refused/v1")).status_code == 404
