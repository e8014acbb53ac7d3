"""The tree of errors: each has a status, a code, and a place in its module's docstring."""

import sys

from orchestrator.core.errors import OrchestratorError


def test_every_error_has_a_status_and_a_code():
    tree = [OrchestratorError]
    for error in tree:
        tree += error.__subclasses__()
        assert 400 <= error.status < 600
        assert error.code
        assert error.__name__ in sys.modules[error.__module__].__doc__
