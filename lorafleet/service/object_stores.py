"""The libraries of object stores: which one a scheme needs, and how it is opened."""

import importlib
import os
from collections.abc import Mapping
from typing import Any

_LIBRARIES = {
    "s3": ("s3fs", "S3FileSystem"),
    "gs": ("gcsfs.core", "GCSFileSystem"),
    "az": ("adlfs", "AzureBlobFileSystem"),
}
# gcsfs.core: the class in gcsfs itself first asks a gRPC service for each bucket's layout (2026.10).
OBJECT_SCHEMES = tuple(_LIBRARIES)


class StoreNotOpened(Exception):
    """A store's library is not installed, or cannot be set up. The message has no secret, and says what to do."""

    def __init__(self, message: str, *, is_missing: bool) -> None:
        """`is_missing`: the library is not installed."""
        super().__init__(message)
        self.is_missing = is_missing


def open_object_store(scheme: str, *, timeout_s: float, options: Mapping[str, Any] | None = None) -> Any:
    """The fsspec file system of a scheme. The library finds credentials and endpoint: environment, profile, role.

    Blocking: the import takes up to a second. Raises StoreNotOpened.

    timeout_s  without a byte
    options    passed to the fsspec class; they override ours
    """
    module, name = _LIBRARIES[scheme]
    try:
        library = importlib.import_module(module)
    except ImportError as exc:
        needs = module.partition(".")[0]
        message = f"{scheme}:// needs {needs}; pip install 'lorafleet[{scheme}]'"
        raise StoreNotOpened(message, is_missing=True) from exc
    try:
        return getattr(library, name)(**_default_options(scheme, timeout_s) | dict(options or {}))
    except Exception as exc:  # noqa: BLE001  (each store's library has its own errors for credentials)
        message = f"{module} cannot be set up ({type(exc).__name__}): are credentials set?"
        raise StoreNotOpened(message, is_missing=False) from None


def _default_options(scheme: str, timeout_s: float) -> dict[str, Any]:
    """Options of the fsspec class: no caches, and our timeouts."""
    common: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if scheme == "s3":
        # No retries in botocore: they would multiply with ours.
        retries = {"max_attempts": 0}
        common["config_kwargs"] = {"connect_timeout": 10, "read_timeout": timeout_s, "retries": retries}
    if scheme == "gs":
        common["requests_timeout"] = timeout_s
    if scheme == "az" and "AZURE_STORAGE_CONNECTION_STRING" not in os.environ:
        common["anon"] = False  # lets adlfs look for an identity
    return common
