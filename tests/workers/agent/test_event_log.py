"""The agent's log of events, and the streams that read it."""

from workers.agent.event_log import AgentEventLog


def event_log(size=10):
    return AgentEventLog(boot_id="b", size=size, now=lambda: "now")


def types(pieces):
    return [piece.partition("event: ")[2].partition("\n")[0] for piece in pieces if "event: " in piece]


async def test_events_before_the_end_are_delivered_to_streams_that_are_open():
    events = event_log()
    events.add("ENGINE_UP")
    stream = events.stream(0, keep_alive_s=60)
    seen = [await anext(stream), await anext(stream)]
    events.add("DRAINING")
    events.add("ENGINE_DOWN")
    events.close()
    seen += [piece async for piece in stream]
    assert types(seen) == ["ENGINE_UP", "DRAINING", "ENGINE_DOWN"]


async def test_a_reader_that_comes_after_the_end_gets_no_stream():
    events = event_log()
    events.add("DRAINING")
    events.close()
    assert [piece async for piece in events.stream(events.position_after(None), keep_alive_s=60)] == [": connected\n\n"]


async def test_a_stream_that_fell_behind_the_buffer_ends():
    events = event_log(size=2)
    stream = events.stream(0, keep_alive_s=60)
    await anext(stream)
    for _ in range(3):
        events.add("DRAINING")
    assert [piece async for piece in stream] == []
