"""The demo's table on terminals of any width."""

import io

import pytest
from rich.console import Console

from lorafleet.local import demo


@pytest.mark.parametrize(("width", "text"), [(80, False), (100, True), (140, True)])
def test_the_demo_shows_texts_only_if_they_fit(width: int, text: bool) -> None:
    out = io.StringIO()
    words = "local After traffic filename Their Coffee " * 3
    rows = [demo.DemoRow("python-expert/v1@73baeb0f6a1d", f"w{n}", 221, 192, 192, 1505.0, words) for n in range(4)]
    demo.show_table(rows, Console(file=out, width=width, force_terminal=True, color_system=None))
    seen = out.getvalue()
    for cell in ("worker", "first token", "cached", "w3", "192", "1505 ms", "python-expert/v1@73baeb0f6a1d"):
        assert cell in seen
    assert ("local After" in seen) == text
    assert max(map(len, seen.splitlines())) <= width
