"""Pictures of every page of the console for docs/: `python -m tests.console.screenshots FOLDER [--hold]`."""

import asyncio
import sys
import tempfile
from pathlib import Path

from tests.console.browser import PAGES, THEMES, chromium, opened, visit
from tests.console.scene import OPERATOR, ConsoleScene, running_scene

_TRAFFIC_S = 150.0


async def take(scene: ConsoleScene, folder: Path) -> None:
    """Write `<page>-<size>-<theme>.png` of every page."""
    async with chromium() as browser:
        for size in ("wide", "narrow"):
            for theme in THEMES:
                async with opened(browser, scene.orchestrator, key=OPERATOR, size=size, theme=theme) as page:
                    for name, path in PAGES.items():
                        await visit(page, path)
                        if name == "what-if":
                            await page.check("fieldset input >> nth=1")
                            await page.wait_for_selector("text=What the orchestrator would do")
                        await page.wait_for_timeout(300)
                        await page.screenshot(path=folder / f"{name}-{size}-{theme}.png", full_page=True)
                    await _one_request(page, folder / f"request-{size}-{theme}.png")


async def _one_request(page: object, path: Path) -> None:
    """The page of the newest decision, with a replay."""
    await visit(page, "/requests")
    await page.click("table td a code")
    await page.wait_for_selector(".terms")
    await page.select_option("select", "least_loaded")
    await page.wait_for_selector("[role=status] >> text=least_loaded")
    await page.screenshot(path=path, full_page=True)


def main() -> None:
    """Set the scene, send traffic, take the pictures; with --hold keep the fleet until interrupted."""
    with tempfile.TemporaryDirectory(prefix="console-") as folder, running_scene(Path(folder)) as scene:
        print(f"console {scene.orchestrator}/ui router {scene.router}", flush=True)  # noqa: T201
        if "--hold" in sys.argv:
            asyncio.run(scene.traffic(36000))
        asyncio.run(scene.traffic(_TRAFFIC_S))
        Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
        asyncio.run(take(scene, Path(sys.argv[1])))


if __name__ == "__main__":
    main()
