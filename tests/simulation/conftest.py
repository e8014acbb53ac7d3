"""Tests with the fixture `simulation` run in simulated time: each in a fork of one process, which imports all once."""

import pytest

from tests.simulation.server_process import SimulatedTest, SimulationServer

_SERVER = pytest.StashKey[SimulationServer]()


@pytest.fixture
def simulation() -> None:
    """Stands for the `Simulation` that the test gets in its own process."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A minute of a fleet takes about a second."""
    for item in items:
        if "simulation" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that asks for `simulation` in the server's fork."""
    if "simulation" not in pyfuncitem.fixturenames:
        return None
    stash = pyfuncitem.session.stash
    if _SERVER not in stash:
        stash[_SERVER] = SimulationServer.start()
    arguments = dict(pyfuncitem.callspec.params) if hasattr(pyfuncitem, "callspec") else {}
    end = stash[_SERVER].run(SimulatedTest(pyfuncitem.path, pyfuncitem.originalname, arguments))
    if end.failure:
        pyfuncitem.add_report_section("call", "log of the simulated services", end.log)
        pytest.fail(end.failure, pytrace=False)
    return True


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _SERVER in session.stash:
        session.stash[_SERVER].stop()
