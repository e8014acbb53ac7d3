"""The server's discovery documents: versions, groups, kinds, and the OpenAPI that kubectl needs."""

from typing import Any

from tests.kube.kinds import RESOURCES, ResourceKind

VERSION = {"major": "1", "minor": "36", "gitVersion": "v1.36.0", "platform": "linux/amd64"}
# Protobuf of a document with a version and no definitions. kubectl asks for it when a file has a List in it, and what
# it finds no definition of it leaves to the server.
OPENAPI_V2 = b"\x0a\x032.0"
OPENAPI_V2_TYPE = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"
_VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
_PARTS: dict[str, dict[str, Any]] = {
    "status": {"verbs": ["get", "patch", "update"]},
    "scale": {"group": "autoscaling", "version": "v1", "kind": "Scale", "verbs": ["get", "patch", "update"]},
    "eviction": {"group": "policy", "version": "v1", "kind": "Eviction", "verbs": ["create"]},
}
_GROUPS = sorted({(resource.group, resource.version) for resource in RESOURCES if resource.group})


def document(path: str, query: dict[str, str]) -> dict[str, Any] | None:
    """The document of this path; None for any other path."""
    if path == "/version":
        return VERSION
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
    if path == "/apis":
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(*group) for group in _GROUPS]}
    if path == "/openapi/v3":
        urls = [prefix[1:] for prefix in ["/api/v1", *(f"/apis/{group}/{version}" for group, version in _GROUPS)]]
        return {"paths": {url: {"serverRelativeURL": f"/openapi/v3/{url}?hash=0"} for url in urls}}
    if path.startswith("/openapi/v3/"):
        return _openapi(path.removeprefix("/openapi/v3"))
    found = [resource for resource in RESOURCES if resource.prefix == path]
    if found:
        listed = [row for resource in found for row in _rows(resource)]
        return {"kind": "APIResourceList", "groupVersion": found[0].api_version, "resources": listed}
    groups = [group for group in _GROUPS if path == f"/apis/{group[0]}"]
    return {"kind": "APIGroup", "apiVersion": "v1", **_group(*groups[0])} if groups else None


def _group(name: str, version: str) -> dict[str, Any]:
    only = {"groupVersion": f"{name}/{version}", "version": version}
    return {"name": name, "versions": [only], "preferredVersion": only}


def _rows(resource: ResourceKind) -> list[dict[str, Any]]:
    row = {
        "name": resource.plural,
        "singularName": resource.kind.lower(),
        "namespaced": resource.namespaced,
        "kind": resource.kind,
        "verbs": _VERBS,
        "shortNames": list(resource.short),
    }
    parts = [
        row | {"name": f"{resource.plural}/{part}", "singularName": "", "shortNames": []} | _PARTS[part]
        for part in resource.parts
    ]
    return [row, *parts]


def _openapi(prefix: str) -> dict[str, Any]:
    """Minimal OpenAPI, from which kubectl learns that the server validates objects."""
    field_validation = {"name": "fieldValidation", "in": "query", "schema": {"type": "string", "uniqueItems": True}}
    paths, schemas = {}, {}
    for resource in RESOURCES:
        if resource.prefix == prefix:
            kind = {"group": resource.group, "version": resource.version, "kind": resource.kind}
            method = {"parameters": [field_validation], "x-kubernetes-group-version-kind": kind}
            paths[resource.path("{namespace}", "{name}")] = {"patch": method, "put": method}
            paths[resource.path("{namespace}")] = {"post": method}
            schemas[f"io.k8s.{resource.kind}"] = {"type": "object", "x-kubernetes-group-version-kind": [kind]}
    info = {"title": "Kubernetes", "version": VERSION["gitVersion"]}
    return {"openapi": "3.0.0", "info": info, "paths": paths, "components": {"schemas": schemas}}
