"""Where the API server is and who we are there: a pod's service account, or a kubeconfig."""

import asyncio
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lorafleet.kube.errors import KubeConfigError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True)
class ApiServerAccess:
    """One reading. `tls` is None for plain http."""

    url: str
    namespace: str
    token: str
    tls: ssl.SSLContext | None = None
    proxy: str | None = None


class AccessSource(Protocol):
    """What access is read from, and read from again once it is refused."""

    async def read(self) -> ApiServerAccess:
        """Raises KubeConfigError."""
        ...

    def token(self) -> str | None:
        """The token as it is now, where looking costs nothing; None: as it was read."""
        ...


class ServiceAccount:
    """A pod's own. The kubelet replaces the token's file well before it expires, so that is read for each request."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self._folder = folder
        self._host = environ.get("KUBERNETES_SERVICE_HOST", "")
        self._port = environ.get("KUBERNETES_SERVICE_PORT", "443")

    async def read(self) -> ApiServerAccess:
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            tls = _trusting(str(self._folder / "ca.crt"))
            namespace = (self._folder / "namespace").read_text().strip()
            token = self._token()
        except OSError as exc:  # ssl.SSLError is one
            raise KubeConfigError(
                f"service account in {self._folder}: {exc}; does the pod have automountServiceAccountToken: true?"
            ) from exc
        return ApiServerAccess(f"https://{host}:{self._port}", namespace, token, tls)

    def token(self) -> str | None:
        try:
            return self._token()
        except OSError:  # in the moment of its replacement: the one we have is still good
            return None

    def _token(self) -> str:
        return (self._folder / "token").read_text().strip()


class KubeConfig:
    """A kubeconfig's current context, understood by the `kubernetes` library: contexts, certificates, exec plugins.

    The library takes 58 MB and 0.4 s to import (kubernetes 37, measured), which pods are spared.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    async def read(self) -> ApiServerAccess:
        return await asyncio.to_thread(self._read)

    def token(self) -> str | None:
        return None

    def _read(self) -> ApiServerAccess:
        try:
            from kubernetes import client, config  # noqa: PLC0415  (see the class)
        except ImportError as exc:
            raise KubeConfigError(
                f"kubeconfig {self._path}: needs the library that reads it: pip install 'lorafleet[kubernetes]'"
            ) from exc
        found = client.Configuration()
        try:
            config.load_kube_config(str(self._path), client_configuration=found, persist_config=False)
            _, context = config.list_kube_config_contexts(str(self._path))
            tls = _tls(found.ssl_ca_cert, found.cert_file, found.key_file, verify=found.verify_ssl)
        except (config.ConfigException, OSError, KeyError, TypeError) as exc:
            raise KubeConfigError(f"kubeconfig {self._path}: {exc}") from exc
        return ApiServerAccess(
            url=str(found.host).rstrip("/"),
            namespace=context["context"].get("namespace") or "default",
            token=str(found.api_key.get("BearerToken", "")).removeprefix("Bearer "),
            tls=tls if str(found.host).startswith("https:") else None,
            proxy=found.proxy,
        )


def source(kubeconfig: Path | None, environ: Mapping[str, str], account: Path) -> AccessSource:
    """A kubeconfig that is named, by setting or KUBECONFIG, before the pod's own account. Raises KubeConfigError."""
    named = [Path(name) for name in environ.get("KUBECONFIG", "").split(os.pathsep) if name]
    path = kubeconfig or next((path for path in named if path.exists()), None)
    if path is not None:
        return KubeConfig(path)
    if named:
        raise KubeConfigError(f"KUBECONFIG names {named[0]}, which does not exist")
    if not environ.get("KUBERNETES_SERVICE_HOST"):
        raise KubeConfigError(
            "no API server: neither in a pod (KUBERNETES_SERVICE_HOST is not set) nor is a kubeconfig named "
            "(setting kubeconfig, or KUBECONFIG)"
        )
    return ServiceAccount(account, environ)


def _tls(ca_file: str | None, cert_file: str | None, key_file: str | None, *, verify: bool) -> ssl.SSLContext:
    context = _trusting(ca_file)
    if not verify:  # the kubeconfig says insecure-skip-tls-verify
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if cert_file:
        context.load_cert_chain(cert_file, key_file)
    return context


def _trusting(ca_file: str | None) -> ssl.SSLContext:
    """Trusts what kubectl trusts.

    source  Python 3.13 ssl.create_default_context: refuses, beyond what 3.11 does, certificates without all the fields
            of RFC 5280. Authorities of clusters lack some: kubernetes.io/docs/tasks/administer-cluster/certificates
            has one made by `openssl req -x509`, which says no key usage
    """
    context = ssl.create_default_context(cafile=ca_file)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context
