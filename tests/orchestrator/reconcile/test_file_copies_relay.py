"""Adapter files by digest: from the worker that has them, else from a peer fleet; and no stream is ever lost."""

import pytest

from lorafleet.keys.own_key import OwnKey
from orchestrator.core.errors import WorkerFailed
from orchestrator.reconcile.file_copies import FileRelay
from tests.orchestrator.doubles import digest_of
from tests.patience import patience
from tests.serving import serving

DIGEST = digest_of("file:///sql/v1")
FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"}
WEIGHTS = f"/v1/files/{DIGEST}/adapter_model.safetensors"


async def test_files_come_from_the_worker_that_reports_them_and_else_from_any_that_has_them(service):
    first, second = await service.worker("w0"), await service.worker("w1")
    second.files[DIGEST] = FILES
    listed = await service.http.get(f"/v1/files/{DIGEST}")
    assert {file["name"] for file in listed.json()["files"]} == FILES.keys()
    answer = await service.http.get(WEIGHTS, headers={"range": "bytes=3-", "if-range": f'"{DIGEST}"'})
    assert (answer.content, answer.headers["etag"]) == (b"weights", f'"{DIGEST}"')
    assert "x-inner" not in answer.headers
    assert second.ranges == ["bytes=3-"]
    first.files[DIGEST] = FILES
    first.put("sql/v1", "file:///sql/v1")
    await service.beat()
    assert (await service.http.get(WEIGHTS)).content == b"weights"
    assert (first.ranges, second.ranges) == ([None], ["bytes=3-"])


async def test_files_that_no_worker_has_come_from_the_peer_fleet_with_its_key(open_service, tmp_path):
    there = open_service(tmp_path / "there.db")
    agent = await there.worker("w0")
    agent.files[DIGEST] = FILES
    async with serving(there.built.app) as url:
        there.built.leadership.lead_until(float("inf"))
        here = open_service(tmp_path / "here.db", peer_fleets=(url,))
        await here.worker("w0")
        assert (await here.http.get(WEIGHTS)).json()["error"]["code"] == "files_not_found"
        assert (await here.http.get(WEIGHTS, params={"fleet": url})).content == b"weights"
        del agent.files[DIGEST]
        gone = await here.http.get(WEIGHTS, params={"fleet": url})
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "files_not_found")
    away = await here.http.get(WEIGHTS, params={"fleet": url})
    assert (away.status_code, away.json()["error"]["code"]) == (503, "fleet_unreachable")


@pytest.mark.parametrize("clients", [20])
async def test_clients_that_leave_before_the_first_byte_take_no_stream_with_them(service, clients):
    agent = await service.worker("w0")
    agent.files[DIGEST] = FILES

    async def gone():
        return {"type": "http.disconnect"}

    async def unsent(_message):
        raise ConnectionError("the client has gone")

    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1", "method": "GET",
        "path": WEIGHTS, "raw_path": WEIGHTS.encode(), "root_path": "", "scheme": "http", "query_string": b"",
        "headers": [(b"host", b"orchestrator")], "client": ("127.0.0.1", 1), "server": ("orchestrator", 80),
    }  # fmt: skip
    for _ in range(clients):
        with pytest.raises(Exception, match=r"gone|Disconnect|^$"):
            await service.built.app(dict(scope), gone, unsent)
    assert (await service.http.get(WEIGHTS)).content == b"weights"


class OpenAgents:
    """The client of agents that want no key."""

    async def key_headers(self, _url):
        return {}


@pytest.mark.parametrize("name", ["../other", "a/b", ".kept", ""])
async def test_a_list_of_files_with_other_than_plain_names_is_refused(service, name):
    agent = await service.worker("w0")
    agent.files[DIGEST] = FILES
    relay = FileRelay(
        service.built.client,
        service.reconciler.reports,
        service.reconciler.files,
        agents=OpenAgents(),
        peers=(),
        peer_key=OwnKey("", None),
        probe_timeout_s=patience(5),
    )
    assert await relay.file_names(DIGEST) == tuple(FILES)
    agent.files[DIGEST] = {name: b""}
    with pytest.raises(WorkerFailed, match=r"names that are no adapter's files"):
        await relay.file_names(DIGEST)
