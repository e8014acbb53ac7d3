"""The inference routes: one row says all that the handler must know of one.

Source: vLLM 0.32 and 0.33 entrypoints (`*/api_router.py`), each row seen on a running engine, with and without an
adapter (tests/contract/test_surface.py); pooling rows on one started with `--runner pooling`.

Not offered, on purpose:
- `/v1/audio/*`, `/v1/realtime`: not text; multipart bodies and websockets.
- `/inference/v1/generate`, `/v1/*/render`, `/v1/*/derender`: the inside of a disaggregated fleet. They take raw
  sampling parameters, whose `extra_args` steer engine and index.
- `/invocations`, `/adapters`: SageMaker's second door to everything, past every check here.
- `/cohere/v2/chat`: off unless an engine is told otherwise, and `/v1/chat/completions` does the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

PromptKind = Literal["chat", "completion", "responses", "messages", "none"]
"""How a body holds its one prompt: what its token ids, and so its KV blocks, are made from."""

UsageKind = Literal["openai", "responses", "messages", "none"]
"""How an answer tells what it took, see `router.protocols.usage`."""

AdapterUse = Literal["runs", "names"]
"""`runs`: the engine must hold the adapter. `names`: it is only a name there (tokens are the base model's), so any
replica of the base model answers and nothing is loaded."""

StateUse = Literal["none", "makes", "needs"]
"""`makes`: an answer may be asked for again by its id, at the same engine. `needs`: asks for such an answer."""

ErrorShape = Literal["openai", "anthropic"]

_COMMON = frozenset(
    {"model", "lora_id", "stream", "cache_salt", "vllm_xargs", "stream_options", "user", "priority", "request_id"}
)
_CHAT_PROMPT = frozenset(
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
# With these an engine's answer says less, or other things, of what it had cached.
_SAMPLING = frozenset({"n", "use_beam_search", "prompt_logprobs", "logprobs"})
# More than any engine takes, and no number of thousands of digits.
_MOST_ANSWERS = 10**9
_SCORED = ("documents", "items", "text_2", "data_2")
_PROMPT_FIELDS: Mapping[PromptKind, frozenset[str]] = {
    "chat": _CHAT_PROMPT | _SAMPLING,
    "completion": frozenset({"prompt", "add_special_tokens", "truncate_prompt_tokens", "suffix", "echo"}) | _SAMPLING,
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
    "none": frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One call of the surface.

    method, path  what a client calls; `{id}` stands for one part of a path. The engine has it under the same path
    generates     decodes tokens, so its load lasts; False: one prefill (or none), and its answer is its end
    streams       `stream: true` is taken
    hides_usage   a stream may be asked for its usage with `stream_options`, which the client then does not see
    has_body      a JSON object must come with it
    computes      has the engine compute something, and so takes room there; False: it counts or spells tokens
    begun         event types of a stream that come before the engine has done anything: they decide nothing, so they
                  wait for what follows
    ends          event types that only the last event of a stream has, where that is not `[DONE]` alone
    takes_salt    its body has `cache_salt`, which reaches the engine's block hashes (vLLM 0.32, read in its source)
    lists         fields of the body that may hold several texts, of each of which the engine makes a sequence
    fields        of the body to decode; the rest is sent on without being looked at
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
    begun: frozenset[bytes] = frozenset()
    ends: frozenset[bytes] = frozenset()
    takes_salt: bool = True
    lists: tuple[str, ...] = ()
    has_body: bool = field(init=False)
    computes: bool = field(init=False)
    fields: frozenset[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        kept = frozenset({"previous_response_id", "background"}) if self.state == "makes" else frozenset()
        object.__setattr__(self, "has_body", self.state != "needs")
        object.__setattr__(self, "computes", self.adapter == "runs")
        object.__setattr__(self, "fields", _COMMON | _PROMPT_FIELDS[self.prompt] | kept | {*self.lists})

    @property
    def operation(self) -> str:
        """Its name in OpenTelemetry's conventions for generative AI."""
        if not self.generates:
            return "embeddings"
        return "text_completion" if self.prompt == "completion" else "chat"


_BEGUN = frozenset({b"response.queued", b"response.created", b"response.in_progress"})
_RESPONSE_ENDS = frozenset({b"response.completed", b"response.incomplete", b"response.failed", b"response.cancelled"})

_ROWS = (
    Route(
        path="/v1/chat/completions",
        summary="A chat completion",
        prompt="chat",
        generates=True,
        streams=True,
        hides_usage=True,
    ),
    Route(
        path="/v1/chat/completions/batch",
        summary="Several chats, one answer each",
        generates=True,
        lists=("messages",),
    ),
    Route(
        path="/v1/completions",
        summary="A text completion",
        prompt="completion",
        generates=True,
        streams=True,
        hides_usage=True,
        lists=("prompt",),
    ),
    Route(
        path="/v1/responses",
        summary="A response, in OpenAI's newer form",
        prompt="responses",
        generates=True,
        streams=True,
        usage="responses",
        state="makes",
        begun=_BEGUN,
        ends=_RESPONSE_ENDS,
    ),
    Route(
        method="GET",
        path="/v1/responses/{id}",
        summary="A stored response",
        usage="none",
        state="needs",
        ends=_RESPONSE_ENDS,
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
        ends=frozenset({b"message_stop"}),
    ),
    Route(
        path="/v1/messages/count_tokens",
        summary="How many tokens a message would take",
        usage="none",
        echoes_model=False,
        adapter="names",
        errors="anthropic",
    ),
    Route(path="/v1/embeddings", summary="Embeddings", lists=("input",)),
    Route(
        path="/v2/embed",
        summary="Embeddings, in Cohere's form",
        usage="none",
        echoes_model=False,
        takes_salt=False,
        lists=("texts", "inputs"),
    ),
    Route(path="/pooling", summary="What the model's pooler gives", lists=("input",)),
    Route(path="/classify", summary="Classes of a text", lists=("input",)),
    Route(path="/score", summary="Similarity of texts", takes_salt=False, lists=_SCORED),
    Route(path="/v1/score", summary="Similarity of texts", takes_salt=False, lists=_SCORED),
    Route(path="/rerank", summary="Documents by relevance to a query", takes_salt=False, lists=_SCORED),
    Route(path="/v1/rerank", summary="Documents by relevance to a query", takes_salt=False, lists=_SCORED),
    Route(path="/v2/rerank", summary="Documents by relevance to a query", takes_salt=False, lists=_SCORED),
    Route(path="/generative_scoring", summary="Probability of labels as the next token", lists=_SCORED),
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
"""By method and path. `/generate` is ours alone and in `sglang_generate`: its items are completions."""

_RESPONSES = "/v1/responses/"


def find(method: str, path: str) -> Route | None:
    """The route of a call, or None: not an inference route."""
    route = ROUTES.get((method, path))
    if route is not None or not path.startswith(_RESPONSES):
        return route
    rest = path[len(_RESPONSES) :]
    if method == "POST" and rest.endswith("/cancel"):
        rest, template = rest[: -len("/cancel")], "/v1/responses/{id}/cancel"
    else:
        template = "/v1/responses/{id}"
    return ROUTES.get((method, template)) if rest and "/" not in rest else None


# What a body with `input` has when it asks for a response and not for embeddings.
_RESPONSE_MARKS = (b'"role"', b'"instructions"', b'"max_output_tokens"', b'"tools"', b'"previous_response_id"')


def route_of(body: bytes) -> Route:
    """The route that a body is most likely meant for: explaining takes any of them, without a path."""
    is_response = any(mark in body for mark in _RESPONSE_MARKS)
    for name, path in (
        (b'"messages"', "/v1/chat/completions"),
        (b'"prompt"', "/v1/completions"),
        (b'"input"', "/v1/responses" if is_response else "/v1/embeddings"),
    ):
        if name in body:
            return ROUTES["POST", path]
    return ROUTES["POST", "/v1/chat/completions"]


def sequences_of(route: Route, decoded: Mapping[str, Any]) -> int:
    """How many sequences an engine makes of a body: `n` answers to each of its texts; 1 of what it will refuse.

    decoded  the route's fields of it
    """
    texts = max([_texts(name, decoded.get(name)) for name in route.lists], default=1)
    n = decoded.get("n")
    if n is None:
        return texts
    try:
        return texts * min(_MOST_ANSWERS, max(1, int(n)))  # vLLM reads "2" and 2.0 as 2
    except (TypeError, ValueError, OverflowError):
        return texts


def _texts(name: str, given: object) -> int:
    if not isinstance(given, list | dict) or not given:
        return 1
    first = given[0] if isinstance(given, list) else None
    # The ids of one text, or the messages of one conversation.
    is_one = isinstance(first, int) or (name == "input" and isinstance(first, dict))
    return 1 if is_one else len(given)


def response_id_of(path: str) -> str:
    """The `{id}` in the path of a route that needs state, as it stands there."""
    return path[len(_RESPONSES) :].removesuffix("/cancel")


def is_begun_only(route: Route, events: bytes) -> bool:
    """Whether the beginning of a stream tells no more than that a request was taken: it may still go elsewhere.

    events  half an event at the end says nothing yet

    vLLM 0.32 sends `response.created` and `response.in_progress` before the engine has seen the request
    (openai/responses/serving.py responses_stream_generator). Chat and messages have nothing of the kind.
    """
    if not route.begun:
        return False
    whole = events[: events.rfind(b"\n\n") + 1].split(b"\n\n")
    return bool(whole[0]) and all(type_of(event) in route.begun for event in whole if event)


def type_of(event: bytes) -> bytes:
    """The type of one event of a stream, empty where it has none."""
    first_line = event.strip(b"\n").partition(b"\n")[0]
    return first_line[len(b"event:") :].strip() if first_line.startswith(b"event:") else b""
