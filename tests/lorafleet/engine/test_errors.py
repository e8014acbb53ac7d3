"""The cause of a failure in an engine's output."""

import pytest

from lorafleet.engine.errors import error_in, last_error

LOGGED = "(EngineCore pid=29135) ERROR 11-27 23:39:45 [core.py:1510] "
TOO_LONG = "ValueError: To serve at least one request with the model's max seq len (2048), (0.0 GiB KV cache is needed"
REPEATED = (
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}"
)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (TOO_LONG, TOO_LONG),
        (LOGGED + TOO_LONG, TOO_LONG),
        ("torch.OutOfMemoryError: CUDA out of memory. ", "torch.OutOfMemoryError: CUDA out of memory."),
        ("api_server.py: error: unrecognized arguments: --a", "error: unrecognized arguments: --a"),
        ("python -m sim: error: argument --b: expected one", "error: argument --b: expected one"),
        (LOGGED + "    raise ValueError(", ""),
        ("INFO: the model has no errors: fine", ""),
        (REPEATED, ""),
        ("Exception: WorkerProc initialization failed. See stack trace for root cause.", ""),
        ("KeyError: " + "k" * 1000, ("KeyError: " + "k" * 1000)[:500]),
        ("", ""),
    ],
)
def test_errors_are_told_from_other_lines_and_from_references_to_them(line: str, expected: str) -> None:
    assert error_in(line) == expected


def test_the_cause_of_a_failed_start_is_that_of_the_core_not_of_the_server_which_waited_for_it() -> None:
    lines = ["INFO: starting", "KeyError: 'old'", LOGGED + TOO_LONG, "Traceback (most recent call last):", REPEATED]
    assert last_error(lines) == TOO_LONG
    assert last_error(lines[:1]) == ""
