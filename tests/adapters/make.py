"""Makes the corpus: `python -P -m tests.adapters.make FOLDER [FAMILY ...]`.

Into FOLDER/FAMILY go the base model (`base`) and a folder for each adapter, with a list of them (`rows.json`).
"""

import json
import sys
import traceback
from pathlib import Path

from tests.adapters.families import FAMILIES
from tests.adapters.making import Workshop
from tests.adapters.shapes import shapes_of

ROWS = "rows.json"


def make_family(name: str, into: Path) -> list[str]:
    """Make a family's base model and adapters; returns what could not be made, with the reason."""
    into.mkdir(parents=True)
    shop = Workshop.open(FAMILIES[name], into / "base")
    rows, failures = [], []
    for number, shape in enumerate(shapes_of(shop)):
        folder = into / f"{number:02}-{shape.name.replace(' ', '-').replace('/', '-')}"
        try:
            folder.mkdir()
            shape.make(shop, folder)
        except Exception as exc:  # noqa: BLE001  (a row that cannot be made is reported, the others go on)
            failures.append(f"{name}, {shape.trainer}, {shape.name}: {type(exc).__name__}: {str(exc)[:300]}")
            continue
        rows.append({"trainer": shape.trainer, "shape": shape.name, "folder": folder.name})
    (into / ROWS).write_text(json.dumps(rows, indent=1))
    return failures


def main() -> None:
    into, names = Path(sys.argv[1]), sys.argv[2:] or list(FAMILIES)
    for name in names:
        try:
            for failure in make_family(name, into / name):
                sys.stdout.write(f"not made: {failure}\n")
        except Exception:  # noqa: BLE001
            sys.stdout.write(f"not made: {name}: {traceback.format_exc(limit=-2)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
