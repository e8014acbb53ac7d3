"""The table of what is matched exactly, in docs/protocol.md, has every type and field of vLLM's own protocols."""

import re
import typing
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from lorafleet.tokenizer.messages import read_tools
from router.protocols.prompts import chat_of_messages, chat_of_responses
from tests.contract.prompt_bodies import MESSAGES_BODIES, RESPONSES_BODIES, UNKNOWN_MESSAGES

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
ROW = re.compile(r"^\| (messages|responses) \| ([a-z' ]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


class _Template:
    """The traits of a chat template that takes everything."""

    wants_system_first = False
    disabled_effort = "none"


def table() -> dict[tuple[str, str], dict[str, str]]:
    """(protocol, kind) -> name -> what the page says of the router's token ids."""
    found: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for protocol, kind, names, says in ROW.findall(PAGE.read_text()):
        for name in re.findall(r"`([^`]+)`", names):
            assert name not in found[protocol, kind], f"{name} is there twice"
            found[protocol, kind][name] = says.strip()
    return found


def types_of(annotation: Any) -> Iterator[str]:
    """The values of `type` of every object in a union of pydantic models and typed dicts."""
    if (fields := getattr(annotation, "model_fields", None)) and "type" in fields:
        yield from texts_in(fields["type"].annotation)
    elif "type" in getattr(annotation, "__annotations__", {}):  # a typed dict, of typing or typing_extensions
        yield from texts_in(typing.get_type_hints(annotation)["type"])
    else:
        for part in typing.get_args(annotation):
            yield from types_of(part)


def texts_in(hint: Any) -> Iterator[str]:
    """The texts of a Literal, perhaps optional."""
    for part in typing.get_args(hint):
        if isinstance(part, str):
            yield part
        elif typing.get_args(part):
            yield from texts_in(part)


def kinds_in(value: Any) -> Iterator[str]:
    """Every `type` in a body."""
    if isinstance(value, Mapping):
        if isinstance(value.get("type"), str):
            yield value["type"]
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from kinds_in(part)


def exact(rows: Mapping[str, str]) -> set[str]:
    return {name for name, says in rows.items() if says.startswith("exact")}


def test_every_block_and_field_of_a_message_is_in_the_table() -> None:
    from vllm.entrypoints.anthropic.protocol import AnthropicContentBlock, AnthropicMessagesRequest

    rows = table()
    assert set(rows["messages", "block"]) == set(texts_in(AnthropicContentBlock.model_fields["type"].annotation))
    assert set(rows["messages", "field"]) == set(AnthropicMessagesRequest.model_fields)


def test_every_item_tool_and_field_of_a_response_is_in_the_table() -> None:
    from openai.types.responses import ResponseInputContentParam, ResponseOutputMessage
    from vllm.entrypoints.openai.responses.protocol import ResponseInputOutputItem, ResponsesRequest, Tool

    rows = table()
    parts = {*types_of(ResponseInputContentParam), *types_of(ResponseOutputMessage.model_fields["content"].annotation)}
    assert set(rows["responses", "item"]) == set(types_of(ResponseInputOutputItem))
    assert set(rows["responses", "part"]) == parts
    assert set(rows["responses", "tool"]) == set(types_of(Tool))
    assert set(rows["responses", "field"]) == set(ResponsesRequest.model_fields)


@pytest.mark.parametrize(("protocol", "bodies"), [("messages", MESSAGES_BODIES), ("responses", RESPONSES_BODIES)])
def test_every_exact_row_has_a_body_whose_ids_are_compared_with_vllms(protocol: str, bodies: list[Any]) -> None:
    rows = table()
    # Pictures are compared in test_pictures.py, and a message's type may be left out.
    used = {kind for _, body in bodies for kind in kinds_in(body)} | {"image", "input_image", "message"}
    hidden = {"computer", "computer_use_preview", "programmatic_tool_calling", "tool_search"}
    hidden |= {f"web_search{more}" for more in ("_2025_08_26", "_preview_2025_03_11")}
    for kind in ("block", "item", "part", "tool", "in a tool's result"):
        assert exact(rows[protocol, kind]) <= used | hidden, kind
    fields = {name for _, body in bodies for name in body}
    assert exact(rows[protocol, "field"]) <= fields


def test_fields_that_are_not_part_of_a_prompt_change_no_chat() -> None:
    rows = table()
    for protocol, chat_of, (_, body) in (
        ("messages", lambda body: chat_of_messages(body, _Template()), MESSAGES_BODIES[0]),
        ("responses", chat_of_responses, RESPONSES_BODIES[0]),
    ):
        for name, says in rows[protocol, "field"].items():
            if says.startswith("not part"):
                assert chat_of({**body, name: "x"}) == chat_of(body), name


@pytest.mark.parametrize("moves", [False, True])
def test_messages_become_the_chat_that_vllm_makes_of_them(moves: bool) -> None:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    def theirs_of(body: dict[str, Any]) -> Any:
        request = AnthropicMessagesRequest.model_validate({**body, "model": "m", "max_tokens": 1025})
        return AnthropicServingMessages.to_chat_completion_request(request, merge_inline_system=moves)

    template = _Template()
    template.wants_system_first = moves
    for name, body in MESSAGES_BODIES:
        ours, theirs = chat_of_messages(body, template), theirs_of(body)
        assert ours is not None, name
        assert ours["messages"] == [_plain(message) for message in theirs.messages], name
        tools = None if theirs.tools is None else [tool.model_dump() for tool in theirs.tools]
        assert read_tools(ours.get("tools")) == tools, name
        for field in ("reasoning_effort", "chat_template_kwargs"):
            assert ours.get(field) == getattr(theirs, field), name
    for body in UNKNOWN_MESSAGES:
        with pytest.raises(ValueError):  # noqa: PT011  (pydantic's own, and its converter's)
            theirs_of(body)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without the iterators that pydantic puts in place of lists."""
    return {
        key: [dict(part) for part in value]
        if key in {"content", "tool_calls"} and not isinstance(value, str)
        else value
        for key, value in message.items()
    }


def test_vllm_refuses_every_item_that_the_table_says_it_refuses() -> None:
    from vllm.entrypoints.openai.responses.utils import construct_input_messages
    from vllm.exceptions import VLLMValidationError

    for name, says in table()["responses", "item"].items():
        assert chat_of_responses({"input": [{"type": name}]}) is None
        if says == "refused by vLLM":
            with pytest.raises(VLLMValidationError, match="Unsupported input item type"):
                construct_input_messages(request_input=[{"type": name}])
