"""Calls that clients and trainers make to one engine, answered for a fleet: what it is, and what is not needed.

Sources: vLLM 0.32 entrypoints, SGLang 0.5.23, and what TRL 1.16, prime-rl, SkyRL 0.4 and AReaL 1.0.4 call.
"""

from importlib.metadata import version
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Query
from fastapi.responses import Response

from lorafleet.keys.auth import AuthFirstRoute, requires
from lorafleet.keys.roles import Caller
from lorafleet.service.http import HttpError
from router.api.control import known_fleet, model_card
from router.core.errors import NoReplica
from router.core.fleet import RouterFleet
from router.http.engine_connection import EngineLost
from router.http.fetch import FetchRefused, fetch
from router.request.services import Services
from workers.wire import Metadata

_TOKENIZER_INFO_S = 10.0
_NOT_NEEDED = "nothing was cleared, and nothing needs to be: no version of an adapter ever sees another's KV"


def engine_call_routes(services: Services) -> APIRouter:
    """The routes of these calls. They need scope `infer` or `register`."""
    may_call = requires(services.keys, "infer", "register")
    api = APIRouter(route_class=AuthFirstRoute, dependencies=[Depends(may_call)])
    infers = Annotated[Caller, Depends(may_call)]

    @api.get("/server_info")
    async def server_info(config_format: Annotated[Literal["text", "json"], Query()] = "text") -> dict[str, Any]:
        """What a trainer reads of vLLM's configuration, for the fleet; what is not known is left out.

        `max_lora_rank` and `max_loras` are those of the worker that takes least: an adapter of that rank fits on every
        worker, and so many adapters can be served at once. `data_parallel_size` is 1: a load reaches all workers.
        """
        config = vllm_config(await _first_model_reports(services))
        return {"vllm_config": config if config_format == "json" else msgspec.json.encode(config).decode()}

    @api.get("/tokenizer_info")
    async def tokenizer_info(caller: infers, model: str | None = None) -> Response:
        """The tokenizer of a base model, as its engine tells it: special tokens and chat template, for evaluations.

        `model` may name an adapter, too; by default the fleet's first base model.
        """
        return Response(await _tokenizer_info(services, caller, model), media_type="application/json")

    @api.get("/get_server_info")
    async def sglang_server_info() -> dict[str, Any]:
        """As `/server_info`, in SGLang's words."""
        config = vllm_config(await _first_model_reports(services))
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
        name = vllm_config(await _first_model_reports(services))["model_config"]["served_model_name"]
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

    return api


async def _first_model_reports(services: Services) -> list[Metadata]:
    """The last reports of the workers that serve the fleet's first base model.

    Raises CatalogUnavailable, NoReplica.
    """
    discovery = services.discovery
    await discovery.wait_for_first_worker()
    if not discovery.has_catalog:
        raise discovery.catalog_unavailable()
    discovery.check_any_report()
    model = _first_base_model(discovery.fleet)
    found = [followed.metadata for followed in discovery.followed.values() if followed.metadata is not None]
    return [report for report in found if report.model.base_model == model]


def _first_base_model(fleet: RouterFleet) -> str:
    """The first base model that is served. Raises NoReplica."""
    model = next((name for name, replica in fleet.base_models.items() if replica), None)
    if model is None:
        raise NoReplica("no worker serves a base model now", retry_after_s=1.0)
    return model


async def _tokenizer_info(services: Services, caller: Caller, model: str | None) -> bytes:
    """The answer of an engine that has the route, as JSON.

    Raises ModelNotFound, NoReplica; HttpError 404 `not_offered` if no engine of the model has the route.
    """
    fleet = await known_fleet(services)
    card = await model_card(services, caller, model or _first_base_model(fleet))
    base_model = card["parent"] or card["id"]
    is_refused = False
    for replica in services.discovery.fleet.roster(base_model).replicas:
        if replica.state not in ("ready", "draining"):
            continue
        token = "" if replica.agent_url else services.config.engine_key
        try:
            return await fetch(
                services.pool, replica.engine_url, "/tokenizer_info", token=token, timeout_s=_TOKENIZER_INFO_S
            )
        except FetchRefused:
            is_refused = True
        except EngineLost:
            continue
    if is_refused:
        message = (
            f"no engine of {base_model} serves /tokenizer_info: start them with --enable-tokenizer-info-endpoint, as"
            " agents do for vLLM; GET /v1/models and POST /tokenize are served by all"
        )
        raise HttpError(404, "not_offered", message)
    raise NoReplica(f"no worker of {base_model} answers now", retry_after_s=1.0)


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
