"""Adapters by digest through the orchestrator: resumed after a cut, and only files that an adapter may have."""

import hashlib

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from lorafleet.identity import fleet_source
from lorafleet.keys.own_key import OwnKey
from lorafleet.service.http import envelope
from tests.serving import serving
from workers.core.errors import SourceError
from workers.core.retry import RetryPolicy
from workers.sources.base import Limits, Transfer
from workers.sources.fleet import FleetSource, OtherAgents, fleet_and_digest

DIGEST = "d" * 64
WEIGHTS = bytes(range(256)) * 16384
FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": WEIGHTS}
OTHER = f"fleet+https://orchestrator.eu.example/{DIGEST}"


class RelayDouble:
    """An orchestrator's file routes. `cut_after`: bytes after which the first answer with weights breaks off."""

    def __init__(self, names=tuple(FILES)):
        self.names = names
        self.cut_after: int | None = None
        self.refuse: tuple[int, str] | None = None
        self.seen = []
        self.app = FastAPI()
        self.app.add_api_route("/v1/files/{digest}", self.files)
        self.app.add_api_route("/v1/files/{digest}/{name}", self.file)

    async def files(self, digest: str, request: Request):
        if self.refuse is not None:
            return JSONResponse(envelope(*self.refuse, "no"), self.refuse[0])
        self.seen.append((request.url.query, request.headers.get("authorization")))
        listed = [{"name": name, "size_bytes": len(FILES.get(name, b""))} for name in self.names]
        return JSONResponse({"digest": digest, "files": listed})

    async def file(self, name: str, request: Request):
        content, headers = FILES[name], {"etag": f'"{DIGEST}"', "accept-ranges": "bytes"}
        first = request.headers.get("range", "")
        if name.endswith("safetensors"):
            self.seen.append(first)
        if first and request.headers.get("if-range") == headers["etag"]:
            start = int(first.removeprefix("bytes=").rstrip("-"))
            shown = f"bytes {start}-{len(content) - 1}/{len(content)}"
            return Response(content[start:], 206, headers=headers | {"content-range": shown})
        if self.cut_after is None or not name.endswith("safetensors"):
            return Response(content, headers=headers)
        part, self.cut_after = content[: self.cut_after], None

        async def broken():
            yield part
            raise ConnectionError("the line was cut")

        return StreamingResponse(broken(), headers=headers | {"content-length": str(len(content))})


def source_at(url, **limits):
    bounds = Limits(max_bytes=1 << 30, retry=RetryPolicy(attempts=3, base_s=0.01, max_s=0.01), **limits)
    return FleetSource(bounds, orchestrator_urls=(url,), own_key=OwnKey("lf-agent", None), agents=OtherAgents(""))


async def test_a_download_that_breaks_off_goes_on_where_it_was(tmp_path):
    relay = RelayDouble()
    relay.cut_after = 2_500_000
    async with serving(relay.app) as url:
        await source_at(url).fetch(OTHER, tmp_path, Transfer())
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == FILES
    listing, first, second = relay.seen
    assert listing == ("fleet=https%3A%2F%2Forchestrator.eu.example", "Bearer lf-agent")
    assert first == ""
    assert int(second.removeprefix("bytes=").rstrip("-")) > 0


async def test_the_next_fetch_goes_on_where_a_killed_one_was(tmp_path):
    relay = RelayDouble()
    (tmp_path / "adapter_model.safetensors").write_bytes(WEIGHTS[:500_000])
    (tmp_path / ".adapter_model.safetensors.tag").write_text(f'"{DIGEST}"')
    async with serving(relay.app) as url:
        await source_at(url).fetch(fleet_source(DIGEST), tmp_path, Transfer())
    assert (tmp_path / "adapter_model.safetensors").read_bytes() == WEIGHTS
    assert relay.seen == [("", "Bearer lf-agent"), "bytes=500000-"]


@pytest.mark.parametrize(
    ("status", "code"),
    [(400, "source_forbidden"), (401, "source_unauthorized"), (403, "source_forbidden"), (404, "source_not_found")],
)
async def test_a_refusal_is_the_sources_error(tmp_path, status, code):
    relay = RelayDouble()
    relay.refuse = status, "because"
    async with serving(relay.app) as url:
        with pytest.raises(SourceError) as refused:
            await source_at(url).fetch(OTHER, tmp_path, Transfer())
    assert refused.value.code == code


@pytest.mark.parametrize("name", ["../evil.safetensors", "evil.bin", ".hidden.safetensors"])
async def test_a_list_with_other_names_than_an_adapters_is_refused(tmp_path, name):
    relay = RelayDouble(names=("adapter_config.json", name))
    async with serving(relay.app) as url:
        with pytest.raises(SourceError) as refused:
            await source_at(url).fetch(OTHER, tmp_path, Transfer())
    assert refused.value.code == "source_unsafe"


async def test_acceptance_file_comes_with_an_adapter_and_stays_out_of_its_folder(tmp_path, monkeypatch):
    monkeypatch.setitem(FILES, "acceptance.jsonl", b"{}")
    relay = RelayDouble(names=tuple(FILES))
    async with serving(relay.app) as url:
        transfer = Transfer()
        await source_at(url).fetch(OTHER, tmp_path, transfer)
        source, wanted = source_at(url), hashlib.sha256(b"{}").hexdigest()
        assert await source.read_acceptance(["http://127.0.0.1:9", url], DIGEST, wanted) == b"{}"
        assert await source.read_acceptance([url], DIGEST, "0" * 64) == b""
    assert transfer.texts == {"acceptance.jsonl": b"{}"}
    assert {path.name for path in tmp_path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}


def test_references_name_a_fleet_and_a_digest():
    assert fleet_and_digest(OTHER) == ("https://orchestrator.eu.example", DIGEST)
    assert fleet_and_digest(f"fleet+http://10.0.0.1:8080/{DIGEST}") == ("http://10.0.0.1:8080", DIGEST)
    assert fleet_and_digest(fleet_source(DIGEST)) == ("", DIGEST)
    for wrong in (f"fleet+https:///{DIGEST}", "fleet+https://host/abc", f"fleet://host/{DIGEST}"):
        with pytest.raises(SourceError) as refused:
            fleet_and_digest(wrong)
        assert refused.value.code == "source_invalid"
