"""A container of a rendered pod as a local process: its command, environment and paths.

A pod has an address of its own in 127.0.0.0/8, so container ports stay as they are. What differs from a cluster: "all
addresses" becomes the pod's own, mounted paths become folders here, Services' names become their addresses, and
`python3` the interpreter of the tests. Nothing else of the manifest is touched.
"""

import base64
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

_ANY_ADDRESS = ("0.0.0.0", "::")
_REFERENCE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")


class NamespaceReader(Protocol):
    """Reads an object of the pod's namespace by resource and name; None without it."""

    def __call__(self, resource: str, name: str) -> dict[str, Any] | None: ...


@dataclass(frozen=True, slots=True)
class PodPlace:
    """Where one pod runs. `hosts`: name of a Service -> its address."""

    pod: Mapping[str, Any]
    address: str
    folder: Path
    hosts: Mapping[str, str]

    @property
    def spec(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.pod["spec"]
        return found


def made_volumes(place: PodPlace, read: NamespaceReader) -> None:
    """Fill the pod's folder with empty folders and files from Secrets and ConfigMaps. Raises KeyError."""
    for volume in place.spec.get("volumes") or []:
        folder = place.folder / volume["name"]
        folder.mkdir(parents=True, exist_ok=True)
        if source := volume.get("secret"):
            _write(folder, _items(_found(read, "secrets", source["secretName"]), source, binary=True))
        elif source := volume.get("configMap"):
            _write(folder, _items(_found(read, "configmaps", source["name"]), source, binary=False))


def command(container: Mapping[str, Any], place: PodPlace, environment: Mapping[str, str]) -> list[str]:
    """The container's command line. One without a command would need its image, of which there is none here."""
    return translated_words([*container["command"], *(container.get("args") or [])], container, place, environment)


def translated_words(
    words: list[str], container: Mapping[str, Any], place: PodPlace, environment: Mapping[str, str]
) -> list[str]:
    program, *rest = [_expanded(word, environment) for word in words]
    program = sys.executable if program in ("python", "python3") else program
    return [program, *(_translated(word, container, place) for word in rest)]


def environment(container: Mapping[str, Any], place: PodPlace, read: NamespaceReader) -> dict[str, str]:
    """The container's environment. Raises KeyError for a missing Secret, ConfigMap or key."""
    found: dict[str, str] = {}
    for source in container.get("envFrom") or []:
        kind, name = ("secrets", "secretRef") if "secretRef" in source else ("configmaps", "configMapRef")
        found |= _items(_found(read, kind, source[name]["name"]), {}, binary=kind == "secrets")
    for entry in container.get("env") or []:
        value = entry.get("value")
        value = _value_from(entry["valueFrom"], place, read) if value is None and "valueFrom" in entry else value
        if value is not None:
            found[entry["name"]] = _translated(_expanded(value, found), container, place)
    return found


def port_of(container: Mapping[str, Any], port: int | str) -> int:
    """A port by number or by its name in the container. Raises KeyError."""
    if isinstance(port, int):
        return port
    named = {entry.get("name"): entry["containerPort"] for entry in container.get("ports") or []}
    return int(named[port])


def _value_from(source: Mapping[str, Any], place: PodPlace, read: NamespaceReader) -> str | None:
    if "fieldRef" in source:
        return _field(source["fieldRef"]["fieldPath"], place)
    kind, ref = (
        ("secrets", source["secretKeyRef"]) if "secretKeyRef" in source else ("configmaps", source["configMapKeyRef"])
    )
    held = read(kind, ref["name"]) or {}
    value = _items(held, {}, binary=kind == "secrets").get(ref["key"])
    if value is None and not ref.get("optional"):
        raise KeyError(f"{kind} {ref['name']} has no key {ref['key']}")
    return value


def _field(path: str, place: PodPlace) -> str:
    if found := re.match(r"^metadata\.(labels|annotations)\['(.*)'\]$", path):
        return str((place.pod["metadata"].get(found.group(1)) or {}).get(found.group(2), ""))
    known = {
        "metadata.name": place.pod["metadata"]["name"],
        "metadata.namespace": place.pod["metadata"]["namespace"],
        "metadata.uid": place.pod["metadata"]["uid"],
        "spec.nodeName": place.spec["nodeName"],
        "spec.serviceAccountName": place.spec.get("serviceAccountName", "default"),
        "status.podIP": place.address,
        "status.hostIP": place.address,
    }
    return str(known[path])


def _expanded(text: str, environment: Mapping[str, str]) -> str:
    """`$(NAME)` as Kubernetes replaces it; unknown names stay as they are."""
    return _REFERENCE.sub(lambda found: environment.get(found.group(1), found.group(0)), text)


def _translated(text: str, container: Mapping[str, Any], place: PodPlace) -> str:
    if text in _ANY_ADDRESS:
        return place.address
    mounts = _mounts(container, place)
    if mounts:
        # In one go, and what is a path of this machine already is left alone: /tmp may be a mount of the pod.
        mounts[str(place.folder.parent)] = str(place.folder.parent)
        paths = "|".join(map(re.escape, sorted(mounts, key=len, reverse=True)))
        text = re.sub(rf"(?<![\w/.-])({paths})(?![\w.-])", lambda found: mounts[found.group(1)], text)
    for name, address in place.hosts.items():
        text = re.sub(rf"//{re.escape(name)}(?=[:/.]|$)(\.[a-z0-9-]+\.svc[a-z.]*)?", f"//{address}", text)
    return text


def _mounts(container: Mapping[str, Any], place: PodPlace) -> dict[str, str]:
    hosted = {v["name"]: v["hostPath"]["path"] for v in place.spec.get("volumes") or [] if "hostPath" in v}
    return {
        mount["mountPath"].rstrip("/"): hosted.get(mount["name"], str(place.folder / mount["name"]))
        for mount in container.get("volumeMounts") or []
    }


def _found(read: NamespaceReader, resource: str, name: str) -> dict[str, Any]:
    held = read(resource, name)
    if held is None:
        raise KeyError(f"{resource} {name} is not there")
    return held


def _items(held: Mapping[str, Any], source: Mapping[str, Any], *, binary: bool) -> dict[str, str]:
    data = held.get("data") or {}
    clear = {key: base64.b64decode(value).decode() if binary else value for key, value in data.items()}
    if "items" not in source:
        return clear
    return {item["path"]: clear[item["key"]] for item in source["items"]}


def _write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
