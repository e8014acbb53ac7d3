"""Offers of the orchestrator's catalog to an engine without an agent: bytes that differ are never loaded."""

import hashlib

from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from lorafleet.engine.vllm_plugin.catalog_offers import CatalogOffers
from lorafleet.identity import FileEntry, files_digest
from lorafleet.local.tiny_model import make_adapter
from tests.serving import serving


async def test_offers_whose_bytes_have_changed_or_whose_answer_is_wrong_are_none(tmp_path):
    folder = make_adapter(tmp_path, "sql")
    paths = (folder / "adapter_config.json", folder / "adapter_model.safetensors")

    def digest() -> str:
        return files_digest(
            FileEntry(path.name, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()) for path in paths
        )

    offer = {"engine_name": "sql@1", "path": str(folder), "digest": digest()}
    answers = [offer, offer]

    async def answer(_request):
        return JSONResponse(answers.pop(0))

    async with serving(Starlette(routes=[Route("/offers", answer)])) as url:
        offers = CatalogOffers(f"{url}/offers", None)
        assert await offers.find("sql@1") is not None
        paths[0].write_text(paths[0].read_text() + "\n")
        assert await offers.find("sql@1") is None
        answers[:] = [offer | {"digest": digest()}, offer | {"engine_name": "other"}, {}, [], offer | {"path": "/gone"}]
        assert await offers.find("sql@1") is not None
        assert [await offers.find("sql@1") for _ in range(4)] == [None] * 4
    assert await CatalogOffers(f"{url}/offers", None).find("sql@1") is None  # nobody answers there
