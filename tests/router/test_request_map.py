"""The map of a request at the top of `router.request` names the classes that are the request, and its stages."""

import ast
import importlib
import re
from pathlib import Path

import router.request

ROOT = Path(__file__).parents[2]
# One request, in one of its forms: named so by its class. A protocol is what a part needs of one.
FORM = "[A-Z].*(Request|Run|Attempt|Exchange)"
PLACES = ("router/core", "router/request", "router/items", "router/api", "lorafleet/http_server")
LIFE = re.compile(r"^ +(\w+) +\|=+\|", re.MULTILINE)
STAGE = re.compile(r"^    (\w+) +(\w+)\.(\w+)  ", re.MULTILINE)


def request_classes():
    for place in PLACES:
        for path in (ROOT / place).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef) and re.fullmatch(FORM, node.name) and not is_protocol(node):
                    yield node.name


def is_protocol(node):
    return any("Protocol" in ast.unparse(base) for base in node.bases)


def test_map_names_each_class_of_a_request_and_no_other():
    named = LIFE.findall(router.request.__doc__)
    assert sorted(named) == sorted(request_classes())
    assert len(named) <= 8


def test_each_stage_of_the_map_is_a_function_of_that_name():
    stages = STAGE.findall(router.request.__doc__)
    assert " ".join(stage for stage, _, _ in stages) == (
        "read authenticate resolve authorise tokenize hash match decide open relay record"
    )
    owners = {
        path.stem: importlib.import_module(f"router.{path.parent.name}.{path.stem}")
        for path in (*(ROOT / "router/request").glob("[a-z]*.py"), ROOT / "router/api/inference.py")
    }
    classes = {name: found for module in owners.values() for name, found in vars(module).items()}
    for stage, owner, name in stages:
        assert callable(getattr(owners.get(owner) or classes[owner], name)), stage
