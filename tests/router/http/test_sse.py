"""What is read of an answer's events, and what is changed in them."""

import json

import pytest

from router.http.sse import StoredAnswerRewriter, event_error, has_first_event, refusal_event

DATE = b"0123456789ab"


def test_stored_answer_has_fleet_names_without_digest_at_any_cut():
    text = json.dumps('say "model":"x@' + DATE.decode() + '"').encode()
    said = b'event: x\ndata: {"response":{"model":"sql/v1@%b"},"text":%b}\n\n' % (DATE, text)
    said += b'data: {"model": "sql/v1@%b"}\r\n\r\ndata: {"model":"a@b"}\n\ndata: {"model":"sql/v1@%b"}' % (DATE, DATE)
    said += b'\n\ndata: {"model":"acme/served","text":"acme/served"}\n\n'
    plain = said.replace(b'sql/v1@%b"' % DATE, b'sql/v1"').replace(b'"model":"acme/served"', b'"model":"base"')
    assert plain.count(DATE) == 1
    for at in range(len(said) + 1):
        undated = StoredAnswerRewriter("acme/served", "base")
        assert undated.rewrite(said[:at]) + undated.rewrite(said[at:]) + undated.end() == plain
    assert StoredAnswerRewriter("acme/served", "base").whole(said) == plain


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"error":{"message":"m","code":503}}', 503),
        (b'{"error":{"message":"m","code":404}}', 404),
        (b'{"object":"error","message":"m","code":400}', 400),
        (b'{"type":"error","error":{"type":"internal_error","message":"{\'code\': 429}"}}', 429),
        (b'{"type":"error","error":{"type":"internal_error","message":"m"}}', 500),
        (b'{"type":"error","error":{"type":"invalid_request_error","message":"m"}}', 400),
        (b'{"type":"error","error":{"type":"overloaded_error","message":"m"}}', 503),
        (b'{"type":"error","error":{"type":"api_error","message":"m"}}', 500),
        (b'{"type":"error","error":{"type":["m"],"message":"m"}}', 500),
        (b'{"error":{"message":"m","code":200}}', 500),
        (b'{"error":{"message":"m","code":600}}', 500),
        (b'{"error":{"message":"m","code":"x"}}', 500),
        (b'{"error":"m"}', 500),
        (b'{"error":{"message', 500),
        (b'{"error":' + b"[" * 100_000, 500),
    ],
)
@pytest.mark.parametrize("before", [b"", b": ping\n\n", b"event: error\n"])
def test_first_event_error_becomes_a_valid_status(before, line, expected):
    event = before + b"data: " + line + b"\n\n"
    assert has_first_event(event)
    assert event_error(event) == (expected, line)


def test_what_is_no_error_is_none_whatever_its_text_says():
    for line in (b'{"choices":[{"text":"{\\"error\\":"}]}', b'{"id":"1","error":null}', b"[DONE]", b""):
        assert event_error(b"data: " + line + b"\n\ndata: " + b'{"error":{"code":500}}\n\n') is None


def test_first_event_that_is_an_error_with_bytes_outside_utf8_is_500():
    line = b'{"error":{"message":"\xff"}}'
    assert event_error(b"data: " + line + b"\n\n") == (500, line)


@pytest.mark.parametrize(
    "held", [b"", b": ping\n\n", b"data: x", b"data: x\n", b": ping\n\ndata: x\n", b"metadata: x\n\n"]
)
def test_half_an_event_or_none_with_data_is_no_first_one(held):
    assert not has_first_event(held)


@pytest.mark.parametrize("body", [b"plain \xff words", b'{"m": "\xff"}', b"[" * 100_000, b'["m"]'])
def test_refusal_that_is_no_json_object_is_enveloped(body):
    first, done, _ = refusal_event(400, body).split(b"\n\n")
    error = json.loads(first.removeprefix(b"data: "))["error"]
    assert error["message"] == body.decode(errors="replace")
    assert done == b"data: [DONE]"
    assert refusal_event(400, body, "anthropic").startswith(b"event: error\ndata: {")
