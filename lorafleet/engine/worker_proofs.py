"""Proof that an address belongs to a worker of this fleet, before a service sends it a key or a request.

The service posts a fresh nonce and the address to `/v1/prove` there, without a key. The agent answers with its names
and an HMAC over all of them. The HMAC's key is the hash of the agent's own key, which a service has in its key files
with the scope `worker`. Neither the key nor its hash is sent.
"""

import hashlib
import hmac
import json
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from pydantic import ValidationError

from lorafleet.keys.auth import ApiKeys
from workers.wire import WORKER_PROOF_PATH, ProofAnswer, ProofRequest

_PURPOSE = "lorafleet worker proof 1"
_MOST_KEPT = 100_000
"""Proofs of addresses. A fleet has a thousand workers; an address that has none is never kept."""


class AgentUnproved(Exception):
    """An address has not proved that it is a worker's. The message says why, and what to do.

    is_answered  whether something answered there, which is then no worker of this fleet
    """

    def __init__(self, message: str, *, is_answered: bool) -> None:
        super().__init__(message)
        self.is_answered = is_answered


@dataclass(frozen=True, slots=True)
class ProvedAgent:
    """The agent that has proved an address. `key_id` is the id of the agent's own key."""

    instance_id: str
    agent_boot_id: str
    key_id: str

    def __str__(self) -> str:
        return f"worker {self.instance_id} (start {self.agent_boot_id}, key {self.key_id})"


def proof_of(key_hash: str, asked: ProofRequest, agent: ProvedAgent) -> str:
    """The proof as hex: HMAC-SHA256 by the hash of the agent's key, over the nonce, the address and the agent."""
    said = (_PURPOSE, asked.nonce, asked.url, agent.instance_id, agent.agent_boot_id, agent.key_id)
    return hmac.new(key_hash.encode(), json.dumps(said).encode(), hashlib.sha256).hexdigest()


@dataclass(slots=True)
class _Kept:
    """A proof, and when its agent was last known to be there."""

    agent: ProvedAgent
    seen_at: float


@dataclass(slots=True)
class AgentProofs:
    """The addresses that have proved to be workers', as long as their agents are heard.

    keys     of this service; without key files no address needs a proof
    ask      posts a body to an address and a path, without a key; returns the answer. Raises AgentUnproved
    valid_s  a proof holds for so long after its agent was last heard
    meet     checks that the certificate at an https address is this worker's own; raises AgentUnproved. With it a
             certificate proves such an address, and no HMAC is asked for. None: services have no certificates
    """

    keys: ApiKeys
    ask: Callable[[str, str, bytes], Awaitable[bytes]]
    valid_s: float
    clock: Callable[[], float]
    meet: Callable[[str, str], Awaitable[None]] | None = None
    _kept: dict[str, _Kept] = field(default_factory=dict)

    @property
    def are_needed(self) -> bool:
        """Whether an address must be proved: not where this service is open itself."""
        return not self.keys.is_open

    def is_proved(self, url: str) -> bool:
        """Whether this address may have a key now."""
        if self.meet is not None and url.startswith("https:"):
            return True  # every connection to it checks the certificate there
        kept = self._kept.get(url.rstrip("/"))
        return not self.are_needed or (kept is not None and self.clock() - kept.seen_at < self.valid_s)

    async def prove(self, url: str) -> None:
        """Have the address proved, unless it is. Raises AgentUnproved."""
        if not self.is_proved(url):
            await self._ask_for_proof(url.rstrip("/"))

    async def prove_sender(self, url: str, sender: ProvedAgent) -> None:
        """Have the address of a report proved as its sender's, unless it is; the sender counts as heard.

        A proof is of one start of an agent at one address, so a restart and another address are proved anew. Raises
        AgentUnproved.
        """
        url = url.rstrip("/")
        kept = self._kept.get(url)
        if self.meet is not None and url.startswith("https:"):
            await self._meet_sender(self.meet, url, sender)
            return
        if not self.are_needed:
            return
        if kept is None or kept.agent != sender or not self.is_proved(url):
            kept = await self._ask_for_proof(url)
        if kept.agent != sender:
            message = f"the agent at {url} is {kept.agent}, and the report is from {sender}: see --advertise-url"
            raise AgentUnproved(message, is_answered=True)
        kept.seen_at = self.clock()

    async def _meet_sender(self, meet: Callable[[str, str], Awaitable[None]], url: str, sender: ProvedAgent) -> None:
        """Have an https address shown as its sender's by the certificate there, unless it has been just now."""
        kept = self._kept.get(url)
        if kept is None or kept.agent != sender or self.clock() - kept.seen_at >= self.valid_s:
            await meet(url, sender.instance_id)
        self._keep(url, sender)

    def _keep(self, url: str, agent: ProvedAgent) -> _Kept:
        """Keep that an address is this agent's, as of now."""
        if len(self._kept) >= _MOST_KEPT:
            self._kept.clear()
        kept = self._kept[url] = _Kept(agent, self.clock())
        return kept

    def forget(self, url: str) -> None:
        """Ask for a new proof before the address gets a key again: nothing answered there, or another agent did."""
        self._kept.pop(url.rstrip("/"), None)

    async def _ask_for_proof(self, url: str) -> _Kept:
        """Ask an address for a proof now, and keep it. Raises AgentUnproved; then the address counts as unproved."""
        self.forget(url)
        asked = ProofRequest(nonce=secrets.token_hex(32), url=url)
        agent = self._checked(asked, await self.ask(url, WORKER_PROOF_PATH, asked.model_dump_json().encode()))
        return self._keep(url, agent)

    def _checked(self, asked: ProofRequest, content: bytes) -> ProvedAgent:
        """The agent of an answer whose proof holds. Raises AgentUnproved."""
        try:
            answer = ProofAnswer.model_validate_json(content)
        except ValidationError as exc:
            message = f"{asked.url} answers no proof: it is no lorafleet agent, or an older one"
            raise AgentUnproved(message, is_answered=True) from exc
        agent = ProvedAgent(answer.instance_id, answer.agent_boot_id, answer.key_id)
        key_hash = self.keys.hash_of(agent.key_id, "worker")
        if key_hash is None:
            message = (
                f"{asked.url} is proved by key {agent.key_id}, which is no valid key with scope `worker` in the key"
                " files here: `lorafleet keys new --scopes worker,drain --file KEYS` makes one for the agent"
            )
            raise AgentUnproved(message, is_answered=True)
        if not hmac.compare_digest(proof_of(key_hash, asked, agent), answer.proof):
            message = f"{asked.url} sent a wrong proof for {agent}: it does not hold that key"
            raise AgentUnproved(message, is_answered=True)
        return agent
