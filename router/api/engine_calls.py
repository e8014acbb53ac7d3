"""Calls that trainers make to one engine, answered for a fleet: what it is, what is not needed, what it does not offer.

Sources: vLLM 0.32 entrypoints, SGLang 0.5.23, and what TRL 1.16, prime-rl, SkyRL 0.4 and AReaL 1.0.4 call.
"""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Query

from lorafleet.service.auth import AuthFirstRoute, requires
from lorafleet.service.http import HttpError
from router.core.errors import NoReplica
from router.request.services import Services
from workers.wire import Metadata

_PUBLISH = "publish adapters by POST /v1/load_lora_adapter; a fleet's base weights never change"
_ENGINES_STAY = "the fleet's engines stay up for all its users; POST /pause holds your own requests"
_ABORT = "end your requests by closing their connections, or all of them by POST /pause?mode=abort and POST /resume"
NOT_OFFERED: Mapping[str, str] = {
    "/sleep": _ENGINES_STAY,
    "/release_kv_cache_memory": _ENGINES_STAY,
    "/release_memory_occupation": _ENGINES_STAY,
    "/resume_memory_occupation": _ENGINES_STAY,
    "/abort_requests": _ABORT,
    "/abort_request": _ABORT,
    "/collective_rpc": f"it would run code inside engines that others use; {_PUBLISH}",
    "/get_world_size": f"there is no group of processes to send weights to; {_PUBLISH}",
    **dict.fromkeys(
        (
            "/init_weight_transfer_engine",
            "/shutdown_weight_transfer_engine",
            "/start_weight_update",
            "/start_draft_weight_update",
            "/update_weights",
            "/finish_weight_update",
            "/update_weight_version",
            "/init_weights_update_group",
            "/destroy_weights_update_group",
            "/update_weights_from_disk",
            "/update_weights_from_distributed",
            "/update_weights_from_tensor",
            "/init_broadcaster",
            "/areal_init_weights_update_group",
            "/areal_update_weights",
            "/areal_update_weights_lora",
            "/areal_update_weights_xccl",
            "/areal_update_weights_lora_xccl",
        ),
        _PUBLISH,
    ),
}
"""Path -> what to do instead. 404, not 501: prime-rl repeats a call for minutes that fails with 5xx, and TRL, SkyRL
and AReaL end with the message of either."""
_NOT_NEEDED = "nothing was cleared, and nothing needs to be: no version of an adapter ever sees another's KV"


def engine_call_routes(services: Services) -> APIRouter:
    """The routes of these calls. They need scope `infer` or `register`."""
    api = APIRouter(route_class=AuthFirstRoute, dependencies=[Depends(requires(services.keys, "infer", "register"))])

    @api.get("/server_info")
    async def server_info(config_format: Annotated[Literal["text", "json"], Query()] = "text") -> dict[str, Any]:
        """What a trainer reads of vLLM's configuration, for the fleet; what is not known is left out.

        `max_lora_rank` and `max_loras` are those of the worker that takes least: an adapter of that rank fits on every
        worker, and so many adapters can be served at once. `data_parallel_size` is 1: a load reaches all workers.
        """
        config = vllm_config(await _reports(services))
        return {"vllm_config": config if config_format == "json" else msgspec.json.encode(config).decode()}

    @api.get("/get_server_info")
    async def sglang_server_info() -> dict[str, Any]:
        """As `/server_info`, in SGLang's words."""
        config = vllm_config(await _reports(services))
        model, lora = config["model_config"], config["lora_config"] or {}
        names = {"max_lora_rank": "max_lora_rank", "max_loras_per_batch": "max_loras", "max_loaded_loras": "max_loras"}
        return {
            "served_model_name": model["served_model_name"],
            "enable_lora": bool(lora),
            "version": version("lorafleet"),
            **({"context_length": model["max_model_len"]} if "max_model_len" in model else {}),
            **{theirs: lora[ours] for theirs, ours in names.items() if ours in lora},
        }

    async def model_info() -> dict[str, Any]:
        """The base model, in SGLang's words."""
        name = vllm_config(await _reports(services))["model_config"]["served_model_name"]
        return {"model_path": name, "served_model_name": name}

    for path in ("/get_model_info", "/model_info"):
        api.add_api_route(path, model_info, methods=["GET"])

    @api.get("/version")
    async def fleet_version() -> dict[str, str]:
        """The version of lorafleet, which is no engine's."""
        return {"version": version("lorafleet"), "server": "lorafleet"}

    async def reset_prefix_cache() -> dict[str, Any]:
        """200 with nothing done: cached KV is never stale here, so a trainer need not clear it after an update."""
        return {"success": True, "message": _NOT_NEEDED}

    for path in ("/reset_prefix_cache", "/flush_cache"):
        api.add_api_route(path, reset_prefix_cache, methods=["POST"])

    @api.get("/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        """False: a fleet's engines never sleep."""
        return {"is_sleeping": False}

    @api.post("/wake_up")
    async def wake_up(tags: Annotated[list[str] | None, Query()] = None) -> dict[str, Any]:
        """200 with nothing done: a fleet's engines are awake."""
        return {"status": "awake", "tags": tags}

    for path, instead in NOT_OFFERED.items():
        api.add_api_route(
            path, _refusal(path, instead), methods=["GET", "POST"], include_in_schema=False, response_model=None
        )
    return api


def _refusal(path: str, instead: str) -> Any:
    """A handler that answers 404 with what to do instead."""

    async def refuse() -> None:
        """Answer 404 with what to do instead."""
        raise HttpError(404, "not_offered", f"{path} is not offered by a fleet: {instead}")

    return refuse


async def _reports(services: Services) -> list[Metadata]:
    """The last reports of the workers that serve the fleet's first base model.

    Raises CatalogUnavailable, NoReplica.
    """
    discovery = services.discovery
    await discovery.wait_for_first_worker()
    if not discovery.has_catalog:
        raise discovery.catalog_unavailable()
    discovery.check_any_report()
    model = next((name for name, replica in discovery.fleet.base_models.items() if replica), None)
    if model is None:
        raise NoReplica("no worker serves a base model now", retry_after_s=1.0)
    found = [followed.metadata for followed in discovery.followed.values() if followed.metadata is not None]
    return [report for report in found if report.model.base_model == model]


def vllm_config(reports: list[Metadata]) -> dict[str, Any]:
    """A fleet's part of vLLM's configuration, by the reports of its workers of one base model, at least one.

    lora_config  None: no worker takes adapters
    """
    name = reports[0].model.base_model
    model: dict[str, Any] = {"model": name, "served_model_name": name}
    # The longest, as in /v1/models: a request goes where it fits.
    longest = max(report.model.runtime_config.max_model_len for report in reports)
    model |= {"max_model_len": longest} if longest > 0 else {}
    takers = [report.lora for report in reports if report.lora.enabled and not report.lora.refusal]
    lora: dict[str, int] = {}
    ranks = [taker.max_lora_rank for taker in takers if taker.max_lora_rank > 0]
    slots = [taker.max_cpu_loras or taker.max_loras for taker in takers if taker.max_cpu_loras or taker.max_loras]
    lora |= {"max_lora_rank": min(ranks)} if ranks else {}
    lora |= {"max_loras": min(slots), "max_cpu_loras": min(slots)} if slots else {}
    return {
        "model_config": model,
        "lora_config": lora or None,
        "parallel_config": {"data_parallel_size": 1},
        "weight_transfer_config": None,
    }
