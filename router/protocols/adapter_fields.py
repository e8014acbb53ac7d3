"""How a request names its adapter: in `lora_id` or `lora_path`, which mean the same, or in `model`.

Every other name for an adapter is refused, wherever it stands. An engine ignores a field that it does not know, so the
base model would answer for the adapter. Such names differ from gateway to gateway, and none of a request's ordinary
fields has one of their words: so the word decides, not a list. Seen in use: `adapter_id` (LoRAX, TGI, there within
`parameters`), `adapters` (MLX, DJL), `lora` (llama.cpp, Cloudflare), `lora_request` (TensorRT-LLM), `lora_adapter_name`
(ServerlessLLM), `generate_config.adapter_name` (RTP-LLM), `lora_dir` (S-LoRA), `loras` (TabbyAPI), `peft` (OctoAI),
`X-Amzn-SageMaker-Adapter-Identifier` (SageMaker).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from router.core.errors import BadBody
from router.protocols.bodies import per_item

RawFields = dict[str, msgspec.Raw]

LORA_ID = "lora_id"
LORA_PATH = "lora_path"
"""SGLang's name for the field."""
EXTRA_BODY = "extra_body"
"""An argument of OpenAI's Python client, which merges it into the body. Other clients send it as it is."""

# Fields whose objects have keys of the client's own: schemas, labels, variables of a chat template, texts.
_CLIENT_KEYED = frozenset(
    {
        "audio",
        "chat_template_kwargs",
        "content_parts",
        "features",
        "input_ids",
        "token_ids",
        "token_offsets",
        "conversation",
        "data_1",
        "data_2",
        "documents",
        "function_call",
        "functions",
        "guided_json",
        "input",
        "inputs",
        "items",
        "json_schema",
        "labels",
        "logit_bias",
        "media_io_kwargs",
        "messages",
        "metadata",
        "mm_processor_kwargs",
        "output_config",
        "prediction",
        "previous_input_messages",
        "prompt",
        "queries",
        "query",
        "questions",
        "reasoning",
        "response_format",
        "state",
        "stream_options",
        "structured_outputs",
        "system",
        "tags",
        "text",
        "text_1",
        "text_2",
        "thinking",
        "tool_choice",
        "tools",
    }
)
# Most requests have no other fields, and are not looked at further.
_ORDINARY = _CLIENT_KEYED | {
    LORA_ID,
    LORA_PATH,
    "cache_salt",
    "encoding_format",
    "frequency_penalty",
    "ignore_eos",
    "logprobs",
    "max_completion_tokens",
    "max_output_tokens",
    "max_tokens",
    "model",
    "n",
    "presence_penalty",
    "seed",
    "stop",
    "stream",
    "temperature",
    "top_k",
    "top_logprobs",
    "top_p",
    "user",
}
# A word begins where no letter is before it, or where a capital follows a small letter: `exploration` has none.
_ADAPTER_WORD = re.compile(r"(?:(?<![A-Za-z])|(?<=[a-z])(?=[A-Z]))(?i:q?lora|adapter|peft)")
# Header names come in small letters. Clients of SageMaker send the first.
ADAPTER_HEADERS = frozenset(
    {
        b"x-amzn-sagemaker-adapter-identifier",
        b"adapter-id",
        b"lora-id",
        b"x-adapter",
        b"x-adapter-id",
        b"x-adapter-name",
        b"x-lora",
        b"x-lora-adapter",
        b"x-lora-id",
        b"x-lora-name",
        b"x-lora-path",
        b"x-lorafleet-adapter",
    }
)
_EMPTY_VALUES = frozenset({b"null", b"false", b"[]", b"{}", b'""'})
_OPENERS = (b"{", b"[")

_decode_fields = msgspec.json.Decoder(RawFields | None).decode
_decode_any = msgspec.json.Decoder().decode


@lru_cache(maxsize=4096)
def is_adapter_name(name: str) -> bool:
    """Whether a field of this name chooses an adapter by its words: `loraAdapter`, `peft-model`. Cached."""
    return _ADAPTER_WORD.search(name) is not None


def is_empty(raw: msgspec.Raw) -> bool:
    """Whether a field says nothing: null, false, or an empty list, object or text. Clients send all of their fields."""
    return b"".join(bytes(raw).split()) in _EMPTY_VALUES


def is_empty_value(value: object) -> bool:
    """As `is_empty`, of a decoded field. 0 is not empty: to Python it is equal to False, and it may be a rank."""
    return value is None or value is False or value in ("", [], {})


def refuse_adapter_fields(body: RawFields) -> None:
    """Raise BadBody where a field chooses an adapter by another name, at the top of the body or within an object.

    Drops such fields from the body where they are empty.
    """
    if _ORDINARY.issuperset(body):
        return
    for name in [name for name in body if name not in _ORDINARY]:
        if is_adapter_name(name):
            if not is_empty(body[name]):
                raise adapter_field_error(name)
            del body[name]
        elif bytes(body[name]).lstrip()[:1] in _OPENERS:
            # Fields of an object that this server does not know are a gateway's parameters.
            nested = _nested_adapter_field(_decode_any(body[name]), name)
            if nested is not None:
                raise adapter_field_error(nested)


def refuse_adapter_headers(headers: Mapping[bytes, bytes], query: bytes) -> None:
    """Raise BadBody where a header, or a parameter of the query, chooses an adapter."""
    if not ADAPTER_HEADERS.isdisjoint(headers):
        name = min(ADAPTER_HEADERS.intersection(headers)).decode()
        raise BadBody(f"header {name} chooses no adapter here: use lora_id, in the body", param=name)
    if query:
        for name, value in parse_qsl(query.decode("latin-1")):
            if value and (name == LORA_ID or is_adapter_name(name)):
                raise BadBody(f"{name} in the query chooses no adapter here: use lora_id, in the body", param=name)


def adapter_field_error(name: str) -> BadBody:
    """The error for a field that chooses an adapter by another name than `lora_id`."""
    where = ", at the top of the body" if "." in name else ""
    return BadBody(f"{name} is not accepted: use lora_id{where}", param=name)


def with_extra_body(body: RawFields) -> RawFields:
    """The body with the fields of a literal `extra_body` object in it, as OpenAI's Python client merges them.

    raises  BadBody where it is no object, or holds another `extra_body`
    """
    try:
        extra = _decode_fields(body[EXTRA_BODY])
    except msgspec.ValidationError as exc:
        raise BadBody(f"{EXTRA_BODY} must be an object: {exc}", param=EXTRA_BODY) from exc
    if extra is not None and EXTRA_BODY in extra:
        raise BadBody(f"{EXTRA_BODY} has an {EXTRA_BODY} within; send its fields in the body", param=EXTRA_BODY)
    return {name: raw for name, raw in body.items() if name != EXTRA_BODY} | (extra or {})


def chosen_adapter(decoded: Mapping[str, Any]) -> tuple[str, Any]:
    """The field that names the adapter, `lora_id` or `lora_path`, and its value; ("lora_id", None) for no adapter.

    decoded  the decoded fields of the body
    raises   BadBody where both name something, and not the same
    """
    lora_id, lora_path = decoded.get(LORA_ID), decoded.get(LORA_PATH)
    if lora_path is None or is_empty_value(lora_path):
        return LORA_ID, lora_id
    if lora_id and lora_id != lora_path:
        message = f"{LORA_ID} {lora_id!r} and {LORA_PATH} {lora_path!r} differ; leave one of them out"
        raise BadBody(message, param=LORA_PATH)
    return LORA_PATH, lora_path


def prompt_adapters(name: str, adapters: list[Any], prompt: object) -> Any:
    """The adapter of all prompts of a text completion; a list of them, one for each prompt, where they differ.

    name      the field that has the list
    adapters  its value: a name or null for each prompt
    prompt    the decoded prompts
    raises    BadBody, where there is not one for each prompt
    """
    texts = text_list(prompt)
    found = per_item(name, adapters, len(texts or ("",)), is_list=texts is not None)
    return found if any(adapter != found[0] for adapter in found) else found[0] or None


def text_list(prompt: object) -> list[Any] | None:
    """The prompts in a completion's `prompt`, each a text or a list of token ids; None where it is one prompt."""
    is_list = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    return prompt if is_list else None  # type: ignore[return-value]


def _nested_adapter_field(value: object, path: str) -> str | None:
    """The path of the first field within this value that chooses an adapter and is not empty; None without one."""
    parts: Iterable[tuple[str, object]] = ()
    if isinstance(value, dict):
        for name, part in value.items():
            if is_adapter_name(name) and not is_empty_value(part):
                return f"{path}.{name}"
        parts = ((f"{path}.{name}", part) for name, part in value.items() if name not in _CLIENT_KEYED)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        parts = ((path, part) for part in value)
    return next((found for name, part in parts if (found := _nested_adapter_field(part, name)) is not None), None)
