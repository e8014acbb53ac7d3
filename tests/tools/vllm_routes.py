"""Prints the routes of the installed vLLM as JSON, `["METHOD path", ...]`: `python -P tests/tools/vllm_routes.py`.

Those of its app with every optional part switched on, and of every router that its modules define. No engine starts.
"""

import importlib
import json
import os
import pkgutil
from collections.abc import Iterable, Iterator

os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    VLLM_ALLOW_RUNTIME_LORA_UPDATING="1",
    VLLM_LOGGING_LEVEL="CRITICAL",
    VLLM_NO_USAGE_STATS="1",
    VLLM_PLUGINS="",
    VLLM_SERVER_DEV_MODE="1",
)

import vllm.entrypoints
from fastapi import APIRouter
from starlette.routing import BaseRoute, WebSocketRoute
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

# FastAPI's own, and what vLLM mounts: no calls.
_PAGES = ("/docs", "/docs/oauth2-redirect", "/openapi.json", "/redoc")
_FLAGS = ["--enable-lora", "--enable-tokenizer-info-endpoint"]


def routers() -> Iterator[Iterable[BaseRoute]]:
    """The routes of the app, and of every router in vLLM's modules."""
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(_FLAGS)
    yield build_app(args, ("generate", "transcription", "realtime"), None).routes
    for module in pkgutil.walk_packages(vllm.entrypoints.__path__, "vllm.entrypoints."):
        if module.name.endswith("api_router"):
            for value in vars(importlib.import_module(module.name)).values():
                if isinstance(value, APIRouter):
                    yield value.routes


def names(routes: Iterable[BaseRoute]) -> Iterator[str]:
    """Method and path of each; `GET` stands for a WebSocket, too, which begins as one."""
    for route in routes:
        path = getattr(route, "path", "")
        methods = {"GET"} if isinstance(route, WebSocketRoute) else getattr(route, "methods", None) or {"GET"}
        if path and path not in _PAGES:
            yield from (f"{method} {path}" for method in methods - {"HEAD", "OPTIONS"})


print(json.dumps(sorted({name for found in routers() for name in names(found)})))
