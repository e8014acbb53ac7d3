"""A Chromium for the console's tests, and what it takes to have one."""

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.patience import patience

INSTALL = (
    "the console's browser tests need `pip install 'lorafleet[browser]'` and a Chromium: `playwright install chromium`,"
    " or Debian's `apt-get install chromium`"
)
SIZES = {"wide": (1440, 900), "narrow": (390, 844), "4k": (3840, 2160)}
THEMES = ("light", "dark")
PAGES = {
    "fleet": "",
    "adapters": "/adapters",
    "map": "/adapters?show=map",
    "orphans": "/adapters?show=orphans",
    "adapter": "/adapters/sql-expert/v1",
    "failed": "/adapters/broken/v1",
    "workers": "/workers",
    "worker": "/workers/w0",
    "aliases": "/aliases",
    "published": "/published/policy",
    "rollout": "/aliases/sql",
    "tenants": "/tenants",
    "tenant": "/tenants/acme",
    "requests": "/requests",
    "what-if": "/what-if",
    "policy": "/policy",
    "activity": "/activity",
}


def chromium_path() -> str | None:
    """A Chromium that the system has; None: playwright's own."""
    return os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


@asynccontextmanager
async def chromium() -> AsyncIterator[Any]:
    """A running Chromium; skips the test, with what to install, where there is none."""
    playwright = pytest.importorskip("playwright.async_api", reason=INSTALL)
    async with playwright.async_playwright() as driver:
        try:
            browser = await driver.chromium.launch(executable_path=chromium_path(), args=["--no-sandbox"])
        except playwright.Error as exc:
            pytest.skip(f"{INSTALL} ({str(exc).splitlines()[0]})")
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def opened(
    browser: Any, url: str, *, key: str = "", size: str = "wide", theme: str = "light"
) -> AsyncIterator[Any]:
    """A page of a new profile, signed in with a key; `page.faults` lists errors of its scripts and console."""
    width, height = SIZES[size]
    context = await browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
    try:
        if key:
            await context.add_init_script(f"sessionStorage.setItem('lorafleet-key', {key!r})")
        page = await context.new_page()
        page.set_default_timeout(patience(15) * 1000)
        page.faults = []
        page.on("pageerror", lambda exc: page.faults.append(str(exc)))
        page.on("console", lambda line: line.type == "error" and page.faults.append(line.text))
        page.home = url
        yield page
    finally:
        await context.close()


async def visit(page: Any, path: str) -> None:
    """Open a view, and wait until everything on it has been loaded."""
    await page.goto(f"{page.home}/ui{path}")
    await page.wait_for_selector("#main h1")
    await page.wait_for_selector(".loading-note", state="detached")
