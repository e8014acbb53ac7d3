"""Logs of services that run in the tests' process."""

import contextlib
from collections.abc import Iterator

import structlog


def log_plainly() -> None:
    """Log as the services do: tracebacks as Python has them.

    structlog's own default is rich's, coloured and with local variables: a second of CPU for each of them.
    """
    structlog.reset_defaults()
    renderer = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[*structlog.get_config()["processors"][:-1], renderer])


@contextlib.contextmanager
def no_logs() -> Iterator[None]:
    """Write no line within the block: else the logs of a service mix with the output of the command line."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    try:
        yield
    finally:
        log_plainly()
