"""PATCH: the object after a patch.

source  RFC 6902, RFC 7396; strategic merge patch as in k8s.io/apimachinery pkg/util/strategicpatch;
        server-side apply is in managers.py
"""

from typing import Any

from tests.kube.fields import KEYED, SETS
from tests.kube.status import ApiError, bad_request

# Lists that a strategic merge patch merges by a key, for the kinds that are here. Two differ from server-side apply.
_MERGED_BY = KEYED | {"ports": ("containerPort", "port"), "topologySpreadConstraints": ("topologyKey",)}


def merged(target: Any, patch: Any) -> Any:
    """JSON merge patch (RFC 7396): null removes, objects merge, everything else replaces."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def strategic(target: Any, patch: Any) -> Any:
    """Strategic merge patch: as `merged`, with keyed lists merged by key, and kubectl's directives."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    if patch.get("$patch") == "replace":
        return {key: value for key, value in patch.items() if key != "$patch"}
    for key, value in patch.items():
        if key.startswith("$deleteFromPrimitiveList/"):
            name = key.partition("/")[2]
            result[name] = [item for item in result.get(name) or [] if item not in value]
        elif key.startswith("$"):
            continue  # the order of elements and retained keys: nothing here hangs on them
        elif value is None:
            result.pop(key, None)
        elif isinstance(value, list):
            result[key] = _list(key, result.get(key) or [], value)
        else:
            result[key] = strategic(result.get(key), value)
    return result


def json_patched(target: Any, operations: Any) -> Any:
    """JSON patch (RFC 6902). Raises 422 when a test fails or a path is missing."""
    if not isinstance(operations, list):
        raise bad_request("a json patch is a list of operations")
    root = {"": target}
    for operation in operations:
        path = ["", *_pointer(operation["path"])]
        kind = operation["op"]
        if kind == "test":
            if _read(root, path) != operation.get("value"):
                raise _unprocessable(f"the server rejected our request: testing path {operation['path']} value failed")
        elif kind == "remove":
            root = _without(root, path)
        elif kind in ("add", "replace"):
            root = _written(root, path, operation.get("value"), insert=kind == "add")
        elif kind in ("move", "copy"):
            source = ["", *_pointer(operation["from"])]
            value = _read(root, source)
            root = _written(_without(root, source) if kind == "move" else root, path, value, insert=True)
        else:
            raise bad_request(f"unexpected json patch operation {kind!r}")
    return root[""]


def _merge_key(name: str, items: list[Any]) -> str:
    """The merge key of a list of this name, if all items have it."""
    keys = _MERGED_BY.get(name, ())
    return next((key for key in keys if items and all(isinstance(item, dict) and key in item for item in items)), "")


def _list(name: str, old: list[Any], new: list[Any]) -> list[Any]:
    if name in SETS:
        return [*old, *(item for item in new if item not in old)]
    key = _merge_key(name, [*old, *new])
    if not key:
        return new
    result = {item[key]: item for item in old}
    for item in new:
        if item.get("$patch") == "delete":
            result.pop(item[key], None)
        else:
            result[item[key]] = strategic(result.get(item[key]), item)
    return list(result.values())


def _pointer(path: str) -> list[str]:
    return [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")[1:]]


def _read(node: Any, path: list[str]) -> Any:
    for part in path:
        try:
            node = node[int(part)] if isinstance(node, list) else node[part]
        except (KeyError, IndexError, ValueError, TypeError) as exc:
            raise _unprocessable(f"the server rejected our request: no value at {'/'.join(path)}") from exc
    return node


def _written(node: Any, path: list[str], value: Any, *, insert: bool) -> Any:
    head, *rest = path
    if rest:
        value = _written(_read(node, [head]), rest, value, insert=insert)
    elif not insert:
        _read(node, [head])
    if not isinstance(node, list):
        return {**node, head: value}
    at = len(node) if head == "-" else int(head)
    return [*node[:at], value, *node[at + (0 if insert and not rest else 1) :]]


def _without(node: Any, path: list[str]) -> Any:
    head, *rest = path
    value = _read(node, [head])
    if rest:
        return _written(node, [head], _without(value, rest), insert=False)
    if isinstance(node, list):
        return [item for at, item in enumerate(node) if at != int(head)]
    return {key: item for key, item in node.items() if key != head}


def _unprocessable(message: str) -> ApiError:
    return ApiError(422, "Invalid", message)
