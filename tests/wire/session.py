"""Recorded sessions: the exchanges of one conversation between two services, with placeholders for volatile values."""

import base64
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import msgspec

from tests.wire.wire_types import LAST_RELEASE, WireSnapshot

# A JSON value, or for msgpack a map whose packed hashes are bytes.
Content = Any


@dataclass(frozen=True, slots=True)
class WireRoute:
    """One call of a conversation, and the wire types of its body, its answer and its stream's items ("": none).

    path     a regular expression
    media    of the answer: json, sse, msgpack, or frames (msgpack, each with its length before it)
    """

    method: str
    path: str
    asks: str = ""
    answers: str = ""
    media: str = "json"

    @property
    def is_stream(self) -> bool:
        return self.media in ("sse", "frames")

    def matches(self, method: str, path: str) -> bool:
        return method == self.method and re.fullmatch(self.path, path.partition("?")[0]) is not None


_METADATA = WireRoute("GET", "/metadata", answers="Metadata")
_LOAD = WireRoute("POST", "/v1/admin/load_lora", "LoadRequest", "LoadAnswer")

CONVERSATIONS: Mapping[str, tuple[WireRoute, ...]] = {
    "agent-to-orchestrator": (WireRoute("POST", "/v1/workers/register", "Heartbeat", "HeartbeatAnswer"),),
    "router-to-orchestrator": (
        WireRoute("GET", "/v1/catalog", answers="Catalog"),
        WireRoute("GET", "/v1/events", answers="FleetEvent", media="sse"),
        WireRoute("POST", "/v1/usage", "UsageReport", "UsageAnswer"),
        WireRoute("POST", "/v1/adapters/.+/ensure", "EnsureRequest", "EnsureAnswer"),
        WireRoute("GET", "/v1/routers/questions", answers="RouterQuestions"),
        WireRoute("POST", "/v1/routers/answers", "RouterReply"),
    ),
    "orchestrator-to-agent": (
        _METADATA,
        WireRoute("GET", "/v1/metadata/loras", answers="AvailableLoras"),
        WireRoute("POST", "/v1/admin/claim", "ClaimRequest", "Metadata"),
        WireRoute("GET", "/v1/admin/source"),
        WireRoute("POST", "/v1/admin/inspect_lora", "InspectRequest", "WorkerAdapter"),
        _LOAD,
        WireRoute("POST", "/v1/admin/mark_files", "MarkFilesRequest"),
        WireRoute("POST", "/v1/admin/unload_lora", "UnloadRequest", "UnloadAnswer"),
        WireRoute("POST", "/v1/admin/drain", "DrainRequest", "DrainAnswer"),
        WireRoute("POST", "/v1/admin/undrain", "UndrainRequest", "Metadata"),
    ),
    "router-to-agent": (
        _METADATA,
        WireRoute("GET", "/v1/events", answers="AgentEvent", media="sse"),
        WireRoute("GET", "/v1/model/files", answers="ModelFiles"),
        WireRoute("GET", "/v1/kv/snapshot", answers="KvSnapshot", media="msgpack"),
        WireRoute("GET", "/v1/kv/stream", answers="KvFrame", media="frames"),
        _LOAD,
    ),
}


@dataclass(slots=True)
class Exchange:
    """A request and its answer.

    at       place in the order of all conversations with the same server
    headers  those that mean something: epoch, etag
    asked    the body; None: none
    answer   the answer's content; of a stream the list of its items
    """

    conversation: str
    at: int
    method: str
    path: str
    headers: dict[str, str]
    asked: Content
    status: int
    answer: Content

    @property
    def route(self) -> WireRoute:
        return route_of(self.conversation, self.method, self.path)

    def __str__(self) -> str:
        return f"{self.conversation} {self.at}: {self.method} {self.path}"


def route_of(conversation: str, method: str, path: str) -> WireRoute:
    """The route of a call. Raises LookupError for one that no route describes: add it to CONVERSATIONS."""
    for route in CONVERSATIONS[conversation]:
        if route.matches(method, path):
            return route
    raise LookupError(f"{conversation}: no route for {method} {path}; add it to CONVERSATIONS in {__name__}")


# -- files ---------------------------------------------------------------------------------------------------


def load_session(*conversations: str, folder: Path = LAST_RELEASE) -> list[Exchange]:
    """The recorded exchanges of these conversations, in their order."""
    found = [
        Exchange(**_decoded(fields))
        for name in conversations
        for fields in json.loads((folder / f"{name}.json").read_text())
    ]
    return sorted(found, key=lambda exchange: exchange.at)


def save_session(conversation: str, exchanges: Iterable[Exchange], *, folder: Path) -> None:
    """Write a conversation's file."""
    texts = [_encoded(asdict(exchange)) for exchange in exchanges]
    lines = ",\n".join("\n".join(_entry_lines(fields)) for fields in texts)
    (folder / f"{conversation}.json").write_text(f"[\n{lines}\n]\n")


def _entry_lines(fields: Mapping[str, Any]) -> Iterator[str]:
    inner = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items())
    yield f" {{\n{inner}\n }}"


def _encoded(value: Content) -> Content:
    """The value with bytes as `{"bytes": base64}`."""
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, dict):
        return {name: _encoded(inner) for name, inner in value.items()}
    return [_encoded(inner) for inner in value] if isinstance(value, list | tuple) else value


def _decoded(value: Content) -> Content:
    if isinstance(value, dict):
        if value.keys() == {"bytes"}:
            return base64.b64decode(value["bytes"])
        return {name: _decoded(inner) for name, inner in value.items()}
    return [_decoded(inner) for inner in value] if isinstance(value, list) else value


# -- content -------------------------------------------------------------------------------------------------


def parsed(media: str, body: bytes) -> Content:
    """An answer's body; of a stream the items that have come whole so far."""
    if media == "sse":
        lines = body.decode().rpartition("\n\n")[0].splitlines()
        return [json.loads(line.removeprefix("data:")) for line in lines if line.startswith("data:")]
    if media == "frames":
        return list(_frames(body))
    if media == "msgpack":
        return msgspec.msgpack.decode(body)
    return json.loads(body) if body else None


def written(media: str, content: Content) -> bytes:
    """The body that is parsed as this content."""
    if media == "sse":
        return b"".join(b"data: %b\n\n" % json.dumps(item).encode() for item in content)
    if media == "frames":
        return b"".join(frame_bytes(item) for item in content)
    if media == "msgpack":
        return msgspec.msgpack.encode(content)
    return b"" if content is None else json.dumps(content).encode()


def frame_bytes(item: Content) -> bytes:
    """One frame: its length as 4 bytes, then the item."""
    packed = msgspec.msgpack.encode(item)
    return len(packed).to_bytes(4, "big") + packed


def _frames(body: bytes) -> Iterator[Content]:
    while len(body) >= 4 and len(body) >= 4 + (size := int.from_bytes(body[:4], "big")):
        yield msgspec.msgpack.decode(body[4 : 4 + size])
        body = body[4 + size :]


def filled(value: Content, texts: Mapping[str, str]) -> Content:
    """The value with each of these texts replaced, in names too."""
    if isinstance(value, str):
        for text, other in texts.items():
            value = value.replace(text, other)
        return value
    if isinstance(value, dict):
        return {filled(name, texts): filled(inner, texts) for name, inner in value.items()}
    return [filled(inner, texts) for inner in value] if isinstance(value, list | tuple) else value


# -- comparison ----------------------------------------------------------------------------------------------


def field_paths(value: Content, at: str = "") -> set[str]:
    """The fields of a value, such as `lora.loaded_loras[].digest`.

    A list has the fields of all its items; bytes that are not empty count as a list.
    """
    if isinstance(value, dict):
        return {
            path
            for name, inner in value.items()
            for path in ({f"{at}.{name}".lstrip(".")} | field_paths(inner, f"{at}.{name}".lstrip(".")))
        }
    if isinstance(value, list):
        return {path for inner in value for path in field_paths(inner, f"{at}[]")}
    return {f"{at}[]"} if isinstance(value, bytes) and value else set()


@dataclass(slots=True)
class AnswerCheck:
    """Compares today's answers with the recorded ones; `problems` has what a client of the last release misses.

    maps    fields whose keys are data
    unused  fields that are left out of an adapter on disk that nobody has asked for, as in the replay
    """

    snapshot: WireSnapshot
    problems: list[str] = field(default_factory=list)
    maps: frozenset[str] = frozenset({"files", "waits_s", "capacity", "uses"})
    unused: frozenset[str] = frozenset({"lora.available_loras[].last_used", "lora.available_loras[].request_count"})

    def compare(self, recorded: Exchange, status: int, answer: Content) -> None:
        """Note fields of the recorded answer that today's lacks, and what the last release's schema refuses."""
        route = recorded.route
        if status != recorded.status:
            said = json.dumps(_encoded(answer))[:500]
            self.problems.append(f"{recorded}: answered {status} {said}; the last release got {recorded.status}")
            return
        for path in sorted(field_paths(recorded.answer) - field_paths(answer) - self.unused):
            if not self.maps & set(path.split(".")[:-1]):
                self.problems.append(f"{recorded}: {route.answers} has no {path} any more")
        for item in answer if route.is_stream else [answer] if route.answers else ():
            self.problems += [f"{recorded}: {fault}" for fault in schema_faults(self.snapshot, route.answers, item)]


def schema_faults(snapshot: WireSnapshot, name: str, item: Content) -> Iterator[str]:
    """What a service of the snapshot's release could not parse as this type."""
    validator = jsonschema.Draft202012Validator(snapshot.schema_of(name))
    for fault in validator.iter_errors(_as_json(item)):
        yield f"{name} {fault.json_path}: {fault.message[:300]}"


def _as_json(value: Content) -> Content:
    """The value as its schema describes it: bytes are text."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dict):
        return {name: _as_json(inner) for name, inner in value.items()}
    return [_as_json(inner) for inner in value] if isinstance(value, list) else value
