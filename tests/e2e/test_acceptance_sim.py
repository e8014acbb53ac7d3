"""Acceptance in a whole fleet: its results are with the adapter, by REST, at routers and on the command line."""

import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from lorafleet.engine.acceptance import FILE_NAME
from lorafleet.local.tiny_model import make_adapter, make_model
from tests.certified import certify
from tests.e2e.small_fleets import SmallFleet, small_fleet
from tests.patience import patience, until
from tests.workers.running import metadata_of

pytestmark = [pytest.mark.fleet, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("acceptance") / "shelf"
    for number in range(4):
        make_adapter(folder, f"step-{number}", rank=8, seed=number)
    for number, of in ((0, 0), (1, 2), (3, 2)):
        certify(folder / f"step-{number}", of=folder / f"step-{of}")
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory, shelf: Path) -> AsyncIterator[SmallFleet]:
    folder = tmp_path_factory.mktemp("fleet")
    async with small_fleet(folder / "fleet", make_model(folder / "model"), shelf=shelf, workers=2, routers=1) as fleet:
        yield fleet


async def test_result_is_with_the_adapter_and_a_push_of_a_new_file_alone_is_compared_at_once(
    fleet: SmallFleet, shelf: Path, tmp_path: Path
) -> None:
    made = await fleet.http.post("/v1/adapters", json={"lora_id": "late", "source": f"file://{shelf}/step-3"})
    assert made.status_code == 201, made.text
    ensured = await fleet.ensure("late")
    assert ensured.json()["ready"], ensured.text

    async def results() -> set[str]:
        found = (await fleet.http.get("/v1/adapters/late")).json()["status"]["acceptance"]
        return {one["result"] for one in found.values()}

    async def differing() -> int:
        """Number of loaded adapters that differ, by their workers' metrics."""
        pages = [(await agent.get("/metrics")).text for agent in fleet.agents.values()]
        name = "lorafleet_workers_differing_adapters "
        lines = [line for page in pages for line in page.splitlines() if line.startswith(name)]
        return sum(int(float(line.removeprefix(name))) for line in lines)

    async def incidents() -> list[str]:
        """The causes of the incidents of answers that differ."""
        entries = (await fleet.http.get("/v1/history")).json()["data"]
        return [entry["body"]["cause"] for entry in entries if entry["kind"] == "acceptance_differs"]

    await until(lambda: _is({"differs"}, results), what="the result is with the adapter")
    (cause,) = await until(incidents, what="it is an incident, once")
    assert "late: " in cause
    assert "it looks like" in cause
    assert await differing() == 1
    folder = Path(shutil.copytree(shelf / "step-3", tmp_path / "step-3"))
    certify(folder)
    status, output = await fleet.cli("adapters", "push", str(folder), "late")
    assert status == 0, output
    await until(lambda: _is({"equal"}, results), what="the new file is compared")
    assert (await differing(), len(await incidents())) == (0, 1)
    status, output = await fleet.cli("adapters", "check", "late")
    assert (status, "equal" in output) == (0, True), output

    async def explained() -> bool:
        body = {"model": "late", "messages": [{"role": "user", "content": "hello"}]}
        scores = (await fleet.routers[0].post("/v1/route", json=body)).json()["scores"]
        return {score["acceptance"] for score in scores} == {"equal"}

    await until(explained, what="the router says so, too")
    broken = await fleet.routers[0].post("/v1/adapters/late/check", json={"file": "{}"})
    assert (broken.status_code, broken.json()["error"]["code"]) == (400, "acceptance_invalid")
    assert FILE_NAME in broken.json()["error"]["message"]


async def test_policy_that_comes_to_require_equal_answers_unloads_what_differs_and_nothing_else(
    fleet: SmallFleet, shelf: Path
) -> None:
    names = {"is-equal": "step-0", "differs": "step-1", "has-no-file": "step-2"}
    for lora_id, source in names.items():
        spec = {"lora_id": lora_id, "source": f"file://{shelf}/{source}"}
        assert (await fleet.http.post("/v1/adapters", json=spec)).status_code == 201
        assert (await fleet.ensure(lora_id)).json()["ready"]

    async def acceptance() -> dict[str, set[str]]:
        found = {lora_id: (await fleet.adapter(lora_id))["status"]["acceptance"] for lora_id in names}
        return {lora_id: {one["result"] for one in each.values()} for lora_id, each in found.items()}

    async def are_compared() -> bool:
        return await acceptance() == {"is-equal": {"equal"}, "differs": {"differs"}, "has-no-file": set()}

    await until(are_compared, what="both files are compared")
    before = await loaded_at(fleet)
    assert (await fleet.http.patch("/v1/policy", json={"acceptance": "require"})).status_code == 200
    await until(lambda: _is(before.keys() - {"differs"}, lambda: loaded_at(fleet)), what="what differs is unloaded")
    assert await loaded_at(fleet) == {name: at for name, at in before.items() if name != "differs"}
    assert "differs" in (await fleet.adapter("differs"))["status"]["error"]
    assert (await fleet.http.patch("/v1/policy", json={"acceptance": "warn"})).status_code == 200
    for lora_id in names:
        assert (await fleet.http.delete(f"/v1/adapters/{lora_id}")).status_code < 300
    await until(lambda: _is({"late"}, lambda: loaded_at(fleet)), what="they are gone")


async def loaded_at(fleet: SmallFleet) -> dict[str, str | None]:
    """lora_id -> when it was loaded, of the adapters that are ready on a worker."""
    reports = [(await metadata_of(agent)).lora.loaded_loras for agent in fleet.agents.values()]
    return {each.lora_id: each.loaded_at for report in reports for each in report if each.state == "ready"}


async def test_rollout_with_require_waits_for_equal_replicas_and_stops_at_a_version_that_differs(
    fleet: SmallFleet, shelf: Path, tmp_path: Path
) -> None:
    for lora_id, source in (("roll/v1", "step-0"), ("roll/v2", "step-1"), ("roll/v3", "step-2")):
        spec = {"lora_id": lora_id, "source": f"file://{shelf}/{source}"}
        assert (await fleet.http.post("/v1/adapters", json=spec)).status_code == 201
    assert len((await fleet.ensure("roll/v1", replicas=2)).json()["ready"]) == 2
    named = await fleet.http.put("/v1/aliases/roll", json={"targets": [{"lora_id": "roll/v1"}]})
    assert named.status_code in (200, 201), named.text
    for lora_id in ("roll/v2", "roll/v3"):
        changed = await fleet.http.patch(f"/v1/adapters/{lora_id}", json={"policy": {"acceptance": "require"}})
        assert changed.status_code == 200, changed.text

    async def rolled_out(to: str) -> tuple[str, str]:
        """The state in which a rollout ends, and its reason."""
        steps = [{"weight": 0.5, "for_s": 0}, {"weight": 1.0, "for_s": 0}]
        body = {"to": to, "steps": steps, "min_requests": 0, "place_s": patience(60)}
        assert (await fleet.http.post("/v1/aliases/roll/rollout", json=body)).status_code == 201

        async def end() -> dict[str, Any] | None:
            status = (await fleet.http.get("/v1/aliases/roll/rollout")).json()["status"]
            return None if status["state"] in ("placing", "watching") else status

        status = await until(end, within_s=90, what=f"the rollout to {to} ends")
        return status["state"], status["reason"] or ""

    async def targets() -> dict[str, float]:
        found = (await fleet.http.get("/v1/aliases/roll")).json()["status"]["targets"]
        return {target["lora_id"]: target["weight"] for target in found}

    for to, said in (("roll/v2", "differs"), ("roll/v3", "it has no acceptance.jsonl")):
        state, reason = await rolled_out(to)
        assert (state, said in reason, await targets()) == ("failed", True, {"roll/v1": 1.0}), reason
    # It is loaded nowhere: workers keep the file, and it is tried again.
    folder = Path(shutil.copytree(shelf / "step-2", tmp_path / "step-2"))
    certify(folder)
    sent = await fleet.http.post("/v1/adapters/roll/v3/check", json={"file": (folder / FILE_NAME).read_text()})
    assert sent.status_code == 200, sent.text
    assert "next load" in str(sent.json()["errors"])
    assert await rolled_out("roll/v3") == ("done", "")
    assert await targets() == {"roll/v3": 1.0}
    results = (await fleet.adapter("roll/v3"))["status"]["acceptance"]
    assert {worker: one["result"] for worker, one in results.items()} == {"w0": "equal", "w1": "equal"}
    for path in ("aliases/roll", "adapters/roll/v1", "adapters/roll/v2", "adapters/roll/v3", "adapters/late"):
        assert (await fleet.http.delete(f"/v1/{path}")).status_code < 300
    await until(lambda: _is(set(), lambda: loaded_at(fleet)), what="nothing is loaded any more")


async def test_router_that_loads_at_a_home_itself_has_the_answers_compared_where_the_policy_requires_it(
    fleet: SmallFleet, shelf: Path
) -> None:
    for lora_id, source in (("cold-equal", "step-0"), ("cold-differs", "step-1")):
        spec = {"lora_id": lora_id, "source": f"file://{shelf}/{source}", "policy": {"acceptance": "require"}}
        made = await fleet.http.post("/v1/adapters", json=spec)
        assert made.status_code == 201, made.text

    names = {"cold-equal", "cold-differs"}

    async def are_known() -> bool:
        found = [(await fleet.adapter(lora_id))["status"]["card"] for lora_id in names]
        return all(found) and names <= set((await fleet.models())[0])

    await until(are_known, what="the router knows both, and no worker has loaded them")
    await fleet.parts["orchestrator"].aclose()
    body = {"prompt": [5] * 40, "max_tokens": 2}
    answer = await fleet.routers[0].post("/v1/completions", json={"model": "cold-equal", **body}, timeout=patience(60))
    assert answer.status_code == 200, answer.text
    refused = await fleet.routers[0].post(
        "/v1/completions", json={"model": "cold-differs", **body}, timeout=patience(60)
    )
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "load_failed"), refused.text
    assert "differs" in refused.json()["error"]["message"]
    reports = [(await metadata_of(agent)).lora.loaded_loras for agent in fleet.agents.values()]
    states = {(each.lora_id, each.state) for report in reports for each in report if each.lora_id in names}
    assert states == {("cold-equal", "ready"), ("cold-differs", "failed")}


async def _is(expected: Collection[str], results: Callable[[], Awaitable[Iterable[str]]]) -> bool:
    return set(await results()) == set(expected)
