"""Who calls, and what a tenant's key is shown: its own adapters and aliases, and nothing of another tenant's.

A tenant sees the adapters that it may use: those with its name among their tenants, and those open to everyone. Of
another tenant it learns nothing, not even a name in an error or a reason; a name that it may not see does not exist for
it. Of the operator's machines it learns no path: it sees the folders alone that it has named itself. What it may change
is decided in `orchestrator/intent/owners.py`.
"""

import re
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import PurePosixPath
from typing import Annotated, Any
from urllib.parse import unquote, urlsplit

from fastapi import Depends, Header, Query
from pydantic_core import from_json
from starlette.requests import Request

from lorafleet.identity import PATH_IN_TEXT, split_version_id
from lorafleet.keys.roles import PROGRAM_HEADER, PROGRAMS, Caller
from lorafleet.service.http import JSON_BODY
from orchestrator.core.incidents import KINDS_OF_INCIDENTS
from orchestrator.core.traffic import SeriesKind
from orchestrator.intent import owners
from orchestrator.model.adapter_documents import AdapterItem, EnsureAnswer
from orchestrator.model.aliases import AliasItem, RolloutItem
from orchestrator.model.catalog import FleetEvent
from orchestrator.model.history import HistoryEntry
from orchestrator.model.pauses import PauseScope
from orchestrator.model.plans import ActionItem, Plan, PlanCost
from orchestrator.model.served_names import AliasSpec, RolloutSpec, Targets
from orchestrator.model.workers import WorkerItem
from orchestrator.reconcile.catalog import Tenants
from orchestrator.store.store import IntentStore

_ABOUT_THE_FLEET = frozenset(
    {"policy_changed", "worker_cordoned", "worker_draining", "worker_uncordoned", "drain", *KINDS_OF_INCIDENTS}
)
OTHER = "another tenant's adapter"
HIDDEN_PATH = "<path>"
_PATH = re.compile(rf"\bfile://[^\s'\"<>,;)\]}}]*[^\s'\"<>,;:)\]}}.]|{PATH_IN_TEXT}")
_ROUTES = ("/v1/", "/ui/")
_WORD = re.compile(r"[\w.-]+")
_NAME = re.compile(r"[A-Za-z0-9._:@/-]+")
# Names in reasons of adapters that may be deleted since, and so are not known any more.
_MADE_ROOM = re.compile(r"(?<=made room for )[^\s;,]+|[^\s;,]+(?= makes room)")
# Facts of an engine that a tenant is shown; counts of slots in use say what others have loaded.
_SHOWN_CAPACITY = frozenset({"max_loras", "max_lora_rank"})


class TenantView:
    """The fleet as one caller may see it. For a caller above tenants everything passes unchanged."""

    def __init__(self, caller: Caller, store: IntentStore) -> None:
        self.tenant = caller.only_tenant
        self._caller = caller
        self._store = store

    @property
    def is_whole(self) -> bool:
        """Whether the caller is above tenants."""
        return self.tenant is None

    # -- what is seen ----------------------------------------------------------------------------------------

    def sees_tenants(self, tenants: Sequence[str] | None) -> bool:
        """Whether the caller sees an adapter of these tenants (None: everyone)."""
        return owners.sees_tenants(self._caller, tenants)

    def sees_entry(self, entry: HistoryEntry) -> bool:
        """Whether the caller sees this entry of the history. Entries about workers and the policy name no tenant."""
        if self.tenant is None or entry.kind in _ABOUT_THE_FLEET:
            return True
        published = self._store.publication_of(entry.subject)
        if entry.kind.startswith("name_") and published is not None:
            return published.spec.tenant in {None, self.tenant}
        return self.sees_alias(entry.subject) if entry.kind.startswith("alias_") else self.sees_adapter(entry.subject)

    def known_tenants(self, tenants: Sequence[str]) -> Sequence[str]:
        """Those of an adapter's tenants of which the caller knows."""
        return tenants if self.tenant is None else tuple(tenant for tenant in tenants if tenant == self.tenant)

    def sees_adapter(self, lora_id: str) -> bool:
        """Whether the caller sees this adapter. One that is not registered (any more) goes by its name."""
        return owners.sees_adapter(self._store, self._caller, lora_id)

    def sees_alias(self, name: str) -> bool:
        """Whether the caller sees this alias: it may use one of its targets, or the name is its own."""
        return owners.sees_alias(self._store, self._caller, name)

    def sees_pause(self, scope: PauseScope) -> bool:
        """Whether the caller sees a pause of this scope: it may hold its tenant's requests."""
        return self.tenant is None or scope.tenant in {None, self.tenant}

    def sees_name(self, name: str) -> bool:
        """Whether the caller sees the adapter, alias or published name of this name."""
        if self._store.targets_of(name):
            return self.sees_alias(name)
        if name in self._store.names and name not in self._store.adapters:
            return owners.sees_published(self._store, self._caller, name) or owners.has_name(self._caller, name)
        return self.sees_adapter(name)

    def require_adapter(self, lora_id: str) -> None:
        """Raises NotFound for an adapter that does not exist for the caller."""
        owners.require_seen(self._store, self._caller, "adapter", lora_id)

    def require_alias(self, name: str) -> None:
        """Raises NotFound for an alias that does not exist for the caller."""
        owners.require_seen(self._store, self._caller, "alias", name)

    # -- how it is shown -------------------------------------------------------------------------------------

    def text(self, text: str, given: Collection[str] = ()) -> str:
        """A reason or an error without the names and paths that the caller does not see.

        given  names and sources that the caller has written itself: they stay, whether or not something has them
        """
        if self.tenant is None or not text:
            return text
        text = _PATH.sub(lambda match: match[0] if self._sees_path(match[0], given) else HIDDEN_PATH, text)

        def shown(match: re.Match[str]) -> str:
            """The word itself, unless it is a hidden name, with or without a digest or punctuation around it."""
            word = match[0]
            for name in (word, word.rstrip(".:"), word.partition("@")[0]):
                if self._is_known(name) and not self.sees_name(name) and not _is_given(name, given):
                    return OTHER
            return word

        def shown_victim(match: re.Match[str]) -> str:
            """The name itself, unless the caller does not see it."""
            name = match[0].strip("'\"")
            return match[0] if self.sees_name(name) or _is_given(name, given) else OTHER

        # Whole names first: without its tenant's a hidden name would leave its rest.
        return self._without_tenants(_NAME.sub(shown, _MADE_ROOM.sub(shown_victim, text)), given)

    def _is_known(self, name: str) -> bool:
        """Whether an adapter, an alias or a published name has this name."""
        return name in self._store.adapters or name in self._store.names

    @cached_property
    def _own_paths(self) -> frozenset[str]:
        """The folders that the tenant has named as sources of adapters which it alone may use."""
        owned = (adapter for adapter in self._store.adapters.values() if adapter.tenants == (self.tenant,))
        return frozenset(_plain_path(adapter.source) for adapter in owned if _is_path(adapter.source))

    def _sees_path(self, path: str, given: Collection[str] = ()) -> bool:
        """Whether the caller may see this path in a text: it is one of our routes, or at or below its own source."""
        if path.startswith(_ROUTES):
            return True
        own = self._own_paths | {_plain_path(source) for source in given if _is_path(source)}
        plain = PurePosixPath(_plain_path(path))
        return any(str(parent) in own for parent in (plain, *plain.parents))

    def _without_tenants(self, text: str, given: Collection[str]) -> str:
        """The text without the names of other tenants of registered adapters."""
        tenants = self._store.tenants

        def shown(match: re.Match[str]) -> str:
            """The word itself, unless it is another tenant."""
            is_other = match[0] in tenants and match[0] != self.tenant and match[0] not in given
            return "another tenant" if is_other else match[0]

        # A pattern for each of a thousand tenants would take a second a text.
        several_words = _pattern_of_several_words(tenants)
        return _WORD.sub(shown, text if several_words is None else several_words.sub(shown, text))

    def adapter(self, item: AdapterItem) -> AdapterItem:
        """The adapter as the caller may see it. Of one that it shares, neither others' demand nor the secret."""
        if self.tenant is None:
            return item
        spec, status = item.spec, item.status
        seen: dict[str, Any] = {"error": status.error and self.text(status.error), "note": self.text(status.note)}
        if spec.tenants != (self.tenant,):
            spec = replace(
                spec,
                source=HIDDEN_PATH if _is_path(spec.source) else spec.source,
                tenants=None if spec.tenants is None else (self.tenant,),
                secret_ref=None,
            )
            seen |= {"requests_per_s": 0.0, "idle_s": None}
        return item.model_copy(update={"spec": spec, "status": status.model_copy(update=seen)})

    def ensured(self, answer: EnsureAnswer) -> EnsureAnswer:
        """The answer to an `ensure` without names that the caller does not see."""
        return answer if answer.error is None else answer.model_copy(update={"error": self.text(answer.error)})

    def alias(self, item: AliasItem) -> AliasItem:
        """The alias with the targets that the caller sees."""
        if self.tenant is None:
            return item
        pending = item.status.pending
        if pending is not None:
            pending = pending.model_copy(
                update={
                    "lacks": self._by_adapter(pending.lacks),
                    "error": pending.error and self.text(pending.error),
                }
            )
        status = item.status.model_copy(update={"targets": self._targets(item.status.targets), "pending": pending})
        return item.model_copy(update={"spec": self._alias_spec(item.spec), "status": status})

    def rollout(self, item: RolloutItem) -> RolloutItem:
        """The rollout with the targets that the caller sees."""
        if self.tenant is None:
            return item
        spec, status = item.spec, item.status
        if isinstance(spec, RolloutSpec):
            spec = spec if self.sees_adapter(spec.to) else replace(spec, to=OTHER)
        else:
            spec = self._alias_spec(spec)
        seen = {
            "before": self._targets(status.before),
            "to": self._targets(status.to),
            "lacks": self._by_adapter(status.lacks),
            "reason": self.text(status.reason),
        }
        return item.model_copy(update={"spec": spec, "status": status.model_copy(update=seen)})

    def _alias_spec(self, spec: AliasSpec) -> AliasSpec:
        """The spec with the targets that the caller sees."""
        return replace(spec, targets=self._targets(spec.targets))

    def _targets(self, targets: Targets) -> Targets:
        """The targets that the caller sees."""
        return tuple(target for target in targets if self.sees_adapter(target.lora_id))

    def _by_adapter(self, texts: Mapping[str, str]) -> dict[str, str]:
        """lora_id -> text, of the adapters that the caller sees."""
        return {lora_id: self.text(text) for lora_id, text in texts.items() if self.sees_adapter(lora_id)}

    def worker(self, item: WorkerItem) -> WorkerItem:
        """The worker with the adapters that the caller sees, and without addresses and counts of others."""
        if self.tenant is None:
            return item
        return item.model_copy(
            update={
                "agent_url": "",
                "engine_url": "",
                "node": "",
                "capacity": {name: count for name, count in item.capacity.items() if name in _SHOWN_CAPACITY},
                "adapters": tuple(filter(self.sees_adapter, item.adapters)),
                "orphans": (),
                "kept_out": tuple(filter(self.sees_adapter, item.kept_out)),
                "refusal": self.text(item.refusal),
                "drain": None,
                "load": None,
            }
        )

    def sees_traffic(self, kind: SeriesKind, name: str) -> bool:
        """Whether all requests of this series are the caller's own: an adapter that others may use tells of theirs."""
        if self.tenant is None:
            return True
        if kind == "adapter":
            adapter = self._store.adapters.get(name)
            return adapter is not None and adapter.tenants is not None and set(adapter.tenants) == {self.tenant}
        return name == self.tenant if kind == "tenant" else kind == "key" and name == self._caller.key_id

    def plan(self, plan: Plan) -> Plan:
        """The part of the plan that concerns adapters that the caller sees, with that part's cost."""
        if self.tenant is None:
            return plan
        actions = tuple(self._action(action) for action in plan.actions if self.sees_adapter(action.lora_id))
        operations = [action.operation for action in actions]
        cost = PlanCost(
            loads=operations.count("load"),
            unloads=operations.count("unload") + sum(action.evict is not None for action in actions),
            bytes=sum(action.size_bytes or 0 for action in actions),
            seconds=max((action.seconds or 0.0 for action in actions), default=0.0),
        )
        return plan.model_copy(
            update={
                "actions": actions,
                "unplaced": tuple(filter(self.sees_adapter, plan.unplaced)),
                "reasons": self._by_adapter(plan.reasons),
                "targets": {name: change for name, change in plan.targets.items() if self.sees_adapter(name)},
                "cost": cost,
            }
        )

    def _action(self, action: ActionItem) -> ActionItem:
        """The action without another tenant's victim."""
        evict = action.evict if action.evict is not None and self.sees_adapter(action.evict) else None
        return action.model_copy(update={"evict": evict, "reason": self.text(action.reason)})

    def event(self, event: FleetEvent, tenants: Tenants) -> FleetEvent | None:
        """The event as the caller may see it; None for one that it may not.

        tenants  those of the event's adapter, as far as known when it was emitted
        """
        if self.tenant is None:
            return event
        is_seen = event.lora_id is None or self.sees_tenants(tenants)
        if event.type.startswith("alias_"):
            is_seen = self.sees_alias(event.message.partition(": ")[0])
        elif event.type.startswith("pause_"):
            is_seen = self.sees_pause(PauseScope.of_key(event.message))
        return replace(event, message=self.text(event.message)) if is_seen else None

    def actor(self, actor: str) -> str:
        """Who did it; of other tenants no name."""
        is_other = self.tenant is not None and actor.startswith("tenant ") and actor != self._caller.name
        is_ours = actor.startswith(f"tenant {self.tenant} (")
        return "another tenant" if is_other and not is_ours else actor

    def body(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A history entry's body without names that the caller does not see."""
        return {name: self._value(name, value) for name, value in body.items()} if self.tenant else dict(body)

    def _value(self, name: str, value: Any) -> Any:
        """One value of a history entry's body, without names that the caller does not see."""
        if name == "tenants":
            return self._tenant_names(value)
        if name in {"targets", "was", "before", "from", "to"} and isinstance(value, list | tuple):
            return [target for target in value if self.sees_adapter(_name_in(target))]
        if name == "evict":
            return value if isinstance(value, str) and self.sees_adapter(value) else None
        if name in {"secret", "secret_ref"}:
            return None
        if isinstance(value, str) and _is_path(value):
            return value if self._sees_path(value) else HIDDEN_PATH
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {key: self._value(key, each) for key, each in value.items()}
        return [self._value("", each) for each in value] if isinstance(value, list | tuple) else value

    def _tenant_names(self, value: Any) -> Any:
        """Tenants, or a list of them before and after a change, without the other tenants."""
        if isinstance(value, list | tuple):
            return [self._tenant_names(each) for each in value if not isinstance(each, str) or each == self.tenant]
        return value


@lru_cache(maxsize=4)
def _pattern_of_several_words(tenants: frozenset[str]) -> re.Pattern[str] | None:
    """A pattern of the tenants whose names are more than one word; None without any."""
    odd = sorted((tenant for tenant in tenants if tenant and not _WORD.fullmatch(tenant)), key=len, reverse=True)
    return re.compile(rf"(?<![\w.-])(?:{'|'.join(map(re.escape, odd))})(?![\w.-])") if odd else None


def _is_path(source: str) -> bool:
    """Whether a source is a folder on workers."""
    return source.startswith(("/", "file://"))


def _plain_path(source: str) -> str:
    """The path of a `file://` URL; a path as it is. Both without a slash at the end."""
    try:
        path = unquote(urlsplit(source).path) if source.startswith("file://") else source
    except ValueError:  # a client's, with half a bracket
        path = source
    return path.rstrip("/") or "/"


def _name_in(target: Any) -> str:
    """The lora_id of an alias's stored target."""
    if isinstance(target, Mapping):
        return str(target.get("lora_id", ""))
    return str(target[0]) if isinstance(target, list | tuple) and target else str(target)


def _is_given(name: str, given: Collection[str]) -> bool:
    """Whether the caller has written the name itself, or the published name that it would be a version of."""
    version = split_version_id(name)
    return name in given or (version is not None and version[0] in given)


def errors_shown(store: IntentStore) -> Callable[[Request, str], str]:
    """A function that returns an error's message as the request's caller may see it, for every route's errors."""

    def shown(request: Request, message: str) -> str:
        """The message without names that the caller neither sees nor has written."""
        caller = getattr(request.state, "caller", None)
        if not isinstance(caller, Caller) or caller.only_tenant is None:
            return message
        return TenantView(caller, store).text(message, _given_names(request, caller))

    return shown


def _given_names(request: Request, caller: Caller) -> frozenset[str]:
    """The names in a request's path and body, as `given_names` has them.

    A body counts where the route reads it: other bodies and queries could be guesses, which an answer would confirm.
    """
    found = [value for value in request.path_params.values() if isinstance(value, str)]
    body = request.scope.get(JSON_BODY) if request.method in {"POST", "PUT", "PATCH"} else None
    return given_names(caller, [*found, *(_texts_in_json(from_json(body)) if body else ())])


def given_names(caller: Caller, names: Sequence[str]) -> frozenset[str]:
    """Names that a caller has written, and what an error may make of them.

    That is the whole name in the caller's namespace, the name of a version, and a word that may be a tenant's name.
    """
    found = [*names, *map(caller.whole_name, names)]
    found += [version[0] for name in found if (version := split_version_id(name)) is not None]
    return frozenset([*found, *(word for name in found for word in _WORD.findall(name))])


def _texts_in_json(value: Any) -> Iterator[str]:
    """Every text in a JSON value, names of fields included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _texts_in_json(each)
    elif isinstance(value, dict):
        yield from value
        for each in value.values():
            yield from _texts_in_json(each)


def tenant_view_of(store: IntentStore) -> Callable[[Request], Awaitable[TenantView]]:
    """A dependency that returns the caller's view. The route's scope check has authenticated the caller before."""

    async def view(request: Request) -> TenantView:  # FastAPI runs a plain function in a thread
        """The view of the request's caller."""
        return TenantView(request.state.caller, store)

    return view


async def _request_caller(request: Request) -> Caller:
    """The request's caller. `requires` has authenticated it before.

    A program that acts by itself names itself in a header, so that the history takes it for no person. Only an
    operator's key may: others could hide their changes.
    """
    found: Caller = request.state.caller
    program = request.headers.get(PROGRAM_HEADER, "")
    return replace(found, program=program) if program in PROGRAMS and found.tenant is None else found


async def _actor_name(request: Request) -> str:
    """The caller's name, for the history."""
    return (await _request_caller(request)).name


Actor = Annotated[str, Depends(_actor_name)]
WhoCalls = Annotated[Caller, Depends(_request_caller)]
Limit = Annotated[int, Query(ge=1, le=10_000, description="most items in one answer")]
Cursor = Annotated[str | None, Query(description="`next` of the answer before")]
IfMatch = Annotated[str | None, Header(description="ETag that this change is based on; * for whatever is there")]


def page_after(rows: Sequence[str], limit: int, cursor: str | None) -> tuple[Sequence[str], str | None]:
    """The next page of sorted rows, and its cursor: its last row, or None at the end.

    A cursor is a row, so pages stay right while rows come and go.
    """
    start = 0 if cursor is None else bisect_right(rows, cursor)
    found = list(rows[start : start + limit])
    return found, found[-1] if found and start + limit < len(rows) else None
