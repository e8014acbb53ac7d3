"""Reads Kubernetes' protobuf, for the few kinds that kubectl and helm send; they accept JSON responses.

source  k8s.io/api core/v1 and k8s.io/apimachinery meta/v1 generated.proto, 1.36; the envelope: runtime/generated.proto
"""

import base64
import datetime
from collections.abc import Iterator
from typing import Any

MAGIC = b"k8s\0"
TYPE = "application/vnd.kubernetes.protobuf"

# Field number -> (name, how it is read): a message's own table, or one of the words in `_read`.
_Fields = dict[int, tuple[str, Any]]
_TIME: _Fields = {1: ("seconds", "int"), 2: ("nanos", "int")}
_OWNER: _Fields = {
    5: ("apiVersion", "text"),
    1: ("kind", "text"),
    3: ("name", "text"),
    4: ("uid", "text"),
    6: ("controller", "bool"),
    7: ("blockOwnerDeletion", "bool"),
}
_META: _Fields = {
    1: ("name", "text"),
    2: ("generateName", "text"),
    3: ("namespace", "text"),
    5: ("uid", "text"),
    6: ("resourceVersion", "text"),
    7: ("generation", "int"),
    8: ("creationTimestamp", "time"),
    11: ("labels", "texts by name"),
    12: ("annotations", "texts by name"),
    13: ("ownerReferences", [_OWNER]),
    14: ("finalizers", ["text"]),
}
_KINDS: dict[str, _Fields] = {
    "ConfigMap": {1: ("metadata", _META), 2: ("data", "texts by name"), 3: ("binaryData", "bytes by name")},
    "DeleteOptions": {
        1: ("gracePeriodSeconds", "int"),
        2: ("preconditions", {1: ("uid", "text"), 2: ("resourceVersion", "text")}),
        4: ("propagationPolicy", "text"),
    },
    "Namespace": {1: ("metadata", _META)},
    "Secret": {
        1: ("metadata", _META),
        2: ("data", "bytes by name"),
        3: ("type", "text"),
        4: ("stringData", "texts by name"),
    },
}


def decoded(message: bytes) -> dict[str, Any]:
    """The object as in JSON. Raises ValueError for an unknown kind."""
    if not message.startswith(MAGIC):
        raise ValueError("no protobuf of Kubernetes: it begins otherwise")
    typed, raw = {}, b""
    for number, value in _split(message[len(MAGIC) :]):
        if number == 1:
            typed = _message(value, {1: ("apiVersion", "text"), 2: ("kind", "text")})
        elif number == 2:
            raw = value
    if typed.get("kind") not in _KINDS:
        raise ValueError(f"protobuf of a {typed.get('kind')}, and only {sorted(_KINDS)} are read here: send JSON")
    return typed | _message(raw, _KINDS[typed["kind"]])


def _message(raw: bytes, fields: _Fields) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, value in _split(raw):
        if number not in fields:
            continue
        name, kind = fields[number]
        if isinstance(kind, list):
            found.setdefault(name, []).append(_read(value, kind[0]))
        elif isinstance(kind, str) and kind.endswith("by name"):
            entry = dict(_split(value))
            content = entry.get(2, b"")
            said = content.decode() if kind.startswith("texts") else base64.b64encode(content).decode()
            found.setdefault(name, {})[entry.get(1, b"").decode()] = said
        elif (read := _read(value, kind)) not in ("", None):
            found[name] = read
    return found


def _read(value: Any, kind: Any) -> Any:
    if isinstance(kind, dict):
        return _message(value, kind)
    if kind == "text":
        return value.decode()
    if kind == "bool":
        return bool(value)
    if kind == "time":
        seconds = _message(value, _TIME).get("seconds")
        when = None if seconds is None else datetime.datetime.fromtimestamp(seconds, datetime.UTC)
        return when and when.strftime("%Y-%m-%dT%H:%M:%SZ")
    return value


def _split(raw: bytes) -> Iterator[tuple[int, Any]]:
    """Field numbers with their values: an int, or bytes."""
    at = 0
    while at < len(raw):
        tag, at = _varint(raw, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _varint(raw, at)
            yield number, value
        elif wire == 2:
            length, at = _varint(raw, at)
            yield number, raw[at : at + length]
            at += length
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
            yield number, raw[at : at + size]
            at += size
        else:
            raise ValueError(f"wire type {wire} is not used by Kubernetes")


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
