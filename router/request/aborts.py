"""The end of a request that a pause aborts, made of what is known of it here."""

from router.protocols.aborted import AbortedAnswer, aborted_answer
from router.request.dispatched import DispatchedRequest
from router.request.engine_request import EngineRequest
from router.request.parsed_request import ParsedRequest


def answer_to_abort(
    request: ParsedRequest, dispatched: DispatchedRequest | None, engine_request: EngineRequest | None
) -> AbortedAnswer | None:
    """The end of this request's answer after an abort; None: its format has no word for that, or it was not sent."""
    if dispatched is None or engine_request is None:
        return None
    return aborted_answer(
        request.route.path,
        request.fields,
        answer_id=request.request_id,
        model=engine_request.engine_model,
        choices=request.sequences,
        prompt_tokens=dispatched.hashed.request.prompt_tokens,
    )
