"""Traffic that shifts over few slots: adapters follow it, no request fails, and everybody agrees in the end.

For real vLLM; `tests/simulation/test_placement.py` does the same on sim. The fleet has two workers with
`--max-loras 2` and at least `FIVE`.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.fleets import RunningFleet, until
from tests.e2e.scenarios import COLD, PYTHON, SQL, fresh_prompt

FIVE = (SQL, PYTHON, "legal/v2", COLD, "late/v1")


class ShiftSuite:
    """Four slots for five adapters: of each worker's four, two stay free for moves."""

    requests = 8

    @pytest.fixture
    def few_slots(self, fleet: RunningFleet) -> Iterator[None]:
        url = f"{fleet.orchestrator}/v1/policy"
        before = fleet.get(url)
        changes = {"reserve_slots": 2, "min_residency_s": 0.5}
        assert fleet.http("PATCH", url, json=changes).status_code == 200
        yield
        fleet.http("PATCH", url, json={name: before[name] for name in changes})

    @pytest.mark.usefixtures("few_slots")
    def test_adapters_follow_the_traffic_and_no_request_fails(self, fleet: RunningFleet) -> None:
        for hot in ((FIVE[0], FIVE[1]), (FIVE[2], FIVE[3]), (FIVE[4], FIVE[0]), (FIVE[1], FIVE[2])):
            with ThreadPoolExecutor(4) as pool:
                answers = list(pool.map(lambda name: _ask(fleet, name), hot * self.requests))
            assert [answer.status_code for answer in answers] == [200] * len(answers), [
                answer.text for answer in answers if answer.status_code != 200
            ]
            assert all(fleet.held_by(lora_id) for lora_id in hot)
        until(lambda: _engines(fleet) == _placements(fleet), within_s=60, what="engines and placements agree")
        held = _engines(fleet)
        assert all(len(names) <= 4 for names in held.values())
        assert len(set().union(*held.values())) >= 2


def _ask(fleet: RunningFleet, lora_id: str) -> Any:
    return fleet.ask(prompt=fresh_prompt(), lora_id=lora_id, max_tokens=8)


def _engines(fleet: RunningFleet) -> dict[str, set[str]]:
    """Worker -> lora_ids that its engine itself lists."""
    found = {}
    for worker, metadata in fleet.workers().items():
        models = fleet.get(f"{metadata['transport']['engine_url']}/v1/models")["data"]
        found[worker] = {model["id"].rpartition("@")[0] for model in models if "@" in model["id"]}
    return found


def _placements(fleet: RunningFleet) -> dict[str, set[str]]:
    """Worker -> lora_ids that are ready there, by the orchestrator; empty while anything is loading."""
    rows = fleet.get(f"{fleet.orchestrator}/v1/placements")["data"]
    if any(row["state"] not in ("ready", "on_disk", "remote") for row in rows):
        return {}
    found: dict[str, set[str]] = {worker: set() for worker in fleet.workers()}
    for row in rows:
        if row["state"] == "ready":
            found[row["worker_id"]].add(row["lora_id"])
    return found
