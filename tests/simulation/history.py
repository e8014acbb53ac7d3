"""What clients did and saw, and the search that tells whether one order of it explains all of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import takewhile
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

        def may_be_next(left: frozenset[int]) -> Iterator[int]:
            first_end = min(_end_of(operations[index]) for index in left)
            return takewhile(lambda index: operations[index].invoked_at <= first_end, _by_begin(left, operations))

        def search(left: frozenset[int], value: int | None) -> bool:
            length = len(trail)
            # A read of the present value changes nothing, so each is taken as soon as it may be.
            while left & must and (reads := [index for index in may_be_next(left) if is_read_of(index, value)]):
                trail.extend(reads)
                left -= frozenset(reads)
            if not left & must:
                return True
            if (left, value) not in seen:
                seen.add((left, value))
                # Of writes that may have had no effect the first of each value is enough: the others may come later.
                tried = {value}
                for index in may_be_next(left):
                    written = operations[index].value
                    if operations[index].kind == "ask" or (index not in must and written in tried):
                        continue
                    if index not in must:
                        tried.add(written)
                    trail.append(index)
                    if search(left - {index}, written):
                        return True
                    trail.pop()
            del trail[length:]
            return False

        def is_read_of(index: int, value: int | None) -> bool:
            return operations[index].kind == "ask" and operations[index].value == value

        return [operations[index] for index in trail] if search(everything, None) else None


def _end_of(operation: Operation) -> float:
    """The last moment at which it may have had its effect."""
    return operation.returned_at if operation.outcome is Outcome.OK else inf


def _by_begin(left: frozenset[int], operations: Sequence[Operation]) -> Iterator[int]:
    return iter(sorted(left, key=lambda index: operations[index].invoked_at))
