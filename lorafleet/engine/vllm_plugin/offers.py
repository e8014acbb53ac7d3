"""Adapters that an engine may load by itself, with their first request: files that an agent writes and an engine reads.

An offer is one file, named after a hash of the engine name. The engine's API process reads it when a request names an
adapter that the engine does not have (vLLM's LoRA resolvers); without a file the engine answers 404. Offers end with
the engine's process: its next start deletes them with the other reports of processes.
"""

import contextlib
import hashlib
import json
import shutil
from dataclasses import asdict
from pathlib import Path

from lorafleet.engine.vllm_plugin.engine_reports import engine_folder
from lorafleet.service.files import make_private_folder
from orchestrator.model.offers import AdapterOffer

_LARGEST_BYTES = 1 << 16
_MARK = "takes-offers"


def mark_as_taking_offers(folder: Path) -> None:
    """Say that this engine reads offers below the reports' folder. Raises OSError."""
    make_private_folder(engine_folder(folder))
    (engine_folder(folder) / _MARK).touch()


def takes_offers(folder: Path) -> bool:
    """Whether the engine whose processes write below this folder reads offers."""
    return (engine_folder(folder) / _MARK).exists()


def write_offer(folder: Path, offer: AdapterOffer) -> None:
    """Let the engine load an adapter by itself; atomic. Raises OSError."""
    path = _offer_path(folder, offer.engine_name)
    make_private_folder(path.parent)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(offer)))
    partial.replace(path)


def read_offer(folder: Path, engine_name: str) -> AdapterOffer | None:
    """The offer of this name; None without one, for a damaged file, and where its adapter's files are gone."""
    path = _offer_path(folder, engine_name)
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        if path.stat().st_size <= _LARGEST_BYTES:
            offer = parse_offer(path.read_bytes(), engine_name)
            if (Path(offer.path) / "adapter_config.json").is_file():
                return offer
    return None


def parse_offer(content: bytes, engine_name: str) -> AdapterOffer:
    """The offer of this name in a file, or an answer of the orchestrator.

    raises  ValueError, TypeError and KeyError for any other content
    """
    raw = json.loads(content)
    offer = AdapterOffer(str(raw["engine_name"]), str(raw["path"]), str(raw["digest"]))
    if offer.engine_name != engine_name:
        raise ValueError(f"an offer of {offer.engine_name!r}, expected one of {engine_name!r}")
    return offer


def withdraw_offer(folder: Path, engine_name: str) -> None:
    """Let the engine not load this adapter by itself any more; no-op without an offer. Raises OSError."""
    _offer_path(folder, engine_name).unlink(missing_ok=True)


def withdraw_all_offers(folder: Path) -> None:
    """Delete all offers; errors of the disk are ignored."""
    shutil.rmtree(_offers_folder(folder), ignore_errors=True)


def _offers_folder(folder: Path) -> Path:
    return engine_folder(folder) / "offers"


def _offer_path(folder: Path, engine_name: str) -> Path:
    """The file of an offer. Its name is a hash, because an engine name may have any characters."""
    return _offers_folder(folder) / f"{hashlib.sha256(engine_name.encode()).hexdigest()[:32]}.json"
