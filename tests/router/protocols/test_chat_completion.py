"""A chat goes to some engines as a completion of its token ids, and its answer comes back as a chat's."""

from array import array
from typing import Any

import msgspec
import pytest

from router.core.errors import BadBody, ReplicaUnreachable, StreamBroken
from router.protocols.chat_completion import ChatStream, chat_answer, completion_of_chat

IDS = array("I", [1, 2, 3])


def completion(**fields: Any) -> dict[str, Any]:
    raw = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}
    made = completion_of_chat({"messages": msgspec.Raw(b"[]"), **raw}, IDS, 100)
    return {name: msgspec.json.decode(value) for name, value in made.items()}


def test_prompt_is_the_ids_and_sampling_fields_stay() -> None:
    made = completion(
        temperature=0.5, stop=["x"], n=2, stream=True, add_generation_prompt=True, tools=[], logprobs=False
    )
    assert made == {"prompt": [1, 2, 3], "temperature": 0.5, "stop": ["x"], "n": 2, "stream": True, "max_tokens": 97}


@pytest.mark.parametrize(
    ("given", "length"), [({"max_tokens": 5}, 5), ({"max_completion_tokens": 6, "max_tokens": 5}, 6), ({}, 97)]
)
def test_answer_is_as_long_as_asked_or_as_the_context_allows(given: dict[str, int], length: int) -> None:
    assert completion(**given)["max_tokens"] == length


@pytest.mark.parametrize(
    ("wanted", "schema"),
    [
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "array"}}}, '{"type":"array"}'),
        ({"type": "json_object"}, '{"type": "object"}'),
        ({"type": "text"}, None),
    ],
)
def test_response_format_is_a_schema(wanted: dict[str, Any], schema: str | None) -> None:
    assert completion(response_format=wanted).get("json_schema") == schema


@pytest.mark.parametrize(
    ("field", "value"),
    [("tools", [{}]), ("logprobs", True), ("echo", True), ("response_format", {"type": "xml"}), ("response_format", 1)],
)
def test_what_a_completion_cannot_do_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(BadBody, match=field) as refused:
        completion(**{field: value})
    assert refused.value.param == field


def test_prompt_that_cannot_be_tokenized_is_refused() -> None:
    with pytest.raises(BadBody, match="/v1/completions"):
        completion_of_chat({}, None, 100)


def test_answer_is_a_chats_and_all_other_fields_stay() -> None:
    choice = {"index": 0, "text": "hi", "finish_reason": "stop", "matched_stop": 7}
    body = {"id": "a", "object": "text_completion", "model": "m", "choices": [choice], "usage": {"prompt_tokens": 3}}
    made = msgspec.json.decode(chat_answer(msgspec.json.encode(body)))
    said = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop", "matched_stop": 7}
    assert made == body | {"object": "chat.completion", "choices": [said]}


def test_error_is_passed_on_and_what_is_no_completion_is_a_bad_answer() -> None:
    assert chat_answer(b'{"error":{"message":"m"}}') == b'{"error":{"message":"m"}}'
    for body in (b"no", b"[]", b'{"object":"text_completion"}', b'{"object":"text_completion","choices":[{}]}'):
        with pytest.raises(ReplicaUnreachable):
            chat_answer(body)


def event(**chunk: Any) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def test_first_event_of_each_choice_has_the_role() -> None:
    stream, kind = ChatStream(), "text_completion"
    texts = [(0, "a"), (1, "b"), (0, "c")]
    chunks = [event(object=kind, choices=[{"index": at, "text": text, "finish_reason": None}]) for at, text in texts]
    made = stream.events(chunks[0]) + stream.events(b"".join(chunks[1:]))
    deltas = [msgspec.json.decode(line[6:])["choices"][0]["delta"] for line in made.splitlines() if line]
    assert deltas == [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}, {"content": "c"}]
    usage = {"object": kind, "choices": [], "usage": {"prompt_tokens": 3}}
    assert stream.events(event(**usage)) == event(**usage | {"object": "chat.completion.chunk"})
    for passed in (b"data: [DONE]\n\n", event(error={"message": "m"}), event(object="chat.completion.chunk")):
        assert stream.events(passed) == passed
    with pytest.raises(StreamBroken):
        stream.events(event(object=kind, choices=[{}]))
