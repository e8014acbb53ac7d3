"""Bodies that no decoder accepts raise the errors that callers catch."""

import msgspec
import pytest

from lorafleet.service.decoding import DECODE_ERRORS


@pytest.mark.parametrize("body", [b"{", b"", b'"\xff"', b"[" * 200_000], ids=["cut", "empty", "not UTF-8", "nested"])
def test_a_body_that_is_no_json_is_one_of_these_errors(body):
    with pytest.raises(DECODE_ERRORS):
        msgspec.json.decode(body)
