"""The recording tool records every call of each conversation, and the types as they are."""

from pathlib import Path

import pytest

from tests.wire.record import record
from tests.wire.session import CONVERSATIONS, load_session, schema_faults
from tests.wire.wire_types import load_snapshot, todays_snapshot

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


def text_of(folder: Path) -> str:
    return "".join(file.read_text() for file in folder.iterdir())


async def test_a_recording_has_every_call_and_nothing_of_this_machine(tmp_path: Path) -> None:
    await record(tmp_path)
    snapshot = load_snapshot(tmp_path)
    assert snapshot == todays_snapshot()
    for conversation, routes in CONVERSATIONS.items():
        session = load_session(conversation, folder=tmp_path)
        assert {exchange.route for exchange in session} == set(routes), conversation
        faults = [
            fault
            for exchange in session
            if exchange.route.asks
            for fault in schema_faults(snapshot, exchange.route.asks, exchange.asked)
        ]
        assert not faults
    texts = text_of(tmp_path)
    assert "127.0.0.1" not in texts
    assert "/tmp/" not in texts
    assert len(texts) < 220_000
