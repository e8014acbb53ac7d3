"""The leader's epoch in the head of a command."""

import httpx
import pytest
from fastapi import FastAPI

from workers.core.errors import AgentRequestError
from workers.epochs import EPOCH_HEADER, Epoch


async def read(*values):
    app, found = FastAPI(), []

    @app.get("/")
    async def route(epoch: Epoch):
        found.append(epoch)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://agent") as client:
        await client.get("/", headers=[(EPOCH_HEADER, value) for value in values])
    return found[0]


async def test_an_epoch_is_a_whole_number_and_none_without_the_header():
    assert await read("42") == 42
    assert await read() is None


@pytest.mark.parametrize("value", ["", "-1", "1.5", "x", "9" * 16, "1e3"])
async def test_an_epoch_that_is_no_number_is_refused(value):
    with pytest.raises(AgentRequestError, match=EPOCH_HEADER) as refused:
        await read(value)
    assert refused.value.code == "invalid_epoch"
