"""Validation and defaulting of objects as on a real server.

source  kubernetes 1.36 pkg/apis/*/validation, k8s.io/apimachinery pkg/util/validation; FACTS measured on a real one
"""

import base64
import ipaddress
import re
from typing import Any

from tests.kube.kinds import ResourceKind
from tests.kube.status import ApiError, bad_request, invalid

_LABEL_PART = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_DNS_LABEL = re.compile(rf"^{_LABEL_PART}$")
_DNS_SUBDOMAIN = re.compile(rf"^{_LABEL_PART}(\.{_LABEL_PART})*$")
_QUALIFIED = re.compile(r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)$")
_MICRO_TIME = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}(Z|[+-]\d\d:\d\d)$")
_MOST_DATA_BYTES = 2**20
_MOST_ANNOTATION_BYTES = 256 * 2**10
_DNS_LABEL_KINDS = ("Namespace", "Service", "Pod")
_SUBDOMAIN_SAID = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', "
    "and must start and end with an alphanumeric character"
)
# Of the kinds that we write: what else stands in them is dropped, with a warning that few clients show.
_FIELDS = {
    "ConfigMap": {"data", "binaryData", "immutable"},
    "Event": {
        "involvedObject", "reason", "message", "source", "firstTimestamp", "lastTimestamp", "count", "type",
        "eventTime", "series", "action", "related", "reportingComponent", "reportingInstance",
    },
    "Lease": {"spec"},
    "Secret": {"data", "stringData", "type", "immutable"},
}  # fmt: skip
_LEASE_FIELDS = {
    "holderIdentity", "leaseDurationSeconds", "acquireTime", "renewTime", "leaseTransitions", "strategy",
    "preferredHolder",
}  # fmt: skip
_LONGEST_NOTE = 1024
_STATEFUL_SET_CHANGES = (
    "replicas", "ordinals", "template", "updateStrategy", "revisionHistoryLimit",
    "persistentVolumeClaimRetentionPolicy", "minReadySeconds",
)  # fmt: skip
Causes = list[tuple[str, str]]


def check(resource: ResourceKind, obj: dict[str, Any], *, allow_loopback: bool) -> None:
    """Raise the 422 or 400 of a real server for an invalid object.

    allow_loopback  real servers refuse endpoints in 127.0.0.0/8; here pods are processes on this machine
    """
    meta = obj["metadata"]
    causes = _metadata(meta, resource)
    if resource.kind in ("ConfigMap", "Secret"):
        causes += _data(resource, obj)
    elif resource.kind == "Lease":
        causes += _lease(obj)
    elif resource.kind == "EndpointSlice":
        causes += _slice(obj, allow_loopback=allow_loopback)
    elif resource.kind == "Event":
        causes += _event(obj)
    if causes:
        raise invalid(resource, meta["name"], causes)


def tidied(resource: ResourceKind, obj: dict[str, Any]) -> dict[str, Any]:
    """As it comes back from a real server: fields that nobody knows are gone, and so are empty lists and maps, or they
    are null where the field is always written. Of what a server fills in only `replicas` is.
    """
    known = _FIELDS.get(resource.kind)
    if known:
        obj = {key: value for key, value in obj.items() if key in known or key in ("apiVersion", "kind", "metadata")}
    if resource.kind == "Lease" and obj.get("spec"):
        obj = obj | {"spec": {key: value for key, value in obj["spec"].items() if key in _LEASE_FIELDS}}
    if resource.kind == "EndpointSlice":
        return obj | {field: obj.get(field) or None for field in ("endpoints", "ports")}
    if resource.kind == "Secret":
        clear = {key: base64.b64encode(text.encode()).decode() for key, text in (obj.get("stringData") or {}).items()}
        data = (obj.get("data") or {}) | clear
        obj = {key: value for key, value in obj.items() if key != "stringData"} | {"data": data}
    if resource.kind in ("ConfigMap", "Secret"):
        return {key: value for key, value in obj.items() if key not in ("data", "binaryData") or value}
    if resource.kind in ("Deployment", "StatefulSet") and obj.get("spec"):
        return obj | {"spec": {"replicas": 1} | {key: it for key, it in obj["spec"].items() if it is not None}}
    if resource.kind == "Namespace":
        return obj | {"spec": {"finalizers": ["kubernetes"]}, "status": {"phase": "Active"}}
    return obj


def check_change(resource: ResourceKind, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raise 422 for a change of an immutable field. Quantities are compared as written."""
    if resource.kind != "StatefulSet":
        return
    before, after = old.get("spec") or {}, new.get("spec") or {}
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    if changed - set(_STATEFUL_SET_CHANGES):
        *names, last = (f"'{name}'" for name in _STATEFUL_SET_CHANGES)
        said = (
            f"Forbidden: updates to statefulset spec for fields other than {', '.join(names)} and {last} are forbidden"
        )
        raise invalid(resource, new["metadata"]["name"], [("spec", said)])


def nothing(resource: ResourceKind) -> dict[str, Any]:
    """The fields of an empty object of this kind, as in a bookmark."""
    slice_fields = {"addressType": "", "endpoints": None, "ports": None}
    return {"EndpointSlice": slice_fields, "Lease": {"spec": {}}}.get(resource.kind, {})


def _metadata(meta: dict[str, Any], resource: ResourceKind) -> Causes:
    causes = []
    name = meta["name"]
    pattern, most = (_DNS_LABEL, 63) if resource.kind in _DNS_LABEL_KINDS[:2] else (_DNS_SUBDOMAIN, 253)
    if resource.group == "rbac.authorization.k8s.io":
        pattern = re.compile(r"^[^/%]+$")
    if not pattern.match(name):
        causes.append(("metadata.name", f'Invalid value: "{name}": {_SUBDOMAIN_SAID}'))
    if len(name) > most:
        causes.append(("metadata.name", f'Invalid value: "{name}": must be no more than {most} characters'))
    for key, value in (meta.get("labels") or {}).items():
        causes += _key("metadata.labels", key)
        if not isinstance(value, str):
            raise bad_request(f"json: cannot unmarshal {value!r} into Go struct field ObjectMeta.metadata.labels")
        if len(value) > 63 or (value and not _QUALIFIED.match(value)):
            said = "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.'"
            causes.append(("metadata.labels", f'Invalid value: "{value}": {said}, of at most 63 characters'))
    annotations = meta.get("annotations") or {}
    for key, value in annotations.items():
        causes += _key("metadata.annotations", key)
        if not isinstance(value, str):
            raise bad_request(f"json: cannot unmarshal {value!r} into Go struct field ObjectMeta.metadata.annotations")
    if sum(len(k.encode()) + len(v.encode()) for k, v in annotations.items()) > _MOST_ANNOTATION_BYTES:
        causes.append(("metadata.annotations", f"Too long: may not be more than {_MOST_ANNOTATION_BYTES} bytes"))
    return causes


def _key(field: str, key: str) -> Causes:
    prefix, slash, name = key.rpartition("/")
    is_good = len(name) <= 63 and _QUALIFIED.match(name) and (not slash or _DNS_SUBDOMAIN.match(prefix))
    said = "name part must consist of alphanumeric characters, '-', '_' or '.'"
    return [] if is_good else [(field, f'Invalid value: "{key}": {said}')]


def _data(resource: ResourceKind, obj: dict[str, Any]) -> Causes:
    causes = []
    size = 0
    for field in ("data", "binaryData"):
        for key, value in (obj.get(field) or {}).items():
            if not isinstance(value, str):
                raise bad_request(
                    f"json: cannot unmarshal {value!r} into Go struct field {resource.kind}.{field} of type string"
                )
            size += len(value.encode())
            if not re.match(r"^[-._A-Za-z0-9]{1,253}$", key):
                causes.append((f"{field}[{key}]", f'Invalid value: "{key}": a valid config key is [-._a-zA-Z0-9]+'))
    if size > _MOST_DATA_BYTES:
        causes.append(("[]", f"Too long: may not be more than {_MOST_DATA_BYTES} bytes"))
    return causes


def _lease(obj: dict[str, Any]) -> Causes:
    spec = obj.get("spec") or {}
    for field in ("renewTime", "acquireTime"):
        value = spec.get(field)
        if value is not None and not _MICRO_TIME.match(str(value)):
            raise bad_request(
                f'Lease in version "v1" cannot be handled as a Lease: parsing time "{value}" as '
                '"2006-01-02T15:04:05.000000Z07:00": cannot parse'
            )
    causes = []
    duration, transitions = spec.get("leaseDurationSeconds"), spec.get("leaseTransitions")
    if duration is not None and duration <= 0:
        causes.append(("spec.leaseDurationSeconds", f"Invalid value: {duration}: must be greater than 0"))
    if transitions is not None and transitions < 0:
        causes.append(("spec.leaseTransitions", f"Invalid value: {transitions}: must be greater than or equal to 0"))
    return causes


def _event(obj: dict[str, Any]) -> Causes:
    """Causes for an invalid Event, such as one about an object of another namespace."""
    own, about = obj["metadata"]["namespace"], (obj.get("involvedObject") or {}).get("namespace", "")
    causes = []
    if about != own and not (about == "" and own == "default"):
        causes.append(("involvedObject.namespace", f'Invalid value: "{about}": does not match event.namespace'))
    if obj.get("eventTime") is None:  # an event of the old kind, of which no more is asked
        return causes
    if not _MICRO_TIME.match(str(obj["eventTime"])):
        raise bad_request(f'Event in version "v1" cannot be handled as a Event: parsing time "{obj["eventTime"]}"')
    needed = ("reportingComponent", "reportingInstance", "action")
    causes += [(field, "Required value") for field in needed if not obj.get(field)]
    if len(obj.get("message") or "") > _LONGEST_NOTE:
        causes.append(("message", f"Invalid value: can have at most {_LONGEST_NOTE} characters"))
    return causes


def _slice(obj: dict[str, Any], *, allow_loopback: bool) -> Causes:
    if obj.get("addressType") not in ("IPv4", "IPv6", "FQDN"):
        return [("addressType", "Required value")]
    causes = []
    endpoints = obj.get("endpoints") or []
    if len(endpoints) > 1000:
        causes.append(("endpoints", f"Too many: {len(endpoints)}: must have at most 1000 items"))
    for at, endpoint in enumerate(endpoints):
        if not endpoint.get("addresses"):
            causes.append((f"endpoints[{at}].addresses", "Required value: must contain at least 1 address"))
        for number, address in enumerate(endpoint.get("addresses") or []):
            problem = _address_problem(obj["addressType"], address, allow_loopback=allow_loopback)
            if problem:
                causes.append((f"endpoints[{at}].addresses[{number}]", f'Invalid value: "{address}": {problem}'))
    names = [port.get("name") or "" for port in obj.get("ports") or []]
    causes += [("ports.name", f'Duplicate value: "{name}"') for name in {n for n in names if names.count(n) > 1}]
    return causes


def _address_problem(address_type: str, address: str, *, allow_loopback: bool) -> str:
    if address_type == "FQDN":
        return ""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return "must be a valid IP address"
    if f"IPv{parsed.version}" != address_type:
        return f"must be an {address_type} address"
    if parsed.is_loopback and not allow_loopback:
        return "may not be in the loopback range (127.0.0.0/8, ::1/128)"
    if parsed.is_unspecified:
        return f"may not be unspecified ({address})"
    return "may not be in the link-local range" if parsed.is_link_local else ""


def typed(resource: ResourceKind, obj: Any) -> ApiError | None:
    """The error in an object's apiVersion or kind, if any."""
    if not isinstance(obj, dict) or not isinstance(obj.get("metadata", {}), dict):
        return bad_request("the object provided is unrecognized: not a JSON object with metadata")
    given = (obj.get("apiVersion", resource.api_version), obj.get("kind", resource.kind))
    if given == (resource.api_version, resource.kind):
        return None
    said = f"{given[0]}, Kind={given[1]}"
    return bad_request(
        f"the API version in the data ({said}) does not match the expected API version "
        f"({resource.api_version}, Kind={resource.kind})"
    )
