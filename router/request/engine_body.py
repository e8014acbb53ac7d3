"""A client's body as an engine gets it: refused and dropped fields, the engine's name of the model, and options."""

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import msgspec

from router.core.errors import BadBody, ReplicaUnreachable
from router.protocols.adapter_fields import RawFields, is_empty, is_empty_value, refuse_adapter_fields
from router.protocols.routes import PromptKind

Body = RawFields

_CACHES = "the fleet's own caches are not a client's to move"
_RANK = "the router chooses the engine, and the rank in it"
_SESSIONS = "sessions are pinned to engines; send the whole prompt, its prefix is cached anyway"

# Fields that steer engine, cache or index, by every name that an engine has for them. Those that choose an adapter are
# in `router.protocols.adapter_fields`.
REFUSED_FIELDS: Mapping[str, str] = {
    # llama.cpp
    "id_slot": _RANK,
    # Dynamo; what is no order is dropped, see `drop_nvext`
    "nvext": _RANK,
    # SGLang 0.5 managers/io_struct.py GenerateReqInput; its OpenAI routes take these, too
    "bootstrap_host": _CACHES,
    "bootstrap_pair_key": _CACHES,
    "bootstrap_port": _CACHES,
    "bootstrap_room": _CACHES,
    "custom_logit_processor": "it is code, run inside the engine",
    "data_parallel_rank": _RANK,
    "disagg_prefill_dp_rank": _RANK,
    "disagg_transfer_id": _CACHES,
    "dp_rank": _RANK,
    "extra_key": "use cache_salt",
    "http_worker_ipc": _RANK,
    "kv_router_hint": _CACHES,
    "routed_dp_rank": _RANK,
    "session_params": _SESSIONS,
    # vLLM 0.32 openai/*/protocol.py
    "ec_transfer_params": _CACHES,
    "kv_cache_report_mode": "the router asks for reports itself",
    "kv_transfer_params": _CACHES,
}
NVEXT = "nvext"
# Fields of Dynamo's `nvext` that change neither the answer nor the engine: hints, and further fields of the answer. ART
# asks for `extra_fields: ["engine_data"]`, and reads vLLM's own token ids where they are there.
_NVEXT_HINTS = frozenset({"agent_hints", "annotations", "extra_fields", "request_timestamp_ms"})
# The same within `vllm_xargs`: vLLM 0.32 v1/request.py reads these there.
REFUSED_EXTRA_ARGS: Mapping[str, str] = {
    "ec_transfer_params": _CACHES,
    "kv_cache_report_mode": "the router asks for reports itself",
    "kv_transfer_params": _CACHES,
}
# Fields that a client may send, and that no engine gets as they are. vLLM 0.32 takes a session from either place before
# it reads the header that has the one within its tenant (`router.protocols.sessions.engine_header`).
STRIPPED_FIELDS = frozenset({"lora_id", "lora_path", "session_id"})
STRIPPED_EXTRA_ARGS = frozenset({"session_id"})
# Where `/inference/v1/generate` has them: it passes its sampling parameters to the engine as they are.
_SAMPLING, _EXTRA_ARGS = "sampling_params", "extra_args"
# Its sampling parameters that routing needs; other routes have fields of these names.
_READ_SAMPLING = frozenset({"n", "max_tokens", "prompt_logprobs", "skip_reading_prefix_cache"})
# The headers of a client that an engine gets. vLLM 0.32 is steered by others (X-data-parallel-rank,
# X-Session-ID, X-Vllm-Priority, X-Request-Id); of these the router sends its own rank and request id.
FORWARDED_HEADERS = frozenset({b"traceparent", b"tracestate"})

_FULL = msgspec.Raw(b'"full"')
_TRUE = msgspec.Raw(b"true")
_UNSET = (b"null", b"false")
_UNASKED = (None, False)

# Fields with which the answer to ids differs from the answer to text. Some repeat or cut the prompt, and a text that
# the tokenizer normalizes does not come back from its ids. Others name an effort: vLLM 0.33 may put another one into
# the prompt (`--reasoning-effort-map`), which its /tokenize does not know.
_NEEDS_TEXT: Mapping[PromptKind, frozenset[str]] = {
    "completion": frozenset({"echo", "suffix", "prompt_embeds", "truncate_prompt_tokens"}),
    "chat": frozenset({"echo", "return_prompt_text", "truncate_prompt_tokens", "reasoning_effort"}),
    "responses": frozenset({"enable_response_messages", "reasoning"}),
    "messages": frozenset({"output_config", "thinking"}),
}


def refuse_steering(body: Body, extra_args: object) -> None:
    """Raise BadBody where a client's body steers engine or index, or chooses an adapter otherwise than by `lora_id`.

    Drop such fields from the body where they are empty: clients send all fields of their types, most of them null.

    extra_args  the decoded `vllm_xargs` field, if any
    """
    refuse_adapter_fields(body)
    if not REFUSED_FIELDS.keys().isdisjoint(body):
        for name in [name for name in body if name in REFUSED_FIELDS]:
            _refuse_field(name, REFUSED_FIELDS, is_empty=is_empty(body[name]))
            del body[name]
    if isinstance(extra_args, dict) and not REFUSED_EXTRA_ARGS.keys().isdisjoint(extra_args):
        unset = frozenset([name for name in extra_args if name in REFUSED_EXTRA_ARGS])
        for name in unset:
            _refuse_field(name, REFUSED_EXTRA_ARGS, "vllm_xargs.", is_empty=is_empty_value(extra_args[name]))
        if "vllm_xargs" in body:
            body["vllm_xargs"] = _without_fields(body["vllm_xargs"], unset)


def drop_nvext(body: Body) -> bool:
    """Drop the body's `nvext` where it holds only hints, and return whether it did; others are left to be refused."""
    try:
        hints = _fields(body[NVEXT])
    except msgspec.ValidationError:
        return False
    if not hints or not _NVEXT_HINTS.issuperset(name for name, raw in hints.items() if not is_empty(raw)):
        return False
    del body[NVEXT]
    return True


def sampling_fields(body: Body, sampling: object) -> dict[str, object]:
    """The sampling parameters of `/inference/v1/generate` that routing needs, by name.

    Raises BadBody where its `extra_args` steer engine or index; drops such ones from the body where they are empty.

    sampling  the decoded `sampling_params`
    """
    if not isinstance(sampling, dict):
        return {}
    extra_args = sampling.get(_EXTRA_ARGS)
    if isinstance(extra_args, dict) and not REFUSED_EXTRA_ARGS.keys().isdisjoint(extra_args):
        unset = frozenset([name for name in extra_args if name in REFUSED_EXTRA_ARGS])
        for name in unset:
            prefix = f"{_SAMPLING}.{_EXTRA_ARGS}."
            _refuse_field(name, REFUSED_EXTRA_ARGS, prefix, is_empty=is_empty_value(extra_args[name]))
        body[_SAMPLING] = _with_extra_args(body[_SAMPLING], dropped=unset)
    return {name: sampling[name] for name in _READ_SAMPLING.intersection(sampling)}


def _refuse_field(name: str, table: Mapping[str, str], prefix: str = "", *, is_empty: bool) -> None:
    """Raise BadBody for this field, with the table's reason, unless it is empty."""
    if not is_empty:
        raise BadBody(f"{prefix}{name} is not accepted: {table[name]}", param=prefix + name)


class EngineOptions(msgspec.Struct, frozen=True):
    """What the router itself asks an engine for, beside the client's fields.

    ask_usage    the usage event of a stream whose client did not ask; it must not reach the client
    report_full  events about reused blocks, too; a client's own other `vllm_xargs` stay. vLLM 0.32 (recorded
                 in tests/recordings) then sends one more BlockStored for each request that finds something cached, in
                 front of its step's events: all reused blocks from block 0 on, parent nil, in the shape of a real
                 store. It is no copy: no removal ever answers it. A request that waits for room is looked up, and
                 reported, again at each step (v1/core/kv_cache_manager.py get_computed_blocks). What is gone is not
                 reported. Embeddings have no such field, and vLLM ignores it there.
    response_id  the id of a stored response; empty: the engine chooses
    prompt       how the body holds its prompt
    prompt_ids   token ids that replace it, see `may_send_ids`; None: the engine tokenizes
    cache_salt   replaces the client's own; empty: that stays
    adapter      the engine's name of the adapter, for engines that do not select it by `model`; empty: the base model
    """

    ask_usage: bool = False
    report_full: bool = False
    response_id: str = ""
    prompt: PromptKind = "none"
    prompt_ids: "array[int] | None" = None
    cache_salt: str = ""
    adapter: str = ""


NO_OPTIONS = EngineOptions()


def vllm_body(body: Body, model: str, options: EngineOptions = NO_OPTIONS) -> bytes:
    """The body for vLLM: its name for the model, the options, and all other fields byte for byte.

    The body has each field once, as the router read it, so the engine sees no other value.

    model  the base model's served name, or `lora_id@digest12`
    """
    engine_body = _with_options(body, model, options)
    if "vllm_xargs" in engine_body:
        engine_body["vllm_xargs"] = _without_fields(engine_body["vllm_xargs"], STRIPPED_EXTRA_ARGS)
    if options.prompt == "token_ids" and _SAMPLING in engine_body:
        added = {"kv_cache_report_mode": _FULL} if options.report_full else {}
        engine_body[_SAMPLING] = _with_extra_args(engine_body[_SAMPLING], added, dropped=STRIPPED_EXTRA_ARGS)
    elif options.report_full:
        engine_body["vllm_xargs"] = _with_field(engine_body.get("vllm_xargs"), "kv_cache_report_mode", _FULL)
    if options.response_id:
        engine_body["request_id"] = msgspec.Raw(msgspec.json.encode(options.response_id))
    if options.prompt_ids is not None:
        ids = msgspec.Raw(msgspec.json.encode(options.prompt_ids.tolist()))
        if options.prompt == "completion":
            engine_body["prompt"] = ids
        else:
            # Made for the second half of a disaggregated pair, and taken without one: vLLM 0.32
            # renderers/online_renderer.py _reused_prompt_token_ids takes the ids out, and an empty rest is no order.
            engine_body["kv_transfer_params"] = msgspec.Raw(msgspec.json.encode({"prompt_token_ids": ids}))
    return msgspec.json.encode(engine_body)


def sglang_body(body: Body, model: str, options: EngineOptions = NO_OPTIONS) -> bytes:
    """The body for SGLang, which has no event reports, and keeps no responses under given ids.

    model  `served name:engine name`, or the base model's served name
    """
    return msgspec.json.encode(_with_options(body, model, options))


def sglang_native_body(
    native: Mapping[str, object], prompt: msgspec.Raw, adapter: str, cache_salt: str, request_id: str
) -> bytes:
    """The body of SGLang's own `/generate`, which selects an adapter by `lora_path`; empty: the base model.

    prompt      a text or token ids, as JSON
    cache_salt  called `extra_key` there; empty: none
    """
    own = {"text" if bytes(prompt).lstrip().startswith(b'"') else "input_ids": prompt, "rid": request_id}
    chosen = {"lora_path": adapter} if adapter else {}
    salted = {"extra_key": cache_salt} if cache_salt else {}
    return msgspec.json.encode({**native, **own, **chosen, **salted})


def sgl_jax_body(body: Body, model: str, options: EngineOptions = NO_OPTIONS) -> bytes:
    """The body for sgl-jax, which selects an adapter by `lora_path`, and calls a salt `extra_key`.

    model  the base model's served name
    """
    engine_body = _with_options(body, model, options)
    if options.adapter:
        engine_body["lora_path"] = _quoted_model(options.adapter)
    if "cache_salt" in engine_body:
        engine_body["extra_key"] = engine_body.pop("cache_salt")
    return msgspec.json.encode(engine_body)


@dataclass(frozen=True, slots=True)
class Dialect:
    """How requests to one kind of engine are written.

    model  (the base model's served name, engine name or "") -> value of `model` in request and answer
    body   (client's fields, that name, options) -> the bytes to send
    paths  where an adapter is selected; None: everywhere. At other paths the base model answers under its name
    salted_paths     where a `cache_salt` separates cached prompts; None: wherever the route has one
    completes_chats  a chat with an adapter goes there as a completion of its token ids
    has_tokenize     it has /tokenize
    """

    model: Callable[[str, str], str]
    body: Callable[[Body, str, EngineOptions], bytes]
    paths: frozenset[str] | None = None
    salted_paths: frozenset[str] | None = None
    completes_chats: bool = False
    has_tokenize: bool = True


def _vllm_model(model_name: str, engine_name: str) -> str:
    """The adapter's engine name, or the base model's served name."""
    return engine_name or model_name


def _sglang_model(model_name: str, engine_name: str) -> str:
    """`base:adapter`, or the base model's served name. Raises ReplicaUnreachable where that name has a colon.

    SGLang 0.5 takes any bare name for the base model; only `base:unknown` is an error there.
    """
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
        "/generate",
    }
)

# SGLang 0.5 hands a salt on where its request has an `extra_key` (entrypoints/openai/serving_base.py
# _compute_extra_key): requests for embeddings have none.
_SGLANG_SALTED = frozenset({"/v1/chat/completions", "/v1/completions", "/generate"})

# sgl-jax, read in its source: of its OpenAI routes completions alone hand `lora_path` on. Its chats are the base
# model's, so that an adapter's go there as completions.
_SGL_JAX_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})


def _base_model(model_name: str, engine_name: str) -> str:  # noqa: ARG001  (other dialects name the adapter)
    """The base model's served name, also for an adapter."""
    return model_name


# By the kind that a worker's agent reports (`transport.dialect` of its metadata). The sim speaks vLLM's.
DIALECTS: Mapping[str, Dialect] = {
    "vllm": Dialect(_vllm_model, vllm_body),
    "sglang": Dialect(_sglang_model, sglang_body, _SGLANG_PATHS, _SGLANG_SALTED),
    "sgl-jax": Dialect(
        _base_model, sgl_jax_body, _SGL_JAX_PATHS, _SGL_JAX_PATHS, completes_chats=True, has_tokenize=False
    ),
}


def dialect_of(kind: str, engine_name: str, path: str = "/v1/completions") -> Dialect:
    """The dialect of this kind of engine.

    raises  ReplicaUnreachable for an adapter on an unknown kind: it might answer from the base model.
            BadBody at a path where a known kind would: trying others would load the adapter on one after the other
    """
    known = DIALECTS.get(kind)
    if known is not None:
        if engine_name and known.paths is not None and path not in known.paths:
            message = f"this adapter is served by {kind}, which runs no adapter at {path}"
            raise BadBody(f"{message}; there is {', '.join(sorted(known.paths))}", param="model")
        return known
    if engine_name:
        raise ReplicaUnreachable(
            f"no adapter is sent to an engine of kind {kind!r}; known: {', '.join(sorted(DIALECTS))}",
            reason="unknown_dialect",
        )
    # The base model under its own name is plain OpenAI.
    return Dialect(_vllm_model, sglang_body, salted_paths=frozenset())


def require_salt(kind: str, dialect: Dialect, path: str) -> None:
    """Raise where this kind of engine cannot keep a caller's cached prompts apart at this path.

    raises  ReplicaUnreachable for an unknown kind: another replica may. BadBody where a known kind cannot
    """
    salted = dialect.salted_paths
    if salted is None or path in salted:
        return
    fix = "or set `cache: shared` for it, see docs/security.md"
    if not salted:
        message = f"engines of kind {kind!r} are not known to keep cached prompts of tenants apart"
        raise ReplicaUnreachable(
            f"{message}: serve the model with {', '.join(sorted(DIALECTS))}, {fix}", reason="unknown_dialect"
        )
    message = f"cached prompts are kept apart for each caller here, which {kind} cannot do at {path}"
    raise BadBody(f"{message}; there is {', '.join(sorted(salted))}, {fix}")


def may_send_ids(kind: PromptKind, body: Body, *, prompt_tokens: int, max_model_len: int) -> bool:
    """Whether vLLM 0.32 and 0.33 answer the prompt's ids exactly as its text (tests/contract/test_surface.py).

    A prompt that is too long, or empty, stays text: vLLM's error for it is another one.
    """
    needs_text = _NEEDS_TEXT.get(kind)
    if needs_text is None or not 0 < prompt_tokens < max_model_len:
        return False
    return all(bytes(body[name]) in _UNSET for name in needs_text if name in body)


def asks_for_usage(stream_options: object) -> bool:
    """Whether a client's decoded `stream_options` ask for the usage event, in any form that an engine accepts."""
    if not isinstance(stream_options, dict):
        return stream_options is not None
    # With the one set, the other puts usage into every chunk (vLLM 0.32). An engine refuses a value that is no boolean,
    # so it is not overwritten.
    return any(stream_options.get(name) not in _UNASKED for name in ("include_usage", "continuous_usage_stats"))


def _with_options(body: Body, model: str, options: EngineOptions) -> Body:
    """The body with the model's name, salt and usage option, and without fields that no engine gets."""
    engine_body = body.copy()
    if not STRIPPED_FIELDS.isdisjoint(body):
        for name in STRIPPED_FIELDS:
            engine_body.pop(name, None)
    engine_body["model"] = _quoted_model(model)
    if options.cache_salt:
        engine_body["cache_salt"] = _quoted_model(options.cache_salt)
    if options.ask_usage:
        engine_body["stream_options"] = _with_field(body.get("stream_options"), "include_usage", _TRUE)
    return engine_body


@lru_cache(maxsize=4096)
def _quoted_model(model: str) -> msgspec.Raw:
    """The name as a JSON string. Cached."""
    return msgspec.Raw(msgspec.json.encode(model))


def _with_field(given: msgspec.Raw | None, name: str, value: msgspec.Raw) -> msgspec.Raw:
    """A nested object with this field added or replaced; unchanged where it is no object."""
    try:
        fields = _fields(given) if given is not None else None
    except msgspec.ValidationError:
        assert given is not None
        return given  # no object: the engine refuses it
    return msgspec.Raw(msgspec.json.encode({**(fields or {}), name: value}))


def _without_fields(given: msgspec.Raw, names: frozenset[str]) -> msgspec.Raw:
    """A nested object without these fields; unchanged where it has none of them."""
    try:
        fields = _fields(given) or {}
    except msgspec.ValidationError:
        return given
    if not fields.keys() & names:
        return given
    return msgspec.Raw(msgspec.json.encode({name: value for name, value in fields.items() if name not in names}))


def _with_extra_args(
    sampling: msgspec.Raw, added: Mapping[str, msgspec.Raw] = MappingProxyType({}), *, dropped: frozenset[str]
) -> msgspec.Raw:
    """Sampling parameters whose `extra_args` have the added fields, and none of the dropped; unchanged else."""
    try:
        params = _fields(sampling) or {}
        args = (_fields(params[_EXTRA_ARGS]) or {}) if _EXTRA_ARGS in params else {}
    except msgspec.ValidationError:
        return sampling  # no object: the engine refuses it
    if not added and not args.keys() & dropped:
        return sampling
    kept = {**{name: value for name, value in args.items() if name not in dropped}, **added}
    return msgspec.Raw(msgspec.json.encode(params | {_EXTRA_ARGS: msgspec.Raw(msgspec.json.encode(kept))}))


_fields = msgspec.json.Decoder(dict[str, msgspec.Raw] | None).decode
