"""resolve: the model name of a request -> a base model, and perhaps an adapter.

A name is read in this order: a base model; the whole name of an adapter or alias; `name@digest12`, one version of it;
the folder that an adapter was registered from; `base:` and one of these. So a name with colons (`m:eval@3`) never
depends on which base models are served.
"""

from collections.abc import Callable
from math import log
from random import Random

import msgspec
from xxhash import xxh3_64_intdigest

from lorafleet.identity import DIGEST_DIGITS, asked_version, split_version_id
from orchestrator.model.catalog import CatalogAdapter
from router.core.errors import AdapterFailed, AdapterInspecting, BadBody, ModelNotFound, without_places
from router.core.fleet import Incarnation, RouterFleet, source_folder

Visible = Callable[[CatalogAdapter], bool]


class RequestTarget(msgspec.Struct, frozen=True):
    """The base model and adapter to run. `asked` is the model name in the answer, as the client wrote it.

    digest  beginning of the digest that the request names (`name@digest12`): no other bytes may answer; empty: any
    only    the one engine that may run it, such as that which keeps an earlier response; None: any
    """

    base_model: str
    adapter: CatalogAdapter | None
    asked: str
    digest: str = ""
    only: Incarnation | None = None

    @property
    def weights(self) -> str:
        """The weights that answer: an adapter's engine name, `lora_id@digest12`, or the base model's name."""
        adapter = self.adapter
        return self.base_model if adapter is None else adapter.engine_name or adapter.lora_id

    @property
    def version(self) -> str:
        """First 12 digits of the digest of the adapter's bytes; "" for the base model, or while it is not known."""
        adapter = self.adapter
        return "" if adapter is None or adapter.digest is None else adapter.digest[:DIGEST_DIGITS]

    def with_adapter(self, adapter: CatalogAdapter) -> "RequestTarget":
        """The target with this adapter, as the catalog has it now; raises ModelNotFound for other bytes than asked."""
        if adapter is self.adapter:
            return self
        if not (adapter.digest or "").startswith(self.digest):
            raise ModelNotFound(f"adapter {adapter.lora_id!r} has other bytes now: {adapter.engine_name}")
        return RequestTarget(adapter.base_model or self.base_model, adapter, self.asked, self.digest, self.only)


def resolve(
    fleet: RouterFleet,
    *,
    model: object,
    lora_id: object,
    visible: Visible,
    rng: Random,
    session: str = "",
    field: str = "lora_id",
) -> RequestTarget:
    """The target of a request.

    model, lora_id  those fields of the body, as they came (None: absent)
    visible         whether the caller may use an adapter; others do not exist for it
    session         keeps to one of an alias's targets; empty: each request draws anew
    field           the body's name for `lora_id`, for errors
    raises          BadBody for wrong types or two fields that disagree, ModelNotFound, AdapterFailed, and
                    AdapterInspecting when the adapter's base model is not served or not known yet
    """
    if not (model is None or isinstance(model, str)):
        raise BadBody(f"model must be a string, found {type(model).__name__}", param="model")
    if not (lora_id is None or isinstance(lora_id, str)):
        why = "; /v1/completions takes a list, with one for each prompt, and so does /generate"
        why = why if isinstance(lora_id, list) else ""
        raise BadBody(f"{field} must be a string, found {type(lora_id).__name__}{why}", param=field)
    if lora_id:
        return _resolve_lora_id(fleet, visible, session, rng, model, lora_id, field=field)
    if not model:
        bases = _visible_bases(fleet, visible)
        if len(bases) == 1:
            (only,) = bases
            return RequestTarget(only, None, only)
        raise BadBody(f"model is missing; name one of: {', '.join(sorted(bases)) or 'none served now'}", param="model")
    if _is_base(fleet, visible, model):
        return RequestTarget(model, None, model)
    base, name = _split_model(fleet, visible, model) if ":" in model else (None, model)
    found = _find_adapter(fleet, visible, session, rng, name)
    if found is None:
        raise ModelNotFound(_unknown_model(fleet, visible, name, name), param="model")
    target = _adapter_target(fleet, found, name, model, "model")
    if base is not None and target.base_model != base:
        raise ModelNotFound(_unknown_model(fleet, visible, model, model), param="model")
    return target


def _resolve_lora_id(
    fleet: RouterFleet, visible: Visible, session: str, rng: Random, model: str | None, lora_id: str, *, field: str
) -> RequestTarget:
    """The target of a request with a `lora_id`, which `model` may not contradict; raises as `resolve`."""
    adapter = _find_adapter(fleet, visible, session, rng, lora_id)
    if adapter is None:
        raise ModelNotFound(_unknown_model(fleet, visible, lora_id, lora_id), param=field)
    target = _adapter_target(fleet, adapter, lora_id, model or lora_id, field)
    named_base = model if model and _is_base(fleet, visible, model) else None
    if named_base is None and model and not _names_target(fleet, visible, model, lora_id, target):
        named = _split_model(fleet, visible, model)[1]
        if _find_adapter(fleet, visible, session, rng, named) is None:
            raise ModelNotFound(_unknown_model(fleet, visible, named, model), param="model")
        raise BadBody(
            f"{field} {lora_id!r} and model {model!r} name different adapters; leave one of them out",
            param=field,
        )
    if named_base is not None and target.base_model != named_base:
        raise BadBody(
            f"{field} {lora_id!r} is an adapter of base model {target.base_model!r}, but model names {model!r};"
            " leave model out or name the adapter's own base model",
            param=field,
        )
    return target


def whole_name(fleet: RouterFleet, namespace: str, name: str, *, may_shadow_base: bool) -> str:
    """The name that a name of a namespace means: `namespace/name` if there is one, else the name as it is.

    A base model's name means the base model, unless the caller may shadow it. `base:name` has the namespace inside.
    """
    whole = f"{namespace}/{name}"
    if fleet.base_models.get(name) is not None and not may_shadow_base:
        return name
    if _has_name(fleet, whole):
        return whole
    at = len(name)
    while (at := name.rfind(":", 0, at)) > 0:
        inner = f"{namespace}/{name[at + 1 :]}"
        if name[:at] in fleet.base_models and _has_name(fleet, inner):
            return f"{name[:at]}:{inner}"
    return name


def _has_name(fleet: RouterFleet, name: str) -> bool:
    """Whether an adapter or alias has this name, or, of `name@digest12`, the part before the digest."""
    version = asked_version(name) if "@" in name else None
    names = (name,) if version is None else (name, version[0])
    return any(each in fleet.adapters or each in fleet.aliases for each in names)


def visible_adapters(fleet: RouterFleet, visible: Visible) -> dict[str, CatalogAdapter]:
    """The adapters that exist for a caller, by lora_id."""
    return {lora_id: adapter for lora_id, adapter in fleet.adapters.items() if visible(adapter)}


def usable_adapters(fleet: RouterFleet, visible: Visible) -> dict[str, CatalogAdapter]:
    """The visible adapters, without those that failed their checks before any worker had verified them."""
    adapters = visible_adapters(fleet, visible)
    return {lora_id: adapter for lora_id, adapter in adapters.items() if adapter.error is None or adapter.digest}


def _adapter_target(fleet: RouterFleet, adapter: CatalogAdapter, name: str, asked: str, param: str) -> RequestTarget:
    """The target of an adapter found under this name; raises AdapterFailed and AdapterInspecting."""
    if adapter.error is not None:
        message = f"adapter {adapter.lora_id!r} failed its checks: {without_places(adapter.error)}"
        raise AdapterFailed(message, lora_id=adapter.lora_id, param=param)
    base_model = adapter.base_model or _only_base(fleet)
    if base_model is None:
        raise AdapterInspecting(adapter.lora_id)
    version = asked_version(name) if "@" in name else None
    return RequestTarget(base_model, adapter, asked, version[1] if version is not None else "")


def _find_adapter(fleet: RouterFleet, visible: Visible, session: str, rng: Random, name: str) -> CatalogAdapter | None:
    """The visible adapter with this lora_id, alias, version or folder, or None.

    Of an alias's targets the session or chance chooses. Raises BadBody for a folder of several adapters.
    """
    adapter = fleet.adapters.get(name)
    if adapter is not None:
        return adapter if visible(adapter) else None
    alias = fleet.aliases.get(name)
    if alias is None:
        if name.startswith("/"):
            return _find_in_folder(fleet, visible, name)
        return _find_version(fleet, visible, name) if "@" in name else None
    usable = [(fleet.adapters[each.lora_id], each.weight) for each in alias.targets if each.lora_id in fleet.adapters]
    usable = [(adapter, weight) for adapter, weight in usable if weight > 0 and visible(adapter)]
    if len(usable) < 2:
        return usable[0][0] if usable else None
    if session:
        return max(usable, key=lambda target: _session_claim(name, session, target[0].lora_id, target[1]))[0]
    return rng.choices([adapter for adapter, _ in usable], [weight for _, weight in usable])[0]


def _find_version(fleet: RouterFleet, visible: Visible, name: str) -> CatalogAdapter | None:
    """The visible adapter whose bytes `name@digest12` names; None: no version of that name with them is kept."""
    version = asked_version(name)
    if version is None:
        return None
    lora_id, digest = version
    kept = (adapter for adapter in fleet.by_digest.get(digest, ()) if visible(adapter))
    return next((adapter for adapter in kept if _is_version(fleet, adapter.lora_id, lora_id)), None)


def _find_in_folder(fleet: RouterFleet, visible: Visible, path: str) -> CatalogAdapter | None:
    """The visible adapter that was registered from this folder, or None.

    raises  BadBody where several with different bytes were
    """
    found = [adapter for adapter in fleet.by_folder.get(source_folder(path), ()) if visible(adapter)]
    if len({adapter.digest for adapter in found}) > 1:
        names = ", ".join(sorted(adapter.lora_id for adapter in found))
        raise BadBody(f"several adapters come from {path}: {names}; name one of them", param="lora_path")
    return found[0] if found else None


def _is_version(fleet: RouterFleet, lora_id: str, name: str) -> bool:
    """Whether an adapter is called by this name: it is its own, it is published under it, or an alias's target."""
    version = split_version_id(lora_id)
    if lora_id == name or (version is not None and version[0] == name):
        return True
    alias = fleet.aliases.get(name)
    return alias is not None and any(target.lora_id == lora_id for target in alias.targets)


def _session_claim(alias: str, session: str, lora_id: str, weight: float) -> float:
    """A target's claim on a session; the highest wins, each as often as its weight says.

    A target whose weight grows takes sessions from the others and gives none away, whatever the others' weights were
    (weighted rendezvous hashing: Schindelhauer and Schomaker, 2005). So every router names the same target, and of a
    rollout's sessions those that moved to the new version stay there when its weight grows further.
    """
    drawn = xxh3_64_intdigest(f"{len(alias)}:{alias}{len(session)}:{session}{lora_id}".encode())
    # 52 bits and a half: exact in a float, and never 0 or 1.
    return -weight / log(((drawn >> 12) + 0.5) / 2**52)


def _split_model(fleet: RouterFleet, visible: Visible, model: str) -> tuple[str | None, str]:
    """`base:adapter` -> (base, adapter), else (None, model): a whole name, or one that does not exist.

    Both parts may hold colons: the longest base model goes first.
    """
    if model in fleet.adapters or model in fleet.aliases:
        return None, model
    at = len(model)
    while (at := model.rfind(":", 0, at)) > 0:
        if _is_base(fleet, visible, model[:at]):
            return model[:at], model[at + 1 :]
    return None, model


def _names_target(fleet: RouterFleet, visible: Visible, model: str, lora_id: str, target: RequestTarget) -> bool:
    """Whether `model`, which is no base model, names the adapter `lora_id`: as it is, with its base, or by an alias."""
    base, name = _split_model(fleet, visible, model)
    alias = fleet.aliases.get(name)
    is_same = name == lora_id or (alias is not None and any(target.lora_id == lora_id for target in alias.targets))
    if not is_same and (target.digest or "@" in name):
        version = asked_version(lora_id)
        is_same = _find_version(fleet, visible, name) is target.adapter or (version is not None and name == version[0])
    return is_same and base in (None, target.base_model)


def _is_base(fleet: RouterFleet, visible: Visible, name: str) -> bool:
    """Whether this base model exists for a caller: it is offered to all, or a visible adapter needs it."""
    return name in fleet.base_models and (name in fleet.offered or name in _visible_bases(fleet, visible))


def _visible_bases(fleet: RouterFleet, visible: Visible) -> frozenset[str]:
    """The base models that exist for a caller: those offered to all, and those of visible adapters."""
    return fleet.offered | {a.base_model for a in fleet.adapters.values() if a.base_model and visible(a)}


def _only_base(fleet: RouterFleet) -> str | None:
    """The base model, if there is exactly one; else None."""
    bases = fleet.base_models
    return next(iter(bases)) if len(bases) == 1 else None


def _unknown_model(fleet: RouterFleet, visible: Visible, name: str, shown: str) -> str:
    """The error message for a model that is unknown, or hidden from the caller.

    name   what was looked up; of a version that is not kept, the message has those that are
    shown  the name in the message
    """
    version = asked_version(name)
    if version is not None:
        alias = fleet.aliases.get(version[0])
        targets = [version[0]] if alias is None else [target.lora_id for target in alias.targets]
        current = [fleet.adapters[lora_id] for lora_id in targets if lora_id in fleet.adapters]
        if names := [str(adapter.engine_name) for adapter in current if adapter.digest and visible(adapter)]:
            return f"The version {shown!r} is not kept; {version[0]!r} is {' or '.join(names)} now"
    return f"The model {shown!r} does not exist or is not yours to use; GET /v1/models lists what is"
