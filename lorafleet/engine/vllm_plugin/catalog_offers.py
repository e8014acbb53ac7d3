"""Offers to an engine without an agent: it asks the orchestrator about a name, and reads the adapter's bytes itself."""

import asyncio
import hashlib
import logging
import ssl
from collections.abc import Mapping
from pathlib import Path

import httpx

from lorafleet.engine.vllm_plugin.lora_reports import REPORTS_VARIABLE
from lorafleet.engine.vllm_plugin.offers import parse_offer, read_offer
from lorafleet.identity import FileEntry, files_digest
from orchestrator.model.offers import AdapterOffer

log = logging.getLogger(__name__)

URL_VARIABLE = "LORAFLEET_OFFERS_URL"
"""Environment variable of the engine: `http://orchestrator:8080/v1/workers/<worker id>/offers`."""
KEY_VARIABLE = "LORAFLEET_OFFERS_KEY_FILE"
"""Environment variable of the engine: a file with a key of scope `worker`."""

_FILES = ("adapter_config.json", "adapter_model.safetensors")
_TIMEOUT_S = 2.0
_DIGESTS_KEPT = 1000


class OfferReader:
    """Finds what an engine may load by itself: by its agent's files, else by asking the orchestrator."""

    def __init__(self, reports: Path | None, catalog: "CatalogOffers | None") -> None:
        self._reports = reports
        self._catalog = catalog

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "OfferReader":
        """By the variables of the engine's environment; without any of them nothing is offered."""
        folder, url = environment.get(REPORTS_VARIABLE), environment.get(URL_VARIABLE)
        key_file = environment.get(KEY_VARIABLE)
        catalog = CatalogOffers(url, Path(key_file) if key_file else None) if url else None
        return cls(Path(folder) if folder else None, catalog)

    async def find(self, engine_name: str) -> AdapterOffer | None:
        """What is offered under this name; None: nothing, or it is not known. Never raises."""
        offer = None if self._reports is None else read_offer(self._reports, engine_name)
        if offer is None and self._catalog is not None:
            offer = await self._catalog.find(engine_name)
        return offer


class CatalogOffers:
    """Asks the orchestrator for each name, so that a deleted adapter is not offered any longer.

    The files must have the registered digest: they are hashed once, and again when they have changed.
    """

    def __init__(self, url: str, key_file: Path | None) -> None:
        """key_file  is read for each question, so that a new key counts at once"""
        self._url = url
        self._key_file = key_file
        self._tls: ssl.SSLContext | bool = ssl.create_default_context() if url.startswith("https:") else False
        self._digests: dict[str, tuple[object, str]] = {}

    async def find(self, engine_name: str) -> AdapterOffer | None:
        """What the catalog offers under this name; None where it cannot be asked, or the bytes differ. Never raises."""
        try:
            offer = await self._ask(engine_name)
            if offer is None:
                return None
            found = await asyncio.to_thread(self._digest, Path(offer.path))
        except (OSError, ValueError, TypeError, KeyError, httpx.HTTPError, httpx.InvalidURL) as exc:
            log.warning("lorafleet: %s is not offered to this engine: %r", engine_name, exc)
            return None
        if found != offer.digest:
            log.error("lorafleet: %s has digest %s, registered is %s", offer.path, found, offer.digest)
            return None
        return offer

    async def _ask(self, engine_name: str) -> AdapterOffer | None:
        """The orchestrator's answer. Raises OSError, ValueError and httpx.HTTPError."""
        key = self._key_file.read_text().strip() if self._key_file else ""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        client = httpx.AsyncClient(verify=self._tls, timeout=_TIMEOUT_S, trust_env=False)
        async with asyncio.timeout(_TIMEOUT_S), client:
            answer = await client.get(self._url, params={"engine_name": engine_name}, headers=headers)
        if answer.status_code == httpx.codes.NOT_FOUND:
            return None
        answer.raise_for_status()
        return parse_offer(answer.content, engine_name)

    def _digest(self, folder: Path) -> str:
        """The digest of the adapter in this folder. Blocking; raises OSError."""
        files = [folder / name for name in _FILES]
        stats = [path.stat() for path in files]
        signature = [(each.st_size, each.st_mtime_ns, each.st_ino) for each in stats]
        known = self._digests.get(str(folder))
        if known is not None and known[0] == signature:
            return known[1]
        digest = files_digest(
            FileEntry(path.name, stat.st_size, _sha256(path)) for path, stat in zip(files, stats, strict=True)
        )
        if len(self._digests) >= _DIGESTS_KEPT:
            del self._digests[next(iter(self._digests))]
        self._digests[str(folder)] = signature, digest
        return digest


def _sha256(path: Path) -> str:
    """sha256 of a file's bytes. Blocking; raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
