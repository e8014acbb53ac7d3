"""What a gateway is told, as messages."""

from router.gateway.messages import ProcessingRequest
from router.gateway.responses import (
    allowed_endpoints,
    answer_head,
    engine_request,
    header_fields,
    own_answer,
    trailers_unchanged,
)

REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nhost: 10.0.0.7:8000\r\ncontent-type: application/json\r\n"
    b"X-Data-Parallel-Rank: 2\r\n\r\n{}\r\n\r\n"
)


def changes(mutation):
    return {each.header.key: each.header.raw_value for each in mutation.set_headers}, set(mutation.remove_headers)


def test_an_engines_request_has_its_new_head_and_none_of_the_clients_own_headers():
    given = dict.fromkeys((b"content-type", b"cookie", b"host", b"te", b"x-forwarded-for", b"x-envoy-a"), b"1")
    message, body = engine_request("10.0.0.7:8000", REQUEST, given, b"/v1/chat/completions")
    assert body == b"{}\r\n\r\n"
    set_, removed = changes(message.request_headers.response.header_mutation)
    assert set_ == {
        ":path": b"/v1/completions",
        "content-type": b"application/json",
        "x-data-parallel-rank": b"2",
        "x-gateway-destination-endpoint": b"10.0.0.7:8000",
    }
    assert removed == {"cookie"}
    told = message.dynamic_metadata.fields["envoy.lb"].struct_value.fields
    assert told["x-gateway-destination-endpoint"].string_value == "10.0.0.7:8000"
    same, _ = engine_request("10.0.0.7:8000", REQUEST, given, b"/v1/completions")
    assert ":path" not in changes(same.request_headers.response.header_mutation)[0]


def test_an_answers_length_is_the_new_one_or_none():
    assert changes(answer_head(b"a: 1\r\n").response_headers.response.header_mutation) == (
        {"a": b"1"},
        {"content-length"},
    )
    whole = answer_head(b"content-length: 3\r\n").response_headers.response.header_mutation
    assert changes(whole) == ({"content-length": b"3"}, set())


def test_an_answer_of_our_own_has_status_headers_and_body():
    own = own_answer(429, b"Retry-After: 7\r\n", b"{}").immediate_response
    assert (own.status.code, own.body) == (429, b"{}")
    assert changes(own.headers) == ({"retry-after": b"7"}, set())


def test_trailers_pass_by_a_message_that_says_so():
    assert trailers_unchanged("response_trailers").WhichOneof("kind") == "response_trailers"


def hinted(value):
    message = ProcessingRequest()
    entry = message.metadata_context.filter_metadata.add(key="envoy.lb.subset_hint")
    entry.value.update({"x-gateway-destination-endpoint-subset": value})
    return allowed_endpoints(message.metadata_context)


def test_allowed_endpoints_are_a_list_or_a_text_and_none_where_nothing_is_said():
    assert (
        hinted(["10.0.0.1:80", "10.0.0.2:80"]) == hinted("10.0.0.1:80, 10.0.0.2:80") == {"10.0.0.1:80", "10.0.0.2:80"}
    )
    assert hinted([]) == hinted("") == frozenset()
    other = ProcessingRequest()
    other.metadata_context.filter_metadata.add(key="envoy.lb")
    assert allowed_endpoints(other.metadata_context) is allowed_endpoints(ProcessingRequest().metadata_context) is None


def test_of_a_name_that_came_twice_the_first_value_counts():
    message = ProcessingRequest()
    for key, value in (("A", b"1"), ("a", b"2")):
        message.request_headers.headers.headers.add(key=key, raw_value=value)
    message.request_headers.headers.headers.add(key="b", value="text")
    assert header_fields(message.request_headers) == {b"a": b"1", b"b": b"text"}
