"""What a service may do by its certificate, where services of a fleet prove their roles to each other (mutual TLS)."""

from collections.abc import Mapping, Sequence

from fastapi import Request

from lorafleet.keys.roles import Caller
from lorafleet.service.http import HttpError
from lorafleet.service.network.tls import PEER, PeerNames, Role, role_name

PEER_HEADER = "x-lorafleet-peer"
"""Names of the certificate with which a request came to a standby, which forwards it with a certificate of its own."""
# What each role's calls to other services need.
_SCOPES_OF_ROLE: Mapping[Role, frozenset[str]] = {
    "worker": frozenset({"worker", "drain"}),
    "router": frozenset({"load", "agent-load"}),
    "orchestrator": frozenset({"agent", "view"}),
}
_NEED_CERTIFICATE = frozenset({"worker", "agent", "agent-load"})
"""Scopes of calls between services: a key alone does not do."""


def peer_of(request: Request) -> PeerNames | None:
    """The names of the certificate that a request came with; None without one.

    An orchestrator that forwards a request says whose it is, and is believed.
    """
    found: PeerNames | None = request.scope.get("state", {}).get(PEER)
    forwarded = request.headers.get(PEER_HEADER)
    if found is None or forwarded is None or not found.has_role("orchestrator"):
        return found
    names = frozenset(filter(None, forwarded.split(",")))
    return PeerNames(names) if names else None


def peer_header(request: Request) -> str:
    """The value of PEER_HEADER for a request that is forwarded; empty where it came without a certificate."""
    peer = peer_of(request)
    return "" if peer is None else ",".join(sorted(peer.names))


def caller_of_peer(peer: PeerNames | None) -> Caller | None:
    """The caller that a service's certificate stands for, with the scopes of its roles; None for any other."""
    roles = [] if peer is None else [role for role in _SCOPES_OF_ROLE if peer.has_role(role)]
    if not roles:
        return None
    scopes = frozenset().union(*(_SCOPES_OF_ROLE[role] for role in roles))
    return Caller(tenant=None, scopes=scopes, key_id=f"certificate of {' and '.join(roles)}")


def check_certificate(caller: Caller, scopes: Sequence[str], peer: PeerNames | None) -> None:
    """Raises HttpError 403 `certificate_needed` where only a service may call, and the certificate is not its."""
    by_certificate = caller_of_peer(peer)
    held = {scope for scope in scopes if caller.may(scope)}
    if held - _NEED_CERTIFICATE or (by_certificate is not None and any(map(by_certificate.may, held))):
        return
    roles = [role for role, own in _SCOPES_OF_ROLE.items() if own & held]
    wanted = " or ".join(map(role_name, roles))
    found = "it came without one" if peer is None else f"its names {peer}"
    raise HttpError(
        403,
        "certificate_needed",
        f"this is a call between services, which needs a client certificate of tls_ca with the name {wanted}; {found}:"
        " give the calling service --tls-cert, --tls-key and --tls-ca",
    )


def check_own_worker(worker_id: str, peer: PeerNames | None) -> None:
    """Raises HttpError 403 `certificate_of_other_worker` unless the certificate is this worker's own."""
    if peer is None or not peer.is_worker(worker_id):
        raise HttpError(
            403,
            "certificate_of_other_worker",
            f"this call is for worker {worker_id!r}, and its certificate names {peer or 'nobody'}: issue one with the"
            f" DNS name {worker_id}.{role_name('worker')}, or give the agent the --instance-id that it names",
        )
