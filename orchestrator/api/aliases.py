"""Aliases: names that point at adapters."""

from typing import Annotated

from fastapi import APIRouter, Body, Depends, Response

from lorafleet.auth import Keys, requires
from orchestrator.api.paging import Cursor, Limit, page_of
from orchestrator.catalog import alias_item
from orchestrator.reconcile import Reconciler
from orchestrator.registry import Registry
from orchestrator.wire import AliasItem, AliasList, AliasSpec

ALIAS_EXAMPLE = {"targets": [{"lora_id": "sql-expert/v1", "weight": 9}, {"lora_id": "sql-expert/v2", "weight": 1}]}


def alias_routes(keys: Keys, registry: Registry, reconciler: Reconciler) -> APIRouter:
    api = APIRouter(tags=["aliases"], dependencies=[Depends(requires(keys, "admin"))])
    store = reconciler.store

    @api.get("/v1/aliases")
    async def aliases(limit: Limit = 1000, cursor: Cursor = None) -> AliasList:
        """Aliases by name."""
        page, following = page_of(store.alias_names, limit, cursor)
        return AliasList(data=tuple(alias_item(name, store.aliases[name]) for name in page), next=following)

    @api.put("/v1/aliases/{name:path}", response_model=AliasItem)
    async def put_alias(
        name: str, spec: Annotated[AliasSpec, Body(examples=[ALIAS_EXAMPLE])], response: Response
    ) -> AliasItem:
        """Point a name at adapters: 201 when new, else 200."""
        response.status_code = 201 if registry.put_alias(name, spec) else 200
        reconciler.changed()
        return alias_item(name, store.aliases[name])

    @api.get("/v1/aliases/{name:path}")
    async def get_alias(name: str) -> AliasItem:
        """One alias."""
        return alias_item(name, registry.alias(name))

    @api.delete("/v1/aliases/{name:path}", status_code=204)
    async def drop_alias(name: str) -> Response:
        """Forget the name; its adapters stay."""
        registry.drop_alias(name)
        reconciler.changed()
        return Response(status_code=204)

    return api
