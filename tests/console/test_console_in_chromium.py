"""The console in Chromium: every page works in both themes and widths, by keyboard, and axe finds nothing."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.console.browser import INSTALL, PAGES, THEMES, chromium, opened, visit
from tests.console.scene import ACME, OPERATOR, VIEWER, running_scene
from tests.patience import patience

pytestmark = [pytest.mark.thorough, pytest.mark.fleet, pytest.mark.timeout(900)]
_TRAFFIC_S = 25.0


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    pytest.importorskip("playwright", reason=INSTALL)
    with running_scene(tmp_path_factory.mktemp("console")) as running:
        asyncio.run(running.traffic(_TRAFFIC_S))
        yield running


@pytest.fixture
async def browser() -> AsyncIterator[object]:
    async with chromium() as running:
        yield running


def axe_source() -> str:
    package = pytest.importorskip("axe_playwright_python", reason=INSTALL)
    return (Path(package.__file__).parent / "axe.min.js").read_text()


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("size", ["wide", "narrow"])
async def test_no_page_has_a_fault_or_overflows_and_axe_finds_nothing(scene, browser, size, theme):
    axe, found = axe_source(), []
    async with opened(browser, scene.orchestrator, key=OPERATOR, size=size, theme=theme) as page:
        for name, path in PAGES.items():
            await visit(page, path)
            overflow = await page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert overflow <= 0, f"{name} is {overflow} px wider than the window"
            await page.evaluate(axe)
            result = await page.evaluate("axe.run({resultTypes: ['violations']})")
            found += [(name, each["id"], each["nodes"][0]["html"]) for each in result["violations"]]
        assert page.faults == []
    assert found == []


async def test_nothing_is_loaded_from_elsewhere_and_the_page_wider_than_any_is_used(scene, browser):
    async with opened(browser, scene.orchestrator, key=OPERATOR, size="4k") as page:
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        for path in PAGES.values():
            await visit(page, path)
        assert {url for url in asked if not url.startswith(scene.orchestrator)} == set()
        assert await page.evaluate("document.querySelector('main').clientWidth") > 3000


async def test_the_key_is_asked_for_and_a_wrong_one_is_said(scene, browser):
    async with opened(browser, scene.orchestrator) as page:
        await page.goto(f"{scene.orchestrator}/ui/workers")
        await page.fill("input[type=password]", "lf-wrong")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("[role=alert] >> text=not known")
        await page.fill("input[type=password]", VIEWER)
        await page.keyboard.press("Enter")
        await page.wait_for_selector("h1 >> text=Workers")
        await page.wait_for_selector("table >> text=w0")


async def test_a_viewer_sees_everything_and_no_action(scene, browser):
    async with opened(browser, scene.orchestrator, key=VIEWER) as page:
        for path in ("/adapters", "/adapters/sql-expert/v1", "/workers/w0", "/aliases/sql"):
            await visit(page, path)
            words = await page.locator("main button.action").all_inner_texts()
            assert set(words) <= {"Pause", "Explain"}, (path, words)


async def test_a_key_of_one_tenant_sees_its_own_part_on_every_page_that_it_is_offered(scene, browser):
    async with opened(browser, scene.orchestrator, key=ACME) as page:
        await visit(page, "")
        assert await page.inner_text("h1") == "acme"
        offered = [await link.get_attribute("href") for link in await page.locator("nav li a").all()]
        assert "/ui/workers" not in offered
        for path in [each.removeprefix("/ui") for each in offered] + ["/adapters/acme/forecast", "/tenants/acme"]:
            await visit(page, path)
            assert await page.locator("[role=alert]").all_inner_texts() == [], path
            assert "globex" not in await page.inner_text("main"), path


async def test_a_cordon_says_what_it_does_and_is_taken_back(scene, browser):
    async with opened(browser, scene.orchestrator, key=OPERATOR) as page:
        await visit(page, "/workers/w1")
        await page.click("main >> text=Cordon")
        dialog = page.locator("dialog")
        assert "gets no new adapters" in await dialog.inner_text()
        assert state_of(scene, "w1") == "ready"
        await dialog.locator("button.primary").click()
        await page.wait_for_selector(".toast >> text=cordoned")
        assert state_of(scene, "w1") == "cordoned"
        await page.click(".toast >> text=Undo")
        await page.wait_for_selector(".toast >> text=Taken back")
        assert state_of(scene, "w1") == "ready"


def state_of(scene, worker: str) -> str:
    return scene.call("GET", f"/v1/workers/{worker}").json()["state"]


async def test_a_refused_action_says_why_and_the_dialog_stays(scene, browser):
    async with opened(browser, scene.orchestrator, key=OPERATOR) as page:
        await visit(page, "/adapters")
        await page.click("main >> text=Register")
        await page.fill("dialog input >> nth=0", "no good name!")
        await page.fill("dialog input >> nth=1", "file:///nowhere")
        await page.click("dialog button.primary")
        await page.wait_for_selector("dialog [role=alert] >> text=lora_id")
        await page.keyboard.press("Escape")
        await page.wait_for_selector("dialog", state="detached")


async def test_an_adapter_is_uploaded_as_its_two_files_and_taken_back(scene, browser):
    folder = scene.fleet.state_dir / "adapters" / "legal" / "v2"
    files = [str(folder / name) for name in ("adapter_config.json", "adapter_model.safetensors")]
    async with opened(browser, scene.orchestrator, key=OPERATOR) as page:
        await visit(page, "/adapters")
        await page.click("main >> text=Upload")
        await page.fill("dialog input[type=text]", "uploaded/v1")
        await page.set_input_files("dialog input[type=file]", files)
        await page.click("dialog button.primary")
        await page.wait_for_selector("h1 >> text=uploaded/v1")
        assert scene.call("GET", "/v1/adapters/uploaded/v1").json()["digest"]
        await page.click(".toast >> text=Undo")
        await page.wait_for_selector(".toast >> text=Taken back")


async def test_a_decision_is_explained_and_replayed_from_the_orchestrators_port_alone(scene, browser):
    async with opened(browser, scene.orchestrator, key=OPERATOR) as page:
        await visit(page, "/requests")
        await page.locator("table td a code").first.click()
        await page.wait_for_selector(".term-row.winner")
        await page.select_option("select", "round_robin")
        await page.wait_for_selector("[role=status] >> text=round_robin")
        assert page.faults == []


async def test_a_view_is_its_address(scene, browser):
    async with opened(browser, scene.orchestrator, key=OPERATOR) as page:
        await visit(page, "/adapters")
        await page.fill("input[type=search]", "expert")
        await page.click("th >> text=adapter")
        await page.click(".ranges >> text=1 h")
        address = page.url
        assert {"q=expert", "sort=id", "range=3600"} <= set(address.partition("?")[2].split("&"))
        names = await page.locator("tbody td:first-child").all_inner_texts()
        await page.goto(address)
        await page.wait_for_selector("tbody td")
        assert await page.locator("tbody td:first-child").all_inner_texts() == names
        assert names == sorted(names)
        assert all("expert" in name for name in names)


async def test_pages_are_reached_and_sorted_by_keyboard(scene, browser):
    async with opened(browser, scene.orchestrator, key=OPERATOR) as page:
        await visit(page, "")
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.className") == "skip"
        for _ in range(3):
            await page.keyboard.press("Tab")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("h1 >> text=Adapters")
        await page.focus("th button")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("th[aria-sort]")
        outline = await page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid"


async def test_what_happens_shows_without_a_reload(scene, browser):
    async with opened(browser, scene.orchestrator, key=OPERATOR) as page:
        await visit(page, "/workers")
        async with httpx.AsyncClient(timeout=patience(20)) as client:
            headers = {"authorization": f"Bearer {OPERATOR}"}
            await client.post(f"{scene.orchestrator}/v1/workers/w2/cordon", headers=headers)
            await page.wait_for_selector("tr:has-text('w2') >> text=cordoned")
            await client.post(f"{scene.orchestrator}/v1/workers/w2/uncordon", headers=headers)
            await page.wait_for_selector("tr:has-text('w2') >> text=ready")
