"""Operations on the sim under kill -9. The long runs and all checks are in `tests/workers/kills.py`:

    python -m tests.workers.kills --engine sim --operations 1000
    python -m tests.workers.kills --engine vllm --operations 100

Ten operations on vLLM are in `tests/contract/test_agent_on_engine.py`.
"""

import pytest

from tests.workers.kills import new_kill_trial

pytestmark = pytest.mark.fleet


@pytest.mark.parametrize(("operations", "seed"), [(40, 3), pytest.param(200, 5, marks=pytest.mark.thorough)])
async def test_state_folder_disk_and_engine_agree_after_every_kill(tmp_path, operations, seed):
    async with new_kill_trial("sim", tmp_path, seed=seed) as it:
        found = await it.run(operations, per_round=20, least_done=operations // 8)
    assert found.violations == []
    assert found.operations >= operations
    assert found.answers > 0
    assert found.outcomes["done"] >= operations // 8, found
    assert set(found.kills) == {"agent", "engine"}, found
