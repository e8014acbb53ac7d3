"""The API server's client: access, credentials, and errors."""

import asyncio
import contextlib
import gc
import json
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
import uvicorn
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lorafleet.http_server.serve import bind
from lorafleet.kube.client import KubeClient, connect
from lorafleet.kube.errors import (
    KubeConfigError,
    KubeConflict,
    KubeError,
    KubeForbidden,
    KubeGone,
    KubeNotFound,
    KubeUnreachable,
)
from tests.kube.certificates import Certificate, made_for
from tests.patience import patience, until
from tests.serving import serving


class StubApiServer:
    """Answers as told, and keeps what it was asked."""

    def __init__(self, answer=None):
        self.answer = answer or (lambda request: JSONResponse({"kind": "Thing"}))
        self.asked: list[Request] = []
        self.bodies: list[bytes] = []

    @property
    def app(self):
        async def handle(request: Request):
            self.asked.append(request)
            self.bodies.append(await request.body())
            answer = self.answer(request)
            return await answer if asyncio.iscoroutine(answer) else answer

        methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]
        return Starlette(routes=[Route("/{path:path}", handle, methods=methods)])


def status(code: int, reason: str, message: str = "so it is", headers=None) -> JSONResponse:
    body = {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message}
    return JSONResponse(body, code, headers)


def kubeconfig(path, url, *, token="", namespace="fleet"):
    user = {"token": token} if token else {}
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "c", "cluster": {"server": url}}],
                "users": [{"name": "u", "user": user}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": namespace}}],
                "current-context": "x",
            }
        )
    )
    return path


@pytest.fixture
async def api():
    return StubApiServer()


@pytest.fixture
async def kube(api, tmp_path):
    async with serving(api.app) as url:
        client = await connect(kubeconfig(tmp_path / "config", url, token="t0"), environ={})
        yield client
        await client.close()


async def test_every_verb_sends_its_body_as_json_with_the_kubeconfigs_token(kube: KubeClient, api):
    assert kube.namespace == "fleet"
    assert await kube.get("/api/v1/x", labelSelector="a=b", limit=5) == {"kind": "Thing"}
    await kube.post("/api/v1/x", {"a": 1})
    await kube.put("/api/v1/x", {"a": 2})
    await kube.patch("/api/v1/x", [{"op": "remove"}], content_type="application/json-patch+json")
    await kube.delete("/api/v1/x", {"preconditions": {"uid": "u"}})
    assert [request.method for request in api.asked] == ["GET", "POST", "PUT", "PATCH", "DELETE"]
    assert dict(api.asked[0].query_params) == {"labelSelector": "a=b", "limit": "5"}
    assert {request.headers["authorization"] for request in api.asked} == {"Bearer t0"}
    assert [json.loads(body) for body in api.bodies[1:]] == [
        {"a": 1},
        {"a": 2},
        [{"op": "remove"}],
        {"preconditions": {"uid": "u"}},
    ]
    assert "content-type" not in api.asked[0].headers
    assert api.asked[2].headers["content-type"] == "application/json"
    assert api.asked[3].headers["content-type"] == "application/json-patch+json"


@pytest.mark.parametrize(
    ("code", "reason", "error"),
    [
        (401, "Unauthorized", KubeForbidden),
        (403, "Forbidden", KubeForbidden),
        (404, "NotFound", KubeNotFound),
        (409, "AlreadyExists", KubeConflict),
        (410, "Expired", KubeGone),
        (422, "Invalid", KubeError),
        (503, "ServiceUnavailable", KubeError),
    ],
)
async def test_a_refusal_is_an_error_with_its_status_reason_and_message(kube: KubeClient, api, code, reason, error):
    api.answer = lambda request: status(code, reason, headers={"retry-after": "3"})
    with pytest.raises(error, match=f"GET .*/api/v1/x: HTTP {code} {reason}: so it is") as told:
        await kube.get("/api/v1/x")
    assert (told.value.status, told.value.reason, told.value.retry_after_s) == (code, reason, 3.0)
    assert type(told.value) is error


async def test_a_malformed_response_counts_as_unreachable(kube: KubeClient, api):
    for nonsense in (Response("<html>"), JSONResponse([1])):
        api.answer = lambda request, nonsense=nonsense: nonsense
        with pytest.raises(KubeUnreachable, match="something other than"):
            await kube.get("/api/v1/x")

    async def never(request):
        await asyncio.Event().wait()

    api.answer = never
    with pytest.raises(KubeUnreachable, match=r"no answer within 0\.05 s"):
        await kube.get("/api/v1/x", timeout_s=0.05)


async def test_calls_that_are_given_up_leave_no_connection(api, tmp_path):
    """A call is given up at any turn of the loop, such as between connecting and sending."""
    async with serving(api.app) as url:
        for turns in range(40):
            client = await connect(kubeconfig(tmp_path / "config", url), environ={})
            call = asyncio.create_task(client.get("/api"))
            for _ in range(turns):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            pool = client._client._transport._pool
            assert all(connection.is_idle() for connection in pool.connections), turns
            await client.close()
    gc.collect()  # a connection that is left open warns, and a warning is an error here


async def test_a_server_that_is_not_there_is_unreachable(tmp_path):
    free = bind("127.0.0.1", 0)
    free.close()
    client = await connect(kubeconfig(tmp_path / "config", "http://127.0.0.1:9"), environ={})
    with pytest.raises(KubeUnreachable, match="ConnectError"):
        await client.get("/api")
    await client.close()


async def test_an_error_without_a_status_object_is_reported_verbatim(kube: KubeClient, api):
    api.answer = lambda request: Response("upstream connect error", 502)
    with pytest.raises(KubeError, match="HTTP 502 : upstream connect error"):
        await kube.get("/api/v1/x")


async def test_a_refused_token_is_read_again_and_the_call_goes_through(kube: KubeClient, api, tmp_path):
    api.answer = lambda request: (
        JSONResponse({"ok": True}) if request.headers["authorization"] == "Bearer t1" else status(401, "Unauthorized")
    )
    with pytest.raises(KubeForbidden):
        await kube.get("/api")
    assert len(api.asked) == 1, "with nothing new to try it is asked once"
    kubeconfig(tmp_path / "config", kube.url, token="t1")
    assert await kube.get("/api") == {"ok": True}
    assert len(api.asked) == 3
    await kube.get("/api")
    assert len(api.asked) == 4, "the new token stays"


async def test_watch_lines_are_reassembled_and_a_silent_stream_is_unreachable(kube: KubeClient, api):
    never = asyncio.Event()

    async def pieces():
        for piece in (b'{"a"', b":1}\n", b'{"b":2}\n{"c', b'":3}\n\n', b'{"unfinished'):
            yield piece
            await asyncio.sleep(0)
        await never.wait()

    api.answer = lambda request: StreamingResponse(pieces())
    seen = []

    async def read():
        async with kube.stream("/w", read_timeout_s=0.1, watch="true") as lines:
            async for line in lines:
                seen.append(json.loads(line))  # noqa: PERF401  (kept though the stream breaks)

    with pytest.raises(KubeUnreachable, match="no answer in time"):
        await read()
    never.set()
    assert seen == [{"a": 1}, {"b": 2}, {"c": 3}]
    api.answer = lambda request: status(403, "Forbidden")
    with pytest.raises(KubeForbidden, match="so it is"):
        async with kube.stream("/w", read_timeout_s=1):
            pass


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "this is not a pod .* no kubeconfig is given"),
        ({"KUBECONFIG": "/nowhere/config"}, "KUBECONFIG names /nowhere/config: no such file"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "automountServiceAccountToken"),
    ],
)
async def test_missing_connection_settings_are_named_in_the_error(tmp_path, environ, expected):
    with pytest.raises(KubeConfigError, match=expected):
        await connect(environ=environ, account=tmp_path)


async def test_a_kubeconfig_without_its_context_is_refused_by_name(tmp_path):
    path = kubeconfig(tmp_path / "config", "http://127.0.0.1:9")
    path.write_text(path.read_text().replace("current-context: x", "current-context: other"))
    with pytest.raises(KubeConfigError, match="other"):
        await connect(path, environ={})


async def test_several_kubeconfigs_are_merged_as_kubectl_does(api, tmp_path):
    """The first current context counts, and the first cluster and user of its names, in whichever file they stand."""
    async with serving(api.app) as url:
        contexts = {"contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "fleet"}}]}
        (tmp_path / "first").write_text(yaml.safe_dump(contexts | {"current-context": "x"}))
        kubeconfig(tmp_path / "second", url, token="t0", namespace="another")
        other = kubeconfig(tmp_path / "third", "http://127.0.0.1:9", token="t1")
        other.write_text(other.read_text().replace("current-context: x", "current-context: missing"))
        names = (str(tmp_path / name) for name in ("first", "none", "second", "third"))
        client = await connect(environ={"KUBECONFIG": ":".join(names)})
        await client.get("/api")
        await client.close()
    assert client.namespace == "fleet"
    assert api.asked[0].headers["authorization"] == "Bearer t0"


@pytest.mark.parametrize("content", [b"clusters: [", b"clusters:\n\t- a", b"\xff\xfe\x00", b"[1]", b"7"])
async def test_a_kubeconfig_that_is_no_kubeconfig_is_an_error_with_its_path(tmp_path, content):
    path = tmp_path / "config"
    path.write_bytes(content)
    with pytest.raises(KubeConfigError, match=str(path)):
        await connect(path, environ={})


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [("clusters", "cluster", {"server": 7}), ("users", "user", {"auth-provider": {"name": "gcp"}})],
)
async def test_a_kubeconfig_with_a_field_of_another_kind_is_an_error_with_its_path(tmp_path, part, field, value):
    path = kubeconfig(tmp_path / "config", "http://127.0.0.1:9")
    config = yaml.safe_load(path.read_text())
    config[part][0][field] = value
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(KubeConfigError, match=str(path)):
        await connect(path, environ={})


def kubeconfig_with_plugin(folder, url):
    """A kubeconfig whose plugin prints the token in the file `token`, and fails without that file."""
    plugin, token = folder / "get-token", folder / "token"
    answer = '{"apiVersion":"client.authentication.k8s.io/v1","kind":"ExecCredential","status":{"token":"%s"}}'
    plugin.write_text(f"#!/bin/sh\ntoken=$(cat {token}) || exit 3\nprintf '{answer}' \"$token\"\n")
    plugin.chmod(0o755)
    called = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(plugin), "interactiveMode": "Never"}
    path = kubeconfig(folder / "config", url)
    content = yaml.safe_load(path.read_text())
    content["users"][0]["user"] = {"exec": called}
    path.write_text(yaml.safe_dump(content))
    return path, token


async def test_a_plugin_that_gives_no_credentials_is_an_error_that_names_it(tmp_path):
    path, _ = kubeconfig_with_plugin(tmp_path, "http://127.0.0.1:9")
    with pytest.raises(KubeConfigError, match="get-token"):
        await connect(path, environ={})


async def test_a_plugin_that_fails_once_is_run_again_at_the_next_call(api, tmp_path):
    """An API server answers calls without a token with 403, after which no credentials are read again."""
    refusals = {None: status(403, "Forbidden"), "Bearer t0": status(401, "Unauthorized")}
    api.answer = lambda request: refusals.get(request.headers.get("authorization"), JSONResponse({"ok": True}))
    async with serving(api.app) as url:
        path, token = kubeconfig_with_plugin(tmp_path, url)
        token.write_text("t0")
        client = await connect(path, environ={})
        token.unlink()
        for _ in range(2):
            with pytest.raises(KubeForbidden):
                await client.get("/api")
        token.write_text("t1")
        assert await client.get("/api") == {"ok": True}
        await client.close()


async def test_a_plugin_that_hangs_is_waited_for_by_all_calls_and_run_once(api, tmp_path):
    """Each run holds a thread of the process until the plugin ends."""
    api.answer = lambda request: (
        JSONResponse({"ok": True}) if request.headers["authorization"] == "Bearer t1" else status(401, "Unauthorized")
    )
    started, may_end = tmp_path / "started", tmp_path / "may-end"
    async with serving(api.app) as url:
        path, token = kubeconfig_with_plugin(tmp_path, url)
        token.write_text("t0")
        client = await connect(path, environ={})
        plugin = tmp_path / "get-token"
        waiting = f"echo >> {started}\nuntil [ -e {may_end} ]; do sleep 0.05; done\n"
        plugin.write_text(plugin.read_text().replace("#!/bin/sh\n", f"#!/bin/sh\n{waiting}"))
        token.write_text("t1")
        try:
            for _ in range(3):
                with pytest.raises(KubeUnreachable):
                    await client.get("/api", timeout_s=0.5)
            await until(started.exists)
            assert len(started.read_text()) == 1
        finally:
            may_end.touch()
        assert await client.get("/api", timeout_s=patience(10)) == {"ok": True}
        await client.close()


def _account(folder, host: str, token: str) -> Certificate:
    """A pod's folder, and the server's certificate for this address."""
    certificate = made_for(host, is_sparse=True)
    (folder / "ca.crt").write_text(certificate.ca_pem)
    (folder / "namespace").write_text("tenants\n")
    (folder / "token").write_text(f"{token}\n")
    return certificate


@contextlib.asynccontextmanager
async def _serving_tls(app, host: str, certificate: Certificate, folder) -> AsyncIterator[int]:
    """The port."""
    (folder / "server.pem").write_text(certificate.pem + certificate.key_pem)
    sock = bind(host, 0)
    config = uvicorn.Config(app, log_config=None, lifespan="off", ssl_certfile=folder / "server.pem")
    server = uvicorn.Server(config)
    serves = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        yield sock.getsockname()[1]
    finally:
        server.should_exit = True
        await serves
        sock.close()


_IN_A_POD = """
import asyncio, sys
from pathlib import Path
from lorafleet.kube.client import connect

async def main():
    kube = await connect(account=Path(sys.argv[1]))
    print(kube.namespace, kube.url, await kube.get("/version"))
    await kube.close()
    heavy = {"kubernetes", "aiohttp", "urllib3"} & sys.modules.keys()
    assert not heavy, heavy

asyncio.run(main())
"""


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_a_pod_uses_its_service_account_without_importing_the_kubernetes_library(tmp_path, api, host):
    api.answer = lambda request: JSONResponse({"token": request.headers["authorization"]})
    certificate = _account(tmp_path, host, "pod-token")
    async with _serving_tls(api.app, host, certificate, tmp_path) as port:
        environ = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": str(port)}
        command = [sys.executable, "-c", _IN_A_POD, str(tmp_path)]
        done = await asyncio.to_thread(
            subprocess.run, command, env=environ, capture_output=True, text=True, timeout=patience(20)
        )
        assert done.returncode == 0, done.stderr
        url = f"https://{f'[{host}]' if ':' in host else host}:{port}"
        assert done.stdout.strip() == f"tenants {url} {{'token': 'Bearer pod-token'}}"

        kube = await connect(environ=environ, account=tmp_path)
        (tmp_path / "token").write_text("rotated")
        assert await kube.get("/version") == {"token": "Bearer rotated"}, "the file is read for each request"
        (tmp_path / "token").unlink()
        assert await kube.get("/version") == {"token": "Bearer pod-token"}, "none there for a moment: the one we had"
        await kube.close()

        stranger = tmp_path / "stranger"
        stranger.mkdir()
        _account(stranger, host, "t")
        kube = await connect(environ=environ, account=stranger)
        with pytest.raises(KubeUnreachable, match="CERTIFICATE_VERIFY_FAILED"):
            await kube.get("/version")
        (stranger / "ca.crt").write_bytes((tmp_path / "ca.crt").read_bytes())
        with pytest.raises(KubeUnreachable):
            await kube.get("/version")
        assert await kube.get("/version") == {"token": "Bearer t"}, "an authority that changes is read again"
        await kube.close()


async def test_a_kubeconfig_of_https_brings_its_own_authority(tmp_path, api):
    certificate = _account(tmp_path, "127.0.0.1", "t")
    async with _serving_tls(api.app, "127.0.0.1", certificate, tmp_path) as port:
        path = kubeconfig(tmp_path / "config", f"https://127.0.0.1:{port}")
        config = yaml.safe_load(path.read_text())
        config["clusters"][0]["cluster"]["certificate-authority"] = str(tmp_path / "ca.crt")
        path.write_text(yaml.safe_dump(config))
        kube = await connect(environ={"KUBECONFIG": f"{tmp_path}/none:{path}"})
        assert await kube.get("/version") == {"kind": "Thing"}
        await kube.close()

        del config["clusters"][0]["cluster"]["certificate-authority"]
        path.write_text(yaml.safe_dump(config))
        kube = await connect(path, environ={})
        with pytest.raises(KubeUnreachable, match="CERTIFICATE_VERIFY_FAILED"):
            await kube.get("/version")
        await kube.close()


async def test_a_kubeconfig_may_name_the_host_of_the_certificate(tmp_path, api):
    """As behind a bastion or a tunnel: the address in the kubeconfig is not that of the certificate."""
    certificate = _account(tmp_path, "127.0.0.2", "t")
    async with _serving_tls(api.app, "127.0.0.1", certificate, tmp_path) as port:
        path = kubeconfig(tmp_path / "config", f"https://127.0.0.1:{port}")
        config = yaml.safe_load(path.read_text())
        cluster = config["clusters"][0]["cluster"]
        cluster["certificate-authority"] = str(tmp_path / "ca.crt")
        for name, is_trusted in (("127.0.0.3", False), ("127.0.0.2", True)):
            cluster["tls-server-name"] = name
            path.write_text(yaml.safe_dump(config))
            kube = await connect(path, environ={})
            if is_trusted:
                assert await kube.get("/version") == {"kind": "Thing"}
            else:
                with pytest.raises(KubeUnreachable, match="CERTIFICATE_VERIFY_FAILED"):
                    await kube.get("/version")
            await kube.close()


@pytest.mark.slow
async def test_services_do_not_import_the_kubernetes_library():
    """Importing `kubernetes` costs each process 58 MB and 0.4 s (37.0, measured)."""
    code = "import router.app, orchestrator.app, sys; print(sorted({'kubernetes', 'aiohttp'} & sys.modules.keys()))"
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True, timeout=patience(60)
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
