"""Whatever the router's own OpenAPI document allows, and much that it does not: never a 500."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

from tests.patience import patience
from tests.properties import THOROUGH
from tests.router.faults.faulty_fleet import FaultyFleet, faulty_fleet

# Of each operation: so many that the document allows, and so many that it does not. Tried once with 400, too.
EXAMPLES = 12 if THOROUGH else 4
OURS = {502, 503, 504}  # said on purpose: the engine of these tests answers nothing but completions


@contextmanager
def a_router() -> Iterator[FaultyFleet]:
    """A whole router in a loop and a thread of its own: schemathesis is not made for one."""
    found: list[FaultyFleet] = []
    failed: list[BaseException] = []
    is_up, down, loop = threading.Event(), asyncio.Event(), asyncio.new_event_loop()

    async def serve() -> None:
        async with faulty_fleet(1, cold_start_timeout_s=1) as router:
            found.append(router)
            is_up.set()
            await down.wait()

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        except BaseException as exc:  # noqa: BLE001  (the test's to raise)
            failed.append(exc)
        finally:
            is_up.set()
            loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert is_up.wait(patience(10))
        yield found[0]
    finally:
        loop.call_soon_threadsafe(down.set)
        thread.join(patience(20))
        assert not failed, failed


def statuses(operation, mode) -> set[int]:
    """What such requests are answered with; fails on a 500, and on an error outside the envelope."""
    seen: set[int] = set()

    @settings(max_examples=EXAMPLES, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case):
        answer = case.call(timeout=patience(10))
        seen.add(answer.status_code)
        assert answer.status_code < 500 or answer.status_code in OURS, case.as_curl_command()
        if answer.status_code >= 400:
            assert {"message", "type", "param", "code"} == answer.json()["error"].keys()

    ask()
    return seen


@pytest.mark.slow
# The router runs in a thread here, and may draw a number while a request is made up.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
def test_no_request_is_answered_with_a_500():
    import schemathesis
    from schemathesis import GenerationMode

    found: dict[str, set[int]] = {}
    with a_router() as router:
        schema = schemathesis.openapi.from_url(f"{router.client.base_url}/openapi.json")
        for result in schema.get_all_operations():
            operation = result.ok()
            found[operation.label] = statuses(operation, GenerationMode.POSITIVE)
            # A call that is a path and nothing else can ask for nothing that is not allowed.
            with suppress(Unsatisfiable):
                found[operation.label] |= statuses(operation, GenerationMode.NEGATIVE)
    assert {200, 400} <= found["POST /v1/chat/completions"]
    assert len(found) > 20
