"""Routes for published names: publish a version, list and read names, delete one."""

from typing import Annotated

from fastapi import APIRouter, Body, Depends, Response

from lorafleet.keys.auth import ApiKeys, requires
from orchestrator.api.parameters import Cursor, Limit, WhoCalls, page_after
from orchestrator.intent import owners
from orchestrator.intent.publisher import NamePublisher
from orchestrator.model.names import NameToPublish
from orchestrator.model.published import PublishedItem, PublishedList, PublishSpec
from orchestrator.store.store import IntentStore

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
