"""The fields of an object as paths: what server-side apply merges, owns and compares. Pure.

A path's parts: a str is a field; ("k", ((key, value), ...)) is the item of a list that has keys; ("v", value) is the
item of a list that is a set. A list or a map that is atomic is one leaf.

source  sigs.k8s.io/structured-merge-diff 6 typed/{merge,reconcile_schema}.go; the lists' keys: kubernetes 1.36
        api/openapi-spec
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

Path = tuple[Any, ...]
Fields = frozenset[Path]

ITEM = object()
"""Marks in `leaves` that an item with keys exists."""

KEYED = {
    "conditions": ("type",),
    "containers": ("name",),
    "env": ("name",),
    "hostAliases": ("ip",),
    "imagePullSecrets": ("name",),
    "initContainers": ("name",),
    "ownerReferences": ("uid",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "volumeMounts": ("mountPath",),
    "volumes": ("name",),
}
SETS = ("finalizers",)
_ATOMIC_MAPS = frozenset({
    "configMapKeyRef", "fieldRef", "labelSelector", "namespaceSelector", "nodeSelector", "podSelector",
    "resourceFieldRef", "roleRef", "scaleTargetRef", "secretKeyRef", "selector",
})  # fmt: skip
_DEFAULTS = {"protocol": "TCP"}
# The server's own: nobody is said to own them.
_NOBODYS = frozenset({
    "creationTimestamp", "deletionGracePeriodSeconds", "deletionTimestamp", "generation", "managedFields", "name",
    "namespace", "resourceVersion", "selfLink", "uid",
})  # fmt: skip


class DuplicateField(Exception):
    """Two items of one list have the same keys."""


def owned_part(obj: Mapping[str, Any]) -> dict[str, Any]:
    """The object without name, kind and server-managed fields."""
    meta = {key: value for key, value in (obj.get("metadata") or {}).items() if key not in _NOBODYS}
    rest = {key: value for key, value in obj.items() if key not in ("apiVersion", "kind", "metadata")}
    return rest | ({"metadata": meta} if meta else {})


def leaves(node: Any, path: Path = ()) -> dict[Path, Any]:
    """Paths of every leaf and every item with keys. Raises DuplicateField."""
    name = path[-1] if path else ""
    if isinstance(node, dict) and node and name not in _ATOMIC_MAPS:
        found: dict[Path, Any] = {}
        for key, value in node.items():
            if value is not None:
                found |= leaves(value, (*path, key))
        return found
    if isinstance(node, list) and node and name in SETS:
        return {(*path, ("v", item)): item for item in node}
    if isinstance(node, list) and node and (keys := _keys(path)):
        found = {}
        for item in node:
            at = (*path, _item(item, keys))
            if at in found:
                raise DuplicateField(f"{shown(path)}: duplicate entries for key {_bracket(at[-1])}")
            found |= {at: ITEM} | leaves(item, at)
        return found
    return {path: node} if path else {}


def merged(live: Any, config: Any, path: Path = ()) -> Any:
    """The object with the applied fields merged into it."""
    name = path[-1] if path else ""
    if isinstance(live, dict) and isinstance(config, dict) and name not in _ATOMIC_MAPS:
        both = {key: merged(live.get(key), value, (*path, key)) for key, value in config.items() if value is not None}
        return live | both
    if isinstance(live, list) and isinstance(config, list) and name in SETS:
        return [*live, *(item for item in config if item not in live)]
    if isinstance(live, list) and isinstance(config, list) and (keys := _keys(path)):
        items = {_item(item, keys): item for item in live}
        for item in config:
            at = _item(item, keys)
            items[at] = merged(items.get(at), item, (*path, at))
        return list(items.values())
    return config


def without(node: Any, gone: Fields, path: Path = ()) -> Any:
    """The object without these fields, and without maps and lists that become empty."""
    if isinstance(node, dict):
        kept = {}
        for key, value in node.items():
            if (at := (*path, key)) not in gone:
                rest = without(value, gone, at)
                if rest or not value or rest is value:
                    kept[key] = rest
        return node if kept == node else kept
    if isinstance(node, list):
        parts = _parts(node, path)
        return [without(item, gone, at) for item, at in zip(node, parts, strict=True) if at not in gone]
    return node


def as_fields_v1(fields: Iterable[Path]) -> dict[str, Any]:
    """A set of fields in the form of `managedFields`."""
    root: dict[str, Any] = {}
    for path in sorted(fields, key=repr):
        node = root
        for part in path:
            node = node.setdefault(_word(part), {})
        if any(isinstance(part, tuple) for part in path[-1:]):
            node["."] = {}
    return root


def from_fields_v1(node: Mapping[str, Any], path: Path = ()) -> Fields:
    found: set[Path] = set()
    for word, below in node.items():
        if word == ".":
            found.add(path)
            continue
        at = (*path, _part(word))
        found |= from_fields_v1(below, at) if below else {at}
    return frozenset(found)


def shown(path: Path) -> str:
    """The path as conflicts show it: `.spec.template.spec.containers[name="worker"].image`."""
    return "".join(f".{part}" if isinstance(part, str) else _bracket(part) for part in path)


def _keys(path: Path) -> tuple[str, ...]:
    """The key fields of the list at this path; () for an atomic list."""
    if path[-1] != "ports":
        return KEYED.get(path[-1], ()) if isinstance(path[-1], str) else ()
    if path == ("spec", "ports"):
        return ("port", "protocol")
    return ("containerPort", "protocol") if len(path) > 1 and isinstance(path[-2], tuple) else ()


def _item(item: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[str, Any]:
    return "k", tuple((key, item.get(key, _DEFAULTS.get(key))) for key in keys)


def _parts(items: list[Any], path: Path) -> list[Path]:
    if path and path[-1] in SETS:
        return [(*path, ("v", item)) for item in items]
    if path and (keys := _keys(path)):
        return [(*path, _item(item, keys)) for item in items]
    return [(*path, ("i", at)) for at, _ in enumerate(items)]


def _bracket(part: tuple[str, Any]) -> str:
    kind, said = part
    if kind == "v":
        return f"[={json.dumps(said)}]"
    return f"[{','.join(f'{key}={json.dumps(value)}' for key, value in said)}]"


def _word(part: Any) -> str:
    if isinstance(part, str):
        return f"f:{part}"
    kind, said = part
    return f"{kind}:{json.dumps(dict(said) if kind == 'k' else said, separators=(',', ':'))}"


def _part(word: str) -> Any:
    kind, _, said = word.partition(":")
    if kind == "f":
        return said
    read = json.loads(said)
    return (kind, tuple(read.items())) if kind == "k" else (kind, read)
