"""Parsing of requests and rendering of responses: paths, verbs, bodies, selectors."""

import gzip
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import yaml
from aiohttp import web

from tests.kube import patches, protobuf, selectors, status
from tests.kube.kinds import BY_PATH, ResourceKind
from tests.kube.store import Object

MOST_BODY_BYTES = 3 * 2**20  # as a real one's; etcd takes 1.5 MiB of it
_PACKED_FROM_BYTES = 128 * 2**10  # as a real one does, at the cheapest level


@dataclass(frozen=True, slots=True)
class PathTarget:
    """The resource, namespace and name of a path."""

    resource: ResourceKind
    namespace: str
    name: str
    part: str  # "", or one of the resource's


def target_of(path: str) -> PathTarget | None:
    """The target of a path; None for the server's own documents."""
    parts = path.strip("/").split("/")
    if parts[:2] == ["api", "v1"]:
        group, version, rest = "", "v1", parts[2:]
    elif parts[0] == "apis" and len(parts) > 3:
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        return None
    namespace = ""
    if len(rest) >= 3 and rest[0] == "namespaces" and rest[2] not in ("status", "finalize"):
        namespace, rest = rest[1], rest[2:]
    plural, name, part = [*rest, "", "", ""][:3]
    resource = BY_PATH.get((group, version, plural))
    if resource is None or len(rest) > 3 or part not in ("", *resource.parts):
        return None
    return PathTarget(resource, namespace, name, part)


def verb_of(request: web.Request, target: PathTarget | None) -> str:
    """The verb as in rules and audit logs."""
    if target is None:
        return request.method.lower()
    if request.method == "GET":
        is_watch = request.query.get("watch", "").lower() in ("true", "1")
        return "watch" if is_watch else "get" if target.name else "list"
    if request.method == "DELETE":
        return "delete" if target.name else "deletecollection"
    return {"POST": "create", "PUT": "update", "PATCH": "patch"}.get(request.method, request.method.lower())


def answered(code: int, body: Any, headers: dict[str, str] | None = None, *, packed: bool = False) -> web.Response:
    """A JSON response. `packed`: compress it; worthwhile for long bodies only."""
    text = msgspec.json.encode(body)
    headers = dict(headers or {})
    if packed and len(text) > _PACKED_FROM_BYTES:
        headers["Content-Encoding"] = "gzip"
        text = gzip.compress(text, 1)
    return web.Response(status=code, body=text, content_type="application/json", headers=headers)


async def body_of(request: web.Request) -> Any:
    """The body as JSON, or YAML by its content type. Raises 400."""
    try:
        text = await request.read()
    except web.HTTPRequestEntityTooLarge as exc:
        said = f"Request entity too large: limit is {MOST_BODY_BYTES}"
        raise status.ApiError(413, "RequestEntityTooLarge", said) from exc
    try:
        if request.content_type == protobuf.TYPE:
            return protobuf.decoded(text)
        return yaml.safe_load(text) if "yaml" in request.content_type else msgspec.json.decode(text)
    except (ValueError, yaml.YAMLError) as exc:
        raise status.bad_request(f"couldn't get version/kind; parse error: {exc}") from exc


async def options_of(request: web.Request) -> dict[str, Any]:
    """The options of a delete, from body or query."""
    given = await body_of(request) if await request.read() else {}
    if "gracePeriodSeconds" in request.query:
        given["gracePeriodSeconds"] = int(request.query["gracePeriodSeconds"])
    return {key: value for key, value in given.items() if value is not None}


async def change_of(request: web.Request) -> Callable[[Object], Any]:
    """A function that returns the patched object."""
    patch = await body_of(request)
    match request.content_type:
        case "application/merge-patch+json":
            return lambda obj: patches.merged(obj, patch)
        case "application/strategic-merge-patch+json":
            return lambda obj: patches.strategic(obj, patch)
        case "application/json-patch+json":
            return lambda obj: patches.json_patched(obj, patch)
    raise status.unsupported_media_type(request.content_type)


def holds_of(query: Any) -> Callable[[Object], bool]:
    """A function that tells whether both selectors match an object."""
    labelled = selectors.label_selector(query.get("labelSelector", ""))
    fielded = selectors.field_selector(query.get("fieldSelector", ""))
    return lambda obj: labelled(obj["metadata"].get("labels") or {}) and fielded(obj)


def version_of(text: str) -> int:
    """The integer in a parameter; 0 without it. Raises 400."""
    try:
        return int(text or 0)
    except ValueError as exc:
        raise status.bad_request(
            f'Invalid value: "{text}": strconv.ParseUint: parsing "{text}": invalid syntax'
        ) from exc
