"""A page in the desktop's browser, where there is one: the console of `up --open`, and the issuer's of `login`."""

import asyncio
import contextlib
import sys
from collections.abc import Mapping

_WITHIN_S = 10.0
# In a process of its own: the browser's words stay out of the terminal, and a text browser gets none to draw in.
_OPEN = "import sys, webbrowser; sys.exit(not webbrowser.open(sys.argv[1]))"


def no_browser_reason(environment: Mapping[str, str], platform: str) -> str:
    """Why no browser of this desktop should be opened; "" where one may. BROWSER names one that may always be.

    platform  as in `sys.platform`
    """
    if environment.get("BROWSER"):
        return ""
    if environment.get("CI"):
        return "this is a CI job"
    if environment.get("SSH_CONNECTION") or environment.get("SSH_TTY"):
        return "this is an SSH session"
    has_display = platform == "darwin" or environment.get("DISPLAY") or environment.get("WAYLAND_DISPLAY")
    return "" if has_display else "there is no display"


async def open_page(
    url: str, environment: Mapping[str, str], *, what: str = "console", platform: str = sys.platform
) -> str:
    """Open the page in the default browser; returns one line that says so, or why not. Never fails.

    what  the line begins with it
    """
    reason = no_browser_reason(environment, platform)
    if not reason and await _try_open(url, environment):
        return f"{what}: opened {url} in a browser"
    return f"{what}: no browser is opened ({reason or 'none was found'}); open {url}"


async def _try_open(url: str, environment: Mapping[str, str]) -> bool:
    """Start a browser; False if none was. One that runs in the foreground counts as started after `_WITHIN_S`."""
    quiet = asyncio.subprocess.DEVNULL
    try:
        opener = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _OPEN, url),
            stdin=quiet, stdout=quiet, stderr=quiet, env=dict(environment), start_new_session=True,
        )  # fmt: skip
    except OSError:
        return False
    try:
        async with asyncio.timeout(_WITHIN_S):
            return await opener.wait() == 0
    except TimeoutError:
        return True
    finally:
        if opener.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                opener.kill()
            await opener.wait()
