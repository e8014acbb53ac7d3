"""Address of and credentials for the API server: a pod's service account, or a kubeconfig."""

import asyncio
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lorafleet.kube.errors import KubeConfigError
from lorafleet.service.network.urls import bracketed
from lorafleet.service.yamls import InvalidYaml, read_yaml

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True)
class ApiServerAccess:
    """Address and credentials as read once.

    tls          None for plain http
    server_name  the name that the server's certificate has; None: the host of the URL
    """

    url: str
    namespace: str
    token: str
    tls: ssl.SSLContext | None = None
    proxy: str | None = None
    server_name: str | None = None


class AccessSource(Protocol):
    """Reads the access, and reads it again after a refusal."""

    async def read(self) -> ApiServerAccess:
        """Read address and credentials now; raises KubeConfigError."""
        ...

    def token(self) -> str | None:
        """The current token, if that is cheap to read; None means the token of the last `read`."""
        ...


class ServiceAccount:
    """The pod's service account. The kubelet replaces the token's file before it expires, so each request reads it."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        """`environ` names the API server's host and port."""
        self._folder = folder
        self._host = environ.get("KUBERNETES_SERVICE_HOST", "")
        self._port = environ.get("KUBERNETES_SERVICE_PORT", "443")

    async def read(self) -> ApiServerAccess:
        """Read the account's CA, namespace and token files into an access; raises KubeConfigError if one is missing."""
        host = bracketed(self._host)
        try:
            tls = _trusting_ssl_context(str(self._folder / "ca.crt"))
            namespace = (self._folder / "namespace").read_text().strip()
            token = self._token()
        except OSError as exc:  # ssl.SSLError is one
            raise KubeConfigError(
                f"service account in {self._folder}: {exc}; does the pod have automountServiceAccountToken: true?"
            ) from exc
        return ApiServerAccess(f"https://{host}:{self._port}", namespace, token, tls)

    def token(self) -> str | None:
        """The token in the account's file now; None if the file cannot be read."""
        try:
            return self._token()
        except OSError:  # while the file is replaced; the last token is still valid
            return None

    def _token(self) -> str:
        """The token in the account's file; raises OSError."""
        return (self._folder / "token").read_text().strip()


class KubeConfig:
    """The current context of kubeconfigs, read by the `kubernetes` library: certificates, exec plugins.

    Several files are merged as kubectl merges them: the first entry of a name counts, and the first current context.
    The library takes 58 MB and 0.4 s to import, so pods do not use it.
    """

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._name = os.pathsep.join(map(str, paths))
        self._reading: asyncio.Future[ApiServerAccess] | None = None

    async def read(self) -> ApiServerAccess:
        """Read the kubeconfigs in a thread; raises KubeConfigError.

        A read that is under way is joined: its exec plugin may hang, and holds its thread until it ends.
        """
        if self._reading is None or self._reading.done():
            self._reading = asyncio.get_running_loop().run_in_executor(None, self._read)
        return await asyncio.shield(self._reading)

    def token(self) -> str | None:
        """None: calls use the token of the last `read`."""
        return None

    def _read(self) -> ApiServerAccess:
        """Read the kubeconfigs and run the user's exec plugin, if any; blocks, raises KubeConfigError."""
        try:
            from kubernetes import client, config  # noqa: PLC0415  (see the class)
        except ImportError as exc:
            raise KubeConfigError(
                f"kubeconfig {self._name}: needs the library that reads it: pip install 'lorafleet[kubernetes]'"
            ) from exc
        contents = [_read_kubeconfig(path) for path in self._paths]
        configuration = client.Configuration()
        try:
            # Of several files the library takes the last current context, kubectl the first.
            current = next((name for content in contents if (name := content.get("current-context"))), None)
            config.load_kube_config(
                self._name, context=current, client_configuration=configuration, persist_config=False
            )
            context = _first_entry(contents, "contexts", current)["context"]
            tls = _tls_context(
                configuration.ssl_ca_cert,
                configuration.cert_file,
                configuration.key_file,
                verify=configuration.verify_ssl,
            )
        except (config.ConfigException, OSError) as exc:
            raise KubeConfigError(f"kubeconfig {self._name}: {exc}") from exc
        except Exception as exc:  # the library raises what its look-ups raise
            raise KubeConfigError(f"kubeconfig {self._name}: not in a kubeconfig's form ({exc!r})") from exc
        token = str(configuration.api_key.get("BearerToken", "")).removeprefix("Bearer ")
        user = _first_entry(contents, "users", context.get("user")).get("user") or {}
        plugin = user.get("exec")
        if plugin and not token and not configuration.cert_file:
            # Without credentials the API server answers 403, after which none are read again.
            raise KubeConfigError(
                f"kubeconfig {self._name}: exec plugin {plugin.get('command')!r} gave no token and no certificate; "
                "run it by hand"
            )
        return ApiServerAccess(
            url=str(configuration.host).rstrip("/"),
            namespace=context.get("namespace") or "default",
            token=token,
            tls=tls if str(configuration.host).startswith("https:") else None,
            proxy=configuration.proxy,
            server_name=configuration.tls_server_name,
        )


def _read_kubeconfig(path: Path) -> dict[str, Any]:
    """The content of one kubeconfig; raises KubeConfigError."""
    try:
        content = read_yaml(path, last_wins=True)  # as kubectl reads it
    except (InvalidYaml, OSError) as exc:
        raise KubeConfigError(f"kubeconfig {path}: {exc}") from exc
    if not isinstance(content, dict):
        raise KubeConfigError(f"kubeconfig {path}: not in a kubeconfig's form (expected a mapping)")
    return content


def _first_entry(kubeconfigs: list[dict[str, Any]], kind: str, name: str | None) -> dict[str, Any]:
    """The first entry of the name among `contexts` or `users`; {} without one. The library has read the kubeconfigs."""
    entries = (entry for kubeconfig in kubeconfigs for entry in kubeconfig.get(kind) or ())
    return next((entry for entry in entries if entry["name"] == name), {})


def find_access_source(kubeconfig: Path | None, environ: Mapping[str, str], account: Path) -> AccessSource:
    """The kubeconfig of the setting, or those of KUBECONFIG; else the pod's service account. Raises KubeConfigError."""
    if kubeconfig is not None:
        return KubeConfig(kubeconfig)
    named = [Path(name) for name in environ.get("KUBECONFIG", "").split(os.pathsep) if name]
    if existing := [path for path in named if path.exists()]:
        return KubeConfig(*existing)
    if named:
        raise KubeConfigError(f"KUBECONFIG names {', '.join(map(str, named))}: no such file")
    if not environ.get("KUBERNETES_SERVICE_HOST"):
        raise KubeConfigError(
            "no API server: this is not a pod (KUBERNETES_SERVICE_HOST is not set), and no kubeconfig is given "
            "(setting kubeconfig, or KUBECONFIG)"
        )
    return ServiceAccount(account, environ)


def _tls_context(ca_file: str | None, cert_file: str | None, key_file: str | None, *, verify: bool) -> ssl.SSLContext:
    """A TLS context with the kubeconfig's authority and client certificate; trusts any server unless `verify`."""
    context = _trusting_ssl_context(ca_file)
    if not verify:  # the kubeconfig has insecure-skip-tls-verify
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if cert_file:
        context.load_cert_chain(cert_file, key_file)
    return context


def _trusting_ssl_context(ca_file: str | None) -> ssl.SSLContext:
    """A TLS context that trusts the same authorities as kubectl.

    source  Python 3.13 ssl.create_default_context also refuses certificates that lack fields of RFC 5280. Authorities
            of clusters lack some, such as the key usage of one made by `openssl req -x509`
            (kubernetes.io/docs/tasks/administer-cluster/certificates)
    """
    context = ssl.create_default_context(cafile=ca_file)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context
