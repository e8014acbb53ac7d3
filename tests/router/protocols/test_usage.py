"""Events that are relayed without a further look are those on which the look finds nothing."""

from hypothesis import given
from hypothesis import strategies as st

from router.http.sse import is_plain, says_done
from router.protocols.usage import UsageFilter

EVENTS = st.sampled_from(
    [
        b'data: {"choices":[{"index":0,"delta":{"content":" a"},"finish_reason":null}]}\n\n',
        b'data: {"choices":[{"index":1,"delta":{"content":" [DONE]"},"finish_reason":null}]}\n\n',
        b'data: {"choices":[{"index":0,"delta":{"content":"\\"finish_reason\\":\\""},"finish_reason":null}]}\n\n',
        b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\r\n\r\n',
        b'data: {"choices":[],"usage":{"prompt_tokens":1}}\n\n',
        b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}],"usage":{"prompt_tokens":1}}\n\n',
        b": keep-alive\n\n",
        b"data: [DONE]\n\n",
    ]
)


@given(st.lists(EVENTS, min_size=1, max_size=4))
def test_plain_events_end_nothing_and_pass_a_usage_filter_as_they_are(events):
    read = b"".join(events)
    if is_plain(read):
        assert not says_done(read)
        waiting = UsageFilter({}, "w0")
        assert waiting.events(read) == read
        assert waiting.pending == b""
    else:
        assert any(mark in read for mark in (b'finish_reason":"', b'"choices":[]', b"[DONE]"))


def test_an_event_with_text_alone_is_plain():
    assert is_plain(b'data: {"choices":[{"index":0,"delta":{"content":" a"},"finish_reason":null}]}\n\n')
