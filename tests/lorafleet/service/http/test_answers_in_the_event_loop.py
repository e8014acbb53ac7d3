"""No request waits for a thread: FastAPI runs each plain function, of a route or of a dependency, in one."""

import inspect

import pytest
from fastapi.routing import APIRoute

from tests.lorafleet.service.http.test_known_fields import agent, orchestrator, router

# These read files.
MAY_TAKE_A_THREAD = {"_state_routes.<locals>.model_files"}


def calls_of(dependant):
    for dependency in dependant.dependencies:
        if dependency.call is not None:
            yield dependency.call
        yield from calls_of(dependency)


def takes_a_thread(call):
    return not any(map(inspect.iscoroutinefunction, (call, getattr(call, "__call__", None))))  # noqa: B004


@pytest.mark.parametrize("service", [orchestrator, agent, router])
async def test_routes_and_their_dependencies_run_in_the_event_loop(service, tmp_path):
    async with service(tmp_path) as app:
        routes = [route for route in app.routes if isinstance(route, APIRoute)]
        calls = [call for route in routes for call in (route.endpoint, *calls_of(route.dependant))]
        assert len(calls) > 10
        in_threads = {call.__qualname__ for call in calls if takes_a_thread(call)}
        assert in_threads <= MAY_TAKE_A_THREAD
