import asyncio
import contextlib
import socket
import subprocess
import sys

import pytest

from lorafleet.http_server import serve
from tests.lorafleet.forks import Forks
from tests.patience import patience, within
from tests.serving import client_of


async def length(scope, receive, send):
    """An app that answers with the length of the body."""
    if scope["type"] == "lifespan":
        for _ in range(2):
            await send({"type": (await receive())["type"] + ".complete"})
        return
    size, more = 0, True
    while more:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    body = str(size).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def served():
    sock = serve.bind("127.0.0.1", 0)
    # In a server's own way but for its signals, which belong to the test runner.
    server = serve.DrainingServer(serve.uvicorn_config(length, grace_s=1.0), None)
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup([sock])
    try:
        yield sock.getsockname()
    finally:
        await server.shutdown([sock])


def test_a_server_may_have_as_many_connections_as_it_is_allowed_to() -> None:
    code = """
import asyncio, resource
from lorafleet.http_server import serve

_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))

async def main():
    print(resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard))

serve.run(main)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=patience(30), check=False
    )
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


@pytest.mark.parametrize("start", [b"GET / HTTP/1.1\r\n", b"GET /", b"GET / HTTP/1.1\r\nx: "])
async def test_an_endless_head_is_refused(start):
    piece = b"x: " + b"a" * 1000 + b"\r\n" if start.endswith(b"1.1\r\n") else b"a" * 1000
    async with served() as (host, port):
        _, writer = await asyncio.open_connection(host, port)
        writer.write(start)
        taken = 0
        with contextlib.suppress(ConnectionError):
            async with within(10):
                # Far more than any socket buffer holds.
                while taken < 20_000_000:
                    writer.write(piece)
                    await writer.drain()
                    taken += len(piece)
        writer.close()
        assert taken < 20_000_000


async def test_large_bodies_follow_each_other_on_one_connection():
    async with served() as (host, port), client_of() as client:
        for size in (0, 10**6, 70_000, 10**6):
            answer = await client.post(f"http://{host}:{port}/", content=b"b" * size)
            assert (answer.status_code, answer.text) == (200, str(size))

        async def pieces():
            for _ in range(1000):
                yield b"c" * 100

        assert (await client.post(f"http://{host}:{port}/", content=pieces())).text == "100000"


@pytest.mark.parametrize("is_declared", [True, False])
async def test_an_endless_body_is_refused_early(is_declared):
    size = 16 * 2**20 + 1

    async def pieces():
        for start in range(0, size, 2**20):
            yield bytes(min(2**20, size - start))

    headers = {"content-length": str(size)} if is_declared else {}
    async with served() as (host, port), client_of(f"http://{host}:{port}") as client:
        fits = await client.post("/", content=bytes(16 * 2**20))
        assert fits.text == str(16 * 2**20)
        refused = await client.post("/", content=pieces(), headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large")
        assert (await client.post("/", content=b"123")).text == "3"


async def test_a_head_of_many_headers_that_fits_is_served():
    async with served() as (host, port), client_of() as client:
        headers = {f"x-{n}": "v" * 100 for n in range(300)}
        assert (await client.get(f"http://{host}:{port}/", headers=headers)).status_code == 200


@pytest.fixture(scope="module")
def forks():
    with Forks() as forks:
        yield forks


@pytest.mark.fleet
@pytest.mark.parametrize(
    "words",
    [
        ["router"],
        ["router", "--processes", "2", "--drain-s", "0"],
        ["orchestrator"],
        ["workers", "--model", ".", "--state-dir", "state"],
    ],
    ids=lambda words: "-".join(words[:2]),
)
def test_a_port_in_use_ends_every_service_with_a_hint(tmp_path, forks, words):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        it = forks.run(*words, "--port", str(port), folder=tmp_path)
    in_use = f"port {port} of 127.0.0.1 is in use by another process: choose another with --port (0 picks a free one)"
    assert (it.returncode, it.stderr.splitlines()) == (2, [f"python -m {words[0]}: {in_use}"])


@pytest.mark.fleet
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["router", "--state-dir", "/proc/nothing"],
            "state_dir /proc/nothing: No such file or directory; name a folder",
        ),
        (["workers", "--model", ".", "--state-dir", "/proc/nothing"], "state_dir /proc/nothing: No such file"),
        (
            ["workers", "--model", ".", "--state-dir", "s", "--cache-dir", "/proc/nothing"],
            "cache_dir /proc/nothing: No",
        ),
        (["workers", "--model", "./nothing", "--state-dir", "s"], "model ./nothing: there is no such folder; give"),
        (
            ["router", "--key-files", "none.yaml"],
            "none.yaml: No such file or directory; `lorafleet keys new --file none.yaml`",
        ),
    ],
)
def test_a_missing_folder_or_file_ends_a_service_with_one_line(tmp_path, forks, words, says):
    it = forks.run(*words, "--port", "0", folder=tmp_path)
    assert it.returncode == 2
    assert says in it.stderr
    assert len(it.stderr.splitlines()) == 1


@pytest.mark.fleet
@pytest.mark.parametrize("service", ["router", "orchestrator"])
def test_an_unwritable_port_file_ends_a_service_without_a_traceback(tmp_path, forks, service):
    it = forks.run(service, "--port", "0", "--port-file", "none/port", folder=tmp_path)
    says = f"python -m {service}: port file none/port: No such file or directory; name one that can be written"
    assert (it.returncode, "Traceback" in it.stderr) == (2, False)
    assert says in it.stderr.splitlines()


@pytest.mark.parametrize(("under", "hears"), [((), True), (("nohup",), False)])
def test_a_terminals_hang_up_stops_a_service_unless_under_nohup(under, hears):
    code = "import signal; from lorafleet.service import process; print(signal.SIGHUP in process.stop_signals())"
    done = subprocess.run(
        [*under, sys.executable, "-c", code], capture_output=True, text=True, timeout=patience(30), check=True
    )
    assert done.stdout == f"{hears}\n"


def test_an_address_of_another_machine_is_named():
    with pytest.raises(OSError, match=r"port 0 of 192\.0\.2\.1 cannot be had \(.*--host"):
        serve.bind("192.0.2.1", 0)


def test_of_two_sockets_bound_to_a_port_only_one_listens():
    first = serve.bind_only("127.0.0.1", 0)
    with first:
        first.listen()
        with pytest.raises(OSError, match="in use by another process"):
            serve.bind("127.0.0.1", first.getsockname()[1])
