"""Both loops: uvloop is what serves, and asyncio's transports differ in when they write, pause and close."""

import asyncio

import uvloop


def pytest_asyncio_loop_factories(config, item):
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
