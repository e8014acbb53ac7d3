"""What the console changes: each action says first what it will do, does it, and is taken back where it can be."""

import asyncio
import shlex
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.console.browser import INSTALL, chromium, opened, visit
from tests.console.scene import FOREIGN, OPERATOR, VIEWER, ConsoleScene, running_scene
from tests.patience import patience, until

pytestmark = [pytest.mark.thorough, pytest.mark.fleet, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    pytest.importorskip("playwright", reason=INSTALL)
    with running_scene(tmp_path_factory.mktemp("actions")) as running:
        asyncio.run(running.traffic(8.0))
        yield running


@pytest.fixture
async def page(scene) -> AsyncIterator[object]:
    async with chromium() as browser, opened(browser, scene.orchestrator, key=OPERATOR) as made:
        yield made
        assert made.faults == []


async def confirmed(page, words: str) -> None:
    """Check that the dialog says these words, and confirm it; returns when it is closed."""
    dialog = page.locator("dialog")
    assert words in " ".join((await dialog.inner_text()).split())
    await dialog.locator("button.primary").click()
    await dialog.wait_for(state="detached")


async def undo(page) -> None:
    """Take the last action back."""
    await page.click(".toast >> text=Undo")
    await page.wait_for_selector(".toast >> text=Taken back")


def published(scene: ConsoleScene) -> dict:
    return scene.call("GET", "/v1/published/policy").json()["status"]


async def test_a_pause_says_who_paused_and_what_waits_and_is_ended_and_renewed(scene, page):
    scene.call("POST", "/v1/pauses", json={"lease_s": 600})
    async with httpx.AsyncClient(timeout=patience(60), trust_env=False) as client:
        chat = {"model": "tiny-qwen", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        waits = asyncio.create_task(
            client.post(
                f"{scene.router}/v1/chat/completions", json=chat, headers={"authorization": f"Bearer {OPERATOR}"}
            )
        )
        await visit(page, "")
        row = page.locator("tr:has-text('every tenant')")
        await row.locator(".warn-text >> text=1").wait_for()
        assert "Ann (key" in await row.inner_text()
        await row.locator("text=End").click()
        await confirmed(page, "1 request that waits start at once")
        assert (await waits).status_code == 200
    assert scene.call("GET", "/v1/pauses").json()["data"] == []
    await undo(page)
    (again,) = scene.call("GET", "/v1/pauses").json()["data"]
    assert again["tenant"] is None
    scene.call("DELETE", "/v1/pauses")


async def test_requests_are_paused_from_the_page_of_requests(scene, page):
    await visit(page, "/requests")
    await page.click("main >> text=Pause requests")
    await page.fill("dialog input[type=number]", "120")
    await confirmed(page, "every new request of every tenant for 2 min")
    await page.wait_for_selector("tr:has-text('every tenant')")
    await undo(page)
    assert scene.call("GET", "/v1/pauses").json()["data"] == []


async def test_a_name_is_pointed_at_a_kept_version_and_back(scene, page):
    await visit(page, "/published/policy")
    await page.click("tr:has-text('policy/v1') >> text=Point here")
    await confirmed(page, "new requests for policy to it, at every router at once")
    await page.wait_for_selector(".toast >> text=policy is policy/v1")
    assert published(scene)["lora_id"] == "policy/v1"
    await undo(page)
    assert published(scene)["lora_id"] == "policy/v2"


async def test_what_a_name_keeps_is_set_and_taken_back(scene, page):
    await visit(page, "/published/policy")
    await page.click("main >> text=What is kept")
    await page.fill("dialog input >> nth=0", "5")
    await confirmed(page, "keep_versions: 2 → 5. The name stays at policy/v2")
    await page.wait_for_selector(".toast >> text=It is set")
    assert published(scene)["keep_versions"] == 5
    await undo(page)
    assert published(scene)["keep_versions"] == 2


async def test_a_new_alias_takes_no_name_that_leads_somewhere_already(scene, page):
    before = scene.call("GET", "/v1/aliases/sql").json()["status"]["targets"]
    await visit(page, "/aliases")
    await page.click("button:text-is('New alias')")
    await page.fill("dialog .form label:has-text('Alias') input", "sql")
    await page.fill("dialog input[aria-label='Target 1']", "legal/v2")
    await page.click("dialog button:text-is('Make it')")
    await page.wait_for_selector("dialog [role=alert]:has-text('sql is an alias already')")
    assert scene.call("GET", "/v1/aliases/sql").json()["status"]["targets"] == before


async def test_a_pin_changes_nothing_that_others_have_changed_since_the_page_was_read(scene, page):
    await visit(page, "/adapters/legal/v2")
    held = asyncio.Event()

    async def hold(route):
        scene.call("PATCH", "/v1/adapters/legal/v2", json={"policy": {"priority": 3}})
        held.set()
        await route.continue_()

    await page.route(
        "**/v1/adapters/legal/v2", lambda route: hold(route) if route.request.method == "PATCH" else route.continue_()
    )
    await page.click("button:text-is('Pin')")
    await page.click("dialog button:text-is('Pin')")
    await page.wait_for_selector("button:text-is('Unpin')")
    policy = scene.call("GET", "/v1/adapters/legal/v2").json()["spec"]["policy"]
    assert held.is_set()
    assert (policy["pinned"], policy["priority"]) == (True, 3)
    scene.call("PATCH", "/v1/adapters/legal/v2", json={"policy": {"pinned": False, "priority": 0}})


async def test_what_a_script_has_loaded_is_adopted_for_a_tenant(scene, page):
    await visit(page, "/workers/w1")
    await page.click("text=adopt or unload")
    await page.click(f"tr:has-text('{FOREIGN}') >> text=Adopt")
    await page.select_option("dialog select", "tenants")
    await page.fill("dialog input[type=text]", "acme")
    await confirmed(page, "acme may use it")
    await page.wait_for_selector(f"h1 >> text={FOREIGN}")
    assert scene.call("GET", f"/v1/adapters/{FOREIGN}").json()["spec"]["tenants"] == ["acme"]


async def test_what_a_script_has_loaded_is_unloaded(scene, page):
    scene.load_past_the_fleet("unwanted", scene.fleet.state_dir / "adapters" / "python-expert" / "v1")
    await visit(page, "/adapters?show=orphans")
    await page.click("tr:has-text('unwanted') >> text=Unload")
    await confirmed(page, "it leaves w1")
    await page.wait_for_selector(".toast >> text=unwanted is being unloaded")
    engine = scene.call("GET", "/v1/workers/w1").json()["engine_url"]
    async with httpx.AsyncClient(timeout=patience(30), trust_env=False) as client:

        async def names() -> set[str]:
            return {each["id"] for each in (await client.get(f"{engine}/v1/models")).json()["data"]}

        async with asyncio.timeout(patience(30)):
            while any(name.startswith("unwanted") for name in await names()):
                await asyncio.sleep(0.1)
    await until(lambda: all(row["lora_id"] != "unwanted" for row in scene.orphans()))


async def test_a_policy_is_changed_after_its_difference_was_shown_and_taken_back(scene, page):
    await visit(page, "/policy")
    row = page.locator("tr:has-text('max_staleness_s')").first
    assert "Ann (key" in await row.inner_text()
    await page.fill("input[aria-label=reserve_slots]", "1")
    await page.fill("input[aria-label=ttl_s]", "900")
    await page.click("text=Review 2 changes")
    await page.wait_for_selector("dialog >> text=With the present demand")
    assert scene.call("GET", "/v1/policy").json()["ttl_s"] == 0
    await confirmed(page, "reserve_slots 0 → 1 ttl_s 0 → 900")
    await page.wait_for_selector(".toast >> text=In force with the next pass")
    values = scene.call("GET", "/v1/policy").json()
    assert (values["reserve_slots"], values["ttl_s"]) == (1, 900)
    await undo(page)
    values = scene.call("GET", "/v1/policy").json()
    assert (values["reserve_slots"], values["ttl_s"], values["max_staleness_s"]) == (0, 0, 7200)


async def test_an_undo_of_a_policy_overwrites_nothing_that_came_between(scene, page):
    await visit(page, "/policy")
    await page.fill("input[aria-label=ttl_s]", "900")
    await page.click("text=Review 1 change")
    await confirmed(page, "ttl_s 0 → 900")
    await page.wait_for_selector(".toast >> text=Undo")
    scene.call("PATCH", "/v1/policy", json={"ttl_s": 60})
    page.faults.clear()
    await page.click(".toast >> text=Undo")
    await page.wait_for_selector(".toast.bad")
    page.faults.clear()  # Chromium says that a call was refused
    assert scene.call("PATCH", "/v1/policy", json={"ttl_s": 0}).json()["ttl_s"] == 0


def output_of(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=patience(30), check=True)
    return done.stdout + done.stderr


async def test_the_commands_that_a_keys_page_shows_change_that_key(scene, page, tmp_path):
    file = tmp_path / "keys.yaml"
    shutil.copy(scene.fleet.state_dir.with_name("keys.yaml"), file)
    await visit(page, "/tenants")
    await page.click("tr:has-text('globex') >> text=Revoke, rotate")
    for label, words in (("Rotate", "the old key is valid until"), ("Revoke", "is revoked")):
        command = shlex.split(await page.locator(f"dialog pre[aria-label^={label}]").inner_text())
        assert command[:2] == ["lorafleet", "keys"]
        assert words in await asyncio.to_thread(output_of, [sys.executable, "-P", "-m", *command], tmp_path)
    await page.keyboard.press("Escape")
    await page.wait_for_selector("dialog", state="detached")


async def test_an_adapters_page_says_which_share_each_worker_took(scene, page):
    await visit(page, "/adapters/sql-expert/v1")
    rows = page.locator("[aria-label='By worker'] tbody tr")
    await rows.first.wait_for()
    shares = [
        float((await rows.nth(at).locator(".meter .figure").inner_text()).split()[0])
        for at in range(await rows.count())
    ]
    assert sum(shares) == pytest.approx(100, abs=len(shares))
    worker = await rows.first.locator("a").inner_text()
    await visit(page, f"/workers/{worker}")
    await page.wait_for_selector("[aria-label='Its adapters by traffic'] >> text=sql-expert/v1")
    await page.wait_for_selector("[aria-label='By tenant'] >> text=acme")


async def test_several_adapters_are_retried_and_deleted_at_once(scene, page):
    broken = scene.fleet.state_dir / "adapters" / "broken" / "v1"
    names = [f"bulk/{number}" for number in range(3)]
    for name in names:
        scene.call("POST", "/v1/adapters", json={"lora_id": name, "source": f"file://{broken}"})
    for name in names:
        path = f"/v1/adapters/{name}"
        await until(lambda path=path: scene.call("GET", path).json()["status"]["state"] == "failed")
    await visit(page, "/adapters?q=bulk")
    await page.check("[aria-label='Choose bulk/0']")
    await page.click("text=Choose all 3 shown")
    await page.click("text=Retry 3")
    await confirmed(page, "bulk/0, bulk/1, bulk/2")
    await page.wait_for_selector("[aria-label='Chosen adapters']", state="detached")
    for name in names:
        await page.check(f"[aria-label='Choose {name}']")
    await page.click("text=Delete 3")
    await confirmed(page, "This cannot be taken back")
    await page.wait_for_selector(".toast >> text=3 adapters: being deleted")

    def is_left() -> bool:
        return any(row["lora_id"] in names for row in scene.call("GET", "/v1/adapters").json()["data"])

    await until(lambda: not is_left())


async def test_a_viewer_is_offered_none_of_it(scene):
    async with chromium() as browser, opened(browser, scene.orchestrator, key=VIEWER) as page:
        for path in ("/published/policy", "/policy", "/adapters?show=orphans", "/requests"):
            await visit(page, path)
            words = await page.locator("main button.action").all_inner_texts()
            assert set(words) <= {"Pause", "Explain", "More"}, (path, words)
            assert await page.locator("main td input, main td select").count() == 0, path
        await visit(page, "/adapters")
        assert await page.locator("main td input").count() == 0
