"""JSON over HTTP to the router, the orchestrator and the agents, for the CLI: every failure is one line."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any

import httpx

from lorafleet.service.failure import CommandFailed, printable
from lorafleet.service.urls import is_http, plain_key, shown


class RestClient:
    """One server. `flag` is how a person would name it differently."""

    def __init__(self, url: str, token: str = "", *, flag: str = "", timeout_s: float = 30.0) -> None:
        self.url = url.rstrip("/")
        self._flag = flag
        try:
            key = plain_key(token)
        except ValueError as exc:
            raise CommandFailed(f"--token, or LORAFLEET_TOKEN: {exc}", status=2) from exc
        if not is_http(self.url):
            named = flag.removeprefix("lorafleet ") or "address"
            raise CommandFailed(f"{named} {shown(url)!r}: must be an address, as http://127.0.0.1:8080", status=2)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        # Loopback and cluster addresses: a proxy from the environment would only be in the way.
        self._client = httpx.Client(base_url=self.url, headers=headers, timeout=timeout_s, trust_env=False)

    def __enter__(self) -> "RestClient":
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._client.close()

    def call(
        self, method: str, path: str, body: Any = None, *, headers: Mapping[str, str] | None = None, **query: Any
    ) -> Any:
        """The answer's JSON (None when it is empty); raises Failure for a server that is away or says no."""
        answer = self._answer(method, path, body, headers=headers, **query)
        return self._json(path, answer) if answer.content else None

    def tagged(self, path: str) -> tuple[Any, str]:
        """The answer's JSON, and its ETag."""
        answer = self._answer("GET", path)
        return self._json(path, answer), answer.headers.get("etag", "")

    def download(self, path: str) -> bytes:
        """The answer as it is."""
        return self._answer("GET", path).content

    def _answer(
        self, method: str, path: str, body: Any = None, *, headers: Mapping[str, str] | None = None, **query: Any
    ) -> httpx.Response:
        params = {name: value for name, value in query.items() if value is not None}
        try:
            answer = self._client.request(method, path, json=body, params=params, headers=headers)
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise CommandFailed(f"{self.url}: {exc}{self._hint('is the fleet up')}") from exc
        except ValueError as exc:  # NaN, or half a surrogate pair: nothing was sent
            raise CommandFailed(f"what was given cannot be sent as JSON: {exc}", status=2) from exc
        if answer.is_success:
            return answer
        message, code = _reason(answer)
        if code == "not_found":  # of the path: names that there are not have codes of their own
            message = f"{self.url} has no {path}{self._hint('is it the right server')}"
        raise RestError(answer.status_code, message, code)

    def _json(self, path: str, answer: httpx.Response) -> Any:
        try:
            return answer.json()
        except ValueError as exc:
            raise self._is_another(path) from exc

    def _is_another(self, path: str) -> CommandFailed:
        return CommandFailed(
            f"{self.url} does not answer {path} as lorafleet does{self._hint('is it the right server')}"
        )

    def _hint(self, question: str) -> str:
        return f"; {question}? ({self._flag} names another address)" if self._flag else ""

    def every(self, path: str) -> list[dict[str, Any]]:
        """All items of a list, page by page."""
        items: list[dict[str, Any]] = []
        cursor = None
        while True:
            page = self.call("GET", path, cursor=cursor)
            if not isinstance(page, dict) or not isinstance(page.get("data"), list):
                raise self._is_another(path)
            items += page["data"]
            cursor = page.get("next")
            if cursor is None:
                return items


class RestError(CommandFailed):
    """The server answered with an error; the message is its own, with what to do where we know more."""

    def __init__(self, http_status: int, message: str, code: str) -> None:
        hints = {401: " (give --token KEY or set LORAFLEET_TOKEN)", 403: " (use a key that has the scope)"}
        commands = {
            "adapter_not_found": " (lorafleet adapters add LORA_ID SOURCE)",
            "already_registered": " (lorafleet adapters set LORA_ID)",
        }
        super().__init__(printable(message) + hints.get(http_status, "") + commands.get(code, ""))
        self.http_status = http_status


def _reason(answer: httpx.Response) -> tuple[str, str]:
    """Its message and its code; the latter empty where the answer is not one of ours."""
    try:
        error = answer.json()["error"]
        return str(error["message"]), str(error.get("code", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{answer.request.method} {answer.request.url}: HTTP {answer.status_code}: {answer.text[:200]}", ""
