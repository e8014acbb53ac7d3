"""read: the session and the program of a request, by the names that engines, gateways and agents have for them.

A session is one conversation: its turns repeat the prompt before them. A program is all that an agent does for one
task: its own session, and those of the sub-agents that it starts.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from xxhash import xxh3_128_hexdigest

from router.core.sessions.session import NO_SESSION, Session

# A longer name is replaced by its hash: each of the thousand kept decisions has one.
_MAX_CHARS = 200
# vLLM 0.32 entrypoints/generate/base/serving.py SESSION_ID_HEADER; it marks the KV events of a request with the value.
_ENGINE_HEADER = b"x-session-id: %b\r\n"


class SessionHeaders(NamedTuple):
    """The headers by which one kind of client names its sessions.

    session  of the conversation; where there is an `agent`, of the whole program
    agent    of a sub-agent in that program; empty: none is named
    parent   of the session that started this one; empty: none is named
    """

    session: bytes
    agent: bytes = b""
    parent: bytes = b""


# The first that a request has is taken; before all of them the setting `session_header`.
SESSION_HEADERS = (
    # Dynamo 1.6 docs, "Identify Agent Sessions"
    SessionHeaders(b"x-dynamo-session-id", parent=b"x-dynamo-parent-session-id"),
    # Claude Code docs, llm-gateway-protocol; anthropics/claude-code#49204; Dynamo 1.6 llm/src/protocols/agents.rs
    SessionHeaders(b"x-claude-code-session-id", b"x-claude-code-agent-id", b"x-claude-code-parent-agent-id"),
    # Codex: codex-rs/codex-api/src/requests/headers.rs, codex-rs/core/src/responses_metadata.rs
    SessionHeaders(b"thread-id", parent=b"x-codex-parent-thread-id"),
    # vLLM 0.32; OpenCode: packages/opencode/src/session/llm/request.ts
    SessionHeaders(b"x-session-id", parent=b"x-parent-session-id"),
    # Codex before it had threads: Dynamo 1.4 llm/src/protocols/agents.rs
    SessionHeaders(b"session-id"),
    # OpenCode, as above; LLM Gateway docs, "Sessions"
    SessionHeaders(b"x-session-affinity", parent=b"x-parent-session-id"),
    # LiteLLM docs, "Session Logs"; OpenHands SDK: local_conversation.py sets it
    SessionHeaders(b"x-litellm-session-id"),
    # Open WebUI with ENABLE_FORWARD_USER_INFO_HEADERS: backend/open_webui/env.py
    SessionHeaders(b"x-openwebui-chat-id"),
)
# Dynamo 1.6 docs: `true` with the last request of a session, however that is named.
FINAL_HEADER = b"x-dynamo-session-final"


class SessionReader:
    """Reads sessions from the heads of requests."""

    def __init__(self, first_header: str) -> None:
        """first_header  the setting `session_header`: goes before all others."""
        first = first_header.lower().encode()
        known = {headers.session: headers for headers in SESSION_HEADERS}
        self._headers = {first: known.pop(first, SessionHeaders(first)), **known}

    def read(self, headers: Mapping[bytes, bytes]) -> Session:
        """The session that these headers name; NO_SESSION where they name none."""
        if self._headers.keys().isdisjoint(headers):
            return NO_SESSION
        for kind in self._headers.values():
            name = _text(headers, kind.session)
            if not name:
                continue
            is_over = _text(headers, FINAL_HEADER).lower() == "true"
            agent, parent = _text(headers, kind.agent), _text(headers, kind.parent)
            if not kind.agent:
                return Session(name, parent if parent != name else "", "", is_over)
            if not agent or agent == name:
                return Session(name, "", name, is_over)
            # Within its program, because agents' ids may be no more than names.
            parent = f"{name}/{parent}" if parent not in {"", agent, name} else name
            return Session(f"{name}/{agent}", parent, name, is_over)
        return NO_SESSION


def _text(headers: Mapping[bytes, bytes], name: bytes) -> str:
    """A header's value as text; empty where there is none."""
    return headers.get(name, b"").decode("latin-1").strip() if name else ""


def body_session(decoded: Mapping[str, Any], named: Session) -> Session:
    """The session that a decoded body names: `session_id` goes before `named`, extra arguments and `user` behind it."""
    own = decoded.get("session_id")
    if isinstance(own, str) and own:
        return named._replace(name=own, parent="" if named.parent == own else named.parent)
    if named.name:
        return named
    sampling = decoded.get("sampling_params")
    for extra in (decoded.get("vllm_xargs"), sampling.get("extra_args") if isinstance(sampling, dict) else None):
        own = extra.get("session_id") if isinstance(extra, dict) else None
        if isinstance(own, str) and own:
            return Session(own)
    user = decoded.get("user")
    return Session(user) if isinstance(user, str) and user else NO_SESSION


def own_session(tenant: str, session: Session) -> Session:
    """The session with names that no other tenant's session has."""
    if session == NO_SESSION:
        return Session(tenant=tenant) if tenant else session
    return Session(
        _own_name(tenant, session.name),
        _own_name(tenant, session.parent),
        _own_name(tenant, session.root),
        session.is_over,
        tenant,
    )


def _own_name(tenant: str, name: str) -> str:
    """A session's name within its tenant, or its hash where it is long; empty stays empty."""
    if not name:
        return ""
    # Length first: without it ("a", "b/c") and ("a/b", "c") would be one session.
    own = f"{len(tenant)}:{tenant}/{name}" if tenant else name
    return own if len(own) <= _MAX_CHARS else xxh3_128_hexdigest(own.encode())


def engine_header(session: str) -> bytes:
    """The header line that tells an engine the session; empty without one.

    Another tenant cannot name it: a tenant's session is told as the hash of its whole name.
    """
    if not session:
        return b""
    is_plain = session.isascii() and session.replace("-", "").replace("_", "").isalnum()
    told = session if is_plain else xxh3_128_hexdigest(session.encode())
    return _ENGINE_HEADER % told.encode()
