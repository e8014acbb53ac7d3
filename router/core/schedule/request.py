"""One request as the scheduler knows it: what it asks for, its block hashes, and what replicas have cached of it."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from lorafleet.identity import BlockHash
from router.core.fleet import Excluded, Incarnation
from router.core.kv.index import WorkerId
from router.core.sessions.session import NO_SESSION, Session

NOTHING: Mapping[Any, Any] = MappingProxyType({})
_NO_BLOCKS: Sequence[BlockHash] = ()

# A prompt's block hashes, by block size.
HashChains = Mapping[int, Sequence[BlockHash]]


# Structs, because each request makes them anew: a named tuple takes four times as long to make and three times as long
# to read, a frozen dataclass longer still.
class RoutingRequest(msgspec.Struct, frozen=True):
    """One request, as far as the choice of a replica depends on it.

    excluded         incarnations that failed this request
    session          the session header, or else the body's `user`; may be empty
    first_blocks     hash of the prompt's first blocks under its adapter; 0 when it was not tokenized. Of an approximate
                     prompt a hash that all turns of its conversation share
    only             the engine that stores the response which this request continues, if any
    sequences        sequences that an engine runs for it: `n` for each of its prompts
    total_tokens     of prompt and answer, where replicas differ in how many they take; 0: not known, or irrelevant
    is_approximate   the prompt was not tokenized: what is cached of it is estimated from what was sent before
    """

    base_model: str
    engine_name: str
    prompt_tokens: int
    excluded: Excluded = frozenset()
    session: str = ""
    first_blocks: int = 0
    only: Incarnation | None = None
    sequences: int = 1
    total_tokens: int = 0
    is_approximate: bool = False


class HashedRequest(msgspec.Struct, frozen=True):
    """A routing request with its prompt's block hashes; without any when the prompt is not known.

    Hashes of an approximate prompt (`request.is_approximate`) are of another kind, with an index of their own.

    chains          hashes by block size
    salted_chains   hashes at replicas that salt prompts (Replica.is_salted); empty where no salt applies, and for
                    approximate prompts
    salted_workers  the replicas that salt prompts
    cache_salt      what keeps its cached prompts apart, at every replica: its tenant's or key's own salt, or the
                    client's (`router.request.cache_salt`); replicas that salt prompts make another one of it
    session         of which it is a turn, as its client names that
    """

    request: RoutingRequest
    chains: HashChains = NOTHING
    salted_chains: HashChains = NOTHING
    salted_workers: frozenset[WorkerId] = frozenset()
    cache_salt: str = ""
    session: Session = NO_SESSION

    def chain(self, worker: WorkerId, block_size: int) -> Sequence[BlockHash]:
        """The prompt's block hashes at one worker."""
        chains = self.salted_chains if worker in self.salted_workers else self.chains
        return chains.get(block_size, _NO_BLOCKS)


class PrefixMatch(msgspec.Struct, frozen=True):
    """The cached prefix of one prompt, by replica; the fields are those of FleetSnapshot."""

    depths: Mapping[WorkerId, int] = NOTHING
    lower: Mapping[WorkerId, tuple[int, int]] = NOTHING
    ranks: Mapping[WorkerId, int] = NOTHING
