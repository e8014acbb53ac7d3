"""Which adapters on workers are registered without anybody's call, and which of those are left nowhere.

What an operator's settings name is intent: a folder in a worker's `lora_path`, its `preload_loras`, what an engine had
at its start. What a client loaded, and what the fleet loaded with a store that it has lost, is not. The policy's
`adopt` says which counts. Pure.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from orchestrator.model.adapters import AdapterSpec, RegisteredAdapter
from orchestrator.model.names import checked_lora_id
from orchestrator.model.orphans import OrphanItem
from orchestrator.model.policy import Adopt, PlacementPolicy


def judged(
    orphans: Sequence[OrphanItem],
    registered: Mapping[str, RegisteredAdapter],
    name_problem: Callable[[str], str | None],
) -> list[OrphanItem]:
    """The orphans, each with why it cannot be registered as it is.

    What a client has loaded does not count against what settings name.

    name_problem  why a name that no adapter has cannot be given to one; None: it can
    """
    digests: dict[tuple[str, bool], set[str]] = defaultdict(set)
    for item in orphans:
        digests[item.lora_id, False].add(item.card.digest)
        if item.is_configured and item.card.digest:
            digests[item.lora_id, True].add(item.card.digest)
    return [
        replace(
            item,
            problem=_problem(
                item,
                registered.get(item.lora_id),
                len(digests[item.lora_id, item.is_configured]),
                name_problem,
            ),
        )
        for item in orphans
    ]


def _problem(
    item: OrphanItem, known: RegisteredAdapter | None, versions: int, name_problem: Callable[[str], str | None]
) -> str | None:
    """Why the orphan cannot be registered as it is; None when it can. `versions`: digests under its lora_id."""
    if known is not None and item.is_foreign and known.digest == item.card.digest and not known.is_deleting:
        return None  # the same bytes under another engine name
    if known is not None:
        found = f"this is {item.card.digest or 'unknown'}" + (f" ({item.error})" if item.error else "")
        return f"{item.lora_id!r} is registered with digest {known.digest}; {found}"
    if versions > 1:
        return f"workers hold {versions} digests of {item.lora_id!r}; register the one that is meant"
    return _bytes_problem(item) or _lora_id_problem(item.lora_id) or name_problem(item.lora_id)


def _bytes_problem(item: OrphanItem) -> str | None:
    """Why what is known of the orphan's bytes is not enough to register it; None when it is."""
    if (
        item.is_configured
        and item.card.source
        and (item.card.digest or item.error or item.card.source.startswith("hf://"))
    ):
        return None  # inspected once it is registered: then it is ready, or failed with the reason
    if item.is_configured and item.error:
        return item.error
    if item.is_foreign and item.error:
        return f"another client loaded it, and its worker cannot read its files: {item.error}"
    if item.is_foreign and item.card.source.startswith("hf://"):
        return None  # inspected once it is registered
    if item.is_foreign and not item.card.digest:
        return (
            "the digest of its files is not known yet: its agent reads them within seconds of the load, so try again;"
            " for an engine without an agent register it by hand, with its digest"
        )
    if not item.card.digest or not item.card.source or not item.card.base_model:
        return "the worker does not say which source, digest and base model it has; register it by hand"
    return None


def _lora_id_problem(lora_id: str) -> str | None:
    """Which rule of names the lora_id breaks; None when it breaks none."""
    try:
        checked_lora_id(lora_id)
    except ValueError as exc:
        return str(exc)
    return None


def to_adopt(orphans: Iterable[OrphanItem], adopt: Adopt) -> list[OrphanItem]:
    """The orphans that are registered without a call, by the policy's `adopt`."""
    wanted = {"none": (), "configured": (True,), "all": (True, False)}[adopt]
    return [item for item in orphans if item.problem is None and item.is_configured in wanted]


def adopted_adapter(item: OrphanItem, tenants: tuple[str, ...] | None, *, is_adopted: bool) -> RegisteredAdapter:
    """The orphan as a registered adapter, with its reported source, digest and card.

    is_adopted  as in `RegisteredAdapter`
    """
    spec = AdapterSpec(
        lora_id=item.lora_id,
        source=item.card.source,
        base_model=item.card.base_model or None,
        digest=item.card.digest or None,
        tenants=tenants,
    )
    return RegisteredAdapter(spec=spec, card=item.card if item.card.rank else None, is_adopted=is_adopted)


def with_left_at(adapter: RegisteredAdapter, *, is_named: bool, now: float) -> RegisteredAdapter:
    """The adapter with since when no worker's settings name it. One that a call has registered has no such time."""
    if not adapter.is_adopted or is_named:
        return adapter if adapter.left_at is None else replace(adapter, left_at=None)
    return adapter if adapter.left_at is not None else replace(adapter, left_at=now)


def is_left_nowhere(adapter: RegisteredAdapter, last_asked_at: float, policy: PlacementPolicy, now: float) -> bool:
    """Whether nobody has named or asked for an adopted adapter in the policy's `unused_name_s`: no name stays for ever.

    last_asked_at, now  Unix times
    """
    if adapter.left_at is None or not policy.unused_name_s:
        return False
    return now - max(adapter.left_at, last_asked_at) >= policy.unused_name_s
