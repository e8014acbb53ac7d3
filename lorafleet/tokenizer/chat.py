"""Request body -> token ids, identical to vLLM's, without vLLM, torch or transformers.

vLLM reads a chat request in three steps, and each changes the text. Its pydantic models and its message parser rewrite
the messages (`messages.py`), and Transformers renders the chat template (`template.py`). A test compares the result
with a running engine's `/tokenize`.

Source: vLLM 0.32 renderers/hf.py, renderers/chat_utils.py, entrypoints/openai/chat_completion/protocol.py.
"""

import functools
import json
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer

from lorafleet.tokenizer.encoding import (
    EncodingSteps,
    SpecialFrame,
    run_steps,
    steps_through_cache,
    steps_through_library,
)
from lorafleet.tokenizer.messages import (
    USUAL_ARGUMENTS,
    Message,
    Untokenizable,
    merge_developer_into_system,
    plain_turns,
    read_flag,
    read_messages,
    read_tools,
)
from lorafleet.tokenizer.split_points import SplitPoints, TokenizerFile
from lorafleet.tokenizer.template import ChatTemplate, StrftimeNow
from lorafleet.tokenizer.template_cache import RenderedTemplateCache
from lorafleet.tokenizer.word_cache import WordCache

TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "special_tokens_map.json",
)
_NAMED_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Body fields whose effect on the prompt only the engine knows: its settings decide, or its tokenizer.
_ENGINE_ONLY: Final = frozenset(["chat_template", "truncate_prompt_tokens", "mm_processor_kwargs", "media_io_kwargs"])
# Arguments of apply_chat_template, in Transformers or around it in vLLM. In chat_template_kwargs they would control
# that function instead of the template, or be refused as duplicates.
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
_TEMPLATE_FIELDS: Final = frozenset(
    {"chat_template_kwargs", "reasoning_effort", "add_generation_prompt", "continue_final_message", "documents"}
)
# Without any of these fields a conversation's prompt depends on its messages alone.
_PROMPT_CHANGING_FIELDS: Final = _ENGINE_ONLY | _TEMPLATE_FIELDS | {"tools", "add_special_tokens"}


def read_files(path: Path) -> dict[str, str]:
    """The tokenizer's files of a model folder, {file name: content}; missing files are left out."""
    return {name: (path / name).read_text(encoding="utf-8") for name in TOKENIZER_FILES if (path / name).is_file()}


class ChatTokenizer:
    """One base model's tokenizer and chat template. Safe to share between threads; encoding releases the GIL."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: Mapping[str, str],
        named_tokens: Mapping[str, str],
        split_points: SplitPoints | None = None,
        *,
        word_cache: WordCache | None = None,
        added_tokens: Sequence[str] = (),
        special_frame: SpecialFrame | None = None,
    ) -> None:
        """`templates` by name ("default", "tool_use"), `named_tokens` as templates see them ("eos_token").

        tokenizer     its padding and truncation are switched off
        added_tokens  every added token that any of the model's files names, as an engine adds all of them
        special_frame the ids around a text that is encoded with special tokens; None if they may depend on the text
        """
        self.added_tokens = tuple(added_tokens)
        self._tokenizer = tokenizer
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._split_points = split_points
        self._special_frame = special_frame
        self.word_cache = word_cache
        self._adds_special_tokens = tokenizer.num_special_tokens_to_add(False) > 0
        self._templates = {name: ChatTemplate(source, named_tokens) for name, source in templates.items()}
        self.date_forms = frozenset().union(*[template.date_forms for template in self._templates.values()])
        """The forms of `strftime_now` that the chat templates write."""
        self.template_cache: RenderedTemplateCache | None = None
        if split_points is not None and split_points.sure is not None and "default" in self._templates:
            self.template_cache = self._templates["default"].rendered_cache(split_points)

    @classmethod
    def from_files(cls, files: Mapping[str, str]) -> "ChatTokenizer":
        """The tokenizer of a model's files, contents by name; only tokenizer.json is required. Raises Untokenizable."""
        if "tokenizer.json" not in files:
            raise Untokenizable("no tokenizer.json: only models with a fast tokenizer can be tokenized here")
        try:
            tokenizer = Tokenizer.from_str(files["tokenizer.json"])
            file = TokenizerFile.from_json(files["tokenizer.json"])
            split_points = SplitPoints.from_file(file)
            word_cache = WordCache.from_file(file, tokenizer.token_to_id)
            frame = SpecialFrame.from_post_processor(file.post_processor, tokenizer)
        except msgspec.DecodeError:
            split_points = word_cache = frame = None  # an unknown file layout: texts are encoded whole
        except Exception as exc:  # tokenizers raises bare Exception for every fault of the file
            raise Untokenizable(f"tokenizer.json: {exc}") from exc
        config = _parsed_object(files, "tokenizer_config.json")
        return cls(
            tokenizer,
            chat_templates(files, config),
            named_tokens(config, _parsed_object(files, "special_tokens_map.json")),
            split_points,
            word_cache=word_cache,
            added_tokens=added_tokens(files),
            special_frame=frame,
        )

    @classmethod
    def from_dir(cls, path: Path) -> "ChatTokenizer":
        """The tokenizer of a model folder. Raises Untokenizable, or OSError for a file that cannot be read."""
        return cls.from_files(read_files(path))

    def render(self, body: Mapping[str, Any], strftime: StrftimeNow | None = None) -> str:
        """The prompt text of a chat request. Does not modify `body`; raises Untokenizable.

        strftime  the template's `strftime_now`; None: this process's local time
        """
        if not _ENGINE_ONLY.isdisjoint(body):
            for key in _ENGINE_ONLY & body.keys():
                if body[key] is not None:
                    raise Untokenizable(f"{key} is for the engine to apply")
        tools = read_tools(body.get("tools"))
        template = self._template(tools)
        messages = read_messages(body.get("messages"), as_parts=template.takes_parts)
        if not template.knows_developer and "developer" in [message["role"] for message in messages]:
            messages = merge_developer_into_system(messages)
        return template.render(messages, tools, _template_arguments(body), strftime)

    def prompt_text(self, body: Mapping[str, Any], strftime: StrftimeNow | None = None) -> tuple[str, bool]:
        """The text of a chat or completion request, and whether special tokens go around it. Raises Untokenizable."""
        if "messages" in body:
            return self.render(body, strftime), read_flag(body, "add_special_tokens", usual=False)
        if body.get("truncate_prompt_tokens") is not None:
            raise Untokenizable("truncate_prompt_tokens is for the engine to apply")
        prompt = body.get("prompt")
        if not isinstance(prompt, str):
            raise Untokenizable(f"prompt is {type(prompt).__name__}, not one text")
        return prompt, read_flag(body, "add_special_tokens", usual=True)

    def prompt_pieces(self, body: Mapping[str, Any], strftime: StrftimeNow | None = None) -> tuple[list[str], bool]:
        """The prompt in pieces that can be encoded alone, and whether special tokens go around it.

        A conversation whose rendering is cached skips the template; any other is rendered by `prompt_text` and split.
        Raises Untokenizable.
        """
        if self.template_cache is not None and _PROMPT_CHANGING_FIELDS.isdisjoint(body):
            turns = plain_turns(body.get("messages"))
            if turns is not None:
                pieces = self.template_cache.pieces(*turns)
                if pieces is not None:
                    return pieces, False
        text, special = self.prompt_text(body, strftime)
        return self.pieces(text, add_special_tokens=special), special

    @property
    def takes_parts(self) -> bool:
        """Whether the chat template gets contents as lists of parts, where no tools are given. Raises Untokenizable."""
        return self._template(None).takes_parts

    @functools.cached_property
    def max_chars_per_token(self) -> int:
        """The length of the longest vocabulary entry: a text has at least its length divided by this in tokens."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)))

    @functools.cached_property
    def wants_system_first(self) -> bool:
        """Whether vLLM moves the system messages of an Anthropic request to the front for this template.

        vLLM renders the bare template to find out, without Transformers' functions. So a template that calls one of
        these fails as well (vLLM 0.32 entrypoints/anthropic/serving.py _detect_merge_inline_system).
        """
        return not self._templates or any(template.refuses_late_system() for template in self._templates.values())

    @functools.cached_property
    def disabled_effort(self) -> str:
        """The reasoning effort for an Anthropic request's `thinking: disabled`: "none" if the template shows it.

        Else "low" (vLLM 0.32 entrypoints/anthropic/serving.py _probe_disabled_thinking_effort).
        """
        without = self._rendered_with_effort("none")
        efforts = ("low", "medium", "high", "xhigh", "max")
        if without is None or any(self._rendered_with_effort(effort) == without for effort in efforts):
            return "low"
        return "none"

    def _rendered_with_effort(self, effort: str) -> str | None:
        """A short chat rendered with this reasoning effort; None if it is Untokenizable."""
        try:
            return self.render({"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": effort})
        except Untokenizable:
            return None

    def pieces(self, text: str, *, add_special_tokens: bool) -> list[str]:
        """`text` in pieces that can be encoded alone; the last is the remainder, possibly empty or the whole text."""
        if self._split_points is None or (add_special_tokens and self._adds_special_tokens):
            return [text]
        return self._split_points.pieces(text)

    def encoding_steps(self, pieces: Sequence[str], *, add_special_tokens: bool) -> EncodingSteps:
        """Encode each piece in steps for an event loop: what is cached, then the rest. Raises Untokenizable."""
        frame = SpecialFrame() if not (add_special_tokens and self._adds_special_tokens) else self._special_frame
        if self.word_cache is None or frame is None:
            return steps_through_library(pieces, functools.partial(self.encode, add_special_tokens=add_special_tokens))
        return steps_through_cache(pieces, self.word_cache, self._encode_plain, frame)

    def encode_pieces(self, pieces: Sequence[str], *, add_special_tokens: bool) -> list["array[int]"]:
        """Encode each piece here and now: its token ids as unsigned 32-bit integers. Raises Untokenizable."""
        return run_steps(self.encoding_steps(pieces, add_special_tokens=add_special_tokens))

    def _encode_plain(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens. Raises Untokenizable."""
        return self.encode(text, add_special_tokens=False)

    def chat_ids(self, body: Mapping[str, Any], strftime: StrftimeNow | None = None) -> list[int]:
        """Render and encode a chat request: the token ids of its prompt. Raises Untokenizable.

        strftime  as of `render`
        """
        return self.encode(
            self.render(body, strftime), add_special_tokens=read_flag(body, "add_special_tokens", usual=False)
        )

    def completion_ids(self, prompt: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a completion request's text prompt. Raises Untokenizable."""
        return self.encode(prompt, add_special_tokens=add_special_tokens)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text; raises Untokenizable. The batch call releases the GIL; the single call holds it.

        A batch of one stays in the calling thread; a larger one would share a thread pool with every other caller
        (tokenizers 0.23).
        """
        try:
            [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeError) as exc:  # a lone surrogate is valid JSON, but not text
            raise Untokenizable(f"the text is not valid Unicode: {exc}") from exc
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        text: str = self._tokenizer.decode(list(ids))
        return text

    def _template(self, tools: list[Message] | None) -> "ChatTemplate":
        """The template for these tools; raises Untokenizable if the model has none."""
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            raise Untokenizable("the model has no chat template")
        return template


def _parsed_object(files: Mapping[str, str], name: str) -> dict[str, Any]:
    """The JSON object in a file; empty if the file is missing. Raises Untokenizable."""
    try:
        parsed = json.loads(files.get(name, "{}"))
    except ValueError as exc:
        raise Untokenizable(f"{name} is not JSON: {exc}") from exc
    if not isinstance(parsed, dict):
        raise Untokenizable(f"{name} is not a JSON object")
    return parsed


def chat_templates(files: Mapping[str, str], config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name, none if the model has none. As in Transformers, a file overrides the configuration.

    Raises Untokenizable for a file that is no JSON object.
    """
    if "chat_template.jinja" in files:
        return {"default": files["chat_template.jinja"]}
    tokens = _parsed_object(files, "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(tokens, str):
        return {"default": tokens}
    if isinstance(tokens, list):
        return {item["name"]: item["template"] for item in tokens}
    return {}


def named_tokens(config: Mapping[str, Any], special_tokens_map: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens of a tokenizer's configuration.

    The older `special_tokens_map.json` comes first where the configuration has no `added_tokens_decoder`, and is not
    read where it has (Transformers 5.19 tokenization_utils_base.py _from_pretrained).
    """
    tokens = {}
    named = config if "added_tokens_decoder" in config else {**config, **special_tokens_map}
    for name in _NAMED_TOKENS:
        token = named.get(name)
        if isinstance(token, Mapping):
            token = token.get("content")
        if isinstance(token, str):
            tokens[name] = token
    return tokens


def added_tokens(files: Mapping[str, str]) -> list[str]:
    """Every added token that some file names, once each, in any order.

    source  Transformers 5.19 tokenization_utils_base.py: besides the named ones `extra_special_tokens` (a list, or by
            name), `additional_special_tokens` before it, and `added_tokens_decoder` by id; each a text or an object
    """
    tokens: list[Any] = []
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        config = _parsed_object(files, name)
        tokens += [token for key, token in config.items() if key.endswith("_token")]
        for key in ("extra_special_tokens", "additional_special_tokens", "added_tokens_decoder"):
            listed = config.get(key)
            tokens += listed.values() if isinstance(listed, Mapping) else listed if isinstance(listed, list) else ()
    listed = _parsed_object(files, "tokenizer.json").get("added_tokens")
    tokens += listed if isinstance(listed, list) else ()
    contents = [token.get("content") if isinstance(token, Mapping) else token for token in tokens]
    return list(dict.fromkeys(content for content in contents if isinstance(content, str) and content))


def _template_arguments(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Variables for the template: the request's chat_template_kwargs, overridden by vLLM's own from the body.

    Raises Untokenizable.
    """
    if _TEMPLATE_FIELDS.isdisjoint(body):
        return USUAL_ARGUMENTS
    own = body.get("chat_template_kwargs") or {}
    if not isinstance(own, Mapping):
        raise Untokenizable("chat_template_kwargs must be an object")
    if steering := own.keys() & _TRANSFORMERS_ARGUMENTS:
        raise Untokenizable(f"chat_template_kwargs may not set {sorted(steering)}")
    effort = body.get("reasoning_effort")
    vllm_arguments: Message = {
        "add_generation_prompt": read_flag(body, "add_generation_prompt", usual=True),
        "continue_final_message": read_flag(body, "continue_final_message", usual=False),
        "documents": body.get("documents"),
        "reasoning_effort": effort,
    }
    if effort is not None and "enable_thinking" not in own:
        vllm_arguments["enable_thinking"] = effort != "none"
    merged = dict(own) | {key: value for key, value in vllm_arguments.items() if not _is_unset(value)}
    return {key: value for key, value in merged.items() if not _is_unset(value)}


def _is_unset(value: Any) -> bool:
    """Whether vLLM leaves out an argument with this value."""
    return value is None or value == "auto"
