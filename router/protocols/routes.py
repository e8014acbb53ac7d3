"""The inference routes: one table row holds everything the handler needs to know of a route.

Source: vLLM 0.32 and 0.33 entrypoints (`*/api_router.py`), each row seen on a running engine, with and without an
adapter (tests/contract/test_surface.py); pooling rows on one started with `--runner pooling`.

docs/routes.md has every route of vLLM's, and router/api/not_offered.py those that are not offered.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

PromptKind = Literal["chat", "completion", "input", "responses", "messages", "token_ids", "none"]
"""The form of a body's prompt, from which its token ids and KV blocks are computed."""

UsageKind = Literal["openai", "responses", "messages", "sglang", "none"]
"""The form of an answer's usage, see `router.protocols.usage`."""

AdapterUse = Literal["runs", "names"]
"""`runs`: the engine must have the adapter loaded. `names`: the adapter's name alone is used (tokens are the base
model's), so any replica of the base model answers."""

StateUse = Literal["none", "makes", "needs"]
"""`makes`: the answer is stored at its engine and can be read by its id. `needs`: reads such an answer."""

ErrorShape = Literal["openai", "anthropic"]

_COMMON_FIELDS = frozenset(
    {
        "model",
        "lora_id",
        "lora_path",
        "stream",
        "cache_salt",
        "vllm_xargs",
        "stream_options",
        "user",
        "session_id",
        "priority",
        "request_id",
    }
)
_CHAT_FIELDS = frozenset(
    {
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "add_special_tokens",
        "chat_template",
        "chat_template_kwargs",
        "documents",
        "media_io_kwargs",
        "mm_processor_kwargs",
        "reasoning_effort",
        "truncate_prompt_tokens",
        "echo",
        "return_prompt_text",
    }
)
# Fields that change what an engine's answer reports as cached.
_SAMPLING_FIELDS = frozenset({"n", "use_beam_search", "prompt_logprobs", "logprobs"})
# An upper bound for `n`: more than any engine accepts.
_MAX_ANSWERS = 10**9
_SCORED_FIELDS = ("documents", "items", "text_2", "data_2")
_PROMPT_FIELDS: Mapping[PromptKind, frozenset[str]] = {
    "chat": _CHAT_FIELDS | _SAMPLING_FIELDS,
    "completion": frozenset({"prompt", "add_special_tokens", "truncate_prompt_tokens", "suffix", "echo"})
    | _SAMPLING_FIELDS,
    "responses": frozenset(
        {
            "input",
            "instructions",
            "tools",
            "reasoning",
            "chat_template_kwargs",
            "mm_processor_kwargs",
            "media_io_kwargs",
            "previous_input_messages",
            "truncation",
        }
    ),
    "messages": frozenset({"system", "messages", "tools", "thinking", "output_config", "chat_template_kwargs"}),
    "input": frozenset(
        {
            "input",
            "messages",
            "add_generation_prompt",
            "continue_final_message",
            "add_special_tokens",
            "chat_template",
            "chat_template_kwargs",
            "media_io_kwargs",
            "mm_processor_kwargs",
            "padding",
            "truncate_prompt_tokens",
        }
    ),
    "token_ids": frozenset({"token_ids", "sampling_params", "features", "content_parts"}),
    "none": frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One inference route.

    method, path  as clients and engines have it; `{id}` stands for one path segment
    generates     whether it decodes tokens; else it takes one prefill at most
    streams       whether `stream: true` is accepted
    hides_usage   whether the router may request a stream's usage by `stream_options` and hide it from the client
    has_body      whether a JSON object is required
    computes      whether it takes a slot at the engine; False if it only counts or spells tokens
    early_events  event types of a stream that the engine sends before it computes anything
    final_events  event types that only a stream's last event has, besides `[DONE]`
    signs         whether its answers have a `system_fingerprint`
    takes_salt    whether its `cache_salt` reaches the engine's block hashes (vLLM 0.32, read in its source)
    lists         body fields that may hold several texts; the engine makes a sequence of each
    fields        body fields to decode; the rest is forwarded unread
    """

    method: Literal["GET", "POST"] = "POST"
    path: str
    summary: str
    prompt: PromptKind = "none"
    generates: bool = False
    streams: bool = False
    usage: UsageKind = "openai"
    hides_usage: bool = False
    echoes_model: bool = True
    adapter: AdapterUse = "runs"
    state: StateUse = "none"
    errors: ErrorShape = "openai"
    early_events: frozenset[bytes] = frozenset()
    final_events: frozenset[bytes] = frozenset()
    signs: bool = False
    takes_salt: bool = True
    lists: tuple[str, ...] = ()
    has_body: bool = field(init=False)
    computes: bool = field(init=False)
    fields: frozenset[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Set the fields that follow from the others: `has_body`, `computes`, `fields`."""
        stored_fields = frozenset({"previous_response_id", "background"}) if self.state == "makes" else frozenset()
        object.__setattr__(self, "has_body", self.state != "needs")
        object.__setattr__(self, "computes", self.adapter == "runs")
        object.__setattr__(self, "fields", _COMMON_FIELDS | _PROMPT_FIELDS[self.prompt] | stored_fields | {*self.lists})

    @property
    def operation(self) -> str:
        """The operation's name in OpenTelemetry's conventions: `embeddings` for every route that does not generate."""
        if not self.generates:
            return "embeddings"
        return "text_completion" if self.prompt in ("completion", "token_ids") else "chat"


COMPLETIONS = "/v1/completions"
# vLLM has it where it was started with --enable-scale-out; agents start it so.
GENERATE_TOKENS = "/inference/v1/generate"
_EARLY_EVENTS = frozenset({b"response.queued", b"response.created", b"response.in_progress"})
_FINAL_EVENTS = frozenset({b"response.completed", b"response.incomplete", b"response.failed", b"response.cancelled"})

_ROWS = (
    Route(
        path="/v1/chat/completions",
        signs=True,
        summary="A chat completion",
        prompt="chat",
        generates=True,
        streams=True,
        hides_usage=True,
    ),
    Route(
        path="/v1/chat/completions/batch",
        signs=True,
        summary="Several chats, one answer each",
        generates=True,
        lists=("messages",),
    ),
    Route(
        path=COMPLETIONS,
        signs=True,
        summary="A text completion",
        prompt="completion",
        generates=True,
        streams=True,
        hides_usage=True,
        lists=("prompt",),
    ),
    Route(
        path=GENERATE_TOKENS,
        summary="Token ids continued, in vLLM's own form",
        prompt="token_ids",
        generates=True,
        streams=True,
        hides_usage=True,
    ),
    Route(
        path="/v1/responses",
        summary="A response, in OpenAI's newer form",
        prompt="responses",
        generates=True,
        streams=True,
        usage="responses",
        state="makes",
        early_events=_EARLY_EVENTS,
        final_events=_FINAL_EVENTS,
    ),
    Route(
        method="GET",
        path="/v1/responses/{id}",
        summary="A stored response",
        usage="none",
        state="needs",
        final_events=_FINAL_EVENTS,
    ),
    Route(path="/v1/responses/{id}/cancel", summary="Cancel a response in the background", usage="none", state="needs"),
    Route(
        path="/v1/messages",
        summary="A message, in Anthropic's form",
        prompt="messages",
        generates=True,
        streams=True,
        usage="messages",
        errors="anthropic",
        final_events=frozenset({b"message_stop"}),
    ),
    Route(
        path="/v1/messages/count_tokens",
        summary="How many tokens a message would take",
        usage="none",
        echoes_model=False,
        adapter="names",
        errors="anthropic",
    ),
    Route(path="/v1/embeddings", summary="Embeddings", prompt="input", lists=("input",)),
    Route(
        path="/v2/embed",
        summary="Embeddings, in Cohere's form",
        usage="none",
        echoes_model=False,
        takes_salt=False,
        lists=("texts", "inputs"),
    ),
    Route(path="/pooling", summary="What the model's pooler gives", lists=("input",)),
    Route(path="/classify", summary="Classes of a text", prompt="input", lists=("input",)),
    Route(path="/score", summary="Similarity of texts", lists=_SCORED_FIELDS),
    Route(path="/v1/score", summary="Similarity of texts", lists=_SCORED_FIELDS),
    Route(path="/rerank", summary="Documents by relevance to a query", lists=_SCORED_FIELDS),
    Route(path="/v1/rerank", summary="Documents by relevance to a query", lists=_SCORED_FIELDS),
    Route(path="/v2/rerank", summary="Documents by relevance to a query", lists=_SCORED_FIELDS),
    Route(path="/generative_scoring", summary="Probability of labels as the next token", lists=_SCORED_FIELDS),
    Route(
        path="/v1/systemone",
        summary="Answers to several questions about one state",
        usage="none",
        lists=("questions",),
    ),
    Route(
        path="/v1/decisions",
        summary="Answers to several questions about one input, in OpenAI's form",
        usage="responses",
        lists=("questions",),
    ),
    Route(path="/tokenize", summary="Token ids of a prompt", usage="none", echoes_model=False, adapter="names"),
    Route(path="/detokenize", summary="Text of token ids", usage="none", echoes_model=False, adapter="names"),
)

ROUTES: Mapping[tuple[str, str], Route] = {(route.method, route.path): route for route in _ROWS}
"""By method and path. `/generate` is in `sglang_generate`, since its items are completions."""

_RESPONSES = "/v1/responses/"


def find_route(method: str, path: str) -> Route | None:
    """The inference route of a method and path; None if there is none."""
    route = ROUTES.get((method, path))
    if route is not None or not path.startswith(_RESPONSES):
        return route
    response_id = path[len(_RESPONSES) :]
    if method == "POST" and response_id.endswith("/cancel"):
        response_id, template = response_id[: -len("/cancel")], "/v1/responses/{id}/cancel"
    else:
        template = "/v1/responses/{id}"
    return ROUTES.get((method, template)) if response_id and "/" not in response_id else None


# Fields that mark a body with `input` as a response request, not an embedding request.
_RESPONSE_MARKS = (b'"role"', b'"instructions"', b'"max_output_tokens"', b'"tools"', b'"previous_response_id"')


def likely_route(body: bytes) -> Route:
    """The route that a body is most likely meant for, as `POST /v1/route` takes bodies of all routes."""
    is_response = any(mark in body for mark in _RESPONSE_MARKS)
    for name, path in (
        (b'"messages"', "/v1/chat/completions"),
        (b'"prompt"', COMPLETIONS),
        (b'"input"', "/v1/responses" if is_response else "/v1/embeddings"),
    ):
        if name in body:
            return ROUTES["POST", path]
    return ROUTES["POST", "/v1/chat/completions"]


def sequence_count(route: Route, decoded: Mapping[str, Any]) -> int:
    """The number of sequences an engine computes for a body: `n` answers to each text; 1 for an invalid body.

    decoded  the body's fields that the route names
    """
    texts = max([_text_count(name, decoded.get(name)) for name in route.lists], default=1)
    n = decoded.get("n")
    if n is None:
        return texts
    try:
        return texts * min(_MAX_ANSWERS, max(1, int(n)))  # vLLM reads "2" and 2.0 as 2
    except (TypeError, ValueError, OverflowError):
        return texts


def _text_count(name: str, value: object) -> int:
    """The number of texts in a body field: a list's length, but 1 for one text's ids, one chat, or any other value."""
    if not isinstance(value, list | dict) or not value:
        return 1
    first = value[0] if isinstance(value, list) else None
    # The ids of one text, or the messages of one conversation.
    is_one = isinstance(first, int) or (name == "input" and isinstance(first, dict))
    return 1 if is_one else len(value)


def response_id_of(path: str) -> str:
    """The `{id}` in the path of a route that reads a stored response."""
    return path[len(_RESPONSES) :].removesuffix("/cancel")


def has_only_early_events(route: Route, events: bytes) -> bool:
    """Whether a stream's beginning has only events that precede any computation, so that a retry is still possible.

    events  the bytes so far; an incomplete event at the end is ignored

    vLLM 0.32 sends `response.created` and `response.in_progress` before the engine has seen the request
    (openai/responses/serving.py responses_stream_generator). Chat and messages have no such events.
    """
    if not route.early_events:
        return False
    whole = events[: events.rfind(b"\n\n") + 1].split(b"\n\n")
    return bool(whole[0]) and all(event_type(event) in route.early_events for event in whole if event)


def event_type(event: bytes) -> bytes:
    """The type of one event of a stream; empty if it has none."""
    first_line = event.strip(b"\n").partition(b"\n")[0]
    return first_line[len(b"event:") :].strip() if first_line.startswith(b"event:") else b""
