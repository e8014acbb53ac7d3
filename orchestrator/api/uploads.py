"""Routes that take an adapter's bytes: in one request, or in several that go on where a broken one ended."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from starlette.requests import ClientDisconnect

from lorafleet.identity import fleet_source
from lorafleet.keys.auth import ApiKeys, requires
from lorafleet.keys.roles import Caller
from lorafleet.service.http.openapi import UPLOAD_SCHEMA
from orchestrator.api.tenancy import TenantView, tenant_view_of
from orchestrator.api.views import WireViews
from orchestrator.core.copies import sent_bytes, upload_id
from orchestrator.core.errors import OrchestratorRequestError
from orchestrator.intent import owners
from orchestrator.intent.publisher import NamePublisher
from orchestrator.intent.uploads import AdapterUploads, UploadAsk, UploadQuery, missing_of
from orchestrator.model.adapter_documents import UploadedAdapter, UploadProgress
from orchestrator.model.names import LoraId, checked_lora_id, checked_published_name
from orchestrator.model.published import PublishedItem, PublishSpec
from orchestrator.store.store import IntentStore
from workers.wire import UploadState

UPLOADS_PATH = "/v1/adapters/"
_SOURCE = fleet_source("0" * 64)  # until the digest is known
_BODY = {
    "parameters": [
        {
            "name": "Content-Range",
            "in": "header",
            "required": False,
            "schema": {"type": "string", "title": "Content-Range"},
            "description": "`bytes 100-199/200`: go on with a broken upload; `bytes */200`: finish it, without a body",
        }
    ],
    "requestBody": {"required": True, "content": {"application/octet-stream": {"schema": UPLOAD_SCHEMA}}},
}
_PUBLISH_S = 110.0  # the most that a publish takes


def upload_routes(
    keys: ApiKeys, store: IntentStore, uploads: AdapterUploads, publisher: NamePublisher, views: WireViews
) -> APIRouter:
    """The routes of uploads. Scope `register`."""
    api = APIRouter(tags=["uploads"])
    registrar = requires(keys, "register")

    @api.put(
        "/v1/adapters/{lora_id:path}",
        response_model=UploadedAdapter | PublishedItem | UploadProgress,
        responses={201: {"description": "registered"}, 202: {"description": "more bytes are needed"}},
        openapi_extra=_BODY,
    )
    async def upload(
        lora_id: LoraId,
        request: Request,
        response: Response,
        caller: Annotated[Caller, Depends(registrar)],
        wanted: Annotated[UploadQuery, Query()],
        seen: Annotated[TenantView, Depends(tenant_view_of(store))],
    ) -> UploadedAdapter | PublishedItem | UploadProgress:
        """Upload an adapter, as an archive or as its two files, and register it: 201, or 200 if it is known.

        With `publish` the bytes are the next version of the published name, and the answer is that of a publish.
        202 while bytes are missing. Nothing is registered unless the bytes are verified, and kept on several workers
        or in the upload store.
        """
        whole = _whole_name(caller, lora_id, is_published=wanted.publish)
        ask = UploadAsk(
            lora_id=whole,
            owner=owners.upload_owner(caller),
            tenant=caller.tenant or owners.upload_owner(caller),
            wanted=wanted,
            sent=sent_bytes(request.headers.get("content-range"), request.headers.get("content-length")),
            tenants=_owned_tenants(store, caller, whole, wanted),
        )
        known = None if wanted.publish else uploads.registered_already(ask)
        if known is not None:
            note = "registered already, with these bytes"
            return UploadedAdapter(**dict(seen.adapter(views.adapter(known))), note_on_copies=note)
        try:
            state = await uploads.receive(ask, request.stream())
        except ClientDisconnect as exc:
            message = f"the client broke off its upload of {lora_id!r}; what has come is kept for an hour"
            raise OrchestratorRequestError(message, code="upload_interrupted") from exc
        async with uploads.kept(ask, state) as kept:
            if kept is None:
                response.status_code = 202
                return _upload_progress(lora_id, state)
            if wanted.publish:
                response.status_code = 200
                spec = PublishSpec(
                    digest=kept.found.digest,
                    base_model=wanted.base_model,
                    timeout_s=_PUBLISH_S,
                    expected_version=wanted.expected_version,
                )
                item = await publisher.publish(ask.lora_id, spec, caller)
                await uploads.forget(ask.upload_id, wanted.base_model)
                return item
            # Another call may have taken the name meanwhile.
            _owned_tenants(store, caller, whole, wanted)
            adapter, is_new = await uploads.register(ask, kept, caller.name)
        response.status_code = 201 if is_new else 200
        return UploadedAdapter(
            **dict(seen.adapter(views.adapter(adapter))),
            kept_on=kept.kept_on,
            note_on_copies=uploads.note_on_copies(kept),
        )

    @api.get("/v1/uploads/{lora_id:path}", dependencies=[Depends(registrar)])
    async def progress(
        lora_id: LoraId, response: Response, caller: Annotated[Caller, Depends(registrar)]
    ) -> UploadProgress:
        """What has come of this key's unfinished upload of the adapter; 404 `upload_unknown` without one.

        The header `upload-offset` has the bytes of the file to go on with.
        """
        found = _upload_progress(lora_id, await uploads.state(owners.upload_owner(caller), caller.whole_name(lora_id)))
        response.headers["upload-offset"] = str(found.received_bytes)
        return found

    @api.delete("/v1/uploads/{lora_id:path}", status_code=204, response_class=Response)
    async def drop(lora_id: LoraId, caller: Annotated[Caller, Depends(registrar)]) -> Response:
        """Forget this key's unfinished upload of the adapter; 204 also without one."""
        await uploads.forget(upload_id(owners.upload_owner(caller), caller.whole_name(lora_id)))
        return Response(status_code=204)

    return api


def _whole_name(caller: Caller, name: str, *, is_published: bool) -> str:
    """The name with the caller's namespace. Raises OrchestratorRequestError for a name that is not allowed."""
    whole = caller.whole_name(name)
    try:
        (checked_published_name if is_published else checked_lora_id)(whole)
    except ValueError as exc:
        raise OrchestratorRequestError(str(exc), param="lora_id") from exc
    return whole


def _owned_tenants(store: IntentStore, caller: Caller, name: str, wanted: UploadQuery) -> tuple[str, ...] | None:
    """The tenants that may use what is uploaded; None: all, or those of the published name.

    Raises OrchestratorRequestError unless the caller may register or publish it under this name.
    """
    if wanted.publish:
        owners.require_write(store, caller, "published name", name, "give")
        return None
    given = {} if wanted.tenant is None else {"tenants": wanted.tenant}
    spec = owners.owned_spec(store, caller, {"lora_id": name, "source": _SOURCE, **given})
    return None if spec.tenants is None else tuple(sorted(set(spec.tenants)))


def _upload_progress(lora_id: str, state: UploadState) -> UploadProgress:
    """What has come of an upload, and what to send next."""
    missing = missing_of(state)
    received = {file.name: file.received_bytes for file in state.files}
    following = missing[0] if missing else state.files[-1].name
    return UploadProgress(
        lora_id=lora_id, files=state.files, missing=missing, received_bytes=received.get(following, 0)
    )
