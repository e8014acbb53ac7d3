"""A real OIDC server on loopback (oidc-provider-mock, on Authlib): discovery, logins by code, signed tokens, keys."""

import contextlib
import math
import secrets
import ssl
import threading
import time
import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import authlib.deprecate  # noqa: F401  (sets a filter for its warnings: before ours)
import flask
import httpx
import jwt
import pytest
import werkzeug.serving
from flask_cors import CORS

from lorafleet.service.network.tls import TlsFiles
from orchestrator.app import build
from orchestrator.config import OrchestratorSettings
from tests.patience import patience, until
from tests.serving import client_of, serving

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it imports a module of Authlib that Authlib 2 will not have
    import oidc_provider_mock
    from authlib import jose
    from oidc_provider_mock import User
    from oidc_provider_mock._app import AuthorizationCodeGrant

# Public clients, as the console is one: Authlib lets each grant say which clients it takes.
AuthorizationCodeGrant.TOKEN_ENDPOINT_AUTH_METHODS = ["none"]

QUIET = pytest.mark.filterwarnings("ignore::DeprecationWarning:(authlib|oidc_provider_mock)")
"""The mark of tests with such a server, which has uses of Authlib that Authlib 2 will not have."""
CLIENT = "lorafleet"
AUDIENCE = CLIENT
GRANTS = """
  - claims: {groups: admins}
    scopes: [admin]
  - claims: {groups: "team-{team}", email_verified: true}
    tenant: "{team}"
    scopes: [tenant-admin]
    namespace: "{team}/runs"
    lora_ids: ["{team}/*"]
    limits: {requests_per_minute: 60}
  - claims: {"realm.roles": reader, scope: "fleet:*"}
    scopes: [view]
  - claims: {"https://x.example/org": "{org}"}
    tenant: "{org}"
    scopes: [infer]
"""


def issuer_file(path: Path, url: str, *, more: str = "", grants: str = GRANTS) -> Path:
    """Write a key file with the issuer at this URL. `more`: lines behind it."""
    path.write_text(f"issuers:\n- issuer: {url}\n  audiences: [{AUDIENCE}]\n  grants:{grants}{more}")
    return path


class OidcServer:
    """The server, in a thread. `calls` are the requests that it got, as (method, path, form).

    tls  its certificate and key, and their authority; without, it speaks plain HTTP
    """

    def __init__(self, tls: TlsFiles | None = None) -> None:
        self._tls = tls
        self._verify = ssl.create_default_context(cafile=tls.ca) if tls else True
        self.calls: list[tuple[str, str, dict[str, str]]] = []
        self._storage: Any = None
        self._app = oidc_provider_mock.app()
        self._app.before_request(self._note_call)
        CORS(self._app)
        self._server: Any = None
        self.port = 0

    def _note_call(self) -> None:
        self._storage = flask.g.oidc_provider_mock_storage
        form = {**flask.request.args.to_dict(), **flask.request.form.to_dict()}
        self.calls.append((flask.request.method, flask.request.path, form))

    @property
    def url(self) -> str:
        return f"http{'s' if self._tls else ''}://localhost:{self.port}"

    def start(self) -> None:
        tls = self._tls and (str(self._tls.cert), str(self._tls.key))
        self._server = werkzeug.serving.make_server("127.0.0.1", self.port, self._app, threaded=True, ssl_context=tls)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        httpx.get(f"{self.url}/jwks", timeout=patience(20), trust_env=False, verify=self._verify).raise_for_status()

    def stop(self) -> None:
        """Be away: connections are refused. `start` comes back on the same port, with the same keys and users."""
        self._server.shutdown()
        self._server.server_close()

    def rotate(self) -> None:
        """Sign by another key from now on; the key set has that one alone."""
        self._storage.jwk = jose.RSAKey.generate_key(is_private=True)

    @property
    def key(self) -> Any:
        """The private key that signs; the key set has it under `kid`."""
        return self._storage.jwk.get_private_key()

    @property
    def kid(self) -> str:
        return str(self._storage.jwk.as_dict()["kid"])

    def set_user(self, subject: str, **claims: object) -> None:
        self._storage.store_user(User(sub=subject, claims=claims))

    def log_in(self, subject: str, **claims: object) -> str:
        """The ID token of a user who logs in by an authorization code, as a browser and a client do it."""
        self.set_user(subject, **claims)
        redirect = "http://localhost:1/back"
        query = {
            "client_id": CLIENT,
            "response_type": "code",
            "scope": "openid profile email",
            "redirect_uri": redirect,
            "nonce": secrets.token_hex(8),
        }
        with httpx.Client(base_url=self.url, timeout=patience(20), trust_env=False, verify=self._verify) as client:
            answer = client.post(f"/oauth2/authorize?{urlencode(query)}", data={"sub": subject})
            code = parse_qs(urlsplit(answer.headers["location"]).query)["code"][0]
            form = {
                "grant_type": "authorization_code",
                "code": code,
                "client_id": CLIENT,
                "redirect_uri": redirect,
            }
            return str(client.post("/oauth2/token", data=form).raise_for_status().json()["id_token"])

    def claims(self, **more: object) -> dict[str, object]:
        """Claims as the server's own tokens have them; None leaves one out."""
        now = int(time.time())
        usual = {"iss": self.url, "aud": AUDIENCE, "sub": "ann", "iat": now, "exp": now + 600, "groups": ["admins"]}
        return {name: value for name, value in {**usual, **more}.items() if value is not None}

    def sign(self, claims: dict[str, object], *, key: Any = None, algorithm: str = "RS256", **headers: object) -> str:
        """A token with these claims and headers, signed by the server's key unless another is given."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # short keys
            return jwt.encode(claims, key or self.key, algorithm=algorithm, headers={"kid": self.kid, **headers})


@contextlib.contextmanager
def oidc_server(tls: TlsFiles | None = None) -> Iterator[OidcServer]:
    """A running server."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTHLIB_INSECURE_TRANSPORT", "1")
        server = OidcServer(tls)
        server.start()
        try:
            yield server
        finally:
            with contextlib.suppress(Exception):
                server.stop()


@contextlib.asynccontextmanager
async def offering_login(oidc: OidcServer, folder: Path, *, more: str) -> AsyncIterator[str]:
    """The URL of an orchestrator that takes the server's tokens, and has begun to offer its login."""
    path = issuer_file(folder / "keys.yaml", oidc.url, more=more)
    whole = build(OrchestratorSettings(store=folder / "store.db", key_files=(path,)))
    whole.leadership.lead_until(math.inf)
    async with serving(whole.app) as url, client_of(url) as client:

        async def is_offered() -> object:
            return (await client.get("/v1/login")).json()["data"]

        await until(is_offered)
        yield url
        whole.stop()
