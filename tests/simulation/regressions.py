"""Histories that once broke a promise, a file each. They are kept whole, whatever their seed means by now."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tests.simulation.scenario import FaultScenario

FOLDER = Path(__file__).parent / "regressions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Regression:
    """A shortest history, and what it showed. `model`: the version of the model that drew it; `mended`: a commit."""

    showed: str
    mended: str
    model: int
    scenario: FaultScenario


def kept_regressions() -> Iterator[tuple[str, Regression]]:
    """Each by its file's name."""
    for file in sorted(FOLDER.glob("*.json")):
        yield file.stem, msgspec.json.decode(file.read_bytes(), type=Regression)


def keep(name: str, regression: Regression) -> Path:
    """Write a regression's file."""
    file = FOLDER / f"{name}.json"
    file.write_bytes(msgspec.json.format(msgspec.json.encode(regression), indent=1) + b"\n")
    return file
