"""Pauses as engines offer them: vLLM's `/pause`, SGLang's `/pause_generation`, and AReaL's pair for its vLLM.

Each is forwarded to the orchestrator with the caller's own key, and reaches every router. Sources: vLLM 0.32
entrypoints/rl/online/api_router.py, SGLang 0.5.23 `/pause_generation`, AReaL 1.0.4 vllm_ext/areal_vllm_server.py.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import httpx
from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel

from lorafleet.keys.auth import AuthFirstRoute, requires
from lorafleet.keys.roles import Caller
from lorafleet.service.http import HttpError
from orchestrator.model.pauses import PauseMode
from router.api.control_calls import ControlCalls, ControlUnavailable
from router.request.services import Services

# The orchestrator bounds a pause by its own pause_wait_s.
_MOST_WAIT_S = 3600.0


class SglangPause(BaseModel):
    """The body of `/pause_generation`. `retract` and `in_place` differ in the KV that a frozen request keeps."""

    mode: str = "abort"


class PauseForward:
    """Calls of the orchestrator's `/v1/pauses`, each with its client's own key."""

    def __init__(self, services: Services, control: httpx.AsyncClient) -> None:
        self._services = services
        self._calls = ControlCalls(services, control)

    async def pause(self, request: Request, mode: PauseMode, lease_s: float | None = None) -> dict[str, Any]:
        """Pause with this mode; returns the fields that stand beside the engine's own words. Raises HttpError."""
        item = await self._call(request, "POST", {"mode": mode} | ({} if lease_s is None else {"lease_s": lease_s}))
        return {name: item[name] for name in ("scope", "mode", "running", "expires_at")}

    async def resume(self, request: Request) -> None:
        """End the client's pause. Raises HttpError."""
        await self._call(request, "DELETE")

    async def _call(self, request: Request, method: str, body: Mapping[str, Any] | None = None) -> Any:
        """The orchestrator's answer. Raises HttpError, for its error and for none."""
        if not self._calls.url:
            raise HttpError(501, "needs_orchestrator", "this router has no orchestrator, which would hold the pause")
        config = self._services.config
        try:
            answer = await self._calls.send(
                request,
                method,
                "/v1/pauses",
                deadline=self._services.clock() + config.control_timeout_s,
                read_s=_MOST_WAIT_S,
                body=None if body is None else lambda: body,
            )
            found = answer.json()
        except (ControlUnavailable, ValueError) as exc:
            message = f"whether anything is paused is not known: the orchestrator does not answer ({exc}); call again"
            raise HttpError(503, "orchestrator_unreachable", message, retry_after_s=1.0) from exc
        if answer.is_error:
            error = found.get("error") or {}
            wait = answer.headers.get("retry-after", "")
            raise HttpError(
                answer.status_code,
                error.get("code") or "pause_failed",
                error.get("message") or "the orchestrator refused the pause",
                param=error.get("param"),
                retry_after_s=float(wait) if wait.isdigit() else None,
            )
        return found


def pause_routes(services: Services, control: httpx.AsyncClient) -> APIRouter:
    """The routes that pause and resume; `control` calls the orchestrator."""
    api = APIRouter(route_class=AuthFirstRoute)
    registers = [Depends(requires(services.keys, "register"))]
    infers = Annotated[Caller, Depends(requires(services.keys, "infer", "register"))]
    forward = PauseForward(services, control)

    @api.post("/pause", dependencies=registers)
    async def pause(
        request: Request,
        mode: Annotated[PauseMode, Query(description="what becomes of running requests")] = "abort",
        clear_cache: Annotated[bool, Query(description="ignored: no version of an adapter sees another's KV")] = True,
        lease_s: Annotated[float | None, Query(gt=0, description="the pause ends by itself after this time")] = None,
    ) -> dict[str, Any]:
        """Hold the new requests of the caller's tenant, at every router, until `/resume` or the end of the lease.

        `keep`: what runs goes on, and `running` says how much. `wait`: nothing of the tenant runs any more at the 200.
        `abort`: what ran was ended with finish_reason `abort`. Repeat the call to renew the lease.
        """
        del clear_cache
        return {"status": "paused"} | await forward.pause(request, mode, lease_s)

    @api.post("/resume", dependencies=registers)
    async def resume(request: Request) -> dict[str, str]:
        """End the caller's pause. Held requests start at once."""
        await forward.resume(request)
        return {"status": "resumed"}

    @api.get("/is_paused")
    async def is_paused(caller: infers) -> dict[str, Any]:
        """Whether new requests of the caller are held at this router, and for how long at most."""
        held = services.pauses.holding(caller)
        if held is None:
            return {"is_paused": False}
        left_s = round(max(0.0, held.until - services.clock()), 3)
        return {"is_paused": True, "tenant": held.pause.tenant, "ends_in_s": left_s}

    @api.post("/pause_generation", dependencies=registers)
    async def pause_generation(request: Request, body: SglangPause = SglangPause()) -> dict[str, Any]:  # noqa: B008
        """As `/pause`, in SGLang's words; modes `retract` and `in_place` are `keep`."""
        modes: Mapping[str, PauseMode] = {"abort": "abort", "retract": "keep", "in_place": "keep"}
        if body.mode not in modes:
            message = f"mode must be one of {', '.join(modes)}, found {body.mode!r:.60}"
            raise HttpError(400, "invalid_request_body", message, param="mode")
        fields = await forward.pause(request, modes[body.mode])
        return {"message": "Generation paused successfully.", "status": "ok"} | fields

    @api.post("/continue_generation", dependencies=registers)
    async def continue_generation(request: Request) -> dict[str, str]:
        """As `/resume`, in SGLang's words."""
        await forward.resume(request)
        return {"message": "Generation continued successfully.", "status": "ok"}

    @api.post("/areal_pause_generation", dependencies=registers)
    async def areal_pause_generation(request: Request) -> dict[str, Any]:
        """As `/pause?mode=abort`, in the words of AReaL's vLLM."""
        fields = await forward.pause(request, "abort")
        return {"success": True, "message": "Generation paused and all requests aborted"} | fields

    @api.post("/areal_continue_generation", dependencies=registers)
    async def areal_continue_generation(request: Request) -> dict[str, Any]:
        """As `/resume`, in the words of AReaL's vLLM."""
        await forward.resume(request)
        return {"success": True, "message": "Generation continued"}

    return api
