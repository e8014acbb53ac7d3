"""Probes: request bodies whose token ids our tokenizer and an engine must agree on before ours is used."""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from lorafleet.tokenizer.chat import ChatTokenizer
from lorafleet.tokenizer.messages import Untokenizable
from lorafleet.tokenizer.template import StrftimeNow

# Added tokens in one probe; an engine that splits them all makes a thousand or two tokens of it.
_TOKENS_PER_PROBE = 256

# Each body covers one way in which tokenizers differ (see docs/why.md).
PROBES: tuple[dict[str, Any], ...] = (
    {"messages": [{"role": "user", "content": "Hello, world! 12345 x_y  z\n\n"}]},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "naïve café 東京 🙂"}]},
    {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "SELECT *\tFROM t;"},
        ]
    },
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]},
    {"messages": [{"role": "user", "content": ""}], "add_generation_prompt": False},
    {
        "messages": [{"role": "user", "content": "weather?"}],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "weather",
                    "description": "by <city>",
                    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
                },
            }
        ],
    },
    {
        "messages": [
            {"role": "user", "content": "weather?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        ]
    },
    {"prompt": "def f(x):\n    return x"},
    {"prompt": "  leading, <|im_start|> special and trailing  "},
    {"prompt": ""},
)


def added_token_probes(contents: Sequence[str]) -> list[dict[str, Any]]:
    """Prompts with every added token, which must be one token to both sides, or to neither."""
    starts = range(0, len(contents), _TOKENS_PER_PROBE)
    return [{"prompt": " x ".join(contents[start : start + _TOKENS_PER_PROBE])} for start in starts]


def checked_ids(
    local: ChatTokenizer, body: Mapping[str, Any], strftime: StrftimeNow | None = None
) -> "array[int] | None":
    """Our ids of a body; None if it cannot be tokenized, or if tokenizer and word cache differ.

    strftime  the template's `strftime_now`; None: this process's local time
    """
    try:
        text, special = local.prompt_text(body, strftime)
        ids = array("I", local.encode(text, add_special_tokens=special))
        [cached] = local.encode_pieces([text], add_special_tokens=special)
    except (Untokenizable, TemplateError, TypeError, ValueError):
        return None
    return ids if cached == ids else None
