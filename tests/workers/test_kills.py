"""A hundred operations on the sim under kill -9. The long runs, and what they look at, are in `tests/workers/kills.py`:

    python -m tests.workers.kills --engine sim --operations 1000
    python -m tests.workers.kills --engine vllm --operations 100

Ten of them on vLLM are in `tests/contract/test_agent_on_engine.py`, beside the engine that its folder's tests share.
"""

import pytest

from tests.workers.kills import trial


@pytest.mark.timeout(120)
async def test_record_disk_and_engine_agree_after_every_kill_and_no_half_adapter_is_served(tmp_path):
    async with trial("sim", tmp_path, seed=5) as it:
        found = await it.run(100, per_round=25)
    assert found.violations == []
    assert found.operations == 100
    assert found.answers > 0
    assert found.outcomes["done"] > 20, found
    assert set(found.kills) == {"agent", "engine"}, found
    assert max(found.agreed_s) < 15, found
