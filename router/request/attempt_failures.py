"""open: which answers and losses fail an attempt, and under which reason of `core.failover.verdict`."""

from lorafleet.engine.vllm_errors import ENGINE_DEAD, SHUTTING_DOWN
from router.core.errors import ReplicaUnreachable
from router.core.failover.circuit_breaker import is_fault
from router.http.engine_connection import EngineLost
from router.request.engine_request import EngineRequest

_SHUTTING_DOWN, _DEAD = SHUTTING_DOWN.encode(), tuple(map(str.encode, ENGINE_DEAD))
# SGLang 0.5.23 managers/tokenizer_manager.py _resolve_lora_path, and sgl-jax lora/lora_registry.py: they have no 404.
_NOT_LOADED = (
    b"Got LoRA adapter that has never been loaded",
    b"Failed to implicitly load LoRA adapter",
    b"requested LoRA adapters are not loaded",
)
# Engines get no client's key, so these refuse the router's: vLLM's --api-key, or a mesh or proxy in front of it.
_KEY_REFUSALS = frozenset({401, 403, 407})
# vLLM 0.32 scale_out/factories.py: a 403 at a route that its command line leaves off. The message says what to do.
_ROUTE_IS_OFF = b"--enable-scale-out"
LOSS_MESSAGES = {
    "connection": "no connection",
    "no_descriptors": "no connection, because this router has no file descriptor left",
    "no_answer": "it broke off before its answer began",
    "begun_only": "it broke off when its answer had begun and nothing more",
    "no_answer_in_time": "no answer in time",
    "hung": "its engine hangs, by its agent's word",
}


def unreachable(request: EngineRequest, lost: EngineLost) -> ReplicaUnreachable:
    """The failure of an attempt whose engine was lost before the client got anything."""
    # The message of the loss names addresses, which only the log may have.
    failure = ReplicaUnreachable(f"replica {request.replica}: {LOSS_MESSAGES[lost.reason]}", reason=lost.reason)
    failure.__cause__ = lost
    return failure


def retry_reason(status: int, first: bytes, request: EngineRequest, *, in_band_error: bool) -> str | None:
    """Why another replica may do better (a reason of core.failover.verdict); None: the client gets this answer."""
    if status in (502, 503):
        return "engine_unavailable"
    if status in _KEY_REFUSALS and not in_band_error and _ROUTE_IS_OFF not in first:
        return "engine_unauthorized"
    # A 404 for an unknown model names the model; any other (a route that the engine lacks) is the client's.
    if status == 404 and request.engine_name and request.engine_model.encode() in first:
        return "adapter_missing"
    if status == 400 and request.engine_name and any(said in first for said in _NOT_LOADED):
        return "adapter_missing"
    if status == 500 and _SHUTTING_DOWN in first:
        return "engine_draining"
    if status == 500 and says_dead(first):
        return "engine_dead"
    if in_band_error and is_fault(status):
        return "first_event_error"
    return None


def says_dead(error: bytes) -> bool:
    """Whether this error of an engine says that the engine has died."""
    return any(said in error for said in _DEAD)
