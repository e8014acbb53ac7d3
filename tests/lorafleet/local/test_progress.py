"""`lorafleet up` prints steps and incidents. Their texts may quote an engine, with brackets and control characters."""

import io

from lorafleet.local.notices import incident_lines
from lorafleet.local.progress import StartProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_step_is_shown_on_a_terminal_as_it_is_called():
    out = Terminal()
    with StartProgress(out) as steps:
        steps.begin("w0", "waiting: [/red] of /models/[x]")
        steps.finish("w0", "ready [/x]")
    assert "w0: ready [/x]" in out.getvalue()


def test_an_incident_has_no_control_characters_of_its_cause():
    item = {
        "at": "2026-01-02T03:04:05+00:00",
        "kind": "engine_died",
        "subject": "w0",
        "body": {"cause": "out of \x1b[2Jmemory\nand more"},
        "next_step": "give it more",
    }
    assert incident_lines(item) == [
        "03:04:05 w0: engine died: out of \\x1b[2Jmemory",
        "         next: give it more",
    ]
