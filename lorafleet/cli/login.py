"""`lorafleet login`: a token of the fleet's identity provider, by the desktop's browser.

source  RFC 8252 (loopback redirection of native apps), RFC 7636 (PKCE)
"""

# ruff: noqa: PLC0415  (httpx is imported when the command needs it)

import asyncio
import base64
import hashlib
import json
import os
import secrets
import ssl
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qs, urlencode, urlsplit

import typer

from lorafleet.service.failure import CommandFailed

app = typer.Typer(no_args_is_help=True)
_TIMEOUT_S = 30.0
_PATH = "/back"


@app.command()
def login(
    context: typer.Context,
    issuer: Annotated[
        str | None, typer.Option(help="the issuer, where the fleet has several", show_default=False)
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="of this machine, for the issuer's answer; 0: any")] = 0,
    within_s: Annotated[float, typer.Option(min=1, help="seconds for the login in the browser")] = 300.0,
    issuer_ca: Annotated[
        Path | None,
        typer.Option(help="the authorities of the issuer's certificate, in PEM; default: the public ones"),
    ] = None,
) -> None:
    """Log in at the fleet's identity provider in a browser, and print the token, which is sent as keys are.

    Example: export LORAFLEET_TOKEN=$(lorafleet login)
    """
    from lorafleet.cli.client import verify_by
    from lorafleet.local.browser import open_page

    verify = verify_by(issuer_ca, flag="--issuer-ca")
    with context.obj.orchestrator() as api:
        offered = api.call("GET", "/v1/login")["data"]
    chosen = _chosen(offered, issuer)
    with HTTPServer(("127.0.0.1", port), _AnswerHandler) as server:
        pending = _PendingLogin(
            login=chosen,
            redirect=f"http://127.0.0.1:{server.server_port}{_PATH}",
            verifier=secrets.token_urlsafe(48),
            state=secrets.token_urlsafe(32),
            nonce=secrets.token_urlsafe(32),
        )
        typer.echo(asyncio.run(open_page(pending.url, os.environ, what="login")), err=True)
        answer = _await_answer(server, within_s)
    typer.echo(_token(pending, answer, verify))


@dataclass(frozen=True, slots=True, kw_only=True)
class _PendingLogin:
    """A login that a browser is at. `login`: an entry of `GET /v1/login`."""

    login: Any
    redirect: str
    verifier: str
    state: str
    nonce: str

    @property
    def url(self) -> str:
        """Where the browser logs in."""
        digest = hashlib.sha256(self.verifier.encode()).digest()
        query = {
            "response_type": "code",
            "client_id": self.login["client"]["client_id"],
            "redirect_uri": self.redirect,
            "scope": self.login["client"]["scope"],
            "state": self.state,
            "nonce": self.nonce,
            "code_challenge": base64.urlsafe_b64encode(digest).rstrip(b"=").decode(),
            "code_challenge_method": "S256",
        }
        address = str(self.login["endpoints"]["authorization"])
        return f"{address}{'&' if '?' in address else '?'}{urlencode(query)}"


def _chosen(offered: list[Any], issuer: str | None) -> Any:
    """The login at this issuer, or the only one. Raises CommandFailed."""
    names = [each["issuer"] for each in offered]
    found = [each for each in offered if issuer in {None, each["issuer"]}]
    if not offered:
        raise CommandFailed("this fleet has no issuer with a `console` in its key files: ask its operator for a key")
    if len(found) != 1:
        raise CommandFailed(f"--issuer: name one of {', '.join(names)}", status=2)
    return found[0]


class _AnswerHandler(BaseHTTPRequestHandler):
    """Takes the issuer's answer from the browser. The server keeps its query as `answer`."""

    timeout = 5.0  # for a browser that connects ahead, and sends nothing

    def do_GET(self) -> None:
        """Keep the answer's query, and tell the reader that the page may be closed."""
        parts = urlsplit(self.path)
        is_answer = parts.path == _PATH
        self.send_response(200 if is_answer else 404)
        self.send_header("content-type", "text/plain; charset=utf-8")
        self.end_headers()
        if is_answer:
            self.server.answer = {name: values[0] for name, values in parse_qs(parts.query).items()}  # type: ignore[attr-defined]
            self.wfile.write(b"lorafleet: back to the terminal; this page may be closed\n")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the base's signature)
        """Nothing: the query has a code."""


def _await_answer(server: HTTPServer, within_s: float) -> dict[str, str]:
    """The query of the issuer's answer. Raises CommandFailed where none comes in time."""
    ends_at = time.monotonic() + within_s
    while (left_s := ends_at - time.monotonic()) > 0:
        server.timeout = left_s
        server.handle_request()
        answer: dict[str, str] | None = getattr(server, "answer", None)
        if answer is not None:
            return answer
    raise CommandFailed(f"nobody has logged in within {within_s:g} s: run it again, or give --within-s")


def _token(pending: _PendingLogin, answer: dict[str, str], verify: ssl.SSLContext | bool) -> str:
    """The token for the fleet, in exchange for the answer's code. Raises CommandFailed."""
    import httpx

    if not secrets.compare_digest(answer.get("state", ""), pending.state):
        raise CommandFailed("the browser's answer is of another login (its `state` differs): run it again")
    if "error" in answer:
        raise CommandFailed(f"the issuer refused the login: {answer.get('error_description', answer['error'])}")
    client, endpoint = pending.login["client"], str(pending.login["endpoints"]["token"])
    form = {
        "grant_type": "authorization_code",
        "code": answer.get("code", ""),
        "redirect_uri": pending.redirect,
        "client_id": client["client_id"],
        "code_verifier": pending.verifier,
    }
    try:
        given = httpx.post(endpoint, data=form, timeout=_TIMEOUT_S, verify=verify)
        tokens: dict[str, Any] = given.json()
    except (httpx.HTTPError, ValueError) as exc:
        hint = "; where its authority is not a public one, give --issuer-ca" if "CERTIFICATE" in str(exc) else ""
        raise CommandFailed(f"the issuer's token endpoint {endpoint}: {exc!r}{hint}") from exc
    token, why = tokens.get(client["token"]), tokens.get("error_description") or tokens.get("error")
    if given.status_code != 200 or not isinstance(token, str):
        raise CommandFailed(f"the issuer gave no {client['token']}: {why or f'HTTP {given.status_code}'}")
    if _claims_in(str(tokens.get("id_token", ""))).get("nonce") != pending.nonce:
        raise CommandFailed("the issuer's ID token is not of this login (its `nonce` differs): run it again")
    return token


def _claims_in(token: str) -> dict[str, Any]:
    """The claims of a token that the issuer itself has just sent; empty where it is none."""
    payload = f"{token}..".split(".")[1]
    try:
        found = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
