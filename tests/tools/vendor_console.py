"""Writes the console's libraries from their npm packages: `python -m tests.tools.vendor_console NODE_MODULES`.

Each becomes one ES module without bare imports and without a source map: a browser needs no build and no network.
"""

import hashlib
import json
import re
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "orchestrator/api/console/vendor"
# package, its file, our name, edits
_FILES = (
    ("preact", "dist/preact.mjs", "preact.js", ()),
    ("preact", "hooks/dist/hooks.mjs", "hooks.js", (('from"preact"', 'from"./preact.js"'),)),
    ("htm", "dist/htm.module.js", "htm.js", ()),
    ("uplot", "dist/uPlot.iife.min.js", "uplot.js", (("__END__", "\nexport default uPlot;\n"),)),
    ("uplot", "dist/uPlot.min.css", "uplot.css", ()),
)


def vendor(modules: Path) -> None:
    """Copy the files with their licences, and write README.md with versions and hashes."""
    rows = []
    for package, source, name, edits in _FILES:
        text = re.sub(r"\n?//# sourceMappingURL=.*", "", (modules / package / source).read_text())
        for before, after in edits:
            assert before == "__END__" or before in text, (name, before)
            text = text + after if before == "__END__" else text.replace(before, after)
        (FOLDER / name).write_text(text.rstrip() + "\n")
        version = json.loads((modules / package / "package.json").read_text())["version"]
        digest = hashlib.sha256((FOLDER / name).read_bytes()).hexdigest()
        rows.append(f"| `{name}` | {package} {version} `{source}` | `{digest}` |")
    for package in sorted({row[0] for row in _FILES}):
        (licence,) = [path for path in (modules / package).iterdir() if path.name.upper().startswith("LICENSE")]
        (FOLDER / f"LICENSE.{package}").write_text(licence.read_text())
    table = "\n".join(["| file | from | sha256 |", "|---|---|---|", *rows])
    (FOLDER / "README.md").write_text(
        "Libraries of the console, as `python -m tests.tools.vendor_console NODE_MODULES` writes them after\n"
        f"`npm install preact htm uplot`. Nothing else is changed in them.\n\n{table}\n"
    )


if __name__ == "__main__":
    vendor(Path(sys.argv[1]))
