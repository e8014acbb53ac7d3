"""Both event loops, for a conftest.py: their transports write, pause and close at other times."""

import asyncio
import subprocess

import pytest
import uvloop

from lorafleet.local.authority import Authority


def pytest_asyncio_loop_factories(config, item):
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def tls_files(tmp_path_factory):
    """A certificate for localhost, and its authority."""
    return Authority(tmp_path_factory.mktemp("authority")).issue("localhost", "localhost")


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    asked = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    asked += f" -addext subjectAltName=DNS:localhost -keyout {key} -out {cert}"
    subprocess.run(["openssl", *asked.split()], check=True, capture_output=True)
    return key, cert
