"""What clients did and saw, and the search that tells whether one order of it explains all of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Any


class Outcome(Enum):
    """How a call ended for its caller."""

    OK = "ok"
    REFUSED = "refused"
    """An error that says that nothing has changed."""
    UNKNOWN = "unknown"
    """No answer, or an error of which the caller cannot tell whether the call has had its effect, or may still."""


@dataclass(slots=True)
class Operation:
    """One call. Times are the simulation's.

    kind      `ask` reads; `write` and `delete` change what a name stands for
    value     number of the adapter's bytes that were written, or that answered; None: none
    is_final  asked after all faults: its `None` counts, too
    """

    kind: str
    name: str
    invoked_at: float
    client: str
    value: int | None = None
    returned_at: float = inf
    outcome: Outcome = Outcome.UNKNOWN
    is_final: bool = False
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def has_returned(self) -> bool:
        return self.returned_at < inf

    def __str__(self) -> str:
        until = f"{self.returned_at:.3f}" if self.has_returned else "never"
        value = "none" if self.value is None else f"bytes {self.value}"
        more = " ".join(f"{key}={value}" for key, value in self.detail.items() if key != "prompt")
        call = f"{self.client}: {self.kind} {self.name}: {self.outcome.value}, {value}"
        return f"[{self.invoked_at:.3f} .. {until}] {call} {more}"


@dataclass(slots=True)
class History:
    """All operations, in the order in which they began."""

    operations: list[Operation] = field(default_factory=list)

    def of(self, name: str) -> list[Operation]:
        return [each for each in self.operations if each.name == name]

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(each.name for each in self.operations))


@dataclass(frozen=True, slots=True)
class Register:
    """One name as a register: at each moment it stands for some bytes, or for none."""

    operations: tuple[Operation, ...]

    @staticmethod
    def of(operations: Sequence[Operation]) -> "Register":
        """The operations that tell something: writes that may have had an effect, and reads of bytes."""
        return Register(
            tuple(
                each
                for each in operations
                if (each.kind != "ask" and each.outcome is not Outcome.REFUSED)
                or (each.kind == "ask" and each.outcome is Outcome.OK and (each.value is not None or each.is_final))
            )
        )

    def explanation(self) -> list[Operation] | None:
        """An order of the operations, each at a moment between its begin and end, that explains every read.

        A write of unknown outcome may take effect at any time after its begin, or never. None: there is no such order.
        """
        operations = self.operations
        everything = frozenset(range(len(operations)))
        must = frozenset(index for index in everything if operations[index].outcome is Outcome.OK)
        seen: set[tuple[frozenset[int], int | None]] = set()
        trail: list[int] = []

        def search(left: frozenset[int], value: int | None) -> bool:
            if not left & must:
                return True
            if (left, value) in seen:
                return False
            seen.add((left, value))
            first_end = min(_end_of(operations[index]) for index in left)
            for index in _by_begin(left, operations):
                operation = operations[index]
                if operation.invoked_at > first_end:
                    break
                if operation.kind == "ask" and operation.value != value:
                    continue
                trail.append(index)
                if search(left - {index}, value if operation.kind == "ask" else operation.value):
                    return True
                trail.pop()
            return False

        return [operations[index] for index in trail] if search(everything, None) else None


def _end_of(operation: Operation) -> float:
    """The last moment at which it may have had its effect."""
    return operation.returned_at if operation.outcome is Outcome.OK else inf


def _by_begin(left: frozenset[int], operations: Sequence[Operation]) -> Iterator[int]:
    return iter(sorted(left, key=lambda index: operations[index].invoked_at))
