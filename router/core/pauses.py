"""Which requests a pause holds: leases of the orchestrator, as one router knows them. Pure: time is an argument."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from orchestrator.model.pauses import PauseLease


@dataclass(frozen=True, slots=True)
class HeldScope:
    """A pause in force at this router, until the time `until` at the latest."""

    pause: PauseLease
    until: float

    def covers(self, tenant: str | None, namespace: str, now: float) -> bool:
        """Whether it holds a new request of this tenant and namespace now."""
        pause = self.pause
        return (
            now < self.until
            and (pause.tenant is None or pause.tenant == tenant)
            and (not pause.namespace or pause.namespace == namespace)
        )


class PauseUpdate(NamedTuple):
    """The pauses in force after a catalog was read, by key.

    new  those of `held` that begin with this catalog
    """

    held: Mapping[str, HeldScope]
    new: Sequence[HeldScope]


def merge_listed_pauses(known: Mapping[str, HeldScope], listed: Iterable[PauseLease], now: float) -> PauseUpdate:
    """The pauses after a catalog was read, and those of them that are of a call that was not known before.

    A pause that the catalog lists no longer has ended. The same call read again ends no later than before: so a pause
    ends also where the orchestrator is gone, and clocks of machines are never compared.
    """
    found: dict[str, HeldScope] = {}
    new = []
    for pause in listed:
        before = known.get(pause.key)
        if before is not None and before.pause == pause:
            found[pause.key] = before
        else:
            found[pause.key] = held = HeldScope(pause, now + pause.lease_s)
            new.append(held)
    return PauseUpdate(found, new)


def holding(pauses: Mapping[str, HeldScope], tenant: str | None, namespace: str, now: float) -> HeldScope | None:
    """The pause that holds a new request of this tenant and namespace the longest; None: it may go."""
    covering = [held for held in pauses.values() if held.covers(tenant, namespace, now)]
    return max(covering, key=lambda held: held.until) if covering else None
