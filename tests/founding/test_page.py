"""The page of the founding designs has no empty cell, and names only tests that exist, and all of this folder."""

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs/founding.md").read_text()
HEADER = ["row", "asked", "met by", "test", "done otherwise, and why"]


def rows() -> list[list[str]]:
    """The cells of each row of the page's one big table."""
    lines = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in PAGE.splitlines() if line[:1] == "|"]
    start = lines.index(HEADER)
    return lines[start + 2 :]


@cache
def names_in(path: Path) -> frozenset[str]:
    """Names of the test functions in a file, also in classes."""
    nodes = ast.walk(ast.parse(path.read_text()))
    functions = (node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(node.name for node in functions if node.name.startswith("test_"))


def test_every_cell_says_something() -> None:
    assert len(rows()) > 100
    assert [row for row in rows() if len(row) != len(HEADER) or not all(row)] == []


def test_all_five_documents_have_rows() -> None:
    assert {row[0].partition(".")[0] for row in rows()} == set("ABDRJV")


def test_every_row_names_tests_that_exist() -> None:
    for row in rows():
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row[3])
        assert named or (row[3] == "none" and row[4].startswith("not ")), row
        for file, name in named:
            assert name in names_in(TESTS / file), (row[0], file, name)


def test_every_test_of_this_folder_shows_a_row() -> None:
    named = set(re.findall(r"`founding/(\w+\.py)::(\w+)`", PAGE))
    files = [path for path in Path(__file__).parent.glob("test_*.py") if path.name != Path(__file__).name]
    assert {(path.name, name) for path in files for name in names_in(path)} - named == set()
