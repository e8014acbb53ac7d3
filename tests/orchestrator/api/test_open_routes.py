"""The console's files: all in the package, none from elsewhere, and nothing that a browser would have to be told."""

import hashlib
import re

from lorafleet.keys.issuers import ConsoleLogin
from lorafleet.keys.signing_keys import Endpoints
from orchestrator.api.open_routes import FOLDER, LoginItem, page_policy, read_assets

OWN = {path: asset.body.decode() for path, asset in read_assets().items() if not path.startswith("vendor/")}


async def test_every_view_has_an_address_and_no_page_needs_a_key(service):
    for path in ("/ui", "/ui/", "/ui/adapters", "/ui/adapters/sql/v1", "/ui/workers/w0", "/ui/no/such/page"):
        answer = await service.http.get(path)
        assert answer.status_code == 200, path
        assert answer.headers["content-type"].startswith("text/html")
        assert answer.headers["content-security-policy"] == page_policy()


def test_the_policy_allows_this_servers_own_files_alone():
    assert "unsafe" not in page_policy()
    allowed = dict(part.split(" ", 1) for part in page_policy().split("; "))
    assert allowed["default-src"] == "'none'"
    assert {source for name, source in allowed.items() if name != "default-src"} <= {"'self'", "'none'"}


def test_the_policy_allows_the_token_endpoints_of_logins_by_their_origins():
    token = "https://login.example:8443/realms/ml/token?x=1;y"
    login = LoginItem(
        issuer="https://login.example:8443/realms/ml",
        client=ConsoleLogin(client_id="console"),
        endpoints=Endpoints(authorization="https://login.example:8443/auth", token=token),
    )
    assert "connect-src 'self' https://login.example:8443;" in page_policy([login])
    assert page_policy([login]).replace(" https://login.example:8443", "") == page_policy()


async def test_without_issuers_nobody_logs_in_at_one(service):
    assert (await service.http.get("/v1/login")).json() == {"data": []}


async def test_every_file_that_the_page_loads_is_served_with_its_type_and_an_etag(service):
    page = (await service.http.get("/ui")).text
    linked = set(re.findall(r'(?:src|href)="/ui/assets/([^"]+)"', page))
    assert "app.js" in linked
    for path, asset in read_assets().items():
        answer = await service.http.get(f"/ui/assets/{path}", headers={"accept-encoding": "gzip"})
        assert answer.content == asset.body, path
        assert answer.headers["content-encoding"] == "gzip"
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = await service.http.get(f"/ui/assets/{path}", headers={"if-none-match": answer.headers["etag"]})
        assert again.status_code == 304
    assert linked <= read_assets().keys()
    assert (await service.http.get("/ui/assets/../ui.py")).status_code in (200, 404)
    assert (await service.http.get("/ui/assets/%2e%2e/ui.py")).status_code == 404


def test_every_import_names_a_file_of_the_console():
    for path, text in OWN.items():
        if path.endswith(".js"):
            for target in re.findall(r'from "([^"]+)"', text):
                assert target.startswith("."), (path, target)
                assert (FOLDER / path).parent.joinpath(target).resolve().is_file(), (path, target)


def test_no_own_file_names_another_server_or_writes_markup():
    page = (FOLDER / "index.html").read_text()
    for path, text in [*OWN.items(), ("index.html", page)]:
        if path.endswith(".svg"):
            continue
        assert re.findall(r"https?://[a-z]|[\"'(]//[a-z]|@import|url\(", text) == [], path
        assert re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function", text) == [], path
    assert re.findall(r"<style|<script(?! type=\"module\" src)| style=| on[a-z]+=", page) == []


def test_a_key_is_never_kept_beyond_its_tab():
    kept = [line for text in OWN.values() for line in text.splitlines() if "localStorage" in line]
    assert all("lorafleet-theme" in line for line in kept)
    assert not any("cookie" in text for text in OWN.values())


def test_libraries_are_those_that_the_table_beside_them_names_with_their_licences():
    folder = FOLDER / "vendor"
    rows = re.findall(
        r"^\| `([^`]+)` \| (\w+) [^|]*\| `([0-9a-f]{64})` \|$", (folder / "README.md").read_text(), re.MULTILINE
    )
    assert {name for name, _, _ in rows} == {path.name for path in folder.iterdir() if path.suffix in {".js", ".css"}}
    for name, package, digest in rows:
        body = (folder / name).read_bytes()
        assert hashlib.sha256(body).hexdigest() == digest, name
        assert b"sourceMappingURL" not in body
        assert (folder / f"LICENSE.{package}").read_text().strip()


def test_all_files_together_stay_small():
    assert sum(len(asset.packed) for asset in read_assets().values()) < 120_000


async def test_every_call_of_the_console_is_a_route(service):
    paths = (await service.http.get("/openapi.json")).json()["paths"]
    plain = {re.sub(r"\{[^}]*\}", "*", path) for path in paths}
    called = {found for text in OWN.values() for found in re.findall(r'["`](/v1/[a-z/]+?)/?(?=["`?$])', text)}
    assert len(called) > 12
    assert {path for path in called if path not in plain and f"{path}/*" not in plain} == set()


async def test_requested_adapters_are_shown_as_demand(service):
    agent = await service.worker()
    await service.register()
    await service.ensure()
    await service.settle()
    name = next(iter(agent.loaded.values()))["engine_name"]
    for seq, requests in ((1, 0), (2, 600)):
        use = {"worker_id": "w0", "engine_name": name, "requests": requests, "in_flight": 0}
        await service.usage(10**15, use, seq=seq)
    assert (await service.adapter())["status"]["requests_per_s"] > 1
