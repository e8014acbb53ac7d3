"""A client's body -> the engine's: the names it may not use, and the name that the engine knows the adapter by."""

from collections.abc import Mapping
from typing import Any

import msgspec

from router.core.errors import BadBody

Body = dict[str, msgspec.Raw]

# Fields that pick an adapter or steer the engine's cache. Each engine has its own, and four of seven engines answer
# from the base model when such a field names nothing; only the router's own record may choose.
REFUSED_FIELDS: Mapping[str, str] = {
    "adapter_id": "use lora_id",
    "adapter_source": "use lora_id",
    "data_parallel_rank": "the router chooses the rank",
    "ec_transfer_params": "the fleet's own caches are not a client's to move",
    "kv_transfer_params": "the fleet's own caches are not a client's to move",
    "lora": "use lora_id",
    "lora_name": "use lora_id",
    "lora_path": "use lora_id",
    "lora_request": "use lora_id",
    "session_params": "sessions are pinned to engines; send the whole prompt, its prefix is cached anyway",
}
# The same, one level down: vLLM 0.32 v1/request.py reads these from where it puts `vllm_xargs`.
REFUSED_EXTRA_ARGS: Mapping[str, str] = {
    "ec_transfer_params": "the fleet's own caches are not a client's to move",
    "kv_cache_report_mode": "the router asks for reports itself",
    "kv_transfer_params": "the fleet's own caches are not a client's to move",
}

_FULL = msgspec.Raw(b'"full"')
_TRUE = msgspec.Raw(b"true")


def refuse_steering(body: Mapping[str, Any], extra_args: object) -> None:
    """Raises BadBody when a client's body steers engine or index.

    extra_args  the decoded `vllm_xargs` field, if any
    """
    nested = extra_args if isinstance(extra_args, dict) else {}
    for fields, table, prefix in ((body, REFUSED_FIELDS, ""), (nested, REFUSED_EXTRA_ARGS, "vllm_xargs.")):
        for name in fields:
            if name in table:
                raise BadBody(f"{prefix}{name} is not accepted: {table[name]}", param=prefix + name)


def dress_vllm(body: Body, model: str, *, report_full: bool = False, ask_usage: bool = False) -> bytes:
    """The same body with vLLM's name for the model and without our own field; all else byte for byte.

    model        the base model's served name, or `lora_id@digest12`
    ask_usage    of a stream whose client did not; its last event must then not reach the client
    report_full  ask for events about reused blocks, too; a client's own other `vllm_xargs` stay. vLLM 0.32 (recorded
                 in tests/recordings) then sends one more BlockStored for each request that finds something cached, in
                 front of its step's events: all reused blocks from block 0 on, parent nil, in the shape of a real
                 store. It is no copy: no removal ever answers it. A request that waits for room is looked up, and
                 reported, again at each step (v1/core/kv_cache_manager.py get_computed_blocks). What is gone is not
                 reported. Embeddings have no such field, and vLLM ignores it there.
    """
    dressed = {name: value for name, value in body.items() if name != "lora_id"}
    dressed["model"] = msgspec.Raw(msgspec.json.encode(model))
    if report_full:
        dressed["vllm_xargs"] = _with(body.get("vllm_xargs"), "kv_cache_report_mode", _FULL)
    if ask_usage:
        dressed["stream_options"] = _with(body.get("stream_options"), "include_usage", _TRUE)
    return msgspec.json.encode(dressed)


def _with(given: msgspec.Raw | None, name: str, value: msgspec.Raw) -> msgspec.Raw:
    """A nested object with one field more, or in the place of its own."""
    try:
        fields = msgspec.json.decode(given, type=dict[str, msgspec.Raw] | None) if given is not None else None
    except msgspec.ValidationError:
        assert given is not None
        return given  # no object: the engine's to refuse
    return msgspec.Raw(msgspec.json.encode({**(fields or {}), name: value}))


def asks_for_usage(stream_options: object) -> bool:
    """Whether a client's decoded `stream_options` ask for the usage event, in whatever form an engine may take."""
    if not isinstance(stream_options, dict):
        return stream_options is not None
    # With the one set, the other puts usage into every chunk (vLLM 0.32).
    return bool(stream_options.get("include_usage") or stream_options.get("continuous_usage_stats"))
