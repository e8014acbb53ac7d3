import pytest

from tests.event_loops import certificate, pytest_asyncio_loop_factories, tls_files  # noqa: F401  (found here by pytest)
from tests.wires import over_tls

# Files whose tests of a listener run over TLS, too: what a client smuggles by bytes, the order of answers, and limits.
_OVER_TLS = {"test_connection_order", "test_framing", "test_request_reader_limits"}
# Their tests of what only a plain connection does: a large write pauses it, it counts the bytes that it drops once it
# has ended, and a client's end of its half does not close it. test_connection_over_tls.py has what TLS does then.
_PLAIN_ALONE = {
    "test_a_100_continue_comes_after_one_queued_behind_a_large_answer",
    "test_a_head_of_the_limit_is_served_and_a_larger_one_refused",
    "test_a_message_refused_after_its_answer_gets_no_second_answer",
    "test_a_request_too_far_ahead_does_not_lose_the_answers_before_it",
    "test_bytes_sent_after_the_last_request_do_not_lose_its_answer",
    "test_the_app_sees_a_disconnect_when_its_message_is_refused",
}


def pytest_generate_tests(metafunc):
    name = metafunc.module.__name__.rpartition(".")[2]
    uses_wire = "listening" in metafunc.function.__code__.co_names
    if name in _OVER_TLS and uses_wire and metafunc.function.__name__ not in _PLAIN_ALONE:
        metafunc.parametrize("wire", ["plain", "tls"], indirect=True)


@pytest.fixture(autouse=True)
def wire(request):
    if getattr(request, "param", "plain") == "plain":
        yield
        return
    with over_tls(request.getfixturevalue("tls_files")):
        yield
