"""SGLang's `/generate`: a batch, of which each item runs as a separate completion."""

from functools import partial

from lorafleet.keys.roles import Caller
from router.items.item_batch import serve_items
from router.protocols import sglang_generate
from router.protocols.bodies import check_items
from router.protocols.routes import ROUTES, Route
from router.request.engine_attempt import AttemptLimits
from router.request.reader import InferenceRequestReader, check_coding
from router.request.response import ClientResponse
from router.request.run import RequestRun
from router.request.services import Services

GENERATE = Route(path=sglang_generate.PATH, summary="Texts continued, in SGLang's native form", generates=True)
_ITEM = ROUTES["POST", sglang_generate.ITEM_PATH]


async def serve_generate_batch(
    services: Services, limits: AttemptLimits, reader: InferenceRequestReader, caller: Caller, response: ClientResponse
) -> None:
    """Answer one `/generate` call: one stream, or all items in one body. Raises RouterError."""
    body = response.exchange.body
    with response.counting_wrong_body(caller):
        check_coding(response.exchange.headers, body)
        check_items(body, services.config.max_body_items)
        batch = sglang_generate.split_batch(body)
        streamed = reader.read_item(response, _ITEM, batch.items[0], 0, batch.natives[0]) if batch.is_streamed else None
    if streamed is not None:
        response.take_quota(caller)
        run = RequestRun(services, limits, caller, streamed, granted=response.granted)
        run.cumulative = sglang_generate.CumulativeStream(batch.names[0], batch.logprobs[0])
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
            reader.read_item(response, _ITEM, item, number, native)
            for number, (item, native) in enumerate(zip(batch.items, batch.natives, strict=True))
        ),
        param="text",
        count=len(batch.items),
        join=partial(sglang_generate.join_answers, batch),
    )
