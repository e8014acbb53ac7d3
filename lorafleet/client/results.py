"""What calls return, and the one error that they raise."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class FleetError(Exception):
    """A call failed. The message is the server's own; it says what to do.

    status  HTTP status; None: no server answered, or the folder is no adapter
    code    the server's error code, see docs/protocol.md; "" without one
    """

    def __init__(self, message: str, *, status: int | None = None, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class PushProgress:
    """Bytes of an upload that have been sent, of all; those that an earlier attempt has sent included."""

    sent_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Pushed:
    """A registered adapter.

    is_new   False: it was registered already, with the same bytes
    kept_on  workers that keep its files; empty with an upload store, and where it was registered already
    note     what to know of these copies; "" if there is nothing
    """

    lora_id: str
    digest: str
    is_new: bool
    kept_on: tuple[str, ...]
    note: str

    @classmethod
    def read(cls, status: int, item: Mapping[str, Any]) -> "Pushed":
        """The adapter in an answer. Raises KeyError, TypeError for an answer that is another's."""
        kept_on, note = tuple(item.get("kept_on", ())), str(item.get("note_on_copies", ""))
        return cls(str(item["lora_id"]), str(item["spec"]["digest"]), status == 201, kept_on, note)


@dataclass(frozen=True, slots=True)
class Published:
    """A published name, as every router goes by it now.

    lora_id  the version that it points at; requests may name it, too
    is_new   False: the name had these bytes already
    workers  where the version is ready
    """

    name: str
    lora_id: str
    digest: str
    version: int
    is_new: bool
    workers: tuple[str, ...]

    @classmethod
    def read(cls, item: Mapping[str, Any]) -> "Published":
        """The name in an answer. Raises KeyError, TypeError for an answer that is another's."""
        status = item["status"]
        return cls(
            str(item["name"]),
            str(status["lora_id"]),
            str(status["digest"]),
            int(status["version"]),
            bool(status.get("is_new", False)),
            tuple(status.get("workers", ())),
        )
