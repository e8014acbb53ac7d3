"""Label and field selectors: equality, sets, existence."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from tests.kube.status import bad_request

Holds = Callable[[Mapping[str, str]], bool]
_KEY = r"[A-Za-z0-9][A-Za-z0-9._/-]*"
_SET = re.compile(rf"^({_KEY})\s+(in|notin)\s+\(([^()]*)\)$")
_EQUAL = re.compile(rf"^({_KEY})\s*(==|=|!=)\s*([A-Za-z0-9._-]*)$")
_EXISTS = re.compile(rf"^(!?)\s*({_KEY})$")
_COMMA = re.compile(r",(?![^()]*\))")  # but not inside a set


def label_selector(text: str) -> Holds:
    """Whether labels match the selector; an empty one matches all. Raises 400 for an invalid selector."""
    parts = [_requirement(part.strip()) for part in _COMMA.split(text)] if text.strip() else []
    return lambda labels: all(part(labels) for part in parts)


def field_selector(text: str) -> Callable[[Mapping[str, Any]], bool]:
    """Whether an object matches the field selector: dotted paths, `=`, `==`, `!=`."""
    parts = []
    for part in filter(None, text.split(",")):
        path, operator, value = re.split(r"(==|!=|=)", part, maxsplit=1) if "=" in part else (part, "", "")
        if not operator:
            raise bad_request(f"invalid selector: {part!r}; can't understand {part!r}")
        parts.append((path.strip().split("."), operator != "!=", value.strip()))
    return lambda obj: all((str(_at(obj, path)) == value) == equal for path, equal, value in parts)


def named_by(field_selector_text: str) -> str:
    """The object that a field selector names by `metadata.name=`, or "", for rules with resourceNames."""
    found = re.search(r"(?:^|,)metadata\.name==?([^,]+)", field_selector_text)
    return found.group(1) if found else ""


def _requirement(part: str) -> Holds:
    if found := _SET.match(part):
        key, operator, listed = found.groups()
        values = {value.strip() for value in listed.split(",")}
        if operator == "in":
            return lambda labels: labels.get(key) in values
        return lambda labels: labels.get(key) not in values  # also where the label is missing
    if found := _EQUAL.match(part):
        key, operator, value = found.groups()
        if operator == "!=":
            return lambda labels: labels.get(key) != value
        return lambda labels: labels.get(key) == value
    if found := _EXISTS.match(part):
        absent, key = found.groups()
        return lambda labels: (key in labels) != bool(absent)
    raise bad_request(f"unable to parse requirement: found {part!r}, expected: a label selector")


def _at(obj: Any, path: list[str]) -> Any:
    for name in path:
        obj = obj.get(name, "") if isinstance(obj, Mapping) else ""
    return obj
