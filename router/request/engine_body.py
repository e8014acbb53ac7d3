"""A client's body -> the engine's: the names it may not use, and the name that the engine knows the adapter by."""

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from lorafleet.identity import adapter_salt
from router.core.errors import BadBody, ReplicaUnreachable
from router.protocols.routes import PromptKind, Route

Body = dict[str, msgspec.Raw]

_LORA = "use lora_id"
_CACHES = "the fleet's own caches are not a client's to move"
_RANK = "the router chooses the engine, and the rank in it"
_SESSIONS = "sessions are pinned to engines; send the whole prompt, its prefix is cached anyway"

# Fields that pick an adapter or steer engine, cache or index, by every name an engine has for it: four of seven engines
# answer from the base model when such a field names nothing, so only the router's own record may choose.
REFUSED_FIELDS: Mapping[str, str] = {
    # LoRAX and TGI
    "adapter_id": _LORA,
    "adapter_parameters": _LORA,
    "adapter_source": _LORA,
    # LMDeploy, and what several proxies call it
    "adapter": _LORA,
    "adapter_name": _LORA,
    "adapters": _LORA,
    # llama.cpp
    "id_slot": _RANK,
    "lora": _LORA,
    # TensorRT-LLM, Dynamo
    "lora_config": _LORA,
    "lora_request": _LORA,
    "nvext": _RANK,
    # vLLM's own load calls
    "lora_int_id": _LORA,
    "lora_modules": _LORA,
    "lora_name": _LORA,
    # SGLang 0.5 managers/io_struct.py GenerateReqInput; its OpenAI routes take these, too
    "bootstrap_host": _CACHES,
    "bootstrap_pair_key": _CACHES,
    "bootstrap_port": _CACHES,
    "bootstrap_room": _CACHES,
    "custom_logit_processor": "it is code, run inside the engine",
    "data_parallel_rank": _RANK,
    "disagg_prefill_dp_rank": _RANK,
    "extra_key": "use cache_salt",
    "http_worker_ipc": _RANK,
    "kv_router_hint": _CACHES,
    "lora_path": _LORA,
    "routed_dp_rank": _RANK,
    "session_params": _SESSIONS,
    # vLLM 0.32 openai/*/protocol.py
    "ec_transfer_params": _CACHES,
    "kv_cache_report_mode": "the router asks for reports itself",
    "kv_transfer_params": _CACHES,
}
# The same, one level down: vLLM 0.32 v1/request.py reads these from where it puts `vllm_xargs`.
REFUSED_EXTRA_ARGS: Mapping[str, str] = {
    "ec_transfer_params": _CACHES,
    "kv_cache_report_mode": "the router asks for reports itself",
    "kv_transfer_params": _CACHES,
}
# Harmless to ask for, but not the engine's to hear. vLLM 0.32 marks its KV events with a session
# (v1/core/block_pool.py), and takes it from either place.
STRIPPED_FIELDS = frozenset({"lora_id", "session_id"})
STRIPPED_EXTRA_ARGS = frozenset({"session_id"})
# All that an engine hears of a client's headers. vLLM 0.32 takes orders from others (X-data-parallel-rank,
# X-Session-ID, X-Vllm-Priority, X-Request-Id); of these the router sends its own rank and request id.
FORWARDED_HEADERS = frozenset({b"traceparent", b"tracestate"})

_FULL = msgspec.Raw(b'"full"')
_TRUE = msgspec.Raw(b"true")
_UNSET = (b"null", b"false")
# What a field may hold that its client does not use.
_NOTHING = frozenset({b"null", b"false", b"[]", b"{}", b'""'})
_UNASKED = (None, False)

# Fields with which an answer would show that the engine was given ids for a text: it repeats the prompt, or cuts it.
# A text that the tokenizer normalizes does not come back from its ids as it was. And fields that hold an effort: vLLM
# 0.33 may put another into the prompt (`--reasoning-effort-map`), which its /tokenize cannot be asked about.
_NEEDS_TEXT: Mapping[PromptKind, frozenset[str]] = {
    "completion": frozenset({"echo", "suffix", "prompt_embeds", "truncate_prompt_tokens"}),
    "chat": frozenset({"echo", "return_prompt_text", "truncate_prompt_tokens", "reasoning_effort"}),
    "responses": frozenset({"enable_response_messages", "reasoning"}),
    "messages": frozenset({"output_config", "thinking"}),
}


def refuse_steering(body: Body, extra_args: object) -> None:
    """Raises BadBody when a client's body steers engine or index. A field that says nothing, such as null, is taken out
    of the body: clients send all that their types have, and no engine need hear of it.

    extra_args  the decoded `vllm_xargs` field, if any
    """
    if not REFUSED_FIELDS.keys().isdisjoint(body):
        for name in [name for name in body if name in REFUSED_FIELDS]:
            _refuse(name, REFUSED_FIELDS, says_nothing=b"".join(bytes(body[name]).split()) in _NOTHING)
            del body[name]
    if isinstance(extra_args, dict) and not REFUSED_EXTRA_ARGS.keys().isdisjoint(extra_args):
        unset = frozenset([name for name in extra_args if name in REFUSED_EXTRA_ARGS])
        for name in unset:
            value = extra_args[name]
            # As JSON: to Python 0 is False, and as a rank it says something.
            _refuse(name, REFUSED_EXTRA_ARGS, "vllm_xargs.", says_nothing=msgspec.json.encode(value) in _NOTHING)
        if "vllm_xargs" in body:
            body["vllm_xargs"] = _without(body["vllm_xargs"], unset)


def _refuse(name: str, table: Mapping[str, str], prefix: str = "", *, says_nothing: bool) -> None:
    if not says_nothing:
        raise BadBody(f"{prefix}{name} is not accepted: {table[name]}", param=prefix + name)


class EngineOptions(msgspec.Struct, frozen=True):
    """What the router itself asks of an engine for one request.

    ask_usage    of a stream whose client did not; its last event must then not reach the client
    report_full  ask for events about reused blocks, too; a client's own other `vllm_xargs` stay. vLLM 0.32 (recorded
                 in tests/recordings) then sends one more BlockStored for each request that finds something cached, in
                 front of its step's events: all reused blocks from block 0 on, parent nil, in the shape of a real
                 store. It is no copy: no removal ever answers it. A request that waits for room is looked up, and
                 reported, again at each step (v1/core/kv_cache_manager.py get_computed_blocks). What is gone is not
                 reported. Embeddings have no such field, and vLLM ignores it there.
    response_id  the id that a stored response shall have; empty: the engine chooses
    prompt       how the body holds its prompt, and `prompt_ids` its ids, if the engine shall not make them again;
                 see `may_send_ids`
    cache_salt   in the place of the client's own; empty: that stays
    """

    ask_usage: bool = False
    report_full: bool = False
    response_id: str = ""
    prompt: PromptKind = "none"
    prompt_ids: "array[int] | None" = None
    cache_salt: str = ""


NO_WISHES = EngineOptions()


def dress_vllm(body: Body, model: str, wishes: EngineOptions = NO_WISHES) -> bytes:
    """The same body with vLLM's name for the model and without our own field; all else byte for byte.

    A body has each name once, as we read it, so the engine cannot see another value than the router did.

    model  the base model's served name, or `lora_id@digest12`
    """
    dressed = _plain(body, model, wishes)
    if "vllm_xargs" in dressed:
        dressed["vllm_xargs"] = _without(dressed["vllm_xargs"], STRIPPED_EXTRA_ARGS)
    if wishes.report_full:
        dressed["vllm_xargs"] = _with(dressed.get("vllm_xargs"), "kv_cache_report_mode", _FULL)
    if wishes.response_id:
        dressed["request_id"] = msgspec.Raw(msgspec.json.encode(wishes.response_id))
    if wishes.prompt_ids is not None:
        ids = msgspec.Raw(msgspec.json.encode(wishes.prompt_ids.tolist()))
        if wishes.prompt == "completion":
            dressed["prompt"] = ids
        else:
            # Made for the second half of a disaggregated pair, and taken without one: vLLM 0.32
            # renderers/online_renderer.py _reused_prompt_token_ids takes the ids out, and an empty rest is no order.
            dressed["kv_transfer_params"] = msgspec.Raw(msgspec.json.encode({"prompt_token_ids": ids}))
    return msgspec.json.encode(dressed)


def dress_sglang(body: Body, model: str, wishes: EngineOptions = NO_WISHES) -> bytes:
    """The same for SGLang, which has no reports to ask for and keeps no responses under names of ours.

    model  `served name:engine name`, or the base model's served name
    """
    return msgspec.json.encode(_plain(body, model, wishes))


@dataclass(frozen=True, slots=True)
class Dialect:
    """How to speak to a kind of engine.

    model  (the base model's served name, engine name or "") -> what goes into `model`, and comes back in the answer
    dress  (body, that name, wishes) -> the bytes to send
    paths  at which that name selects the adapter; None: at each. Elsewhere the base model answers under its name
    """

    model: Callable[[str, str], str]
    dress: Callable[[Body, str, EngineOptions], bytes]
    paths: frozenset[str] | None = None


def _vllm_model(model_name: str, engine_name: str) -> str:
    return engine_name or model_name


def _sglang_model(model_name: str, engine_name: str) -> str:
    """SGLang 0.5 takes a bare name for the base model, whatever it says; only `base:unknown` is an error there."""
    if ":" in model_name:
        raise ReplicaUnreachable(
            f"SGLang would take what follows the colon of {model_name!r} for an adapter; serve it under another name",
            reason="unknown_dialect",
        )
    return f"{model_name}:{engine_name}" if engine_name else model_name


# SGLang 0.5.23: all others take an adapter's name and leave it at that (entrypoints/openai/serving_*.py); /v1/responses
# and /v1/score, seen running, answer from the base model, with 200.
_SGLANG_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/tokenize",
        "/detokenize",
    }
)

# By the kind that a worker's agent reports (`transport.dialect` of its metadata). The sim speaks vLLM's.
DIALECTS: Mapping[str, Dialect] = {
    "vllm": Dialect(_vllm_model, dress_vllm),
    "sglang": Dialect(_sglang_model, dress_sglang, _SGLANG_PATHS),
}


def dialect_of(kind: str, engine_name: str, path: str = "/v1/completions") -> Dialect:
    """How to speak to this kind of engine.

    raises  ReplicaUnreachable for an adapter on a kind that we do not know: it might answer from the base model;
            BadBody at a path where a known one would. Another replica is not asked for: the adapter would be loaded
            on one after the other
    """
    known = DIALECTS.get(kind)
    if known is not None:
        if engine_name and known.paths is not None and path not in known.paths:
            message = f"this adapter is served by {kind}, which runs no adapter at {path}"
            raise BadBody(f"{message}; there are /v1/chat/completions, /v1/completions and /v1/messages", param="model")
        return known
    if engine_name:
        raise ReplicaUnreachable(
            f"no adapter is sent to an engine of kind {kind!r}; known: {', '.join(sorted(DIALECTS))}",
            reason="unknown_dialect",
        )
    # The base model under its own name is plain OpenAI.
    return Dialect(_vllm_model, dress_sglang)


def salt_for(route: Route, engine_name: str, cache_salt: object) -> str:
    """The `cache_salt` of a body for an engine where prompts are salted; empty: it has none.

    engine_name  of the adapter; empty for the base model
    cache_salt   the client's own, decoded
    raises       BadBody for a salt that is none, and for an adapter at a route whose body takes no salt: its answer
                 could come from another adapter's KV
    """
    if not route.computes:
        return ""
    if engine_name and not route.takes_salt:
        message = (
            f"this adapter is served by engines that keep adapters apart by cache_salt, which {route.path} has not"
        )
        raise BadBody(f"{message}; there are /v1/chat/completions, /v1/completions and /v1/embeddings", param="model")
    if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
        raise BadBody(f"cache_salt must be a text that is not empty, found {cache_salt!r}", param="cache_salt")
    return adapter_salt(engine_name, cache_salt or "")


def may_send_ids(kind: PromptKind, body: Body, *, prompt_tokens: int, max_model_len: int) -> bool:
    """Whether an engine given the prompt's ids answers exactly as it would the text, in vLLM 0.32 and 0.33.

    Seen running, bodies compared but for ids and times (tests/contract/test_surface.py). A prompt that is too long is
    left as text because vLLM words that error otherwise, an empty one because it is another error.
    """
    needs_text = _NEEDS_TEXT.get(kind)
    if needs_text is None or not 0 < prompt_tokens < max_model_len:
        return False
    return all(bytes(body[name]) in _UNSET for name in needs_text if name in body)


def asks_for_usage(stream_options: object) -> bool:
    """Whether a client's decoded `stream_options` ask for the usage event, in whatever form an engine may take."""
    if not isinstance(stream_options, dict):
        return stream_options is not None
    # With the one set, the other puts usage into every chunk (vLLM 0.32). What is no truth value is the engine's to
    # refuse, so it is not overwritten.
    return any(stream_options.get(name) not in _UNASKED for name in ("include_usage", "continuous_usage_stats"))


def _plain(body: Body, model: str, wishes: EngineOptions) -> Body:
    dressed = body.copy()
    if not STRIPPED_FIELDS.isdisjoint(body):
        for name in STRIPPED_FIELDS:
            dressed.pop(name, None)
    dressed["model"] = _quoted(model)
    if wishes.cache_salt:
        dressed["cache_salt"] = _quoted(wishes.cache_salt)
    if wishes.ask_usage:
        dressed["stream_options"] = _with(body.get("stream_options"), "include_usage", _TRUE)
    return dressed


@lru_cache(maxsize=4096)
def _quoted(model: str) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(model))


def _with(given: msgspec.Raw | None, name: str, value: msgspec.Raw) -> msgspec.Raw:
    """A nested object with one field more, or in the place of its own."""
    try:
        fields = _fields(given) if given is not None else None
    except msgspec.ValidationError:
        assert given is not None
        return given  # no object: the engine's to refuse
    return msgspec.Raw(msgspec.json.encode({**(fields or {}), name: value}))


def _without(given: msgspec.Raw, names: frozenset[str]) -> msgspec.Raw:
    """A nested object without these fields; as it came where it has none of them."""
    try:
        fields = _fields(given) or {}
    except msgspec.ValidationError:
        return given
    if not fields.keys() & names:
        return given
    return msgspec.Raw(msgspec.json.encode({name: value for name, value in fields.items() if name not in names}))


_fields = msgspec.json.Decoder(dict[str, msgspec.Raw] | None).decode
