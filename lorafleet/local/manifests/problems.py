"""A problem of a rendered object, and the small texts that the rules share."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

Manifest = Mapping[str, Any]
FieldPath = tuple[str | int, ...]

_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(n|u|m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|[eE][+-]?[0-9]+)?")
_UNITS = {"": Decimal(1)} | {
    unit: Decimal(10) ** (3 * power) for unit, power in zip("numkMGTPE", (-3, -2, -1, 1, 2, 3, 4, 5, 6), strict=True)
}
_UNITS |= {f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", start=1)}
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUALIFIED = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class ManifestProblem:
    """A field that an API server refuses."""

    path: FieldPath
    found: object
    expected: str
    example: str

    def below(self, *path: str | int) -> "ManifestProblem":
        """The problem of an object that has this one's object at the path."""
        return replace(self, path=(*path, *self.path))


Problems = Iterator[ManifestProblem]


def quantity(value: object) -> Decimal | None:
    """The number of a quantity, as 500m or 4Gi; None for other text.

    source  kubernetes 1.37 apimachinery pkg/api/resource/quantity.go
    """
    match = _QUANTITY.fullmatch(str(value))
    if match is None:
        return None
    unit = match[2] or ""
    return Decimal(match[1]) * (_UNITS[unit] if unit in _UNITS else Decimal(f"1{unit}"))


def is_label(text: str) -> bool:
    """Whether the text is a DNS label, as names of containers and volumes are."""
    return _LABEL.fullmatch(text) is not None


def is_subdomain(text: str) -> bool:
    """Whether the text is a DNS subdomain, as names of most objects and hosts are."""
    return len(text) <= 253 and _SUBDOMAIN.fullmatch(text) is not None


def is_label_value(text: str) -> bool:
    """Whether the text may be a label's value."""
    return text == "" or _QUALIFIED.fullmatch(text) is not None


def is_label_key(text: str) -> bool:
    """Whether the text may be the key of a label, an annotation or an extended resource."""
    prefix, slash, name = text.rpartition("/")
    return _QUALIFIED.fullmatch(name) is not None and (not slash or is_subdomain(prefix))


def one_of(path: FieldPath, found: object, known: Collection[str]) -> Problems:
    """A problem unless the field is left out or one of these words."""
    if found is not None and found not in known:
        yield ManifestProblem(path, found, f"one of {', '.join(known)}", f"{path[-1]}: {min(known)}")


def exactly_one(path: FieldPath, given: Manifest, known: Collection[str], example: str) -> Problems:
    """A problem unless exactly one of these fields is given."""
    found = [name for name in known if given.get(name) is not None]
    if len(found) != 1:
        expected = f"exactly one of {', '.join(known)}"
        yield ManifestProblem(path, " and ".join(found) or "none", expected, example)
