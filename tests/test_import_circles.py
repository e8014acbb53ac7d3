"""No files of the product import each other in a circle: imports for types alone are imports, too."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("router", "orchestrator", "workers", "lorafleet")


def sources():
    """Module name -> its source; without `__init__`, whose names are those of the modules in the package."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if path.name != "__init__.py"]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text() for path in files}


def imports_of(name, source, modules):
    """The modules that a module imports, for types or at run time, at the top or within a function."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module} | {f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return found & modules - {name}


def check_no_circle(sources):
    graph = {name: imports_of(name, source, sources.keys()) for name, source in sources.items()}
    TopologicalSorter(graph).prepare()


def test_no_files_import_each_other_in_a_circle():
    check_no_circle(sources())


def test_a_circle_of_imports_for_types_alone_is_found():
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a.two import B\n"
    with pytest.raises(CycleError, match=r"a\.two"):
        check_no_circle({"a.one": typed, "a.two": "def f():\n    from a import one\n"})
