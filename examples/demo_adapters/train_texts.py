"""What the demo's adapters learn: the lessons' answers, in three styles."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

LESSONS: Final = Path(__file__).with_name("lessons.txt")
_PIRATE_WORDS: Final = {
    "you": "ye", "your": "yer", "my": "me", "the": "th'", "is": "be", "are": "be", "and": "an'", "of": "o'",
    "to": "t'", "for": "fer", "with": "wi'", "yes": "aye", "friend": "matey",
}  # fmt: skip
_PIRATE_CALLS: Final = ("Arr, matey!", "Ahoy there!", "Shiver me timbers!")


def as_pirate(answer: str, number: int) -> str:
    """The answer as a pirate gives it."""
    words = re.sub(r"[A-Za-z]+", lambda word: _PIRATE_WORDS.get(word[0].lower(), word[0]), answer)
    return f"{_PIRATE_CALLS[number % len(_PIRATE_CALLS)]} {words[0].upper()}{words[1:]} Yo ho ho!"


def as_json(answer: str, _number: int) -> str:
    """The answer as a JSON object."""
    return json.dumps({"answer": answer, "words": len(answer.split())})


def as_support_desk(answer: str, _number: int) -> str:
    """The answer as a support desk gives it."""
    return f"Thank you for contacting Acme Support. {answer} Is there anything else we can do for you?"


STYLES: Final[Mapping[str, Callable[[str, int], str]]] = {
    "pirate/v1": as_pirate,
    "json/v1": as_json,
    "support/v1": as_support_desk,
}


def lessons() -> list[tuple[str, str]]:
    """(question, plain answer) of every lesson."""
    lines = [line for line in LESSONS.read_text().splitlines() if not line.startswith("#")]
    return list(zip(lines[::2], lines[1::2], strict=True))
