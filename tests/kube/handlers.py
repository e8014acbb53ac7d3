"""HTTP handlers: a request becomes a verb, and the registry's result a response."""

import asyncio
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from aiohttp import web

from tests.kube import documents, managers, parts, selectors, status, watching, wire
from tests.kube.faults import ServerFaults
from tests.kube.lists import PagedLists
from tests.kube.registry import ObjectRegistry
from tests.kube.rules import AccessRules


class ApiServerRequest(NamedTuple):
    """One received request, including those that a fault or a rule refused."""

    time: float
    verb: str
    path: str
    query: dict[str, str]
    user: str


@dataclass(slots=True)
class RequestHandlers:
    """Handles the server's requests. `bookmark_s`: interval of bookmarks."""

    registry: ObjectRegistry
    rules: AccessRules
    faults: ServerFaults
    requests: list[ApiServerRequest]
    forbidden: list[str]
    bookmark_s: float = 60.0
    lists: PagedLists = field(default_factory=PagedLists)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=wire.MOST_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self.answer)
        return app

    async def answer(self, request: web.Request) -> web.StreamResponse:
        target = wire.target_of(request.path)
        asked = self._note(request, target)
        await self.faults.thawed()
        await self.faults.request_delay()
        if refusal := self.faults.refusal():
            return refusal
        try:
            user = self.rules.user(request.headers.get("Authorization", ""))
            if target is None:
                return self._of_itself(request)
            self._permit(user, asked, target, request)
            if asked.verb == "watch":
                return await self._watch(request, target)
            if target.part in parts.NAMES:
                code, body = await parts.answer(self.registry, request, asked.verb, target, _writer(request, target))
            else:
                code, body = await self._object(request, asked.verb, target)
        except status.ApiError as exc:
            if exc.code in (401, 403):
                self.forbidden.append(f"{exc.message} ({asked.verb} {asked.path})")
            headers = {"Retry-After": str(exc.retry_after_s)} if exc.retry_after_s is not None else {}
            return wire.answered(exc.code, exc.body(), headers)
        await self.faults.thawed()
        await self.faults.answering()
        await self.faults.answer_delay()
        return wire.answered(code, body, packed="gzip" in request.headers.get("Accept-Encoding", ""))

    # --- before the verb -----------------------------------------------------------------------------------------

    def _note(self, request: web.Request, target: wire.PathTarget | None) -> ApiServerRequest:
        verb = wire.verb_of(request, target)
        try:
            user = self.rules.user(request.headers.get("Authorization", ""))
        except status.ApiError:
            user = ""
        asked = ApiServerRequest(asyncio.get_running_loop().time(), verb, request.path, dict(request.query), user)
        self.requests.append(asked)
        return asked

    def _of_itself(self, request: web.Request) -> web.Response:
        if request.path in ("/healthz", "/livez", "/readyz"):
            return web.Response(text="ok")
        if request.path == "/openapi/v2":
            return web.Response(body=documents.OPENAPI_V2, content_type=documents.OPENAPI_V2_TYPE)
        found = documents.document(request.path.rstrip("/"), dict(request.query))
        return web.Response(status=404, text="404 page not found\n") if found is None else wire.answered(200, found)

    def _permit(self, user: str, asked: ApiServerRequest, target: wire.PathTarget, request: web.Request) -> None:
        name = target.name or selectors.named_by(request.query.get("fieldSelector", ""))
        self.rules.require(user, asked.verb, target.resource, target.part, target.namespace, name)

    # --- verbs ---------------------------------------------------------------------------------------------------

    async def _object(self, request: web.Request, verb: str, target: wire.PathTarget) -> tuple[int, Any]:
        resource, namespace, name = target.resource, target.namespace, target.name
        dry_run = bool(request.query.get("dryRun"))
        by = _writer(request, target)
        match verb:
            case "list":
                return 200, self.lists.listed(self.registry.store, target, request.query)
            case "get":
                return 200, self.registry.get(resource, namespace, name)
            case "create":
                obj = self.registry.create(resource, namespace, await wire.body_of(request), by=by, dry_run=dry_run)
                return 201, obj
            case "update":
                obj, is_new = self.registry.replace(
                    resource, namespace, name, await wire.body_of(request), by=by, dry_run=dry_run
                )
                return (201 if is_new else 200), obj
            case "patch":
                if request.content_type == "application/apply-patch+yaml":
                    return await self._apply(request, target, dry_run=dry_run)
                change = await wire.change_of(request)
                return 200, self.registry.patch(resource, namespace, name, change, by=by, dry_run=dry_run)
            case "delete":
                return self._delete(target, await wire.options_of(request), dry_run=dry_run)
            case "deletecollection":
                return self._delete_all(request, target, await wire.options_of(request))
        raise status.method_not_allowed()

    async def _apply(self, request: web.Request, target: wire.PathTarget, *, dry_run: bool) -> tuple[int, Any]:
        managers.require_manager(request.query)
        obj, is_new = self.registry.apply(
            target.resource,
            target.namespace,
            target.name,
            await wire.body_of(request),
            by=_writer(request, target),
            force=request.query.get("force", "").lower() == "true",
            dry_run=dry_run,
        )
        return (201 if is_new else 200), obj

    async def _watch(self, request: web.Request, target: wire.PathTarget) -> web.StreamResponse:
        query = request.query
        asked = query.get("resourceVersion", "")
        version = wire.version_of(asked)
        initial = query.get("sendInitialEvents", "").lower() == "true"
        watch = watching.WatchRequest(
            resource=target.resource,
            namespace=target.namespace,
            version=None if version == 0 or initial else version,
            holds=wire.holds_of(query),
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

    async def _tell(self, response: web.StreamResponse, watch: watching.WatchRequest) -> None:
        async for line in watching.lines(watch, self.registry.store):
            await self.faults.thawed()
            await self.faults.event_delay()
            await response.write(line)
        await self.faults.thawed()

    def _delete(self, target: wire.PathTarget, options: dict[str, Any], *, dry_run: bool) -> tuple[int, Any]:
        obj, is_gone = self.registry.delete(target.resource, target.namespace, target.name, options, dry_run=dry_run)
        if target.resource.graceful or not is_gone:
            return 200, obj
        return 200, status.success(target.resource, target.name, obj["metadata"]["uid"])

    def _delete_all(self, request: web.Request, target: wire.PathTarget, options: dict[str, Any]) -> tuple[int, Any]:
        holds = wire.holds_of(request.query)
        for obj in self.registry.store.find(target.resource, target.namespace):
            if holds(obj):
                meta = obj["metadata"]
                self.registry.delete(target.resource, meta.get("namespace", ""), meta["name"], options)
        empty = {"metadata": {"resourceVersion": str(self.registry.store.version)}, "items": []}
        return 200, {"kind": f"{target.resource.kind}List", "apiVersion": target.resource.api_version} | empty


def _writer(request: web.Request, target: wire.PathTarget) -> managers.FieldWriter:
    return managers.writer_of(request.query, request.headers.get("User-Agent", ""), target.part)
