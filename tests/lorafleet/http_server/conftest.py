from tests.event_loops import certificate, pytest_asyncio_loop_factories  # noqa: F401  (pytest finds them here)
