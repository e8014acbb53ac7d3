"""Names that other systems have for settings: taken as ours, or refused with what to use."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class OtherName:
    """What another system's variable, key or flag means here.

    setting  ours, which takes its value; empty: none does
    only     the one value that says what holds here anyway, in lower case; others are refused
    advice   what to use in its place: the end of the error that refuses it
    """

    setting: str = ""
    only: str = ""
    advice: str = ""

    def accepts(self, value: object) -> bool:
        """Whether the value need not be refused."""
        return bool(self.setting) or (bool(self.only) and str(value).lower() == self.only)


def refusals(found: Mapping[str, Any], names: Mapping[str, OtherName]) -> list[str]:
    """A sentence for each other system's name among the keys found that has no meaning here."""
    known = ((name, names[name]) for name in found if name in names)
    return [f"{name}: {other.advice}" for name, other in known if not other.accepts(found[name])]


def translated(found: Mapping[str, Any], names: Mapping[str, OtherName]) -> dict[str, Any]:
    """The values found, with each name of another system replaced by our setting, or left out where it says nothing."""
    ours = {name: value for name, value in found.items() if name not in names}
    theirs = {names[name].setting: value for name, value in found.items() if name in names and names[name].setting}
    return theirs | ours
