"""HTTP: a path and a method to a verb, and the registry's answer back."""

import asyncio
import base64
import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import yaml
from aiohttp import web

from tests.kube import documents, patches, protobuf, selectors, status, watching
from tests.kube.faults import Faults
from tests.kube.kinds import BY_PATH, BY_PLURAL, Resource
from tests.kube.registry import Registry
from tests.kube.rules import Rules
from tests.kube.store import Object

_MOST_BODY_BYTES = 3 * 2**20  # as a real one's; etcd takes 1.5 MiB of it
_PACKED_FROM_BYTES = 128 * 2**10  # as a real one does, at the cheapest level
_MOST_PAGES = 64
_TOO_OLD_TOKEN = (
    "The provided continue parameter is too old to display a consistent list result. You can start a new list without "
    "the continue parameter, or use the continue token in this response to retrieve the remainder of the results. "
    "Continuing with the provided token results in an inconsistent list - objects that were created, modified, or "
    "deleted between the time the first chunk was returned and now may show up in the list."
)


class Asked(NamedTuple):
    """One request, as it came: also those that a fault or a rule refused."""

    time: float
    verb: str
    path: str
    query: dict[str, str]
    user: str


@dataclass(frozen=True, slots=True)
class Target:
    """What a path names."""

    resource: Resource
    namespace: str
    name: str
    part: str  # "", or one of the resource's


@dataclass(slots=True)
class Handlers:
    """One API server's answers. `bookmark_s`: how often a watch that asks for bookmarks gets one."""

    registry: Registry
    rules: Rules
    faults: Faults
    requests: list[Asked]
    forbidden: list[str]
    bookmark_s: float = 60.0
    # resource, namespace, name, field manager -> what it has applied: what managedFields are for on a real server
    _applied: dict[tuple[Resource, str, str, str], Any] = field(default_factory=dict)
    # version -> the whole list as it was: what the next pages come from
    _pages: dict[int, list[Object]] = field(default_factory=dict)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=_MOST_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self.answer)
        return app

    async def answer(self, request: web.Request) -> web.StreamResponse:
        target = target_of(request.path)
        asked = self._note(request, target)
        await self.faults.thawed()
        if refusal := self.faults.refusal():
            return refusal
        try:
            user = self.rules.user(request.headers.get("Authorization", ""))
            if target is None:
                return self._of_itself(request)
            self._permit(user, asked, target, request)
            if asked.verb == "watch":
                return await self._watch(request, target)
            answer = self._part if target.part in ("scale", "eviction") else self._object
            code, body = await answer(request, asked.verb, target)
        except status.ApiError as exc:
            if exc.code in (401, 403):
                self.forbidden.append(f"{exc.message} ({asked.verb} {asked.path})")
            headers = {"Retry-After": str(exc.retry_after_s)} if exc.retry_after_s is not None else {}
            return _json(exc.code, exc.body(), headers)
        await self.faults.thawed()
        return _json(code, body, packed="gzip" in request.headers.get("Accept-Encoding", ""))

    # --- before the verb -----------------------------------------------------------------------------------------

    def _note(self, request: web.Request, target: Target | None) -> Asked:
        verb = verb_of(request, target)
        try:
            user = self.rules.user(request.headers.get("Authorization", ""))
        except status.ApiError:
            user = ""
        asked = Asked(asyncio.get_running_loop().time(), verb, request.path, dict(request.query), user)
        self.requests.append(asked)
        return asked

    def _of_itself(self, request: web.Request) -> web.Response:
        if request.path in ("/healthz", "/livez", "/readyz"):
            return web.Response(text="ok")
        found = documents.document(request.path.rstrip("/"), dict(request.query))
        return web.Response(status=404, text="404 page not found\n") if found is None else _json(200, found)

    def _permit(self, user: str, asked: Asked, target: Target, request: web.Request) -> None:
        name = target.name or selectors.named_by(request.query.get("fieldSelector", ""))
        self.rules.require(user, asked.verb, target.resource, target.part, target.namespace, name)

    # --- verbs ---------------------------------------------------------------------------------------------------

    async def _object(self, request: web.Request, verb: str, target: Target) -> tuple[int, Any]:
        resource, namespace, name = target.resource, target.namespace, target.name
        dry_run = bool(request.query.get("dryRun"))
        match verb:
            case "list":
                return 200, self._list(request, target)
            case "get":
                return 200, self.registry.get(resource, namespace, name)
            case "create":
                return 201, self.registry.create(resource, namespace, await _body(request), dry_run=dry_run)
            case "update":
                obj, is_new = self.registry.replace(
                    resource, namespace, name, await _body(request), part=target.part, dry_run=dry_run
                )
                return (201 if is_new else 200), obj
            case "patch":
                if request.content_type == "application/apply-patch+yaml":
                    return await self._apply(request, target, dry_run=dry_run)
                change = await _change(request)
                obj, _ = self.registry.patch(resource, namespace, name, change, part=target.part, dry_run=dry_run)
                return 200, obj
            case "delete":
                return self._delete(target, await _options(request), dry_run=dry_run)
            case "deletecollection":
                return self._delete_all(request, target, await _options(request))
        raise status.method_not_allowed()

    async def _apply(self, request: web.Request, target: Target, *, dry_run: bool) -> tuple[int, Any]:
        resource, namespace, name = target.resource, target.namespace, target.name
        patch = await _body(request)
        by = (resource, namespace, name, request.query.get("fieldManager", ""))
        before = self._applied.get(by, {}) if self.registry.store.get(resource, namespace, name) else {}
        obj, is_new = self.registry.patch(
            resource,
            namespace,
            name,
            lambda obj: patches.applied(obj, before, patch),
            part=target.part,
            creates=True,
            dry_run=dry_run,
        )
        if not dry_run:
            self._applied[by] = patch
        return (201 if is_new else 200), obj

    def _list(self, request: web.Request, target: Target) -> Any:
        resource, store, query = target.resource, self.registry.store, request.query
        asked = _version(query.get("resourceVersion", ""))
        if asked > store.version:
            raise status.too_large_version(asked, store.version)
        holds = _holds(query)
        limit, token = int(query.get("limit") or 0), query.get("continue", "")
        version, start = _resumed(token) if token else (store.version, "")
        if version == -1:  # the inconsistent rest of a list that broke
            version = store.version
        whole = store.find(resource, target.namespace)
        if token and version != store.version:
            if version < store.oldest[resource] or version not in self._pages:
                raise status.expired(_TOO_OLD_TOKEN, resume=_token(-1, start))
            whole = self._pages[version]
        found = [obj for obj in whole if holds(obj) and _key(obj) > start]
        meta: dict[str, Any] = {"resourceVersion": str(version)}
        if limit and len(found) > limit:
            self._pages[version] = whole
            while len(self._pages) > _MOST_PAGES:
                del self._pages[min(self._pages)]
            meta["continue"] = _token(version, _key(found[limit - 1]))
            if not query.get("labelSelector") and not query.get("fieldSelector"):
                meta["remainingItemCount"] = len(found) - limit
            found = found[:limit]
        # The items of a list do not say their kind: the list does. Only custom resources are otherwise.
        items = [{key: value for key, value in obj.items() if key not in ("kind", "apiVersion")} for obj in found]
        return {"kind": f"{resource.kind}List", "apiVersion": resource.api_version, "metadata": meta, "items": items}

    async def _watch(self, request: web.Request, target: Target) -> web.StreamResponse:
        query = request.query
        asked = query.get("resourceVersion", "")
        version = _version(asked)
        initial = query.get("sendInitialEvents", "").lower() == "true"
        watch = watching.Watch(
            resource=target.resource,
            namespace=target.namespace,
            version=None if version == 0 or initial else version,
            holds=_holds(query),
            bookmarks=query.get("allowWatchBookmarks", "").lower() in ("true", "1"),
            marks_initial=initial,
            timeout_s=float(query.get("timeoutSeconds") or 0) or None,
            bookmark_s=self.bookmark_s,
        )
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        self.faults.watches.append(request)
        ended = asyncio.ensure_future(self.faults.dropped.wait())
        telling = asyncio.ensure_future(self._tell(response, watch))
        try:
            await asyncio.wait({ended, telling}, return_when=asyncio.FIRST_COMPLETED)
            if telling.done():
                telling.result()
            await response.write_eof()
        except ConnectionError:
            pass  # the client has gone, or a fault has cut the connection
        finally:
            self.faults.watches.remove(request)
            ended.cancel()
            telling.cancel()
            await asyncio.wait({ended, telling})
        return response

    async def _tell(self, response: web.StreamResponse, watch: watching.Watch) -> None:
        async for line in watching.lines(watch, self.registry.store):
            await self.faults.thawed()
            await response.write(line)
        await self.faults.thawed()

    async def _part(self, request: web.Request, verb: str, target: Target) -> tuple[int, Any]:
        """Evictions, and scales: only the number of replicas, whatever else the object says."""
        obj = self.registry.get(target.resource, target.namespace, target.name)
        match target.part, verb:
            case "eviction", "create":
                return self._evict(target, await _body(request))
            case "scale", "get":
                return 200, scale_of(obj)
            case "scale", "patch":
                scale = (await _change(request))(scale_of(obj))
            case "scale", "update":
                scale = await _body(request)
            case _:
                raise status.method_not_allowed()
        new = obj | {"spec": obj["spec"] | {"replicas": scale["spec"]["replicas"]}}
        stored, _ = self.registry.replace(target.resource, target.namespace, target.name, new)
        return 200, scale_of(stored)

    def _delete(self, target: Target, options: dict[str, Any], *, dry_run: bool) -> tuple[int, Any]:
        obj, is_gone = self.registry.delete(target.resource, target.namespace, target.name, options, dry_run=dry_run)
        if target.resource.graceful or not is_gone:
            return 200, obj
        return 200, status.success(target.resource, target.name, obj["metadata"]["uid"])

    def _delete_all(self, request: web.Request, target: Target, options: dict[str, Any]) -> tuple[int, Any]:
        holds = _holds(request.query)
        for obj in self.registry.store.find(target.resource, target.namespace):
            if holds(obj):
                meta = obj["metadata"]
                self.registry.delete(target.resource, meta.get("namespace", ""), meta["name"], options)
        empty = {"metadata": {"resourceVersion": str(self.registry.store.version)}, "items": []}
        return 200, {"kind": f"{target.resource.kind}List", "apiVersion": target.resource.api_version} | empty

    def _evict(self, target: Target, eviction: Any) -> tuple[int, Any]:
        """A delete that asks the disruption budgets first: 429 when one of them has nothing to give."""
        pod = self.registry.get(target.resource, target.namespace, target.name)
        labels = pod["metadata"].get("labels") or {}
        budgets = self.registry.store.find(BY_PLURAL["poddisruptionbudgets"], target.namespace)
        for budget in budgets:
            wanted = budget["spec"]["selector"].get("matchLabels") or {}
            if wanted.items() <= labels.items() and not budget["status"].get("disruptionsAllowed"):
                said = "Cannot evict pod as it would violate the pod's disruption budget."
                cause = f"The disruption budget {budget['metadata']['name']} needs more healthy pods"
                causes = [{"reason": "DisruptionBudget", "message": cause}]
                raise status.ApiError(429, "TooManyRequests", said, {"causes": causes})
        self.registry.delete(target.resource, target.namespace, target.name, eviction.get("deleteOptions") or {})
        return 201, {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}


def scale_of(obj: Object) -> Object:
    """Deployments and StatefulSets as an autoscaler sees them."""
    meta = {key: obj["metadata"][key] for key in ("name", "namespace", "uid", "resourceVersion")}
    has = (obj.get("status") or {}).get("replicas", 0)
    spec = {"replicas": obj["spec"].get("replicas", 1)}
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": meta,
        "spec": spec,
        "status": {"replicas": has},
    }


def target_of(path: str) -> Target | None:
    """What a path names, or None for the server's own documents."""
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
    return Target(resource, namespace, name, part)


def verb_of(request: web.Request, target: Target | None) -> str:
    """As rules and audit logs name it."""
    if target is None:
        return request.method.lower()
    if request.method == "GET":
        is_watch = request.query.get("watch", "").lower() in ("true", "1")
        return "watch" if is_watch else "get" if target.name else "list"
    if request.method == "DELETE":
        return "delete" if target.name else "deletecollection"
    return {"POST": "create", "PUT": "update", "PATCH": "patch"}.get(request.method, request.method.lower())


def _json(code: int, body: Any, headers: dict[str, str] | None = None, *, packed: bool = False) -> web.Response:
    text = msgspec.json.encode(body)
    headers = dict(headers or {})
    if packed and len(text) > _PACKED_FROM_BYTES:
        headers["Content-Encoding"] = "gzip"
        text = gzip.compress(text, 1)
    return web.Response(status=code, body=text, content_type="application/json", headers=headers)


async def _body(request: web.Request) -> Any:
    """JSON, or YAML where that is said. Raises 400."""
    try:
        text = await request.read()
    except web.HTTPRequestEntityTooLarge as exc:
        said = f"Request entity too large: limit is {_MOST_BODY_BYTES}"
        raise status.ApiError(413, "RequestEntityTooLarge", said) from exc
    try:
        if request.content_type == protobuf.TYPE:
            return protobuf.decoded(text)
        return yaml.safe_load(text) if "yaml" in request.content_type else msgspec.json.decode(text)
    except (ValueError, yaml.YAMLError) as exc:
        raise status.bad_request(f"couldn't get version/kind; parse error: {exc}") from exc


async def _options(request: web.Request) -> dict[str, Any]:
    given = await _body(request) if await request.read() else {}
    if "gracePeriodSeconds" in request.query:
        given["gracePeriodSeconds"] = int(request.query["gracePeriodSeconds"])
    return {key: value for key, value in given.items() if value is not None}


async def _change(request: web.Request) -> Callable[[Object], Any]:
    """What the patch makes of an object."""
    patch = await _body(request)
    match request.content_type:
        case "application/merge-patch+json":
            return lambda obj: patches.merged(obj, patch)
        case "application/strategic-merge-patch+json":
            return lambda obj: patches.strategic(obj, patch)
        case "application/json-patch+json":
            return lambda obj: patches.json_patched(obj, patch)
    raise status.unsupported_media_type(request.content_type)


def _holds(query: Any) -> Callable[[Object], bool]:
    labelled = selectors.label_selector(query.get("labelSelector", ""))
    fielded = selectors.field_selector(query.get("fieldSelector", ""))
    return lambda obj: labelled(obj["metadata"].get("labels") or {}) and fielded(obj)


def _version(text: str) -> int:
    try:
        return int(text or 0)
    except ValueError as exc:
        raise status.bad_request(
            f'Invalid value: "{text}": strconv.ParseUint: parsing "{text}": invalid syntax'
        ) from exc


def _key(obj: Object) -> str:
    return f"{obj['metadata'].get('namespace', '')}/{obj['metadata']['name']}"


def _token(version: int, start: str) -> str:
    said = json.dumps({"v": "meta.k8s.io/v1", "rv": version, "start": start})
    return base64.urlsafe_b64encode(said.encode()).decode().rstrip("=")


def _resumed(token: str) -> tuple[int, str]:
    try:
        said = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
        return int(said["rv"]), str(said["start"])
    except (ValueError, KeyError) as exc:
        raise status.bad_request(f"continue key is not valid: {exc}") from exc
