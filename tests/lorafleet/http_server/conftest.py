import pytest

from tests.event_loops import certificate, pytest_asyncio_loop_factories, tls_files  # noqa: F401  (found here by pytest)
from tests.wires import over_tls

# Files whose tests of a listener run over TLS, too: what a client smuggles by bytes.
_OVER_TLS = {"test_framing"}


def pytest_generate_tests(metafunc):
    name = metafunc.module.__name__.rpartition(".")[2]
    uses_wire = "listening" in metafunc.function.__code__.co_names
    if name in _OVER_TLS and uses_wire:
        metafunc.parametrize("wire", ["plain", "tls"], indirect=True)


@pytest.fixture(autouse=True)
def wire(request):
    if getattr(request, "param", "plain") == "plain":
        yield
        return
    with over_tls(request.getfixturevalue("tls_files")):
        yield
