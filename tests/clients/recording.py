"""A recorded conversation: the requests of one program, small, and without texts, hosts, keys or names of people."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "recorded"
MODEL = "MODEL"
"""Stands for the model's name in bodies and paths."""
# What a server may act upon. Values of keys are replaced.
_HEADERS = ("accept", "anthropic-beta", "anthropic-version", "authorization", "content-type", "upgrade", "x-api-key")
_LONGEST = 60
_MOST_TOOLS = 3
_WORDS = re.compile(r"\S+")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_OWN = re.compile(
    r"(?i)(session|thread|user|device|account|installation|turn|request|trace|window)[_-]?(id|context|state)?$"
)


@dataclass(frozen=True)
class RecordedCall:
    """One request."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: Any

    def with_model(self, name: str) -> "RecordedCall":
        """The request for this model."""
        return RecordedCall(self.method, self.path.replace(MODEL, name), self.headers, _renamed(self.body, MODEL, name))


def read(path: Path) -> tuple[str, list[RecordedCall]]:
    """(program and version, its requests) of a recording."""
    whole = json.loads(path.read_text())
    return f"{whole['program']} {whole['version']}", [RecordedCall(**call) for call in whole["calls"]]


def write(program: str, version: str, calls: list[dict[str, Any]], model: str) -> Path:
    """Write the recording of these requests, as small as their form allows; each form once."""
    kept: list[dict[str, Any]] = []
    for call in calls:
        headers = {name: _hidden(name, value) for name, value in call["headers"].items() if name in _HEADERS}
        path = call["path"].replace(model, MODEL)
        small = {
            "method": call["method"],
            "path": path,
            "headers": headers,
            "body": _small(_renamed(call["body"], model, MODEL)),
        }
        if small not in kept:
            kept.append(small)
    target = FOLDER / f"{program}.json"
    whole = json.dumps({"program": program, "version": version, "calls": kept}, indent=1)
    target.write_text(f"{_UUID.sub('own', whole)}\n")
    return target


def _hidden(name: str, value: str) -> str:
    if name == "authorization":
        return "Bearer KEY"
    return "KEY" if name == "x-api-key" else value


def _renamed(value: Any, old: str, new: str) -> Any:
    if isinstance(value, dict):
        return {key: _renamed(each, old, new) for key, each in value.items()}
    if isinstance(value, list):
        return [_renamed(each, old, new) for each in value]
    return new if value == old else value


def _small(value: Any, name: str = "") -> Any:
    """The value with its texts cut to their first words in neutral ones, and few of its tools."""
    if isinstance(value, dict):
        return {key: _small(each, key) for key, each in value.items()}
    if isinstance(value, list):
        return [_small(each, name) for each in (value[:_MOST_TOOLS] if name in ("tools", "include") else value)]
    if not isinstance(value, str):
        return value
    if _OWN.search(name) and name != "role":
        return "own"
    if len(value) > _LONGEST or "/" in value:
        # As many words as one line has: the prompt's form stays, and nobody's text.
        return " ".join(f"word{at}" for at in range(min(12, len(_WORDS.findall(value)))))
    return value
