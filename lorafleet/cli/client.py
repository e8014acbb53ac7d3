"""The CLI's REST client: JSON over HTTP to router and orchestrator, with every failure as one line."""

import ssl
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import httpx

from lorafleet.service.failure import CommandFailed, printable
from lorafleet.service.network.tls import TlsError, client_context
from lorafleet.service.network.urls import checked_key, is_http, without_secrets

T = TypeVar("T")

# A leader changes in five seconds, and a process restarts in less than a minute.
_AWAY_S = 60.0
_AGAIN_S = 1.0
_PASSING = frozenset({408, 429, 500, 502, 503, 504})


class _AnswerObject(dict[str, Any]):
    """A JSON object of an answer. The look-up of a field that is missing raises the error that `wrong` gives."""

    wrong: Callable[[str], Exception] = KeyError  # of a copy, such as `dataclasses.asdict` makes

    def __missing__(self, name: str) -> Any:
        raise self.wrong(f"no field {name!r}")


def verify_by(ca: Path | None, *, flag: str = "--tls-ca") -> ssl.SSLContext | bool:
    """What httpx checks certificates by: an authority's file, else the public ones. Raises CommandFailed.

    flag  the option that names the file
    """
    if ca is None:
        return True
    try:
        return client_context(ca)
    except TlsError as exc:
        raise CommandFailed(f"{flag}{str(exc).removeprefix('tls_ca')}", status=2) from exc


class RestClient:
    """A client of one server. An answer without a field that a command looks up is a CommandFailed, too.

    flag         the option that sets the server's address
    key_option  the option and the variable that set its key, for messages
    """

    def __init__(
        self,
        url: str,
        token: str = "",
        *,
        flag: str = "",
        key_option: str = "--token KEY, or LORAFLEET_TOKEN",
        ca: Path | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        """Raises CommandFailed with status 2 for an invalid address, key or authority."""
        self.url = url.rstrip("/")
        self._flag = flag
        self._key_option = key_option
        self._timeout_s = timeout_s
        try:
            key = checked_key(token)
        except ValueError as exc:
            raise CommandFailed(f"{key_option}: {exc}", status=2) from exc
        if not is_http(self.url):
            option = flag.removeprefix("lorafleet ") or "address"
            raise CommandFailed(
                f"{option} {without_secrets(url)!r}: must be an address, such as http://127.0.0.1:8080", status=2
            )
        headers = {"authorization": f"Bearer {key}"} if key else {}
        # Loopback and cluster addresses: no proxy from the environment.
        verify = verify_by(ca)
        self._client = httpx.Client(
            base_url=self.url, headers=headers, timeout=timeout_s, trust_env=False, verify=verify
        )

    def __enter__(self) -> "RestClient":
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        """Close the HTTP client."""
        self._client.close()

    def call(
        self, method: str, path: str, body: Any = None, *, headers: Mapping[str, str] | None = None, **query: Any
    ) -> Any:
        """Send a request; the answer's JSON, {} for an empty one. Raises CommandFailed, also for an error answer."""
        return self._parse_json(path, self._send(method, path, body, headers=headers, **query))

    def get_with_etag(self, path: str) -> tuple[Any, str]:
        """GET `path`: the answer's JSON and its ETag. Raises CommandFailed."""
        answer = self._send("GET", path)
        return self._parse_json(path, answer), answer.headers.get("etag", "")

    def download(self, path: str, **query: Any) -> bytes:
        """GET `path`: the answer's bytes. Raises CommandFailed."""
        return self._send("GET", path, **query).content

    def _send(
        self, method: str, path: str, body: Any = None, *, headers: Mapping[str, str] | None = None, **query: Any
    ) -> httpx.Response:
        """Send a request and return the answer; raises CommandFailed, or RestError for an error answer."""
        params = {name: value for name, value in query.items() if value is not None}
        try:
            answer = self._client.request(method, path, json=body, params=params, headers=headers)
        except httpx.ReadTimeout as exc:
            next_step = "; what it was asked for may still happen: look, or run the command again"
            if method == "GET":
                next_step = self._hint("is the fleet up")
            raise NoAnswer(f"{self.url}: no answer within {self._timeout_s:g} s{next_step}") from exc
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            if "CERTIFICATE_VERIFY_FAILED" in str(exc):
                next_step = "give --tls-ca, or LORAFLEET_TLS_CA: the file of the authority that signed its certificate"
                raise NoAnswer(f"{self.url}: {exc}; {next_step}") from exc
            raise NoAnswer(f"{self.url}: {exc}{self._hint('is the fleet up')}") from exc
        except ValueError as exc:  # NaN, or half a surrogate pair
            raise CommandFailed(f"the values cannot be sent as JSON: {exc}", status=2) from exc
        except TypeError as exc:  # YAML has values that JSON lacks
            message = f"the values cannot be sent as JSON: {exc}; put dates and other text in quotes"
            raise CommandFailed(message, status=2) from exc
        if answer.is_success:
            return answer
        if answer.is_redirect:  # lorafleet's services send none to a path of theirs
            raise self._wrong_server(path, "a redirect")
        message, code, param = _parse_error(answer)
        if code == "not_found":  # no such route; missing adapters and the like have codes of their own
            message = f"{self.url} has no {path}{self._hint('is it the right server')}"
        raise RestError(answer.status_code, message, code, key_option=self._key_option, param=param)

    def _parse_json(self, path: str, answer: httpx.Response) -> Any:
        """The JSON of an answer, an object; {} for an empty answer. Raises CommandFailed."""

        def wrong(detail: str) -> CommandFailed:
            return self._wrong_server(path, detail)

        def answer_object(fields: dict[str, Any]) -> _AnswerObject:
            found = _AnswerObject(fields)
            found.wrong = wrong
            return found

        if not answer.content:
            return answer_object({})
        try:
            found = answer.json(object_hook=answer_object)
        except (ValueError, RecursionError) as exc:
            raise wrong("no JSON") from exc
        if not isinstance(found, dict):
            raise wrong("no JSON object")
        return found

    def _wrong_server(self, path: str, detail: str) -> CommandFailed:
        """The error for an answer that is not lorafleet's. `detail`: what the answer is, or lacks."""
        hint = self._hint("is it the right server, of this version")
        return CommandFailed(f"{self.url} does not answer {path} as lorafleet does ({detail}){hint}")

    def _hint(self, question: str) -> str:
        """A question for an error message, with the option that sets the address; "" if there is no such option."""
        return f"; {question}? ({self._flag} names another address)" if self._flag else ""

    def list_all(self, path: str) -> list[dict[str, Any]]:
        """GET all items of a list, page by page. Raises CommandFailed."""
        items: list[dict[str, Any]] = []
        cursor = None
        while True:
            page = self.call("GET", path, cursor=cursor)
            found = page.get("data")
            if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
                raise self._wrong_server(path, "no list of objects in `data`")
            items += found
            cursor = page.get("next")
            if cursor is None:
                return items


def read_patiently(read: Callable[[], T], *, passing: Collection[int] = ()) -> T:
    """Call `read` until it succeeds, and return its result.

    Without an answer, or with a status that may be temporary, it is called again each second. The error is raised after
    a minute, any other error at once.

    passing  further statuses that may be temporary
    """
    deadline = time.monotonic() + _AWAY_S
    while True:
        try:
            return read()
        except (NoAnswer, RestError) as exc:
            may_pass = isinstance(exc, NoAnswer) or exc.http_status in _PASSING or exc.http_status in passing
            if not may_pass or time.monotonic() >= deadline:
                raise
            time.sleep(_AGAIN_S)


class NoAnswer(CommandFailed):
    """The server did not answer."""


class RestError(CommandFailed):
    """The server answered with an error. The message is the server's, plus a hint for known codes.

    param  the field that is wrong, such as `policy.loading`; empty if the answer names none
    """

    def __init__(self, http_status: int, message: str, code: str, *, key_option: str, param: str = "") -> None:
        hints = {401: f" (give {key_option})"}
        commands = {
            "adapter_not_found": " (lorafleet adapters add LORA_ID SOURCE)",
            "already_registered": " (lorafleet adapters set LORA_ID)",
        }
        super().__init__(printable(message) + hints.get(http_status, "") + commands.get(code, ""))
        self.http_status = http_status
        self.param = param


def _parse_error(answer: httpx.Response) -> tuple[str, str, str]:
    """The message, code and field of an error answer; code and field are empty if the answer is not lorafleet's."""
    try:
        error = answer.json()["error"]
        return str(error["message"]), str(error.get("code", "")), str(error.get("param") or "")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{answer.request.method} {answer.request.url}: HTTP {answer.status_code}: {answer.text[:200]}", "", ""
