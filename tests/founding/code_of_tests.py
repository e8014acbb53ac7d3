"""The code that a test runs of the tests: its own, that of helpers, fixtures and constants, and the examples."""

import ast
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests.founding.texts import EXAMPLES, PIECES

TESTS = Path(__file__).parents[1]
_DOCUMENTED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module


@dataclass(frozen=True, slots=True)
class ReadTestFile:
    """What the names in a file of the tests stand for: functions, methods, classes, constants, and imports of tests."""

    definitions: dict[str, list[ast.AST]] = field(default_factory=dict)
    imports: dict[str, tuple[Path, str]] = field(default_factory=dict)


@cache
def read_test_file(path: Path) -> ReadTestFile:
    """A file of the tests, without its docstrings."""
    read, tree = ReadTestFile(), ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node):
            node.body[:1] = [] if len(node.body) > 1 else [ast.Pass()]
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                read.definitions.setdefault(name, []).append(node)
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("tests"):
                other = TESTS.parent / f"{module.replace('.', '/')}.py"
                read.imports.update({each.asname or each.name: (other, each.name) for each in names if other.exists()})
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for part in (part for target in targets for part in ast.walk(target)):
                if isinstance(part, ast.Name):
                    read.definitions.setdefault(part.id, []).append(node)
    return read


@cache
def _conftests(path: Path) -> list[Path]:
    """Files whose fixtures a file of the tests may use, the nearest first."""
    folders = [folder for folder in path.parents if folder == TESTS or TESTS in folder.parents]
    found = [folder / "conftest.py" for folder in folders]
    return [conftest for conftest in found if conftest != path and conftest.exists()]


@cache
def _meanings(path: Path, name: str) -> list[tuple[Path, ast.AST]]:
    """What a name may stand for in a file: its own definitions, imported ones, fixtures of its conftests.

    Of a class of another file only the methods that are called count, each by its own name.
    """
    read = read_test_file(path)
    others = [read.imports[name]] if name in read.imports and read.imports[name][0] != path else []
    others += [(conftest, name) for conftest in _conftests(path)]
    found = [(path, node) for node in read.definitions.get(name, ())]
    for other, called in others:
        nodes = read_test_file(other).definitions.get(called, ())
        found += [(other, node) for node in nodes if not isinstance(node, ast.ClassDef)]
    return found


@cache
def _code_and_names(node: ast.AST) -> tuple[str, frozenset[str]]:
    """The text of a definition, and the names that it uses."""
    names = set()
    for part in ast.walk(node):
        match part:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                names.add(name)
    return ast.unparse(node), frozenset(names)


@cache
def code_of_test(file: str, name: str) -> str:
    """The code of a test, by its file below `tests/`, and of what it uses of the tests; no docstrings, no comments."""
    waiting, seen, code = [*_meanings(TESTS / file, name)], set(), []
    while waiting:
        path, node = waiting.pop()
        if id(node) not in seen:
            seen.add(id(node))
            text, names = _code_and_names(node)
            code.append(text)
            waiting += [found for used in names for found in _meanings(path, used)]
    asked = re.finditer(r"""\bpiece\(f?(["'])(.+?)(?:\1|\{)""", "\n".join(code))
    beginnings = tuple(found[2] for found in asked)
    examples = [(EXAMPLES / each.file).read_text() for name, each in PIECES.items() if name.startswith(beginnings)]
    return "\n".join([*code, *examples])


def has_test(file: str, name: str) -> bool:
    """Whether a file below `tests/` has a test of that name."""
    return (TESTS / file).exists() and name in read_test_file(TESTS / file).definitions
