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
    "kv_transfer_params": "the fleet's own caches are not a client's to move",
    "lora": "use lora_id",
    "lora_name": "use lora_id",
    "lora_path": "use lora_id",
    "lora_request": "use lora_id",
    "session_params": "sessions are pinned to engines; send the whole prompt, its prefix is cached anyway",
}
# The same, one level down.
REFUSED_EXTRA_ARGS: Mapping[str, str] = {"kv_cache_report_mode": "the router asks for reports itself"}


def refuse_steering(body: Mapping[str, Any], extra_args: object) -> None:
    """Raises BadBody when a client's body steers engine or index.

    extra_args  the decoded `vllm_xargs` field, if any
    """
    nested = extra_args if isinstance(extra_args, dict) else {}
    for fields, table, prefix in ((body, REFUSED_FIELDS, ""), (nested, REFUSED_EXTRA_ARGS, "vllm_xargs.")):
        for name in fields:
            if name in table:
                raise BadBody(f"{prefix}{name} is not accepted: {table[name]}", param=prefix + name)


def dress_vllm(body: Body, model: str) -> bytes:
    """The same body with vLLM's name for the model and without our own field; all else byte for byte.

    model  the base model's served name, or `lora_id@digest12`
    """
    dressed = {name: value for name, value in body.items() if name != "lora_id"}
    dressed["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.json.encode(dressed)
