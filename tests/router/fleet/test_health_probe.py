"""Health probes of engines that answer with errors."""

import asyncio
import json

import pytest

from router.fleet.health_probe import HealthProbes
from router.http.engine_connection import EngineLost
from router.http.fetch import FetchRefused
from tests.patience import until
from tests.router.core.schedule.test_policy import a_replica

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
    scripted = ScriptedEngines(completions=completions, pooling=pooling)
    scripted.go_on.set()
    scripted.probes.probe(REPLICA)
    await until(lambda: scripted.found)
    assert scripted.found == [("w0", found)]
    assert scripted.bodies[0] == {"model": "served", "prompt": "a", "max_tokens": 1}
    assert scripted.paths == ["/v1/completions", "/pooling"][: 1 if pooling is None else 2]


async def test_an_engine_has_one_probe_at_a_time():
    scripted = ScriptedEngines(completions=b"{}")
    for _ in range(5):
        scripted.probes.probe(REPLICA)
    scripted.probes.probe(a_replica("w0", engine_boot_id="b"))
    await until(lambda: len(scripted.paths) == 2)
    scripted.go_on.set()
    await until(lambda: len(scripted.found) == 2 and not scripted.probes.running)
    scripted.probes.probe(REPLICA)
    await until(lambda: len(scripted.found) == 3)


async def test_an_unexpected_error_gives_no_finding_and_the_next_probe_runs():
    scripted = ScriptedEngines(completions=ZeroDivisionError())
    scripted.go_on.set()
    scripted.probes.probe(REPLICA)
    await until(lambda: scripted.paths and not scripted.probes.running)
    assert scripted.found == []
    scripted.answers = {"completions": b"{}"}
    scripted.probes.probe(REPLICA)
    await until(lambda: scripted.found == [("w0", "well")])


async def test_closing_cancels_running_probes():
    scripted = ScriptedEngines(completions=b"{}")
    scripted.probes.probe(REPLICA)
    await until(lambda: scripted.paths)
    await scripted.probes.close()
    assert (scripted.found, scripted.probes.running) == ([], 0)
