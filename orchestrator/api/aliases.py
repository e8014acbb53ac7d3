"""Routes for names that point at adapters: aliases, and published names with their versions."""

from typing import Annotated

from fastapi import APIRouter, Body, Depends, Response

from lorafleet.keys.auth import ApiKeys, requires
from orchestrator.api.history import ALIAS_KINDS, HistoryCursor, history_page
from orchestrator.api.rollouts import alias_item
from orchestrator.api.tenancy import Cursor, IfMatch, Limit, TenantView, WhoCalls, page_after, tenant_view_of
from orchestrator.intent import owners
from orchestrator.intent.publisher import NamePublisher
from orchestrator.intent.registry import AdapterRegistry
from orchestrator.model.aliases import AliasItem, AliasList
from orchestrator.model.history import HistoryList
from orchestrator.model.names import AliasName, NameToPublish
from orchestrator.model.published import PublishedItem, PublishedList, PublishSpec
from orchestrator.model.served_names import AliasSpec
from orchestrator.reconcile.reconciler import Reconciler
from orchestrator.store.store import IntentStore

ALIAS_EXAMPLE = {"targets": [{"lora_id": "sql-expert/v1", "weight": 9}, {"lora_id": "sql-expert/v2", "weight": 1}]}


def alias_routes(keys: ApiKeys, registry: AdapterRegistry, reconciler: Reconciler) -> APIRouter:
    """The routes that list, set and delete aliases, and read their history.

    Reads need scope `view`, changes `tenant-admin`.
    """
    api = APIRouter(tags=["aliases"])
    view = [Depends(requires(keys, "view"))]
    change = [Depends(requires(keys, "tenant-admin"))]
    store = reconciler.store
    seen_by = Annotated[TenantView, Depends(tenant_view_of(store))]

    def item(name: str) -> AliasItem:
        """The alias with its pending targets, as wire model. Raises NotFound: a change may wait while others delete."""
        return alias_item(registry.alias(name), reconciler.names)

    def item_with_etag(name: str, response: Response, seen: TenantView) -> AliasItem:
        """The alias as the caller may see it; sets the response's ETag."""
        response.headers["etag"] = registry.alias_etag(name) or ""
        return seen.alias(item(name))

    @api.get("/v1/aliases", dependencies=view)
    async def aliases(seen: seen_by, limit: Limit = 1000, cursor: Cursor = None) -> AliasList:
        """Aliases by name."""
        names = [name for name, found in store.names.items() if found.targets and seen.sees_alias(name)]
        page, following = page_after(names, limit, cursor)
        return AliasList(data=tuple(seen.alias(item(name)) for name in page), next=following)

    @api.put("/v1/aliases/{name:path}", dependencies=change, response_model=AliasItem)
    async def put_alias(
        name: AliasName,
        spec: Annotated[AliasSpec, Body(examples=[ALIAS_EXAMPLE])],
        response: Response,
        caller: WhoCalls,
        seen: seen_by,
        if_match: IfMatch = None,
    ) -> AliasItem:
        """Point a name at adapters: 201 when new, 200 when it does, 202 while the new ones are being placed.

        Until the new targets have replicas like the old ones, the alias keeps its targets; `status.pending` says which
        are missing. 404 if another call has deleted the alias before every router went by the change.
        """
        owners.require_alias(store, caller, name, [target.lora_id for target in spec.targets], "give")
        is_new = registry.put_alias(name, spec, caller.name, if_match=if_match)
        shown = None
        while (in_force := registry.alias(name).targets) != shown:  # a pass may shift them during the wait
            shown = in_force
            await reconciler.publish_change(("names", name))
        found = item_with_etag(name, response, seen)
        is_pending = found.status.pending is not None and found.status.pending.state == "placing"
        response.status_code = 201 if is_new else 202 if is_pending else 200
        return found

    @api.get("/v1/aliases/{name:path}/history", dependencies=view)
    async def alias_history(
        name: AliasName, seen: seen_by, limit: Limit = 100, cursor: HistoryCursor = None
    ) -> HistoryList:
        """The alias's former targets, with time and actor, newest first. Also of a deleted alias."""
        if not seen.sees_alias(name):
            seen.require_alias(name)
        return history_page(store, limit, cursor, kinds=ALIAS_KINDS, subject=name, seen=seen)

    @api.get("/v1/aliases/{name:path}", dependencies=view)
    async def get_alias(name: AliasName, response: Response, seen: seen_by) -> AliasItem:
        """One alias, with an ETag for a later change."""
        seen.require_alias(name)
        return item_with_etag(name, response, seen)

    @api.delete("/v1/aliases/{name:path}", dependencies=change, status_code=204)
    async def drop_alias(name: AliasName, caller: WhoCalls, if_match: IfMatch = None) -> Response:
        """Forget the name; its adapters stay."""
        owners.require_write(store, caller, "alias", name, "change")
        registry.delete_alias(name, caller.name, if_match=if_match)
        await reconciler.publish_change(("names", name))
        return Response(status_code=204)

    return api


PUBLISH_EXAMPLE = {"source": "/shared/runs/42/step-7", "replicas": "all", "keep_versions": 2}


def published_routes(keys: ApiKeys, store: IntentStore, publisher: NamePublisher) -> APIRouter:
    """The routes that publish under names, list, read and delete them. A tenant's key sees its own names alone."""
    api = APIRouter(tags=["published names"])
    read = [Depends(requires(keys, "view", "register"))]
    write = [Depends(requires(keys, "register"))]

    @api.get("/v1/published", dependencies=read)
    async def names(caller: WhoCalls, limit: Limit = 1000, cursor: Cursor = None) -> PublishedList:
        """Published names in order, of those that the caller may use."""
        mine = [name for name in store.names if owners.sees_published(store, caller, name)]
        page, following = page_after(mine, limit, cursor)
        return PublishedList(data=tuple(publisher.item(name) for name in page), next=following)

    @api.post("/v1/published/{name:path}", dependencies=write)
    async def publish(
        name: NameToPublish, spec: Annotated[PublishSpec, Body(examples=[PUBLISH_EXAMPLE])], caller: WhoCalls
    ) -> PublishedItem:
        """Publish bytes as the name's next version; answers once every router sends its requests to that version.

        The bytes are copied: their place is not read again. The same bytes again answer at once. On an error the name
        is as it was.
        """
        publisher.require_own_bytes(spec, caller)
        return await publisher.publish(caller.whole_name(name), spec, caller)

    @api.get("/v1/published/{name:path}", dependencies=read)
    async def published(name: NameToPublish, caller: WhoCalls) -> PublishedItem:
        """One published name with its versions. 404 if there is none."""
        whole = caller.whole_name(name)
        owners.require_seen(store, caller, "published name", whole)
        return publisher.item(whole)

    @api.delete("/v1/published/{name:path}", status_code=204, dependencies=write)
    async def delete(name: NameToPublish, caller: WhoCalls) -> Response:
        """Delete the name and its versions. What runs on them finishes. 404 if there is none."""
        await publisher.delete(caller.whole_name(name), caller)
        return Response(status_code=204)

    return api
