"""Calls of the orchestrator with a client's own key, repeated while the orchestrator changes its leader."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import httpx
import msgspec
from fastapi import Request

from lorafleet.keys.auth import KEY_HEADERS, authorization_of
from lorafleet.keys.runs import RUN, path_in_run
from lorafleet.service.decoding import DECODE_ERRORS
from router.request.services import Services

_RETRY_S = 0.25
# Refusals by the orchestrator that end by themselves: a new leader, its first seconds, a store that is away.
_PASSING_CODES = frozenset(
    {"not_leading", "starting", "stopping", "store_unreachable", "no_worker", "worker_unreachable"}
)


class ControlUnavailable(Exception):
    """The orchestrator did not do it in time. The message says why."""


class ControlCalls:
    """Calls of the orchestrator that may be repeated: what they ask for is the same after one time or two."""

    def __init__(self, services: Services, control: httpx.AsyncClient) -> None:
        self.url = services.config.orchestrator_url.rstrip("/")
        self._control = control
        self._clock = services.clock

    async def send(
        self,
        request: Request,
        method: str,
        path: str,
        *,
        deadline: float,
        read_s: float | None = None,
        body: Callable[[], Mapping[str, Any]] | None = None,
    ) -> httpx.Response:
        """The orchestrator's answer, that of the next leader where the leader changes. Raises ControlUnavailable.

        request   the client's, whose key is passed on
        deadline  by the service's clock; no call begins later
        read_s    how long an answer may take; None: until the deadline
        body      makes the body of each try
        """
        sent = authorization_of(*map(request.headers.get, KEY_HEADERS))
        headers = {} if sent is None else {"authorization": sent}
        trouble = "it does not answer"
        while (left_s := deadline - self._clock()) > 0:
            try:
                answer = await self._control.request(
                    method,
                    f"{self.url}{path_in_run(request.scope.get(RUN, ''), path)}",
                    json=None if body is None else body(),
                    headers=headers,
                    # The orchestrator ends in time by itself; a little more lets its answer through.
                    timeout=httpx.Timeout(left_s + 1.0, read=left_s + 1.0 if read_s is None else read_s),
                )
            except (httpx.HTTPError, httpx.InvalidURL) as exc:
                trouble = f"it does not answer ({type(exc).__name__})"
            else:
                code, message = decode_error(answer)
                if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE or code not in _PASSING_CODES:
                    return answer
                trouble = message
            await asyncio.sleep(min(_RETRY_S, left_s))
        raise ControlUnavailable(trouble)


class ControlError(NamedTuple):
    """The code and the message of the orchestrator's error; empty for none."""

    code: str
    message: str


def decode_error(answer: httpx.Response) -> ControlError:
    """The error in the orchestrator's answer; without a code where it cannot be decoded."""
    if answer.is_success:
        return ControlError("", "")
    try:
        error = msgspec.json.decode(answer.content)["error"]
        return ControlError(str(error["code"]), str(error["message"]))
    except (*DECODE_ERRORS, KeyError, TypeError):
        return ControlError("", f"the orchestrator answers HTTP {answer.status_code}")
