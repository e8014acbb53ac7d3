"""Request bodies, and vLLM 0.32's checks of them with the same error messages, types and codes.

source  vllm/entrypoints/openai/*/protocol.py, serve/exception_handling/, serve/engine/serving.py; tests/contract
        compares the messages with a running vLLM
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

_MOST_LOGPROBS = 20  # vLLM's default of --max-logprobs
Tokens = list[Annotated[int, Field(ge=0)]]


class ErrorAnswer(Exception):
    """An error answer: vLLM's envelope and HTTP status."""

    def __init__(
        self, message: str, kind: str = "BadRequestError", status: int = 400, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status
        self.param = param

    def body(self) -> dict[str, Any]:
        """The JSON body of the answer."""
        error = {"message": sanitized(str(self)), "type": self.kind, "param": self.param, "code": self.status}
        return {"error": error}


def invalid_parameter(message: str, param: str, value: object = None) -> ErrorAnswer:
    """A 400 with the message format of vLLM's own validators."""
    shown = "" if value is None else f", value={value}"
    return ErrorAnswer(f"{message} (parameter={param}{shown})", param=param)


class RequestBody(BaseModel):
    """A request body; unknown fields are allowed, as in vLLM."""

    model_config = ConfigDict(extra="allow")


class StreamOptions(RequestBody):
    """`stream_options` of a request."""

    include_usage: bool | None = True
    continuous_usage_stats: bool | None = False


class SamplingBody(RequestBody):
    """How the tokens of an answer are chosen: the fields of vLLM's SamplingParams that every request has."""

    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool = False


class AnswerBody(RequestBody):
    """Who answers, and in which form: the fields of every request that generates tokens."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    request_id: str | None = None


class GenerationBody(AnswerBody, SamplingBody):
    """The common fields of chats and completions."""

    return_tokens_as_token_ids: bool | None = None
    vllm_xargs: dict[str, Any] | None = None

    @property
    def logprobs_count(self) -> int | None:
        """How many likeliest tokens the answer has at each place; None: no log-probabilities."""
        return None

    @property
    def stops(self) -> list[str]:
        """The non-empty stop strings."""
        return [stop for stop in ([self.stop] if isinstance(self.stop, str) else self.stop or []) if stop]

    @property
    def wants_reused_reported(self) -> bool:
        """Whether KV events must also report reused blocks (kv_cache_report_mode "full")."""
        return (self.vllm_xargs or {}).get("kv_cache_report_mode") == "full"


class MessagesBody(RequestBody):
    """The `messages` of a chat."""

    messages: list[dict[str, Any]]


class ChatBody(GenerationBody, MessagesBody):
    """The body of a chat. The base classes' order determines the order of validation errors."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    kv_transfer_params: dict[str, Any] | None = None
    echo: bool = False

    @property
    def logprobs_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def given_prompt_ids(self) -> list[int] | None:
        """The prompt's token ids if the client sent them; None without them or with `echo`. Raises invalid_parameter.

        As vLLM 0.32 online_renderer.py _reused_prompt_token_ids.
        """
        ids = (self.kv_transfer_params or {}).get("prompt_token_ids")
        if ids is None or self.echo:
            return None
        if not isinstance(ids, list) or not ids or any(type(token) is not int or token < 0 for token in ids):
            name = "kv_transfer_params.prompt_token_ids"
            message = "`kv_transfer_params['prompt_token_ids']` must be a non-empty list of non-negative integers."
            raise invalid_parameter(message, name)
        return ids


class CompletionBody(GenerationBody):
    """The body of /v1/completions."""

    prompt: Tokens | list[Tokens] | str | list[str] | None = None
    max_tokens: int | None = 16
    echo: bool | None = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool = True

    @property
    def logprobs_count(self) -> int | None:
        return self.logprobs


class SamplingParamsBody(SamplingBody):
    """`sampling_params` of /inference/v1/generate: vLLM's own, of which the sim knows some."""

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    extra_args: dict[str, Any] | None = None


class GenerateTokensBody(AnswerBody):
    """The body of /inference/v1/generate."""

    token_ids: Tokens = Field(min_length=1)
    sampling_params: SamplingParamsBody

    def as_completion(self) -> "CompletionBody":
        """The completion that generates the same tokens. Raises `ErrorAnswer` for the prompt's log-probabilities."""
        if self.sampling_params.prompt_logprobs is not None:
            message = "the sim engine computes no prompt_logprobs; ask without `sampling_params.prompt_logprobs`"
            raise ErrorAnswer(message, param="sampling_params.prompt_logprobs")
        sampling = self.sampling_params.model_dump(exclude={"extra_args", "prompt_logprobs"})
        own = self.model_dump(exclude={"token_ids", "sampling_params"})
        asked = {"prompt": self.token_ids, "return_tokens_as_token_ids": True}
        return CompletionBody(**own | sampling | asked | {"vllm_xargs": self.sampling_params.extra_args})


class TokenizePromptBody(RequestBody):
    """The body of /tokenize with a prompt."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class TokenizeChatBody(RequestBody):
    """The body of /tokenize with messages."""

    model: str | None = None
    messages: list[dict[str, Any]]
    return_token_strs: bool | None = False


class PoolingBody(RequestBody):
    """The common fields of requests to a model that pools."""

    model: str | None = None
    cache_salt: str | None = None


class InputBody(PoolingBody):
    """The body of /v1/embeddings, /pooling and /classify: texts, or a chat."""

    input: Tokens | list[Tokens] | str | list[str] = ""
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True

    @property
    def texts(self) -> list[str | list[int]]:
        """The texts, each as text or token ids."""
        if isinstance(self.input, str) or (self.input and isinstance(self.input[0], int)):
            return [self.input]
        return list(self.input)  # type: ignore[arg-type]


class ScoreBody(PoolingBody):
    """The body of /score, under each of vLLM's names for the two sides."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None

    @property
    def pair(self) -> tuple[list[str], list[str]]:
        """The first texts and the second ones. Raises `ErrorAnswer`."""
        one = self.text_1 if self.text_1 is not None else self.queries
        other = self.text_2 if self.text_2 is not None else self.documents
        if one is None or other is None:
            raise ErrorAnswer("the sim engine scores `text_1` with `text_2`, or `queries` with `documents`")
        return ([one] if isinstance(one, str) else one), ([other] if isinstance(other, str) else other)


class RerankBody(PoolingBody):
    """The body of /rerank."""

    query: str
    documents: list[str]
    top_n: int = 0


class DetokenizeBody(RequestBody):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Tokens


class LoadAdapterBody(BaseModel):
    """The body of /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapterBody(BaseModel):
    """The body of /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = None


Parsed = TypeVar("Parsed", bound=BaseModel)


def read_json(raw: bytes, content_type: str) -> Any:
    """The body as JSON. Raises `ErrorAnswer` with FastAPI's message."""
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise ErrorAnswer(
            "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed", "Bad Request"
        )
    if not raw:
        raise _validation_error([{"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}])
    try:
        return json.loads(raw)
    except json.JSONDecodeError as exc:
        fault = {"type": "json_invalid", "loc": ("body", exc.pos), "msg": "JSON decode error", "input": {}}
        raise _validation_error([fault | {"ctx": {"error": exc.msg}}]) from exc
    except UnicodeDecodeError as exc:
        raise ErrorAnswer("There was an error parsing the body", "Bad Request") from exc


def parse_body(kind: type[Parsed], data: Any) -> Parsed:
    """`data` as a body of this class. Raises `ErrorAnswer` with all validation errors."""
    try:
        return kind.model_validate(data, from_attributes=True)
    except ValidationError as exc:
        raise _validation_error(_faults(exc)) from exc


def parse_tokenize(data: Any) -> TokenizePromptBody | TokenizeChatBody:
    """A /tokenize body of either class. Raises `ErrorAnswer` with the validation errors of both."""
    faults = []
    kinds: tuple[type[TokenizePromptBody], type[TokenizeChatBody]] = (TokenizePromptBody, TokenizeChatBody)
    for kind in kinds:
        try:
            return kind.model_validate(data, from_attributes=True)
        except ValidationError as exc:
            faults += _faults(exc)
    raise _validation_error(faults)


def check_generate(body: GenerationBody) -> None:
    """Raises `ErrorAnswer` for a wrong stream option or salt: vLLM's checks before it looks up the model."""
    if body.stream_options is not None and not body.stream:
        raise invalid_parameter("Stream options can only be defined when `stream=True`.", "stream_options")
    if body.cache_salt is not None and not body.cache_salt:
        raise invalid_parameter("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")


def check_logprobs(body: ChatBody | CompletionBody) -> None:
    """Raises `ErrorAnswer` for log-probabilities that the sim does not compute, or more than vLLM allows."""
    count = body.logprobs_count
    if count is None:
        return
    if body.stream or body.echo:
        message = "the sim engine gives logprobs of whole answers alone: ask without `stream` and `echo`"
        raise ErrorAnswer(message, param="logprobs")
    if count > _MOST_LOGPROBS:
        message = f"Requested sample logprobs of {count}, which is greater than max allowed: {_MOST_LOGPROBS}"
        raise ErrorAnswer(message, param="logprobs")
    if count > 1 and not body.return_tokens_as_token_ids:
        message = "the sim engine knows the likeliest tokens by id alone: ask with `return_tokens_as_token_ids`"
        raise ErrorAnswer(message, param="logprobs")


def check_sampling(body: GenerationBody, max_tokens: int | None, max_model_len: int) -> None:
    """Raises `ErrorAnswer` for wrong sampling parameters: vLLM's checks after tokenization.

    max_tokens  the requested limit
    """
    if max_tokens is not None and max_tokens > max_model_len:
        raise invalid_parameter(
            f"max_tokens={max_tokens} cannot be greater than max_model_len={max_model_len}. "
            "Please request fewer output tokens.",
            "max_tokens",
            max_tokens,
        )
    if body.n < 1:
        raise ErrorAnswer(f"n must be at least 1, got {body.n}.")
    if body.temperature is not None and body.temperature < 0:
        raise invalid_parameter(
            f"temperature must be non-negative, got {body.temperature}.", "temperature", body.temperature
        )
    if body.n > 1 and body.temperature == 0:
        raise ErrorAnswer(f"n must be 1 when using greedy sampling, got {body.n}.")


def output_limit(max_tokens: int | None, prompt_tokens: int, max_model_len: int) -> int:
    """The number of tokens that may follow the prompt. Raises `ErrorAnswer` if there is no room."""
    room = max_model_len - prompt_tokens
    limit = room if max_tokens is None else min(max_tokens, room)
    if limit < 1:
        raise invalid_parameter(f"max_tokens must be at least 1, got {limit}.", "max_tokens", limit)
    return limit


def check_length(prompt_tokens: int, max_model_len: int, *, from_text: bool) -> None:
    """Raises `ErrorAnswer` for an empty prompt, and for one that exceeds the context length.

    vLLM truncates text just above the limit during tokenization, so its message says "at least".
    """
    if not prompt_tokens:
        raise ErrorAnswer("The decoder prompt cannot be empty")
    if prompt_tokens <= max_model_len:
        return
    shown_tokens = f"at least {max_model_len + 1}" if from_text else str(prompt_tokens)
    value = max_model_len + 1 if from_text else prompt_tokens
    raise invalid_parameter(
        f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
        f"{shown_tokens} input tokens, which exceeds this limit even without any output tokens. "
        "Please reduce the length of the input prompt.",
        "input_tokens",
        value,
    )


def check_characters(text: str, max_model_len: int, max_chars_per_token: int) -> None:
    """Raises `ErrorAnswer` for a text that cannot fit in `max_model_len` tokens; called before tokenization.

    source  vLLM 0.32 renderers/params.py _text_len_check
    """
    most = max_model_len * max_chars_per_token
    if len(text) > most:
        raise invalid_parameter(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains {len(text)} "
            f"characters (more than {most} characters, which is the upper bound for {max_model_len} input tokens). "
            "Please reduce the length of the input prompt.",
            "input_text",
            len(text),
        )


def prompts_of(body: CompletionBody) -> Sequence[str | list[int]]:
    """The prompts of a completion, one or many. Raises `ErrorAnswer` if there is none."""
    prompt = body.prompt
    if prompt is None or prompt == "":
        raise invalid_parameter("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ErrorAnswer("You must pass at least one prompt")
    return [prompt] if isinstance(prompt[0], int) else prompt  # pydantic's union guarantees: then all are ints


def sanitized(message: str) -> str:
    """The message with file paths replaced. source  vLLM 0.32 serve/exception_handling/utils.py sanitize_message"""
    message = re.sub(r"/(?:home|usr|opt|var|tmp|root|lib|mnt|srv)(?:/[\w.\-]+)+", "<path>", message)
    return re.sub(r"(?:/[\w\-]+)+/[\w\-]+\.\w+", "<path>", message).strip()


# Parts of pydantic's error locations that vLLM omits from `param` and `loc`.
_MARKERS = frozenset({"str", "int", "float", "bool", "list", "dict", "nullable", "union"})


def _faults(exc: ValidationError) -> list[dict[str, Any]]:
    """The validation errors with FastAPI's locations."""
    faults: list[dict[str, Any]] = []
    for fault in exc.errors(include_url=False):
        faults.append({**fault, "loc": ("body", *fault["loc"])})  # noqa: PERF401 - a comprehension loses the type
    return faults


def _validation_error(faults: Sequence[Mapping[str, Any]]) -> ErrorAnswer:
    """vLLM's answer to pydantic validation errors."""
    lines = [
        str({**fault, "loc": _location(fault["loc"]), "input": _shown_input(fault["input"])}) for fault in faults[:10]
    ]
    if len(faults) > len(lines):
        lines.append(f"...and {len(faults) - len(lines)} more errors")
    noun = "error" if len(faults) == 1 else "errors"
    message = "\n  ".join([f"{len(faults)} validation {noun}:", *(line[:1000] for line in lines)])
    return ErrorAnswer(message, "Bad Request", param=_location(faults[0]["loc"]))


def _location(loc: Sequence[int | str]) -> str:
    """An error location as vLLM shows it."""
    names = [str(part) for part in loc if not (re.search(r"[\[\]{}()]", str(part)) or str(part).lower() in _MARKERS)]
    return ".".join(names)


def _shown_input(value: object) -> str:
    """A wrong value as vLLM's error message shows it: shortened, a list or dict by its size."""
    if isinstance(value, list | dict):
        return f"<{type(value).__name__} of {len(value)} items>"
    text = str(value)
    return text if len(text) <= 200 else text[:200] + "...[truncated]"
