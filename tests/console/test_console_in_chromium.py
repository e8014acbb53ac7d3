"""The console in Chromium: every page works in both themes and widths, by keyboard, and axe finds nothing."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from lorafleet.engine.acceptance import FILE_NAME
from tests.certified import certify
from tests.console.browser import INSTALL, PAGES, THEMES, chromium, opened, visit
from tests.console.scene import ACME, GLOBEX, OPERATOR, VIEWER, running_scene
from tests.patience import patience, until

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
        assert scene.call("GET", "/v1/adapters/uploaded/v1").json()["spec"]["digest"]
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
        await page.wait_for_selector("tbody td:first-child:not(:has-text('expert'))", state="detached")
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
        await page.wait_for_selector(".skip:focus")
        for _ in range(3):
            await page.keyboard.press("Tab")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("h1 >> text=Adapters")
        await page.focus("th button")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("th[aria-sort]")
        outline = await page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid"


async def test_the_menu_of_a_narrow_screen_shows_the_present_page(scene, browser):
    async with opened(browser, scene.orchestrator, key=OPERATOR, size="narrow") as page:
        await visit(page, "/policy")
        left, right, width = await page.evaluate(
            """() => {
              const link = document.querySelector(".side [aria-current]"), menu = link.closest("ul");
              const [inner, outer] = [link, menu].map((node) => node.getBoundingClientRect());
              return [inner.left - outer.left, inner.right - outer.left, outer.width];
            }"""
        )
        assert 0 <= left < right <= width + 1


async def test_what_happens_shows_without_a_reload(scene, browser):
    async with opened(browser, scene.orchestrator, key=OPERATOR) as page:
        await visit(page, "/workers")
        async with httpx.AsyncClient(timeout=patience(20)) as client:
            headers = {"authorization": f"Bearer {OPERATOR}"}
            await client.post(f"{scene.orchestrator}/v1/workers/w2/cordon", headers=headers)
            await page.wait_for_selector("tr:has-text('w2') >> text=cordoned")
            await client.post(f"{scene.orchestrator}/v1/workers/w2/uncordon", headers=headers)
            await page.wait_for_selector("tr:has-text('w2') >> text=ready")


async def test_a_frozen_orchestrator_is_said_and_the_page_lives_again_after_it(scene, browser):
    (pid,) = scene.fleet.pids("-m", "orchestrator")
    async with opened(browser, scene.orchestrator, key=OPERATOR) as page:
        await visit(page, "")
        await page.wait_for_selector(".live:text-is('live')")
        os.kill(pid, signal.SIGSTOP)
        try:
            await page.wait_for_selector(
                ".live:has-text('no connection to the orchestrator')", timeout=patience(60) * 1000
            )
        finally:
            os.kill(pid, signal.SIGCONT)
        await page.wait_for_selector(".live:text-is('live')", timeout=patience(60) * 1000)


async def test_a_column_lacks_what_is_not_known_at_its_end_in_either_order(scene, browser):
    async with opened(browser, scene.orchestrator, key=VIEWER) as page:
        for order in ("p95", "-p95"):
            await visit(page, f"/adapters?sort={order}")
            column = await page.locator("thead th").all_inner_texts()
            at = next(index for index, text in enumerate(column) if text.startswith("first token p95"))
            cells = await page.locator(f"tbody td:nth-child({at + 1})").all_inner_texts()
            assert cells[0] != "\N{EN DASH}", order
            assert cells[-1] == "\N{EN DASH}", order


async def test_a_request_is_found_by_its_id_and_says_why_it_went_there(scene, browser):
    request_id = scene.call("GET", "/v1/decisions?limit=1").json()["data"][0]["request_id"]
    async with opened(browser, scene.orchestrator, key=VIEWER) as page:
        await visit(page, "/requests")
        await page.fill("input[type=search]", request_id)
        await page.wait_for_selector("tbody tr:only-child")
        await page.click(f"tbody a:has-text('{request_id[:12]}')")
        await page.wait_for_selector(".term-row.winner")
        await visit(page, "/requests?adapter=no-such-adapter-or-request")
        await page.wait_for_selector("text=None of the requests that routers keep")


async def test_a_refused_request_says_which_limit_it_reached_how_to_raise_it_and_whose_key_it_was(scene, browser):
    asked = {"model": "tiny-qwen", "messages": [{"role": "user", "content": "again"}], "max_tokens": 1}
    async with httpx.AsyncClient(timeout=patience(60), trust_env=False) as client:
        headers = {"authorization": f"Bearer {GLOBEX}"}
        for _ in range(120):  # its key may make 60 requests a minute
            answer = await client.post(f"{scene.router}/v1/chat/completions", json=asked, headers=headers)
            if answer.status_code == 429:
                break
    request_id = answer.headers["x-request-id"]
    async with opened(browser, scene.orchestrator, key=VIEWER) as page:
        await visit(page, "/requests?tenant=globex&status=429")
        await page.click(f"tbody tr:has-text('globex') a:has-text('{request_id[:12]}')")
        notice = page.locator("[role=note]")
        await notice.locator("text=Limit reached: the key's requests a minute").wait_for()
        assert "limits.requests_per_minute of key" in await notice.inner_text()
        await until(lambda: "requests_per_minute" in scene.call("GET", "/v1/traffic/totals?kind=key&range_s=900").text)
        await visit(page, "/tenants")
        await page.wait_for_selector("tr:has-text('globex') .limit:has-text('refused') .fill.bad")
        assert page.faults == []


async def test_no_table_is_wider_than_a_window_of_1440(scene, browser):
    wider = "[...document.querySelectorAll('.table-box')].filter((box) => box.scrollWidth > box.clientWidth)"
    async with opened(browser, scene.orchestrator, key=OPERATOR) as page:
        for path in ("", "/adapters", "/tenants", "/requests", "/requests?status=failed", "/workers", "/aliases"):
            await visit(page, path)
            assert await page.evaluate(f"{wider}.map((box) => box.getAttribute('aria-label'))") == [], path


async def test_a_page_that_loads_slowly_keeps_its_place(scene, browser):
    async with opened(browser, scene.orchestrator, key=VIEWER) as page:
        answers = asyncio.Event()

        async def wait(route):
            await answers.wait()
            await route.continue_()

        await page.route("**/v1/traffic?**", wait)
        await page.goto(f"{scene.orchestrator}/ui")
        await page.wait_for_selector(".skeleton .tiles")
        below = page.locator("section:has(#engines)")
        before = (await below.bounding_box())["y"]
        answers.set()
        await page.wait_for_selector(".loading-note", state="detached")
        assert before > 600, "what is below the charts begins where it will be"
        assert "Loading" not in await page.inner_text("main")


async def test_people_are_named_by_the_notes_of_their_keys(scene, browser):
    async with opened(browser, scene.orchestrator, key=VIEWER) as page:
        await visit(page, "/tenants")
        await page.wait_for_selector("tr:has-text('on call')")
        await visit(page, "/aliases")
        await page.wait_for_selector("tr:has-text('sql') >> text=Ann (key")
        await visit(page, "/activity?show=changes")
        await page.wait_for_selector("li:has-text('alias set') >> text=Ann (key")
    async with opened(browser, scene.orchestrator, key=ACME) as page:
        await visit(page, "/aliases")
        assert "Ann" not in await page.inner_text("main")


async def test_the_fleets_page_names_errors_with_who_gets_them_and_what_changed_before(scene, browser):
    # The page has the last changes alone.
    scene.call("PUT", "/v1/aliases/just-set", json={"targets": [{"lora_id": "sql-expert/v1"}]})
    scene.call("DELETE", "/v1/aliases/just-set")
    async with opened(browser, scene.orchestrator, key=VIEWER) as page:
        await visit(page, "")
        row = page.locator("section:has-text('Errors, and what changed before') li:has-text('404 model_not_found')")
        await row.wait_for()
        await row.locator("text=/since|before/").first.wait_for()
        assert "to key" in await row.inner_text()
        await page.wait_for_selector("section:has-text('Changes') li:has-text('alias set'):has-text('just-set')")
        await page.click("a.tile:has-text('First token')")
        await page.wait_for_selector("th[aria-sort=descending] >> text=first token p95")


_CAUSES = (Path(__file__).parent / "causes.js").read_text()


async def test_a_spell_of_errors_begins_after_quiet_and_only_changes_before_it_are_named(scene, browser):
    async with opened(browser, scene.orchestrator, key=VIEWER) as page:
        await visit(page, "")
        result = await page.evaluate(_CAUSES)
    shown = {one["code"]: (one["since"], one["isOlder"], one["isNow"], one["perS"]) for one in result["found"]}
    assert shown == {
        "500 new": (1150, False, True, 2),
        "429 old": (1000, True, True, 1),
        "503 over": (1050, False, False, 1),
    }
    assert result["near"] == [1149, 1100]


_FIGURES = (Path(__file__).parent / "figures.js").read_text()


async def test_figures_that_the_pages_work_out_are_right(scene, browser):
    async with opened(browser, scene.orchestrator, key=VIEWER) as page:
        await visit(page, "")
        found = await page.evaluate(_FIGURES)
    # 4,000 tokens a prompt, 3,000 of them not cached; of 10 answered requests one waited 2 s for a load.
    assert found["parts"] == [["in the engine", 2.3], ["prefill", 1.0], ["wait for room", 0.5], ["loads", 0.2]]
    assert found["live"] == ["ann", "ann", "lorafleet, which rolled back", "trainer"]
    assert found["lost"] == ["b", "c"]  # `a` is loaded elsewhere, `d` has another copy, `e` has none today
    assert found["incidents"] == [["engine_died w1", 1], ["lease_away ", 9], ["circuit_opened w1", 1]]
    month = {"tokens_per_month": 7, "engine_seconds_per_month": 1.5}
    month |= {f"soft_{name}": spent for name, spent in month.items()}
    assert found["spent"] == month | {f"tenant_{name}": 0 for name in month}
    assert found["use"] == {"requests_per_minute": 20, "tokens_per_minute": 100}


async def test_the_use_of_today_is_one_click_away(scene, browser):
    async with opened(browser, scene.orchestrator, key=VIEWER) as page:
        await visit(page, "/tenants")
        await page.click(".ranges >> text=today")
        await page.wait_for_selector("tr:has-text('acme')")
        assert "range=today" in page.url
        await page.goto(page.url)
        await page.wait_for_selector(".ranges [aria-pressed=true] >> text=today")


async def test_what_if_names_what_moves_and_counts_nothing_that_has_no_place_today(scene, browser):
    worker = scene.call("GET", "/v1/adapters/sql-expert/v1").json()["status"]["workers"][0]
    async with opened(browser, scene.orchestrator, key=VIEWER) as page:
        await visit(page, "/what-if")
        await page.click(f"fieldset label:has-text('{worker}')")
        await page.wait_for_selector("section:has-text('Then') li:has-text('sql-expert/v1')")
        tile = page.locator(".tile:has-text('Without a place')")
        assert (await tile.locator(".value").inner_text()) == "0"


async def test_an_adapter_says_where_the_time_to_its_first_token_goes(scene, browser):
    async with opened(browser, scene.orchestrator, key=VIEWER) as page:
        await visit(page, "/adapters/sql-expert/v1")
        await page.wait_for_selector("section:has-text('Where the time to the first token goes') li")


async def test_an_adapter_says_whether_its_answers_are_the_trainers_and_what_they_look_like(scene, browser, tmp_path):
    adapters = Path(scene.call("GET", "/v1/adapters/sql-expert/v1").json()["spec"]["source"].removeprefix("file://"))
    async with opened(browser, scene.orchestrator, key=VIEWER) as page:
        await visit(page, "/adapters/python-expert/v1")
        await page.wait_for_selector("text=no acceptance file")
        for trained, said in (("sql-expert/v1", "equal"), ("legal/v2", "looks like another adapter")):
            folder = Path(shutil.copytree(adapters, tmp_path / said.replace(" ", "-")))
            certify(folder, of=adapters.parents[1] / trained)
            sent = {"file": (folder / FILE_NAME).read_text()}
            answer = scene.call("POST", "/v1/adapters/sql-expert/v1/check", json=sent).json()
            assert answer["acceptance"], answer
            await visit(page, "/adapters/sql-expert/v1")
            row = page.locator("text=Trainer's log-probabilities").locator("..")
            text = await row.inner_text()
            assert said in text, text
            assert all(worker in text for worker in answer["acceptance"]), text
        assert page.faults == []
