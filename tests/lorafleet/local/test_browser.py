"""`lorafleet up --open`: a browser is opened where a desktop is, and otherwise a line says why not."""

import asyncio
import os
from pathlib import Path

import pytest

from lorafleet.local.browser import no_browser_reason, open_page
from tests.patience import patience

URL = "http://127.0.0.1:8080/ui"


@pytest.mark.parametrize(
    ("environment", "platform", "reason"),
    [
        ({}, "linux", "no display"),
        ({"DISPLAY": ":0"}, "linux", ""),
        ({"WAYLAND_DISPLAY": "wayland-0"}, "linux", ""),
        ({}, "darwin", ""),
        ({"DISPLAY": "localhost:10.0", "SSH_CONNECTION": "10.0.0.1 1 10.0.0.2 22"}, "linux", "SSH"),
        ({"SSH_TTY": "/dev/pts/1"}, "darwin", "SSH"),
        ({"DISPLAY": ":99", "CI": "true"}, "linux", "CI"),
        # As editors that work on a remote machine set it: their helper opens the page on the person's own.
        ({"BROWSER": "/opt/helper.sh", "SSH_TTY": "/dev/pts/1"}, "linux", ""),
    ],
)
def test_a_browser_is_opened_on_a_desktop_and_where_browser_names_one(environment, platform, reason):
    found = no_browser_reason(environment, platform)
    assert reason in found if reason else found == ""


def browser(folder: Path, then: str) -> dict[str, str]:
    """The environment of a desktop whose browser writes the address to a file."""
    script = folder / "browser"
    script.write_text(f'#!/bin/sh\necho "$1" >> {folder}/opened\necho words of the browser\n{then}\n')
    script.chmod(0o700)
    return {"PATH": os.environ["PATH"], "BROWSER": str(script)}


async def test_the_page_is_opened_once_and_the_line_says_so(tmp_path, capfd):
    said = await open_page(URL, browser(tmp_path, "exit 0"))
    assert said == f"console: opened {URL} in a browser"
    assert (tmp_path / "opened").read_text() == f"{URL}\n"
    assert capfd.readouterr() == ("", "")


async def test_the_line_begins_with_what_is_opened(tmp_path):
    said = await open_page(URL, browser(tmp_path, "exit 1"), what="login")
    assert said == f"login: no browser is opened (none was found); open {URL}"


async def test_a_browser_that_fails_is_no_failure_and_the_line_has_the_address(tmp_path):
    said = await open_page(URL, browser(tmp_path, "exit 1"))
    assert said == f"console: no browser is opened (none was found); open {URL}"


async def test_a_stop_ends_the_wait_for_a_browser_that_keeps_running(tmp_path):
    os.mkfifo(tmp_path / "gate")
    opening = asyncio.create_task(open_page(URL, browser(tmp_path, f"echo begun > {tmp_path}/gate; exec sleep 60")))
    assert await asyncio.wait_for(asyncio.to_thread((tmp_path / "gate").read_text), patience(20)) == "begun\n"
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(opening, patience(10))


async def test_without_a_desktop_nothing_is_started(tmp_path):
    environment = browser(tmp_path, "exit 0") | {"BROWSER": ""}
    assert "no display" in await open_page(URL, environment, platform="linux")
    assert not (tmp_path / "opened").exists()
