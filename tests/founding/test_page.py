"""The page of the founding texts: each row has its word, its reason, and a test that runs the text's own words.

`FOUNDING_TEXTS` names the folder of the five texts; where it is set, each row is also compared with its line.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from tests.founding.code_of_tests import TESTS, code_of_test, has_test, read_test_file

PAGE = (TESTS.parent / "docs/founding.md").read_text()
HEADER = ["line", "asked", "word", "by", "why otherwise", "test"]
WORDS = ("met", "otherwise", "the engine's", "not met")
TEXTS = ("000", "001", "002", "003", "004")
VERBS = {"GET", "POST", "PUT", "PATCH", "DELETE"}
NEAR = 25
"""How many lines before and after a row's own line the text may have the row's words."""


@dataclass(frozen=True, slots=True)
class Row:
    """A demand of a text, and what meets it. `line` is where the text has it."""

    text: str
    line: int
    asked: str
    word: str
    by: str
    why: str
    test: str

    @property
    def tests(self) -> list[tuple[str, str]]:
        """The tests that show it: file and function."""
        return re.findall(r"`([\w/]+\.py)::(\w+)`", self.test)

    @property
    def identifiers(self) -> list[str]:
        """The text's own words in it: fields, routes, metrics, labels, keys. A route's parameters are left out."""
        quoted = " ".join(re.findall(r"`([^`]+)`", self.asked))
        return [word for word in re.findall(r"[\w./:-]*\w", re.sub(r"/\{\w+\}", "/ ", quoted)) if word not in VERBS]


def cells(line: str) -> list[str]:
    """The cells of a line of a table."""
    return [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split(" | ")]


def rows() -> Iterator[Row]:
    """The rows of all tables with the page's header, each with the number of its text."""
    text, in_table = "", False
    for line in PAGE.splitlines():
        if heading := re.match(r"## (\d{3}) ", line):
            text = heading[1]
        in_table = line[:1] == "|" and (in_table or cells(line) == HEADER)
        if in_table and re.match(r"\| \d", line):
            number, *others = cells(line.replace("|  |", "| - |"))
            assert len(others) == len(HEADER) - 1, line
            yield Row(text, int(number), *("" if cell == "-" else cell for cell in others))


ROWS = list(rows())


def counts() -> list[str]:
    """The lines of the table at the page's top."""
    lines = ["| text | " + " | ".join(WORDS) + " | all |", "|---|" + "---:|" * (len(WORDS) + 1)]
    for name in (*TEXTS, "all"):
        words = Counter(row.word for row in ROWS if name in (row.text, "all"))
        lines.append(f"| {name} | " + " | ".join(str(words[word]) for word in WORDS) + f" | {words.total()} |")
    return lines


def test_every_row_has_its_word_and_what_meets_it() -> None:
    assert len(ROWS) > 200
    for row in ROWS:
        assert row.word in WORDS, row
        assert row.asked, row
        assert row.by or row.word == "not met", row


def test_all_five_texts_have_rows_in_the_texts_order() -> None:
    assert sorted({row.text for row in ROWS}) == list(TEXTS)
    for row, following in pairwise(ROWS):
        assert row.text < following.text or (row.text == following.text and row.line <= following.line), following


def test_what_is_otherwise_or_not_met_has_its_reason() -> None:
    for row in ROWS:
        assert bool(row.why) or row.word not in ("otherwise", "not met"), row


def test_the_page_says_its_own_counts() -> None:
    assert "\n".join(counts()) in PAGE


def test_every_row_names_tests_that_exist() -> None:
    for row in ROWS:
        assert row.tests or row.word == "not met", row
        assert [test for test in row.tests if not has_test(*test)] == [], (row.text, row.line)


@pytest.mark.parametrize("text", TEXTS)
def test_a_met_rows_tests_run_the_texts_own_words(text: str) -> None:
    missing = []
    for row in ROWS:
        if (row.text, row.word) == (text, "met"):
            code = "\n".join(code_of_test(*test) for test in row.tests)
            absent = [word for word in row.identifiers if word not in code]
            missing += [(row.line, row.test, absent)] if absent else []
    assert missing == []


@pytest.mark.skipif("FOUNDING_TEXTS" not in os.environ, reason="FOUNDING_TEXTS names no folder of the founding texts")
@pytest.mark.parametrize("text", TEXTS)
def test_each_row_quotes_its_line(text: str) -> None:
    (path,) = Path(os.environ["FOUNDING_TEXTS"]).glob(f"{text}_*")
    lines = path.read_text().splitlines()
    absent = []
    for row in ROWS:
        if row.text == text:
            near = "\n".join(lines[max(0, row.line - NEAR) : row.line + NEAR])
            absent += [(row.line, word) for word in row.identifiers if word not in near]
    assert absent == []


def test_every_test_of_this_folder_shows_a_row() -> None:
    named = {test for row in ROWS for test in row.tests}
    for path in Path(__file__).parent.glob("test_*.py"):
        if path.name != Path(__file__).name:
            tests = {name for name in read_test_file(path).definitions if name.startswith("test_")}
            assert {(f"founding/{path.name}", name) for name in tests} - named == set()
