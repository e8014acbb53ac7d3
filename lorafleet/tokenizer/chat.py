"""Request body -> token ids, identical to vLLM's, without vLLM, torch or transformers.

vLLM reads a chat request in three steps, and each changes the text: its pydantic models drop and add fields, its
message parser flattens contents and decodes tool arguments, and Transformers renders the template. Each is done again
here; a test holds the result against a running engine's `/tokenize`.

Source: vLLM 0.32 renderers/hf.py, renderers/chat_utils.py, entrypoints/openai/chat_completion/protocol.py;
Transformers 5.19 utils/chat_template_utils.py.
"""

import functools
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeVar

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes as ast
import jinja2.parser
import msgspec
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from lorafleet.tokenizer.ascii_bpe import AsciiBpeCache
from lorafleet.tokenizer.split_points import SplitPoints
from lorafleet.tokenizer.template_cache import Part, RenderedTemplateCache, Speakers, StandInTemplate

TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "special_tokens_map.json",
)
_NAMED_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Body keys that change what vLLM tokenizes in a way only the engine can know: its settings decide, or its tokenizer.
_ENGINE_ONLY: Final = frozenset(["chat_template", "truncate_prompt_tokens", "mm_processor_kwargs", "media_io_kwargs"])
# Arguments of apply_chat_template itself, in Transformers or around it in vLLM; in chat_template_kwargs they would
# steer these, not the template, or are refused because they come twice.
_TRANSFORMERS_ARGUMENTS: Final = frozenset(
    [
        "chat_template",
        "conversation",
        "messages",
        "model_config",
        "self",
        "tokenizer",
        "tools",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    ]
)
_TEXT_PARTS: Final[Mapping[str, str]] = {  # type of a content part -> the key that holds its text
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
# What vLLM's types know of a content part; anything else rides along into templates that take parts.
_PART_FIELDS: Final = frozenset(
    [
        "audio_embeds",
        "audio_url",
        "closed",
        "data",
        "file",
        "image_embeds",
        "image_pil",
        "image_url",
        "input_audio",
        "name",
        "prompt_cache_breakpoint",
        "refusal",
        "text",
        "thinking",
        "type",
        "uuid",
        "video_embeds",
        "video_url",
    ]
)
_FUNCTION_FIELDS: Final[Mapping[str, type]] = {"description": str, "parameters": dict, "strict": bool}
_BILLING_HEADER: Final = "x-anthropic-billing-header"  # vLLM drops this line: it changes with every request
_CONTINUE_TAG: Final = "CONTINUE_FINAL_MESSAGE_TAG "

Message = dict[str, Any]


class VllmMadeFunction(dict[str, Any]):
    """The function of a tool call that vLLM itself makes of a request: its keys stay in their order.

    source  vLLM 0.32 entrypoints/openai/responses/utils.py: such messages go to the template without being read again
    """


class VllmMadeTools(list[Message]):
    """The tools that vLLM itself makes of a request. There may be none, which a template can tell from no list at all.

    source  vLLM 0.32 renderers/online_renderer.py render_responses: the list goes to the template, empty or not
    """


class Untokenizable(ValueError):
    """This body cannot be turned into ids here; the engine may still accept it. The message says why."""


def read_files(path: Path) -> dict[str, str]:
    """What `ChatTokenizer.from_files` takes, read from a model folder: {file name: content}, missing files left out."""
    return {name: (path / name).read_text(encoding="utf-8") for name in TOKENIZER_FILES if (path / name).is_file()}


class ChatTokenizer:
    """One base model's tokenizer and chat template. Safe to share between threads; encoding releases the GIL."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: Mapping[str, str],
        named_tokens: Mapping[str, str],
        cuts: SplitPoints | None = None,
        words: AsciiBpeCache | None = None,
        added_tokens: Sequence[str] = (),
    ) -> None:
        """`templates` by name ("default", "tool_use"), `named_tokens` as templates see them ("eos_token").

        added_tokens  every one that the model's files name, those that tokenizer.json lacks and an engine adds, too
        """
        self.added_tokens = tuple(added_tokens)
        self._tokenizer = tokenizer
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._cuts = cuts
        self._words = words
        self._has_frame = tokenizer.num_special_tokens_to_add(False) > 0
        self._templates = {name: _ChatTemplate(source, named_tokens) for name, source in templates.items()}
        self._frames: RenderedTemplateCache | None = None
        if cuts is not None and cuts.sure is not None and "default" in self._templates:
            self._frames = self._templates["default"].frames(cuts)

    @classmethod
    def from_files(cls, files: Mapping[str, str]) -> "ChatTokenizer":
        """From file contents by name; only tokenizer.json must be there. Raises Untokenizable if one is unreadable."""
        if "tokenizer.json" not in files:
            raise Untokenizable("no tokenizer.json: only models with a fast tokenizer can be tokenized here")
        try:
            tokenizer = Tokenizer.from_str(files["tokenizer.json"])
            cuts = SplitPoints.of(files["tokenizer.json"])
            words = AsciiBpeCache.of(files["tokenizer.json"], tokenizer.token_to_id)
        except msgspec.DecodeError:
            cuts = words = None  # in a shape that we do not know: it can be encoded, but not in pieces
        except Exception as exc:  # tokenizers raises bare Exception for every fault of the file
            raise Untokenizable(f"tokenizer.json: {exc}") from exc
        config = _parsed_object(files, "tokenizer_config.json")
        config.update(_parsed_object(files, "special_tokens_map.json"))
        return cls(tokenizer, _templates(files, config), _named_tokens(config), cuts, words, _added_tokens(files))

    @classmethod
    def from_dir(cls, path: Path) -> "ChatTokenizer":
        return cls.from_files(read_files(path))

    def render(self, body: Mapping[str, Any]) -> str:
        """The prompt text of a chat request. Does not modify `body`; raises Untokenizable."""
        if not _ENGINE_ONLY.isdisjoint(body):
            for key in _ENGINE_ONLY & body.keys():
                if body[key] is not None:
                    raise Untokenizable(f"{key} is for the engine to apply")
        tools = _tools(body.get("tools"))
        template = self._template(tools)
        messages = _conversation(body.get("messages"), as_parts=template.takes_parts)
        if not template.knows_developer and "developer" in [message["role"] for message in messages]:
            messages = _developer_as_system(messages)
        return template.render(messages, tools, _template_arguments(body))

    def prompt_text(self, body: Mapping[str, Any]) -> tuple[str, bool]:
        """The text of a chat or completion request, and whether special tokens go around it. Raises Untokenizable."""
        if "messages" in body:
            return self.render(body), _flag(body, "add_special_tokens", usual=False)
        if body.get("truncate_prompt_tokens") is not None:
            raise Untokenizable("truncate_prompt_tokens is for the engine to apply")
        prompt = body.get("prompt")
        if not isinstance(prompt, str):
            raise Untokenizable(f"prompt is {type(prompt).__name__}, not one text")
        return prompt, _flag(body, "add_special_tokens", usual=True)

    def prompt_pieces(self, body: Mapping[str, Any]) -> tuple[list[str], bool]:
        """What `prompt_text` says, its text cut as `pieces` does. Raises Untokenizable."""
        if self._frames is not None and _UNUSUAL.isdisjoint(body):
            said = _plainly_said(body.get("messages"))
            if said is not None:
                pieces = self._frames.pieces(*said)
                if pieces is not None:
                    return pieces, False
        text, special = self.prompt_text(body)
        return self.pieces(text, add_special_tokens=special), special

    @functools.cached_property
    def max_chars_per_token(self) -> int:
        """The longest entry of the vocabulary: no text has fewer tokens than its characters divided by this."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)))

    @functools.cached_property
    def wants_system_first(self) -> bool:
        """Whether vLLM, asked for Anthropic's messages, moves system messages to the front for this template.

        It tries the bare template, without what Transformers puts around it (vLLM 0.32 entrypoints/anthropic/serving.py
        _detect_merge_inline_system), so one that calls a function of Transformers fails, too.
        """
        return not self._templates or any(template.refuses_late_system() for template in self._templates.values())

    @functools.cached_property
    def disabled_effort(self) -> str:
        """What vLLM, asked for Anthropic's messages, makes of `thinking: disabled`: the effort "none" if this template
        takes it and shows it, else "low" (vLLM 0.32 entrypoints/anthropic/serving.py _probe_disabled_thinking_effort).
        """
        without = self._rendered_with_effort("none")
        efforts = ("low", "medium", "high", "xhigh", "max")
        if without is None or any(self._rendered_with_effort(effort) == without for effort in efforts):
            return "low"
        return "none"

    def _rendered_with_effort(self, effort: str) -> str | None:
        try:
            return self.render({"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": effort})
        except Untokenizable:
            return None

    def pieces(self, text: str, *, add_special_tokens: bool) -> list[str]:
        """`text` cut where the pieces can be encoded apart; the last is the remainder, and may be all or nothing."""
        if self._cuts is None or (add_special_tokens and self._has_frame):
            return [text]
        return self._cuts.pieces(text)

    def encode_pieces(self, pieces: Sequence[str], *, add_special_tokens: bool) -> list["array[int]"]:
        """Token ids of each piece, as unsigned 32-bit integers. Raises Untokenizable."""
        return [array("I", self.encode(piece, add_special_tokens=add_special_tokens)) for piece in pieces]

    def quick_ids(self, piece: str, *, add_special_tokens: bool) -> "array[int] | None":
        """The ids of a piece by its words, with Python's lock held for a millisecond at most; None: `encode` it."""
        if self._words is None or (add_special_tokens and self._has_frame):
            return None
        return self._words.ids(piece, self._encoded)

    def _encoded(self, word: str) -> list[int]:
        return self.encode(word, add_special_tokens=False)

    def chat_ids(self, body: Mapping[str, Any]) -> list[int]:
        """Token ids of a chat request's prompt. Raises Untokenizable."""
        return self.encode(self.render(body), add_special_tokens=_flag(body, "add_special_tokens", usual=False))

    def completion_ids(self, prompt: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a completion request's text prompt."""
        return self.encode(prompt, add_special_tokens=add_special_tokens)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids. The batch call releases the GIL where the single one holds it (tokenizers 0.23).

        A batch of one stays in the calling thread; more would share one pool with every other caller.
        """
        try:
            [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeError) as exc:  # a lone surrogate is valid JSON, and no text
            raise Untokenizable(f"the text is not valid Unicode: {exc}") from exc
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out."""
        text: str = self._tokenizer.decode(list(ids))
        return text

    def _template(self, tools: list[Message] | None) -> "_ChatTemplate":
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            raise Untokenizable("the model has no chat template")
        return template


# --- the model's files -------------------------------------------------------------------------------------------


def _parsed_object(files: Mapping[str, str], name: str) -> dict[str, Any]:
    try:
        parsed = json.loads(files.get(name, "{}"))
    except ValueError as exc:
        raise Untokenizable(f"{name} is not JSON: {exc}") from exc
    if not isinstance(parsed, dict):
        raise Untokenizable(f"{name} is not a JSON object")
    return parsed


def _templates(files: Mapping[str, str], config: Mapping[str, Any]) -> dict[str, str]:
    """By name; a template file beats what tokenizer_config.json says, as in Transformers."""
    if "chat_template.jinja" in files:
        return {"default": files["chat_template.jinja"]}
    found = _parsed_object(files, "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(found, str):
        return {"default": found}
    if isinstance(found, list):
        return {item["name"]: item["template"] for item in found}
    return {}


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _NAMED_TOKENS:
        token = config.get(name)
        if isinstance(token, Mapping):
            token = token.get("content")
        if isinstance(token, str):
            tokens[name] = token
    return tokens


def _added_tokens(files: Mapping[str, str]) -> list[str]:
    """Every token that some file names, once each, in no order that matters.

    source  Transformers 5.19 tokenization_utils_base.py: besides the named ones `extra_special_tokens` (a list, or by
            name), `additional_special_tokens` before it, and `added_tokens_decoder` by id; each a text or an object
    """
    found: list[Any] = []
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        config = _parsed_object(files, name)
        found += [token for key, token in config.items() if key.endswith("_token")]
        for key in ("extra_special_tokens", "additional_special_tokens", "added_tokens_decoder"):
            listed = config.get(key)
            found += listed.values() if isinstance(listed, Mapping) else listed if isinstance(listed, list) else ()
    listed = _parsed_object(files, "tokenizer.json").get("added_tokens")
    found += listed if isinstance(listed, list) else ()
    contents = [token.get("content") if isinstance(token, Mapping) else token for token in found]
    return list(dict.fromkeys(content for content in contents if isinstance(content, str) and content))


# --- what vLLM makes of the body ---------------------------------------------------------------------------------


def _tools(tools: Any) -> list[Message] | None:
    """As vLLM's pydantic models dump them again: known keys only, in their order, null where absent."""
    if tools is None:
        return None
    if not isinstance(tools, list) or not (tools or isinstance(tools, VllmMadeTools)):
        raise Untokenizable("tools must be a list with at least one tool")
    return [_tool(tool) for tool in tools]


def _tool(tool: Any) -> Message:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or "name" not in function:
        raise Untokenizable("each tool must be an object with a function that has a name")
    dumped: Message = {
        "name": function["name"],
        "description": function.get("description"),
        "parameters": function.get("parameters"),
    }
    if function.get("strict") is not None:
        dumped["strict"] = _flag(function, "strict", usual=None)
    deferred = _flag(tool, "defer_loading", usual=None)
    inner = _flag(function, "defer_loading", usual=None)
    if inner is not None or deferred is not None:
        dumped["defer_loading"] = inner if inner is not None else deferred
    outer: Message = {"type": tool.get("type", "function"), "function": dumped}
    if deferred is not None:
        outer["defer_loading"] = deferred
    return outer


T = TypeVar("T", bool, None)


def _flag(body: Mapping[str, Any], name: str, *, usual: T) -> bool | T:
    """A field that is true or false. vLLM takes 0, "no" and a dozen more for false, and is left to read them itself."""
    value = body.get(name, usual)
    if value is usual or isinstance(value, bool):
        return value
    raise Untokenizable(f"{name} is {value!r}, not true or false")


_TEMPLATE_FIELDS: Final = frozenset(
    {"chat_template_kwargs", "reasoning_effort", "add_generation_prompt", "continue_final_message", "documents"}
)
_USUAL_ARGUMENTS: Final[Mapping[str, Any]] = {"add_generation_prompt": True, "continue_final_message": False}
# Without any of these a conversation's prompt depends on its messages alone.
_UNUSUAL: Final = _ENGINE_ONLY | _TEMPLATE_FIELDS | {"tools", "add_special_tokens"}
_SPEAKERS: Final = frozenset(["system", "user", "assistant"])


def _template_arguments(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Variables for the template: the request's chat_template_kwargs, and over them what vLLM takes from the body."""
    if _TEMPLATE_FIELDS.isdisjoint(body):
        return _USUAL_ARGUMENTS
    own = body.get("chat_template_kwargs") or {}
    if not isinstance(own, Mapping):
        raise Untokenizable("chat_template_kwargs must be an object")
    if steering := own.keys() & _TRANSFORMERS_ARGUMENTS:
        raise Untokenizable(f"chat_template_kwargs may not set {sorted(steering)}")
    effort = body.get("reasoning_effort")
    ours: Message = {
        "add_generation_prompt": _flag(body, "add_generation_prompt", usual=True),
        "continue_final_message": _flag(body, "continue_final_message", usual=False),
        "documents": body.get("documents"),
        "reasoning_effort": effort,
    }
    if effort is not None and "enable_thinking" not in own:
        ours["enable_thinking"] = effort != "none"
    merged = dict(own) | {key: value for key, value in ours.items() if not _is_unset(value)}
    return {key: value for key, value in merged.items() if not _is_unset(value)}


def _is_unset(value: Any) -> bool:
    return value is None or value == "auto"


def _conversation(messages: Any, *, as_parts: bool) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise Untokenizable("messages must be a list with at least one message")
    return [_message(message, as_parts=as_parts) for message in messages]


def _plainly_said(messages: Any) -> tuple[Speakers, list[str]] | None:
    """Who speaks, and what, where every message is a text that reaches the template as it came; else None."""
    speakers, texts = [], []
    try:
        for message in messages:
            speaker, text = message["role"], message["content"]
            if type(text) is not str or speaker not in _SPEAKERS or len(message) != 2:
                return None
            if speaker == "system" and text.startswith(_BILLING_HEADER):
                return None
            speakers.append(speaker)
            texts.append(text)
    except (KeyError, TypeError):
        return None
    return (tuple(speakers), texts) if speakers else None


def _message(message: Any, *, as_parts: bool) -> Message:
    # The type first: the question whether something is a Mapping takes longer than all the rest.
    if not (type(message) is dict or isinstance(message, Mapping)) or not isinstance(message.get("role"), str):
        raise Untokenizable("each message must be an object with a role")
    role = message["role"]
    read: Message = {"role": role, "content": _content(role, message.get("content"), as_parts=as_parts)}
    if role == "assistant":
        if calls := message.get("tool_calls"):
            read["tool_calls"] = _tool_calls(calls)
        reasoning = message.get("reasoning")
        if reasoning is None:
            reasoning = message.get("reasoning_content")
        if reasoning is not None:
            read["reasoning"] = read["reasoning_content"] = reasoning
    elif role == "tool" and "tool_call_id" in message:
        read["tool_call_id"] = message["tool_call_id"]
    if "name" in message or "task" in message:
        for key in ("name", "task"):
            if isinstance(message.get(key), str):
                read[key] = message[key]
    if role == "developer":
        read["tools"] = _developer_tools(message.get("tools"))
    return read


def _content(role: str, content: Any, *, as_parts: bool) -> str | list[Message]:
    """Text for templates that want text, a list of {"type", ...} for those that go through the parts themselves."""
    if isinstance(content, str):
        if not as_parts and not (role == "system" and content.startswith(_BILLING_HEADER)):
            return content
        content = [content]
    elif content is None:
        content = []
    elif not isinstance(content, list):
        raise Untokenizable("content must be text, a list of parts, or null")
    parts = [read for part in content if (read := _part(part)) is not None]
    if role == "system":
        parts = _without_billing_header(parts)
    if not as_parts:
        # As vLLM: an empty text is no part of a text, and one of the parts where those are kept.
        return "\n".join([said for part in parts if (said := part["text" if part["type"] == "text" else "name"])])
    if role == "tool" and all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(part: Any) -> Message | None:
    """{"type": "text", "text"} and what else the client put there, a tool reference, or None for an empty part."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "tool_reference" and isinstance(part.get("name"), str):
        return {"type": "tool_reference", "name": part["name"]}
    if not isinstance(kind, str) or kind not in _TEXT_PARTS or part.get("uuid") is not None:
        raise Untokenizable(f"content part of type {kind!r}: only text can be tokenized here")
    text = part.get(_TEXT_PARTS[kind])
    if text is None and kind in {"text", "refusal"}:
        return None
    if not isinstance(text, str):
        raise Untokenizable(f"content part of type {kind!r} has no text")
    return {"type": "text", "text": text} | {key: value for key, value in part.items() if key not in _PART_FIELDS}


def _without_billing_header(parts: list[Message]) -> list[Message]:
    kept = []
    for part in parts:
        if part["type"] == "text" and part["text"].startswith(_BILLING_HEADER):
            rest = part["text"].partition("\n")[2]
            if not rest:
                continue
            part = part | {"text": rest}  # noqa: PLW2901
        kept.append(part)
    return kept


def _tool_calls(calls: Any) -> list[Message]:
    """With arguments as an object, which templates expect, where OpenAI sends JSON text; keys in vLLM's order."""
    if not isinstance(calls, list):
        raise Untokenizable("tool_calls must be a list")
    read = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or call.get("type", "function") != "function":
            raise Untokenizable("each tool call must be an object of type function with a function")
        order = () if isinstance(function, VllmMadeFunction) else ("arguments", "name")
        known = _in_order(function, order) | {"arguments": _arguments(function.get("arguments"))}
        read.append(_in_order(call, ("id", "function", "type")) | {"function": known})
    return read


def _developer_tools(tools: Any) -> Any:
    """In the order of the types that a message is read by, which are not those of a request's own tools.

    Any that is not quite of those types is read by others, and left to the engine.

    source  vLLM 0.32 renderers/chat_utils.py CustomChatCompletionMessageParam; openai 2 FunctionDefinition
    """
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise Untokenizable("a developer's tools must be a list")
    return [_developer_tool(tool) for tool in tools]


def _developer_tool(tool: Any) -> Message:
    match tool:
        case {"type": "function", "function": {"name": str(), **rest} as function} if all(
            isinstance(rest[key], kinds) for key, kinds in _FUNCTION_FIELDS.items() if key in rest
        ):
            known = _in_order(function, ("name", *_FUNCTION_FIELDS))
            return _in_order(tool, ("function", "type")) | {"function": known}
    raise Untokenizable("each tool of a developer must be of type function, with a function that has a name")


def _arguments(arguments: Any) -> Mapping[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = {}  # as vLLM: text that is no JSON lives in the history, and must not fail every later turn
    return arguments if isinstance(arguments, Mapping) else {}


def _in_order(given: Mapping[str, Any], first: Sequence[str]) -> Message:
    """`given` with the keys `first` in front, as pydantic returns a TypedDict: declared fields, then the extra ones."""
    ordered = {key: given[key] for key in first if key in given}
    return ordered | {key: value for key, value in given.items() if key not in ordered}


def _developer_as_system(messages: list[Message]) -> list[Message]:
    """For templates that know no developer: such messages become system ones, and all system ones one, in front."""
    converted = []
    for message in messages:
        if message["role"] == "developer":
            rest = {key: value for key, value in message.items() if key not in {"role", "tools"}}
            converted.append({"role": "system"} | rest)
        else:
            converted.append(message)
    system = [message for message in converted if message["role"] == "system"]
    if len(system) == 1 and converted[0] is system[0]:
        return converted
    texts = [_plain(message["content"]) for message in system]
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(message for message in converted if message["role"] != "system")]


def _plain(content: str | list[Message]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content if "text" in part)


# --- templates ---------------------------------------------------------------------------------------------------


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} marks the assistant's text for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[ast.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter would escape <, > and & for HTML, and sort keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005  (Transformers gives templates local time)


class _TemplateEnvironment(ImmutableSandboxedEnvironment):
    """`message.role` of a plain object is looked up as its key at once: the sandbox tries an attribute first. And
    `loop.first` is a plain truth: the sandbox asks a dozen questions whether it might change something.
    """

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict:
            if attribute not in _DICT_ATTRIBUTES:
                try:
                    return obj[attribute]
                except KeyError:
                    return self.undefined(obj=obj, name=attribute)
        elif type(obj) is LoopContext and attribute in _LOOP_FIGURES:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


_DICT_ATTRIBUTES: Final = frozenset(dir(dict))
_LOOP_FIGURES: Final = frozenset(["first", "last", "index", "index0", "revindex", "revindex0", "length"])


def _environment() -> _TemplateEnvironment:
    environment = _TemplateEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _ChatTemplate:
    """A chat template, compiled once, and what vLLM reads off its source."""

    def __init__(self, source: str, named_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        try:
            parsed = environment.parse(source)
            self._code = environment.compile(source)
        except jinja2.TemplateError as exc:
            raise Untokenizable(f"the chat template does not compile: {exc}") from exc
        self._compiled = environment.template_class.from_code(environment, self._code, {})
        # What every rendering begins with: one dict to copy, where jinja2's own way copies three and chains two.
        self._usual = {**environment.globals, **named_tokens, "documents": None}
        self._source = source
        self.knows_developer = '"developer"' in source or "'developer'" in source
        self.takes_parts = _goes_through_parts(parsed)
        self._knows_content = "content" in source
        # vLLM passes on only what the template names, so that a client cannot reach anything else.
        self._variables = jinja2.meta.find_undeclared_variables(parsed) | {"documents"}

    def render(self, messages: list[Message], tools: list[Message] | None, arguments: Mapping[str, Any]) -> str:
        """`arguments` as _template_arguments gives them; raises Untokenizable for whatever the template refuses."""
        prompting = arguments.get("add_generation_prompt", True)
        continuing = arguments.get("continue_final_message", False)
        variables = self._usual.copy()
        if arguments is not _USUAL_ARGUMENTS:
            variables.update((key, value) for key, value in arguments.items() if key in self._variables)
            variables.pop("continue_final_message", None)
        variables["add_generation_prompt"] = prompting
        if continuing and prompting:
            raise Untokenizable("continue_final_message needs add_generation_prompt to be false")
        variables["messages"] = self._open_ended(messages) if continuing else messages
        variables["tools"] = tools
        try:
            text = "".join(self._compiled.root_render_func(self._compiled.new_context(variables, shared=True)))
        except Exception as exc:  # a template may fail on a client's input in any way Python can
            raise Untokenizable(f"the chat template refused the request: {exc}") from exc
        return _cut_at_tag(text, messages[-1]["content"]) if continuing else text

    def frames(self, cuts: SplitPoints) -> RenderedTemplateCache:
        """What it puts around the texts of conversations without tools and wishes."""
        watched = StandInTemplate(_environment(), self._code)

        def rendered(speakers: Speakers, texts: Sequence[Any]) -> str:
            return self.render(self._said(speakers, texts), None, _USUAL_ARGUMENTS)

        def shown(speakers: Speakers, texts: Sequence[Any]) -> Sequence[Part]:
            said = self._said(speakers, texts)
            return watched.shown(self._usual | {"add_generation_prompt": True, "messages": said, "tools": None})

        return RenderedTemplateCache(cuts, rendered, shown)

    def _said(self, speakers: Speakers, texts: Sequence[Any]) -> list[Message]:
        contents = [[{"type": "text", "text": text}] for text in texts] if self.takes_parts else texts
        return [{"role": speaker, "content": content} for speaker, content in zip(speakers, contents, strict=True)]

    def refuses_late_system(self) -> bool:
        """Whether a system message after a user's is an error; rendered as vLLM tries it, without our additions."""
        bare = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
        turns = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
        try:
            bare.from_string(self._source).render(messages=turns, add_generation_prompt=False)
        except jinja2.TemplateError:
            return True
        return False

    def _open_ended(self, messages: list[Message]) -> list[Message]:
        """With a mark behind the last message's text, to cut the rendered prompt there."""
        last = messages[-1]
        content = last["content"]
        if not self._knows_content:
            raise Untokenizable("continue_final_message: the chat template does not use content")
        if isinstance(content, str):
            return [*messages[:-1], last | {"content": content + _CONTINUE_TAG}]
        for index in range(len(content) - 1, -1, -1):
            if "text" in content[index]:
                marked = content[index] | {"text": content[index]["text"] + _CONTINUE_TAG}
                return [*messages[:-1], last | {"content": [*content[:index], marked, *content[index + 1 :]]}]
        raise Untokenizable("continue_final_message: the final message has no text to continue")


def _cut_at_tag(text: str, content: str | list[Message]) -> str:
    final = content if isinstance(content, str) else next(p["text"] for p in reversed(content) if "text" in p)
    if final.strip() not in text or _CONTINUE_TAG.strip() not in text:
        raise Untokenizable("continue_final_message: the chat template does not show the final message")
    end = text.rindex(_CONTINUE_TAG.strip())
    # A template that trims the message trims the mark's space; then the text before the mark is trimmed as well.
    return text[:end] if text.startswith(_CONTINUE_TAG, end) else text[:end].rstrip()


# --- does the template want content as text or as parts? (vLLM 0.32 renderers/hf.py, _iter_nodes_assign_*) ---------


def _goes_through_parts(template: ast.Template) -> bool:
    """Whether some loop of the template runs over a message's content: then vLLM hands it parts, else text."""
    messages = {
        loop.target.name
        for loop in template.find_all(ast.For)
        if isinstance(loop.target, ast.Name)
        and any(_is_from(loop.iter, name) for name in _aliases(template, "messages"))
    }
    in_macros: dict[int, set[str]] = {}  # loop inside a macro -> the macro's arguments that are some message's content
    for macro in template.find_all(ast.Macro):
        arguments = set(_content_arguments(template, macro, messages))
        in_macros |= {id(loop): arguments for loop in macro.find_all(ast.For)}
    for loop in template.find_all(ast.For):
        if any(_is_from(loop.iter, name, "content") for name in messages):
            return True
        if isinstance(loop.iter, ast.Name) and loop.iter.name in in_macros.get(id(loop), {"content"}):
            return True
    return False


def _aliases(template: ast.Template, name: str) -> set[str]:
    """`name` and every variable that is set to it or to a slice of it, however indirectly."""
    known, todo = {name}, [name]
    while todo:
        source = todo.pop()
        for assign in template.find_all(ast.Assign):
            target = assign.target
            if isinstance(target, ast.Name) and target.name not in known and _is_from(assign.node, source):
                known.add(target.name)
                todo.append(target.name)
    return known


def _content_arguments(template: ast.Template, macro: ast.Macro, messages: set[str]) -> Iterator[str]:
    def is_content(node: ast.Node) -> bool:
        return any(_is_from(node, name, "content") for name in messages)

    names = [argument.name for argument in macro.args]
    for call in template.find_all(ast.Call):
        if isinstance(call.node, ast.Name) and call.node.name == macro.name:
            yield from (name for name, node in zip(names, call.args, strict=False) if is_content(node))
            yield from (pair.key for pair in call.kwargs if pair.key in names and is_content(pair.value))


def _is_from(node: ast.Node | None, name: str, key: str | None = None) -> bool:
    """Whether the expression is `name` (or `name.key`), perhaps filtered, tested or sliced."""
    if isinstance(node, ast.Filter | ast.Test):
        return _is_from(node.node, name, key)
    if isinstance(node, ast.Getitem) and isinstance(node.arg, ast.Slice):
        return _is_from(node.node, name, key)
    if key is None:
        return isinstance(node, ast.Name) and node.ctx == "load" and node.name == name
    if isinstance(node, ast.Getitem):
        return isinstance(node.arg, ast.Const) and node.arg.value == key and _is_from(node.node, name)
    return isinstance(node, ast.Getattr) and node.attr == key and _is_from(node.node, name)
