"""What goes to clients of messages that were written for operators."""

import pytest

from router.core.errors import without_addresses


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("Cannot connect to host 127.0.0.1:8100 ssl:default", "Cannot connect to host <address> ssl:default"),
        ("POST http://engine-7.fleet.svc:8100/v1/load failed", "POST <address> failed"),
        ("(tcp://*:5557) is gone", "(<address>) is gone"),
        ("no route to [fd00::17]:8100", "no route to <address>"),
        ("localhost:8090 and worker-3:8100.", "<address> and <address>."),
        ("adapter 'sql/v1' has rank 64, r:64 is more than max_lora_rank=16", None),
        ("base:adapter, 10:30, v1.2.3, tiny-qwen:sql/v1", None),
        ("worker w0: s3://bucket/path is no folder", None),
    ],
)
def test_addresses_are_left_out_and_all_else_stays(text, left):
    assert without_addresses(text) == (left or text)
