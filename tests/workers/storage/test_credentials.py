"""Credentials that adapters name: files, allowed sources, and the hosts that receive them."""

import functools
import shutil

import httpx
import pytest

from lorafleet.local.tiny_model import make_adapter
from tests.workers.contexts import agent_context, installer_of
from tests.workers.sources.test_base import ADAPTER, HubStore, WebFiles, limits
from workers.core.errors import SourceError
from workers.inventory.installed_adapters import InstalledAdapters
from workers.sources.base import Transfer
from workers.sources.web import WebSource
from workers.storage.cache import AdapterCache
from workers.storage.cache_folder import CacheFolder
from workers.storage.credentials import Credentials
from workers.verification.manifest import AdapterRules
from workers.wire import InspectRequest, LoadRequest

TOKEN = "hunter2-of-acme"


def mount(folder, name="acme-hub", *, token=TOKEN, sources="hf://acme\nhttps://models.example.com/acme/\n"):
    """Write a Secret as the kubelet mounts it, with its links."""
    data = folder / name / "..2026_11_21"
    data.mkdir(parents=True)
    (data / "token").write_text(f"{token}\n")
    (data / "sources").write_text(sources)
    for key in ("token", "sources"):
        (folder / name / key).symlink_to(data / key)


async def test_secret_is_read_for_its_allowed_sources(tmp_path):
    mount(tmp_path)
    credentials = Credentials(tmp_path)
    assert await credentials.read("acme-hub/token", "hf://acme/sql@main") == TOKEN
    assert await credentials.read("acme-hub/token", "https://models.example.com/acme/sql") == TOKEN
    shutil.rmtree(tmp_path / "acme-hub")
    mount(tmp_path, token="rotated")
    assert await credentials.read("acme-hub/token", "hf://acme/sql") == "rotated"


@pytest.mark.parametrize(
    ("secret", "ref", "why"),
    [
        ("acme-hub/token", "https://evil.example/acme/sql", "is not allowed for this source; its file 'sources' has"),
        ("acme-hub/token", "hf://acme-evil/sql", "is not allowed for this source"),
        ("acme-hub/other", "hf://acme/sql", "needs 'other' and 'sources'"),
        ("nobody/token", "hf://acme/sql", "cannot be read"),
        ("acme-hub/sources", "hf://acme/sql", "is no name/key"),
        ("../acme-hub/token", "hf://acme/sql", "is no name/key"),
        ("acme-hub/../token", "hf://acme/sql", "is no name/key"),
        ("acme-hub", "hf://acme/sql", "is no name/key"),
        ("empty/token", "hf://acme/sql", "is empty"),
        ("lines/token", "hf://acme/sql", "more than one line"),
    ],
)
async def test_missing_secret_or_other_source_is_refused(tmp_path, secret, ref, why):
    mount(tmp_path)
    mount(tmp_path, "empty", token="")
    mount(tmp_path, "lines", token="a\nheader: b")
    with pytest.raises(SourceError, match=why) as refused:
        await Credentials(tmp_path).read(secret, ref)
    assert refused.value.code == "source_unauthorized"
    assert TOKEN not in str(refused.value)


async def test_error_without_secrets_dir_names_the_setting():
    with pytest.raises(SourceError, match="secrets_dir is not set for this worker"):
        await Credentials(None).read("acme-hub/token", "hf://acme/sql")


@pytest.mark.parametrize("kind", [WebFiles, HubStore])
async def test_adapters_credential_replaces_the_workers(tmp_path, kind):
    async with kind(tmp_path).open() as store:
        ref, into, transfer = store.put("sql", ADAPTER), tmp_path / "into", Transfer()
        into.mkdir()
        transfer.credential = TOKEN
        await store.source().fetch(ref, into, transfer)
        message = {request.headers.get("authorization") for request in store.site.requests}
        assert message == {f"Bearer {TOKEN}"} | ({None} if kind is HubStore else set())  # signed URLs need no token


@pytest.mark.parametrize(
    ("credential", "header"), [("abc", "Bearer abc"), ("Basic YWJj", "Basic YWJj"), ("Bearer abc", "Bearer abc")]
)
async def test_credential_is_not_sent_to_a_redirects_other_host(tmp_path, credential, header):
    requested = []

    def answer(request):
        requested.append((request.url.host, request.headers.get("authorization")))
        if request.url.host == "a.example":
            return httpx.Response(302, headers={"location": f"https://cdn.example{request.url.path}"})
        content = ADAPTER.get(request.url.path.rpartition("/")[2])
        return httpx.Response(404) if content is None else httpx.Response(200, content=content)

    source = WebSource(limits(), transport=functools.partial(httpx.MockTransport, answer))
    transfer = Transfer()
    transfer.credential = credential
    await source.fetch("https://a.example/sql", tmp_path, transfer)
    assert set(requested) == {("a.example", header), ("cdn.example", None)}


class TokenSource:
    """A source that requires a token."""

    def __init__(self, files) -> None:
        self._files = files
        self.shown = []

    async def fetch(self, ref, into, transfer) -> None:
        self.shown.append(transfer.credential)
        if transfer.credential != TOKEN:
            raise SourceError("source_unauthorized", "who are you?")
        for file in self._files.iterdir():
            shutil.copy(file, into)


async def test_fetch_uses_the_requests_secret_even_after_a_restart(tmp_path):
    mount(tmp_path / "secrets")
    source = TokenSource(make_adapter(tmp_path / "from", "a/v1"))
    rules = AdapterRules(64, frozenset(), "off")
    disk = CacheFolder(tmp_path / "cache", agent_id="a", grace_s=10.0, lease_s=100.0)
    cache = AdapterCache(disk, sources={"hf": source}, rules=rules, fetch_deadline_s=10)

    def installer():
        return installer_of(agent_context(cache, tmp_path / "state", secrets=tmp_path / "secrets"))

    first = installer()
    with pytest.raises(SourceError, match="who are you"):
        await first.inspect(InspectRequest(lora_id="a/v1", source="hf://acme/a"))
    await first.inspect(InspectRequest(lora_id="a/v1", source="hf://acme/a", secret="acme-hub/token"))
    found = await first.install(LoadRequest(lora_id="b/v1", source="hf://acme/b", secret="acme-hub/token"))
    shutil.rmtree(disk.path(found.digest))
    installed = InstalledAdapters(tmp_path / "state")
    await installer().reinstall_if_missing(installed.versions("b/v1")[0])
    assert source.shown == ["", TOKEN, TOKEN, TOKEN]
    assert TOKEN not in "".join(path.read_text() for path in (tmp_path / "state").rglob("*.json"))
