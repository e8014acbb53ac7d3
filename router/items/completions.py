"""A text completion whose prompts have different adapters: each prompt runs as a separate completion."""

from functools import partial

from lorafleet.keys.roles import Caller
from router.items.item_batch import serve_items
from router.protocols.completion_batch import check_not_streamed, join_completions, split_completions
from router.request.engine_attempt import AttemptLimits
from router.request.parsed_request import ParsedRequest
from router.request.reader import InferenceRequestReader
from router.request.response import ClientResponse
from router.request.services import Services


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
        (reader.read_item(response, request.route, body, number) for number, body in enumerate(bodies)),
        count=len(request.lora_id),
        param="prompt",
        join=partial(join_completions, f"cmpl-{response.request_id}", names_weights=request.names_weights),
    )
