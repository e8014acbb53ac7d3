"""A call whose items run as separate requests, each at the replica that is best for it. One body answers them all.

Two calls are made of items: SGLang's `/generate`, and a completion whose prompts have different adapters.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from lorafleet.keys.roles import Caller
from router.core.errors import BadBody, RouterError
from router.http.sse import ModelRenamer
from router.protocols import sglang_generate
from router.protocols.bodies import ItemAnswer, check_items
from router.protocols.completion_batch import check_not_streamed, join_completions, split_completions
from router.protocols.routes import ROUTES, Route
from router.request.accounting import count_run, record, record_error, record_usage
from router.request.dispatched import record_whole_answer
from router.request.engine_attempt import AttemptLimits
from router.request.parsed_request import InferenceRequestReader, ParsedRequest, check_coding
from router.request.response import ClientResponse, within_deadline
from router.request.run import RequestRun
from router.request.services import Services

# Items of one batch that run at a time; the rest queue.
MAX_RUNNING_ITEMS = 64
# Items of one batch: each is read, and has a task, before the first is sent: about 30 us of the event loop.
MAX_ITEMS = 10_000
GENERATE = Route(path=sglang_generate.PATH, summary="Texts continued, in SGLang's native form", generates=True)
_GENERATE_ITEM = ROUTES["POST", sglang_generate.ITEM_PATH]
_JSON = "content-type: application/json\r\n"

JoinAnswers = Callable[[Sequence[ItemAnswer]], bytes]
"""The items' whole answers, in their order, as the call's answer. Raises RouterError."""


async def serve_items(
    services: Services,
    limits: AttemptLimits,
    caller: Caller,
    response: ClientResponse,
    items: Iterable[ParsedRequest],
    *,
    count: int,
    param: str,
    join: JoinAnswers,
) -> None:
    """Run all items, and answer with one body. If one item fails, the whole call fails. Raises RouterError.

    count  of the items; `param`: the body's field that has them
    """
    with response.counting_wrong_body(caller):
        _check_size(count, caller, param)
        runs = [RequestRun(services, limits, caller, item) for item in items]
    await within_deadline(services, runs[0].request, _serve_whole(services, join, runs, caller, response))


def _check_size(items: int, caller: Caller, param: str) -> None:
    """Raise BadBody for more items than one call may have, or the caller's key or tenant in a minute."""
    if items > MAX_ITEMS:
        raise BadBody(f"{items} items are more than {MAX_ITEMS}: send several calls", param=param)
    for account in caller.limited:
        per_minute = account.limits.requests_per_minute
        if per_minute is not None and items > per_minute:
            whose = "this API key" if account.id == caller.key_id else "all keys of its tenant"
            raise BadBody(f"{items} items are more than the {per_minute:g} requests a minute of {whose}")


async def _serve_whole(
    services: Services,
    join: JoinAnswers,
    runs: Sequence[RequestRun],
    caller: Caller,
    response: ClientResponse,
) -> None:
    """Take the quota of all items at once, run them, and send one body. Raises RateLimited.

    With a quota for each item, a refusal half-way would waste what the others have computed.
    """
    if not caller.limited:
        await _serve_items(join, runs, response, MAX_RUNNING_ITEMS)
        return
    services.budgets.check(caller.limited, services.clock())
    granted = services.quotas.take_batch(
        caller.limited,
        services.clock(),
        len(runs),
        at_once=MAX_RUNNING_ITEMS,
        arrived=response.granted,
    )
    try:
        for run, item in zip(runs, granted.items, strict=True):
            run.granted = item
        await _serve_items(join, runs, response, granted.at_once)
    finally:
        services.quotas.end_batch(granted, services.clock())


async def _serve_items(
    join: JoinAnswers, runs: Sequence[RequestRun], response: ClientResponse, max_running: int
) -> None:
    """Run all items, and send one body; the first refused item refuses the batch, and ends the others."""
    slots = asyncio.Semaphore(max_running)
    tasks = [asyncio.create_task(_item_answer(run, slots)) for run in runs]
    try:
        answers = await asyncio.gather(*tasks)
    except _ItemRefused as exc:
        response.send_whole(exc.status, _JSON, exc.body)
        return
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    response.send_whole(200, _JSON, join(answers))


async def _item_answer(run: RequestRun, slots: asyncio.Semaphore) -> ItemAnswer:
    """Run one item at its engine, once it has a slot, and record its end; its whole answer. Raises _ItemRefused."""
    async with slots:
        try:
            status, code, limit = 499, "", ""
            try:
                dispatched, answer = await run.reach_engine()
            except RouterError as exc:
                status, code, limit = exc.status, exc.code, exc.limit
                record_error(run, exc)
                raise
            target, model, status = dispatched.target, answer.message.engine_model, answer.status
            body = ModelRenamer(model, target.asked).whole(answer.first)
            if status >= 400:
                raise _ItemRefused(status, body)
            record_whole_answer(run.services, dispatched)
            record_usage(run, dispatched, answer)
            return ItemAnswer(body, target.weights)
        finally:
            record(run)
            count_run(run, status, code, limit)


class _ItemRefused(Exception):
    """An engine refused one item, and so the batch fails."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status)
        self.status = status
        self.body = body


async def serve_completion_batch(
    services: Services,
    limits: AttemptLimits,
    reader: InferenceRequestReader,
    caller: Caller,
    response: ClientResponse,
    request: ParsedRequest,
) -> None:
    """Answer a completion whose `lora_id` is a list. Raises RouterError."""
    check_not_streamed(request.decoded.get("stream"), param=request.adapter_field)
    bodies = split_completions(request.fields, request.decoded["prompt"], request.lora_id)
    await serve_items(
        services,
        limits,
        caller,
        response,
        (
            reader.read_item(response.exchange, request.route, response.trace, body, number)
            for number, body in enumerate(bodies)
        ),
        count=len(request.lora_id),
        param="prompt",
        join=partial(join_completions, f"cmpl-{response.request_id}", names_weights=request.names_weights),
    )


async def serve_generate_batch(
    services: Services, limits: AttemptLimits, reader: InferenceRequestReader, caller: Caller, response: ClientResponse
) -> None:
    """Answer one `/generate` call: one stream, or all items in one body. Raises RouterError."""
    exchange, body = response.exchange, response.exchange.body
    with response.counting_wrong_body(caller):
        check_coding(exchange.headers, body)
        check_items(body, services.config.max_body_items)
        batch = sglang_generate.split_batch(body)
        streamed = None
        if batch.is_streamed:
            streamed = reader.read_item(exchange, _GENERATE_ITEM, response.trace, batch.items[0], 0, batch.natives[0])
    if streamed is not None:
        response.take_quota(caller)
        cumulative = sglang_generate.CumulativeStream(batch.names[0], batch.logprobs[0])
        run = RequestRun(services, limits, caller, streamed, cumulative=cumulative, granted=response.granted)
        if services.config.stream_keep_alive_s:
            response.keep_alive(services.config.stream_keep_alive_s)
        await response.serve(run)
        return
    await serve_items(
        services,
        limits,
        caller,
        response,
        (
            reader.read_item(exchange, _GENERATE_ITEM, response.trace, item, number, native)
            for number, (item, native) in enumerate(zip(batch.items, batch.natives, strict=True))
        ),
        param="text",
        count=len(batch.items),
        join=partial(sglang_generate.join_answers, batch),
    )
