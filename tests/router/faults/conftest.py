"""On uvloop, which is what serves; the faults of clients over TLS, too."""

import pytest
import uvloop

from tests.event_loops import tls_files  # noqa: F401  (pytest finds it here)
from tests.wires import over_tls


def pytest_asyncio_loop_factories(config, item):
    return {"uvloop": uvloop.new_event_loop}


# A TLS client closes both halves at once; and the crowd of the other opens sockets of its own.
_PLAIN = {
    "test_a_client_that_says_no_more_has_left_and_its_engine_stops",
    "test_clients_that_leave_at_any_moment_leave_nothing_behind",
}


def pytest_generate_tests(metafunc):
    name = metafunc.function.__name__
    if metafunc.module.__name__.endswith("test_clients_that_fail") and name not in _PLAIN:
        metafunc.parametrize("wire", ["plain", "tls"], indirect=True)


@pytest.fixture(autouse=True)
def wire(request):
    if getattr(request, "param", "plain") == "plain":
        yield
        return
    with over_tls(request.getfixturevalue("tls_files")):
        yield
