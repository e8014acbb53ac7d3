"""Health probes of engines that answer with errors."""

import asyncio
import json

import pytest

from router.fleet.health_probe import HealthProbes
from router.http.engine_connection import EngineLost
from router.http.fetch import FetchRefused
from tests.patience import until
from tests.router.test_policy import a_replica

REPLICA = a_replica("w0", engine_boot_id="a", model_name="served")


class ScriptedEngines:
    """Answers each path as scripted; exceptions are raised."""

    def __init__(self, **answers):
        self.answers = answers
        self.paths = []
        self.bodies = []
        self.found = []
        self.go_on = asyncio.Event()
        self.probes = HealthProbes(self.ask, lambda replica, finding: self.found.append((replica.id, finding)))

    async def ask(self, _replica, path, body):
        self.paths.append(path)
        self.bodies.append(json.loads(body))
        await self.go_on.wait()
        answer = self.answers[path.rpartition("/")[2]]
        if isinstance(answer, Exception):
            raise answer
        return answer


def refused(status):
    return FetchRefused("no", status)


@pytest.mark.parametrize(
    ("completions", "pooling", "found"),
    [
        (b"{}", None, "well"),
        (refused(404), b"{}", "well"),
        (refused(400), b"{}", "well"),
        (refused(501), b"{}", "well"),
        (refused(500), None, "unwell"),
        (refused(503), None, "unwell"),
        (refused(404), refused(500), "unwell"),
        (refused(404), refused(404), "unwell"),
        (EngineLost("connection", "no"), None, "unwell"),
        (EngineLost("no_answer", "no"), None, "unwell"),
        (EngineLost("no_answer_in_time", "no"), None, "unknown"),
        (EngineLost("no_descriptors", "no"), None, "unknown"),
        (refused(404), EngineLost("no_answer_in_time", "no"), "unknown"),
    ],
)
async def test_a_finding_follows_the_engines_answers(completions, pooling, found):
    asked = ScriptedEngines(completions=completions, pooling=pooling)
    asked.go_on.set()
    asked.probes.probe(REPLICA)
    await until(lambda: asked.found)
    assert asked.found == [("w0", found)]
    assert asked.bodies[0] == {"model": "served", "prompt": "a", "max_tokens": 1}
    assert asked.paths == ["/v1/completions", "/pooling"][: 1 if pooling is None else 2]


async def test_an_engine_has_one_probe_at_a_time():
    asked = ScriptedEngines(completions=b"{}")
    for _ in range(5):
        asked.probes.probe(REPLICA)
    asked.probes.probe(a_replica("w0", engine_boot_id="b"))
    await until(lambda: len(asked.paths) == 2)
    asked.go_on.set()
    await until(lambda: len(asked.found) == 2 and not asked.probes.running)
    asked.probes.probe(REPLICA)
    await until(lambda: len(asked.found) == 3)


async def test_an_unexpected_error_gives_no_finding_and_the_next_probe_runs():
    asked = ScriptedEngines(completions=ZeroDivisionError())
    asked.go_on.set()
    asked.probes.probe(REPLICA)
    await until(lambda: asked.paths and not asked.probes.running)
    assert asked.found == []
    asked.answers = {"completions": b"{}"}
    asked.probes.probe(REPLICA)
    await until(lambda: asked.found == [("w0", "well")])


async def test_closing_cancels_running_probes():
    asked = ScriptedEngines(completions=b"{}")
    asked.probes.probe(REPLICA)
    await until(lambda: asked.paths)
    await asked.probes.close()
    assert (asked.found, asked.probes.running) == ([], 0)
