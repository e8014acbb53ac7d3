import contextlib
import itertools
import json
from math import inf

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.local.tiny_model import make_model
from lorafleet.tokenizer.chat import ChatTokenizer, read_files
from lorafleet.tokenizer.messages import Untokenizable
from router.api.openapi import EXAMPLES, openapi_paths
from router.core.errors import BadBody, RequestError
from router.protocols.bodies import check_items
from router.protocols.prompts import chat_of_messages, chat_of_responses, prompt_body
from router.protocols.routes import (
    ROUTES,
    find_route,
    has_only_early_events,
    likely_route,
    response_id_of,
    sequence_count,
)
from router.protocols.sglang_generate import split_batch
from router.protocols.stored_responses import (
    ResponseNotFound,
    decode_response_id,
    tagged_response_id,
    worker_gone_error,
    worker_of_response,
)
from router.protocols.usage import EngineUsage, UsageFilter, usage_of, usage_of_events
from router.request.engine_body import Body, refuse_steering, vllm_body
from tests.contract.prompt_bodies import MESSAGES_BODIES, RESPONSES_BODIES, UNKNOWN_MESSAGES, UNKNOWN_RESPONSES

USER = {"role": "user", "content": "Hi"}


# --- the table


def test_every_row_is_found_by_its_method_and_path():
    for (method, path), route in ROUTES.items():
        assert find_route(method, path.replace("{id}", "resp_1.a.b")) is route
        assert find_route("PUT", path) is None


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/audio/transcriptions"),
        ("POST", "/inference/v1/abort_requests"),
        ("POST", "/v1/chat/completions/render"),
        ("POST", "/invocations"),
        ("POST", "/v1/load_lora_adapter"),
        ("GET", "/v1/chat/completions"),
        ("GET", "/v1/responses/"),
        ("GET", "/v1/responses/a/b"),
        ("GET", "/v1/responses/a/cancel"),
        ("POST", "/v1/responses/cancel"),
        ("POST", "/v1/responses/a"),
        ("POST", "/v1/responses//cancel"),
        ("GET", "/v1/responses/../models"),
    ],
)
def test_a_path_outside_the_table_is_no_inference_route(method, path):
    assert find_route(method, path) is None


def test_the_id_of_a_stored_response_is_read_off_its_path():
    assert response_id_of("/v1/responses/resp_1.a.b") == "resp_1.a.b"
    assert response_id_of("/v1/responses/resp_1.a.b/cancel") == "resp_1.a.b"


def test_a_route_decodes_its_prompt_and_routing_fields():
    for route in ROUTES.values():
        assert {"model", "lora_id", "stream", "cache_salt", "vllm_xargs"} <= route.fields
    assert "previous_response_id" in ROUTES["POST", "/v1/responses"].fields
    assert "messages" not in ROUTES["POST", "/v1/rerank"].fields


@pytest.mark.parametrize(
    ("path", "body", "sequences"),
    [
        ("/v1/chat/completions", {"messages": [USER, USER]}, 1),
        ("/v1/chat/completions", {"messages": [USER], "n": 3}, 3),
        *[("/v1/chat/completions", {"n": n}, 2) for n in (2, "2", 2.0)],
        *[("/v1/chat/completions", {"n": n}, 1) for n in (None, 0, -5, "two", [9], {}, inf, "9" * 5000)],
        ("/v1/chat/completions/batch", {"messages": [[USER], [USER, USER]]}, 2),
        ("/v1/completions", {"prompt": "one two", "n": 2}, 2),
        ("/v1/completions", {"prompt": ["one", "two", "three"], "n": 2}, 6),
        ("/v1/completions", {"prompt": [1, 2, 3], "n": 2}, 2),
        ("/v1/completions", {"prompt": [[1, 2, 3], [4]]}, 2),
        ("/v1/completions", {"prompt": []}, 1),
        ("/v1/completions", {"prompt": ["a", "b"], "n": "9" * 4300}, 2 * 10**9),
        ("/v1/embeddings", {"input": ["one", "two"]}, 2),
        ("/v1/embeddings", {"input": [1, 2]}, 1),
        ("/v1/embeddings", {"input": [USER, USER]}, 1),
        ("/v1/embeddings", {"input": [[USER, USER]]}, 1),
        ("/v2/embed", {"inputs": [{"content": []}, {"content": []}]}, 2),
        ("/rerank", {"query": "q", "documents": ["a", "b", "c"]}, 3),
        ("/score", {"text_1": "a", "text_2": ["b", "c"]}, 2),
        ("/v1/systemone", {"questions": {"a": {}, "b": {}}}, 2),
        ("/v1/decisions", {"input": "x", "questions": [{}, {}, {}]}, 3),
    ],
)
def test_the_number_of_sequences_of_a_body_is_known(path, body, sequences):
    route = ROUTES["POST", path]
    assert sequence_count(route, {name: body[name] for name in route.fields.intersection(body)}) == sequences


TEXTS = st.text(st.sampled_from(['"', "\\", "{", "[", "]", "}", ",", ":", "a", "é", "\n", "\ud83d"]), max_size=8)
VALUES = st.recursive(
    st.one_of(TEXTS, st.integers(), st.booleans(), st.none()),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
)


def items_in(value) -> int:
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(items_in, value.values()))
    return 1 + sum(map(items_in, value)) if isinstance(value, list) else isinstance(value, str)


@given(VALUES, st.integers(0, 40), st.booleans(), st.sampled_from([None, 1]))
def test_a_body_with_too_many_items_is_refused(value, most, is_ascii, indent):
    body = json.dumps(value, ensure_ascii=is_ascii, indent=indent).encode(errors="surrogatepass")
    if items_in(value) > most:
        with pytest.raises(BadBody, match=f"more than {most} texts"):
            check_items(body, most)
    else:
        check_items(body, most)


@pytest.mark.parametrize("body", [b'"' * 100, b'"\\' * 50, b'[{"' * 50, b'{"a":"' + b'\\"' * 50])
def test_items_of_invalid_json_are_counted(body):
    check_items(body, 200)
    with contextlib.suppress(BadBody):
        check_items(body, 10)


def test_only_early_events_leave_a_retry_possible():
    responses, chat = ROUTES["POST", "/v1/responses"], ROUTES["POST", "/v1/chat/completions"]
    created = b'event: response.created\ndata: {"type":"response.created"}\n\n'
    begun = b'event: response.in_progress\ndata: {"type":"response.in_progress"}\n\n'
    delta = b'event: response.output_text.delta\ndata: {"delta":"event: response.created"}\n\n'
    assert has_only_early_events(responses, created)
    assert has_only_early_events(responses, created + begun)
    assert not has_only_early_events(responses, created + begun + delta)
    assert not has_only_early_events(responses, delta)
    assert not has_only_early_events(responses, b'data: {"error":{}}\n\n')
    assert not has_only_early_events(chat, created)
    assert has_only_early_events(responses, created + delta[:-1]), "half an event says nothing yet"
    assert has_only_early_events(responses, created + b"event: respo")
    assert not has_only_early_events(responses, created[:-1])
    assert not has_only_early_events(responses, created + b'data: {"error":{}}\n\n')


# --- usage


@pytest.mark.parametrize(
    ("kind", "answer", "usage"),
    [
        ("openai", {"usage": {"prompt_tokens": 9, "completion_tokens": 2}}, (9, 2, None)),
        ("openai", {"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}}, (9, None, 8)),
        ("openai", {"usage": {"prompt_tokens": 9, "prompt_tokens_details": None}}, (9, None, None)),
        ("responses", {"usage": {"input_tokens": 9, "output_tokens": 2}}, (9, 2, None)),
        (
            "responses",
            {"response": {"usage": {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 0}}}},
            (9, None, 0),
        ),
        ("messages", {"usage": {"input_tokens": 9, "output_tokens": 2}}, (9, 2, None)),
        (
            "messages",
            {"usage": {"input_tokens": 1, "cache_read_input_tokens": 32, "cache_creation_input_tokens": 8}},
            (41, None, 32),
        ),
    ],
)
def test_usage_is_read_where_each_kind_of_answer_has_it(kind, answer, usage):
    body = json.dumps(answer).encode()
    assert usage_of(kind, body) == EngineUsage(*usage)
    assert usage_of_events(kind, b"event: x\ndata: " + body + b"\n\ndata: [DONE]\n\n") == EngineUsage(*usage)
    assert usage_of("none", body) is None


@pytest.mark.parametrize("body", [b"", b"{", b'{"usage":3}', b'{"usage":null}', b'{"a":"\\"usage\\""}', b'"usage"\xff'])
@pytest.mark.parametrize("kind", ["openai", "responses", "messages"])
def test_an_answer_of_another_form_has_no_usage(kind, body):
    assert usage_of(kind, body) is None
    assert usage_of_events(kind, b"data: " + body + b"\n\n") is None


SIGNED = b',"system_fingerprint":"vllm-1"'
USAGE_EVENT = b'data: {"id":"1","choices":[],"usage":{"prompt_tokens":3},"system_fingerprint":"vllm-1"}\n\n'
DONE = b"data: [DONE]\n\n"


def text_event(text: str, *, index: int = 0, ends: bool = False, signed: bool = False) -> bytes:
    reason = b'"length"' if ends else b"null"
    choice = b'{"index":%d,"text":%b,"finish_reason":%b}' % (index, json.dumps(text).encode(), reason)
    return b'data: {"choices":[' + choice + b"]" + SIGNED * signed + b"}\n\n"


def shown(known: dict, *chunks: bytes) -> list[bytes]:
    hidden = UsageFilter(known, "w0")
    return [*(hidden.events(chunk) for chunk in chunks), hidden.end()]


def test_a_filtered_stream_has_its_fingerprint_in_place():
    first, last = text_event("one"), text_event("two", ends=True)
    signed = text_event("two", ends=True, signed=True)
    known: dict[str, bytes] = {}
    assert shown(known, first, last, USAGE_EVENT, DONE) == [first, b"", signed, DONE, b""]
    assert shown(known, first, last, USAGE_EVENT, DONE) == [first, signed, b"", DONE, b""], "nothing waits any more"
    whole = first + last + USAGE_EVENT + DONE
    assert shown({}, whole) == shown(known, whole) == [first + signed + DONE, b""]


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("is_known", [True, False])
def test_a_filtered_stream_does_not_depend_on_its_chunks(line_end, is_known):
    ends = [text_event("x", index=i, ends=True) for i in (0, 1)]
    texts = [text_event(f"{i} \\n\\n", index=i % 2) for i in range(9)]
    events = [*texts[:5], ends[0], *texts[5:], ends[1], USAGE_EVENT, DONE]
    events = [event.replace(b"\n", line_end) for event in events]
    known = {"w0": b'"system_fingerprint":"vllm"'} if is_known else {}
    one_by_one = b"".join(shown(dict(known), *events))
    for size in range(2, len(events) + 1):
        for first in range(1, size + 1):
            cuts = [0, *range(first, len(events), size), len(events)]
            pieces = [b"".join(events[a:b]) for a, b in itertools.pairwise(cuts)]
            found = shown(dict(known), *pieces)
            assert b"".join(found) == one_by_one, (size, first)
            assert all(not each or each.endswith(line_end * 2) for each in found), (size, first)


def test_every_choice_has_the_fingerprint_once_it_is_known():
    ends = [text_event("x", index=i, ends=True) for i in (0, 1)]
    signed = [text_event("x", index=i, ends=True, signed=True) for i in (0, 1)]
    more = text_event("y", index=1)
    known: dict[str, bytes] = {}
    assert shown(known, ends[0], more, ends[1], USAGE_EVENT) == [b"", ends[0] + more, b"", signed[1], b""]
    assert shown(known, ends[0], more, ends[1], USAGE_EVENT) == [signed[0], more, signed[1], b"", b""]
    assert shown({}, ends[0], ends[1], USAGE_EVENT)[2] == signed[0] + signed[1]


def test_a_stream_without_fingerprint_or_end_loses_no_event():
    last = text_event("two", ends=True)
    plain = USAGE_EVENT.replace(SIGNED, b"")
    assert shown({}, last, plain, DONE) == [b"", last, DONE, b""]
    assert shown({}, last) == [b"", last]
    assert shown({}, last, DONE) == [b"", last + DONE, b""]
    error = b'data: {"error":{"message":"dead"}}\n\n'
    assert shown({}, last, error) == [b"", last + error, b""]


def test_a_new_fingerprint_replaces_the_old_one():
    known = {"w0": b'"system_fingerprint":"old"'}
    shown(known, text_event("x", ends=True), USAGE_EVENT)
    assert known == {"w0": SIGNED[1:]}


def test_a_text_that_looks_like_a_usage_is_unchanged():
    odd = text_event('"finish_reason":"stop" "choices":[] "usage":{')
    assert shown({}, odd) == [odd, b""]


def test_a_body_is_explained_by_the_route_that_it_is_most_likely_meant_for():
    for body, path in (
        ({"messages": [USER]}, "/v1/chat/completions"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": {}}]}]}, "/v1/chat/completions"),
        ({"prompt": "x"}, "/v1/completions"),
        ({"input": "x"}, "/v1/embeddings"),
        ({"input": "x", "instructions": "y"}, "/v1/responses"),
        ({"input": [USER]}, "/v1/responses"),
        ({}, "/v1/chat/completions"),
    ):
        assert likely_route(json.dumps(body).encode()).path == path


# --- stored responses


@pytest.mark.parametrize("worker", ["w0", "10.0.0.7:8090", "pod-a.b/c", "Zürich", "a" * 200])
@pytest.mark.parametrize("tenant", [None, "", "team"])
def test_a_response_id_names_its_worker(worker, tenant):
    made = tagged_response_id(None, "f00", tenant=tenant, worker=worker)
    assert made.startswith("resp_f00.")
    assert find_route("GET", f"/v1/responses/{made}") is not None
    assert worker_of_response(made, tenant=tenant, param="response_id") == worker


def test_a_clients_valid_id_is_the_prefix():
    assert tagged_response_id("mine-1", "f00", tenant=None, worker="w0").startswith("mine-1.")
    for odd in ("a.b", "", "a/b", "ä", "x" * 200, 3, ["a"]):
        assert tagged_response_id(odd, "f00", tenant=None, worker="w0").startswith("resp_f00.")


def test_another_tenants_response_is_not_found_even_with_its_id():
    made = tagged_response_id(None, "f00", tenant="a", worker="w0")
    for other in ("b", None, ""):
        with pytest.raises(ResponseNotFound, match="not found"):
            worker_of_response(made, tenant=other, param="previous_response_id")


def test_a_tenant_with_an_empty_name_is_not_an_operator():
    for whose, other in ((None, ""), ("", None)):
        made = tagged_response_id(None, "f00", tenant=whose, worker="w0")
        with pytest.raises(ResponseNotFound):
            worker_of_response(made, tenant=other, param="id")


@pytest.mark.parametrize("more", ["/cancel", "?x=1", "/../r", "\n", ".x", " "])
def test_an_id_with_a_suffix_is_invalid(more):
    made = tagged_response_id(None, "f00", tenant="a", worker="w0")
    for odd in (made + more, more + made):
        with pytest.raises(ResponseNotFound):
            worker_of_response(odd, tenant="a", param="id")


def test_an_id_with_another_tenants_mark_is_unknown_to_the_engine():
    mine = tagged_response_id("x", "f00", tenant="a", worker="w0")
    theirs = tagged_response_id("x", "f00", tenant="b", worker="w0")
    assert mine != theirs


@pytest.mark.parametrize(
    "odd",
    [
        "",
        "resp_1",
        "a.b.c",
        "a.0123456789abcdef.!",
        "a.0123456789abcdef.",
        "a.0123456789abcdef.A",  # not base64
        "a.0123456789abcdef._w",  # not UTF-8
        None,
        3,
        "a" * 999,
    ],
)
def test_an_id_that_no_router_made_is_not_found(odd):
    assert decode_response_id(odd) is None
    with pytest.raises(ResponseNotFound) as caught:
        worker_of_response(odd, tenant=None, param="response_id")
    assert (caught.value.status, caught.value.code, caught.value.param) == (404, "response_not_found", "response_id")
    assert isinstance(caught.value, RequestError)


def test_a_response_whose_worker_is_gone_names_it():
    assert "worker 'w7', which is gone" in str(worker_gone_error("resp_1", "w7", param="response_id"))


# --- prompts


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("surface") / "tiny-qwen")


def with_template(model, template: str) -> ChatTokenizer:
    return ChatTokenizer.from_files(read_files(model) | {"chat_template.jinja": template})


def test_every_known_prompt_is_converted_to_a_chat(model):
    tokenizer = ChatTokenizer.from_dir(model)
    for name, body in RESPONSES_BODIES:
        chat = chat_of_responses(body)
        assert chat is not None, name
        assert tokenizer.chat_ids(chat), name
    for name, body in MESSAGES_BODIES:
        chat = chat_of_messages(body, tokenizer)
        assert chat is not None, name
        assert tokenizer.chat_ids(chat), name


@pytest.mark.parametrize(
    "body", [*UNKNOWN_RESPONSES, {"input": [{"type": "message", "role": "assistant", "content": []}]}]
)
def test_a_response_that_only_the_engine_can_render_has_no_chat(body):
    assert chat_of_responses(body) is None


@pytest.mark.parametrize("body", UNKNOWN_MESSAGES)
def test_a_message_that_only_the_engine_can_render_has_no_chat(body):
    assert chat_of_messages(body) is None


def test_a_tool_call_nested_without_end_has_no_chat():
    nested: list = []
    for _ in range(100_000):
        nested = [nested]
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": nested}}
    chat = chat_of_messages({"messages": [{"role": "assistant", "content": [call]}]})
    assert chat is None


def test_tools_that_no_model_sees_leave_an_empty_list(model):
    template = (
        "{{ 'some' if tools is not none else 'none' }}{{ tools | length if tools else 0 }}{{ messages[0].content }}"
    )
    tokenizer = with_template(model, template)
    texts = []
    for tools in (
        [],
        [{"type": "web_search"}],
        [{"type": "mcp", "server_label": "a"}, {"type": "custom", "name": "b"}],
    ):
        chat = chat_of_responses({"input": "x", "tools": tools})
        assert chat is not None
        texts.append(tokenizer.render(chat))
    assert texts == ["none0x", "some0x", "some1x"]


def test_a_conversion_does_not_change_the_body_that_is_sent():
    for convert, bodies in ((chat_of_responses, RESPONSES_BODIES), (chat_of_messages, MESSAGES_BODIES)):
        for name, body in bodies:
            before = json.dumps(body)
            convert(body)
            assert json.dumps(body) == before, name


def test_system_messages_move_to_the_front_for_a_template_that_refuses_them_later(model):
    body = {"messages": [USER, {"role": "system", "content": "b"}, USER], "system": "a"}
    strict = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
    )
    strict += "{{ m.content }}{% endfor %}"
    lax = "{% for m in messages %}{{ m.content }}{% endfor %}"
    moved, kept = (chat_of_messages(body, with_template(model, template)) for template in (strict, lax))
    assert moved == {"messages": [{"role": "system", "content": "ab"}, USER, USER]}
    assert kept == {"messages": [{"role": "system", "content": "a"}, USER, {"role": "system", "content": "b"}, USER]}
    assert chat_of_messages(body) is None, "without the template nobody knows"


def test_disabled_thinking_is_an_effort_that_the_template_shows(model):
    body = {"messages": [USER], "thinking": {"type": "disabled"}}
    shows = "{{ messages[0].content }}{% if reasoning_effort == 'none' %}quick{% endif %}"
    hides = "{{ messages[0].content }}"
    efforts = [chat_of_messages(body, with_template(model, template)) for template in (shows, hides)]
    assert [chat["reasoning_effort"] for chat in efforts] == ["none", "low"]
    assert chat_of_messages(body) is None


def test_a_prompt_is_read_as_its_route_reads_it():
    both = {"messages": [USER], "prompt": "x"}
    assert prompt_body("chat", both) == both
    assert prompt_body("completion", both) == {"prompt": "x"}, "vLLM does not look at messages there"
    assert prompt_body("none", both) is None


def test_a_completion_that_the_engine_cuts_is_not_tokenized_here(model):
    tokenizer = ChatTokenizer.from_dir(model)
    with pytest.raises(Untokenizable, match="truncate_prompt_tokens"):
        tokenizer.prompt_text({"prompt": "one two three", "truncate_prompt_tokens": 1})


def test_special_tokens_go_around_a_response_and_a_completion_and_not_around_a_chat_or_a_message(model):
    begin = "<|endoftext|>"
    (begin_id,) = ChatTokenizer.from_dir(model).encode(begin, add_special_tokens=False)
    files = read_files(model)
    frame = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": begin, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {begin: {"id": begin, "ids": [begin_id], "tokens": [begin]}},
    }
    files["tokenizer.json"] = json.dumps(json.loads(files["tokenizer.json"]) | {"post_processor": frame})
    tokenizer = ChatTokenizer.from_files(files)
    begins = {}
    for kind, body in (
        ("responses", {"input": "Hi"}),
        ("completion", {"prompt": "Hi"}),
        ("chat", {"messages": [USER]}),
        ("messages", {"messages": [USER]}),
    ):
        pieces, special = tokenizer.prompt_pieces(prompt_body(kind, body, tokenizer))
        begins[kind] = tokenizer.encode_pieces(pieces, add_special_tokens=special)[0][0] == begin_id
    assert begins == {"responses": True, "completion": True, "chat": False, "messages": False}


# --- the API's own description


def test_every_route_is_described_with_an_example_of_what_to_send_and_what_comes_back():
    paths = openapi_paths()
    assert {(method.upper(), path) for path, item in paths.items() for method in item} == {
        *ROUTES,
        ("POST", "/generate"),
    }
    for (method, path), route in ROUTES.items():
        operation = paths[path][method.lower()]
        content = operation["responses"]["200"]["content"]
        assert content["application/json"]["example"], path
        assert ("text/event-stream" in content) == route.streams, path
        assert ("requestBody" in operation) == route.has_body, path


def test_every_example_is_accepted_by_the_router():
    for (_method, path), route in ROUTES.items():
        sent, _answered = EXAMPLES[path]
        if route.has_body:
            fields = msgspec.json.decode(msgspec.json.encode(sent), type=Body)
            refuse_steering(fields, None)
            assert json.loads(vllm_body(fields, "m")) == sent | {"model": "m"}
    assert len(split_batch(msgspec.json.encode(EXAMPLES["/generate"][0])).items) == 2
