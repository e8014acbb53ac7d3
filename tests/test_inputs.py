"""Inputs that were once taken wrongly, or are like one that was: a file each, below `inputs/`, with its raw bytes."""

from pathlib import Path

import pytest

from lorafleet.kv.events import KvEventDecoder, UndecodableBatch
from tests.wires import HOT, error_of, listening, post
from workers.core.errors import SourceError
from workers.verification.verify import read_tensors

_INPUTS = Path(__file__).parent / "inputs"


def inputs(kind):
    files = sorted((_INPUTS / kind).iterdir())
    return pytest.mark.parametrize("file", files, ids=[file.name for file in files])


@inputs("http")
async def test_request_is_refused_and_the_next_one_served(file):
    async with listening() as served:
        status, _ = error_of(await served.response_to(file.read_bytes()))
        assert status == 400
        assert served.seen == []
        async with await served.client() as client:
            client.send(post(HOT, b"abc"))
            assert (await client.answer())[0] == 200


@inputs("safetensors")
def test_weights_are_refused_as_a_fault_of_their_source(file):
    with pytest.raises(SourceError):
        read_tensors(file)


@inputs("kv_events")
def test_batch_is_refused_or_its_other_events_are_kept(file):
    try:
        batch = KvEventDecoder().decode(file.read_bytes())
    except UndecodableBatch:
        return
    assert batch.rejected or batch.events
