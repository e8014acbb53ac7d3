"""Keys of a router's calls: one for the orchestrator, and one for agents, which prove their addresses first."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import httpx

from lorafleet.engine.worker_proofs import AgentProofs, AgentUnproved
from lorafleet.keys.auth import ApiKeys
from lorafleet.keys.own_key import OwnKey
from router.http.engine_connection import EngineLost
from router.http.engine_pool import EnginePool
from router.http.fetch import FetchRefused, fetch

_PROOF_VALID_S = 10.0
"""A guess: a proof costs an agent a tenth of a poll, and an address is not given to another pod much sooner."""
_MOST_PROOF_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class CallKeys:
    """Keys by the called service's URL.

    own     for the orchestrator
    agents  for agents; opens nothing else
    """

    orchestrator_url: str
    own: OwnKey
    agents: OwnKey
    proofs: AgentProofs

    async def key_for(self, url: str) -> str:
        """The key for this URL; empty for none. Raises FetchRefused for an agent that does not prove its address."""
        if url.rstrip("/") == self.orchestrator_url:
            return self.own.key
        try:
            await self.proofs.prove(url)
        except AgentUnproved as exc:
            raise FetchRefused(str(exc)) from exc
        return self.agents.key

    async def headers_for(self, url: str) -> dict[str, str]:
        """The `authorization` header for this URL; empty without a key. Raises httpx.ConnectError without a proof."""
        try:
            key = await self.key_for(url)
        except FetchRefused as exc:
            raise httpx.ConnectError(str(exc)) from exc
        return {"authorization": f"Bearer {key}"} if key else {}


def make_call_keys(
    *,
    keys: ApiKeys,
    own: OwnKey,
    agents: OwnKey,
    orchestrator_url: str,
    pool: EnginePool,
    timeout_s: float,
    clock: Callable[[], float],
    is_mutual: bool = False,
) -> CallKeys:
    """The keys of a router; `pool` has its connections to agents.

    is_mutual  they check certificates, which prove agents' addresses
    """
    ask = partial(_ask_for_proof, pool, timeout_s)
    proofs = AgentProofs(
        keys=keys, ask=ask, valid_s=_PROOF_VALID_S, clock=clock, meet=_trust_connection if is_mutual else None
    )
    return CallKeys(orchestrator_url=orchestrator_url.rstrip("/"), own=own, agents=agents, proofs=proofs)


async def _trust_connection(_url: str, _worker_id: str) -> None:
    """Each connection to an agent has checked that the certificate there is a worker's."""


async def _ask_for_proof(pool: EnginePool, timeout_s: float, url: str, path: str, body: bytes) -> bytes:
    """Post a request for a proof, which carries no key; the answer's body. Raises AgentUnproved."""
    try:
        return await fetch(pool, url, path, body=body, timeout_s=timeout_s, max_bytes=_MOST_PROOF_BYTES)
    except FetchRefused as exc:
        raise AgentUnproved(f"no proof that this is a worker: {exc}", is_answered=True) from exc
    except (EngineLost, ValueError) as exc:
        raise AgentUnproved(f"no proof that {url} is a worker: {exc}", is_answered=False) from exc
