"""Calls that a fleet does not offer: what clients, trainers and engines' own tools ask for, and what to do instead.

Sources: vLLM 0.32 entrypoints, SGLang 0.5.23, what TRL 1.16, prime-rl, SkyRL 0.4, AReaL 1.0.4 and axolotl call, and
the routes of OpenAI, Anthropic and Ollama that their clients know. docs/routes.md has all of vLLM's.
"""

from collections.abc import Collection, Mapping

from lorafleet.service.http import no_route, shown_path

_PUBLISH = "publish adapters by POST /v1/load_lora_adapter; a fleet's base weights never change"
_ENGINES_STAY = "the fleet's engines stay up for all its users; POST /pause holds your own requests"
_ABORT = "end your requests by closing their connections, or all of them by POST /pause?mode=abort and POST /resume"
_FOR_OPERATORS = "it is about one engine: operators ask that engine, or read GET /metrics here"
_ENGINES_OWN = "it is internal to an engine and its fleet; call POST /v1/chat/completions or POST /v1/completions"
_NO_STORE = "a fleet stores no files and no conversations; send whole requests to POST /v1/chat/completions"
_TEXT_ONLY = "a fleet answers with text alone; call POST /v1/chat/completions or POST /v1/responses"
_CHAT = "call POST /v1/chat/completions, or POST /v1/messages"
_OLLAMA = "it is Ollama's; set your client to OpenAI's API, with this URL and /v1"

_WEIGHTS = (
    "/get_world_size",
    "/init_weight_transfer_engine",
    "/shutdown_weight_transfer_engine",
    "/start_weight_update",
    "/start_draft_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/update_weight_version",
    "/weight_checker",
    "/weight_info",
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/update_weights_from_disk",
    "/update_weights_from_distributed",
    "/update_weights_from_tensor",
    "/init_broadcaster",
    "/init_communicator",
    "/close_communicator",
    "/update_named_param",
    "/batch_update_named_params",
    "/http_update_weights",
    "/set_lora_adapter",
    "/clear_lora_adapter",
    "/areal_init_weights_update_group",
    "/areal_update_weights",
    "/areal_update_weights_lora",
    "/areal_update_weights_xccl",
    "/areal_update_weights_lora_xccl",
)
NOT_OFFERED: Mapping[str, str] = {
    **dict.fromkeys(_WEIGHTS, _PUBLISH),
    "/collective_rpc": f"it would run code inside engines that others use; {_PUBLISH}",
    "/adapters/": _PUBLISH,
    **dict.fromkeys(
        ("/sleep", "/release_kv_cache_memory", "/release_memory_occupation", "/resume_memory_occupation"),
        _ENGINES_STAY,
    ),
    **dict.fromkeys(("/scale_elastic_ep", "/is_scaling_elastic_ep"), _ENGINES_STAY),
    **dict.fromkeys(("/abort_requests", "/abort_request"), _ABORT),
    **dict.fromkeys(("/reset_mm_cache", "/reset_encoder_cache"), "no cache is ever stale here; go on without it"),
    "/ping": "call GET /health",
    **dict.fromkeys(
        ("/load", "/kv_event_sources", "/start_profile", "/stop_profile", "/fault_tolerance/"), _FOR_OPERATORS
    ),
    "/render": f"{_ENGINES_OWN}; POST /tokenize gives a prompt's token ids",
    "/derender": f"{_ENGINES_OWN}; POST /detokenize gives the text of token ids",
    "/invocations": f"it is SageMaker's, and would reach every other route; {_CHAT}",
    "/messages/batches/": "send each message to POST /v1/messages",
    **dict.fromkeys(("/audio/", "/realtime/", "/images/", "/videos/"), _TEXT_ONLY),
    **dict.fromkeys(
        ("/files/", "/batches/", "/assistants/", "/threads/", "/vector_stores/", "/conversations/"), _NO_STORE
    ),
    **dict.fromkeys(("/fine_tuning/", "/fine-tunes/"), f"train elsewhere, and {_PUBLISH}"),
    "/moderations": _CHAT,
    **dict.fromkeys(
        (
            "/api/chat",
            "/api/generate",
            "/api/tags",
            "/api/show",
            "/api/ps",
            "/api/pull",
            "/api/embed",
            "/api/embeddings",
            "/api/version",
        ),
        _OLLAMA,
    ),
    **dict.fromkeys(("/v1/chat", "/v2/chat", "/chat", "/v1/complete"), _CHAT),
}
"""The end of a path -> what to do instead; with a slash at its end, a part of a path with all below it.

They are answered 404, not 501: prime-rl repeats a call for minutes that fails with 5xx, and TRL, SkyRL and AReaL end
with the message of either."""


def why_not_offered(path: str) -> str | None:
    """What to do in place of a call of this path, whatever stands before it; None: nothing is known of it."""
    whole = f"{path.rstrip('/')}/"
    for known, instead in NOT_OFFERED.items():
        if known in whole if known.endswith("/") else whole.endswith(f"{known}/"):
            return instead
    return None


def unknown_path(path: str, known: Collection[str]) -> tuple[str, str]:
    """(code, message) of the error for a path without a route. `known`: paths of all routes."""
    instead = why_not_offered(path)
    if instead is not None:
        return "not_offered", f"{shown_path(path)} is not offered by a fleet: {instead}"
    code, message = no_route(path)
    nearest = _nearest_path(path, known)
    return code, message if nearest is None else f"there is no {shown_path(path)} here; call {nearest}"


def _nearest_path(path: str, known: Collection[str]) -> str | None:
    """The known path that this one, with another prefix or without its own, most likely means; None: there is none."""
    asked = path.rstrip("/")
    found = [each for each in known if asked and "{" not in each and (asked.endswith(each) or each.endswith(asked))]
    return max(found, key=len, default=None)
