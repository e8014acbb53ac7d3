"""SGLang's `/generate`: a batch, of which each item runs as a separate completion."""

import asyncio
from collections.abc import Sequence

from lorafleet.service.auth import Caller
from router.core.errors import BadBody
from router.protocols import sglang_generate
from router.protocols.bodies import check_items
from router.protocols.routes import ROUTES, Route
from router.request.accounting import record, record_usage
from router.request.engine_attempt import AttemptLimits
from router.request.reader import InferenceRequestReader
from router.request.response import ClientResponse, within_deadline
from router.request.run import RequestRun
from router.request.services import Services

GENERATE = Route(path=sglang_generate.PATH, summary="Texts continued, in SGLang's native form", generates=True)
_ITEM = ROUTES["POST", sglang_generate.ITEM_PATH]
# Items of one batch that run at a time; the rest queue.
_MAX_RUNNING_ITEMS = 64
# Items of one batch: each is read, and has a task, before the first is sent: about 30 us of the event loop.
_MAX_ITEMS = 10_000
_JSON = "content-type: application/json\r\n"


async def serve_generate_batch(
    services: Services, limits: AttemptLimits, reader: InferenceRequestReader, caller: Caller, response: ClientResponse
) -> None:
    """Answer one `/generate` call: one stream, or all items in one body. Raises RouterError."""
    body = response.exchange.body
    check_items(body, services.config.max_body_items)
    batch = sglang_generate.split_batch(body)
    _check_size(len(batch.items), caller)
    runs = [
        RequestRun(services, limits, caller, reader.read_item(response, _ITEM, item, number))
        for number, item in enumerate(batch.items)
    ]
    if batch.is_streamed:
        (run,) = runs
        run.cumulative = sglang_generate.CumulativeStream(batch.names[0])
        if services.config.stream_keep_alive_s:
            response.keep_alive(services.config.stream_keep_alive_s)
        await response.serve(run)
    else:
        await within_deadline(services, runs[0].request, _serve_whole(services, batch, runs, caller, response))


def _check_size(items: int, caller: Caller) -> None:
    """Raise BadBody for more items than one call may have, or the caller's key in a minute."""
    if items > _MAX_ITEMS:
        raise BadBody(f"{items} items are more than {_MAX_ITEMS}: send several calls", param="text")
    per_minute = None if caller.limits is None else caller.limits.requests_per_minute
    if per_minute is not None and items > per_minute:
        raise BadBody(f"{items} items are more than the {per_minute:g} requests a minute of this API key")


async def _serve_whole(
    services: Services,
    batch: sglang_generate.GenerateBatch,
    runs: Sequence[RequestRun],
    caller: Caller,
    response: ClientResponse,
) -> None:
    """Take the quota of all items at once, run them, and send one body. Raises RateLimited.

    With a quota for each item, a refusal half-way would waste what the others have computed.
    """
    if caller.limits is None:
        await _serve_items(batch, runs, response, _MAX_RUNNING_ITEMS)
        return
    granted = services.quotas.take_batch(
        caller.key_id, caller.limits, services.clock(), len(runs), at_once=_MAX_RUNNING_ITEMS
    )
    try:
        for run, item in zip(runs, granted.items, strict=True):
            run.granted = item
        await _serve_items(batch, runs, response, granted.at_once)
    finally:
        services.quotas.end_batch(granted, services.clock())


async def _serve_items(
    batch: sglang_generate.GenerateBatch, runs: Sequence[RequestRun], response: ClientResponse, max_running: int
) -> None:
    """Run all items, and send one body; the first refused item refuses the batch, and ends the others."""
    slots = asyncio.Semaphore(max_running)
    tasks = [asyncio.create_task(_item_body(run, slots)) for run in runs]
    try:
        bodies = await asyncio.gather(*tasks)
    except _ItemRefused as exc:
        response.send_whole(exc.status, _JSON, exc.body)
        return
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    response.send_whole(200, _JSON, sglang_generate.join_answers(batch, bodies))


async def _item_body(run: RequestRun, slots: asyncio.Semaphore) -> bytes:
    """Run one item at its engine, once it has a slot, and record its end; its whole answer. Raises _ItemRefused."""
    async with slots:
        try:
            await run.reach_engine()
            assert run.attempt is not None
            assert run.dispatched is not None
            if run.attempt.status >= 400:
                raise _ItemRefused(run.attempt.status, run.attempt.first)
            run.dispatched.record_whole_answer()
            record_usage(run)
            return run.attempt.first
        finally:
            record(run)


class _ItemRefused(Exception):
    """An engine refused one item, and so the batch fails."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status)
        self.status = status
        self.body = body
