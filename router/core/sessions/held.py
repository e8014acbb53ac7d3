"""The sessions whose KV one engine holds, in their order of use: whose blocks the next prompt pushes out.

vLLM evicts the block that was unused for longest, and of one prompt the last one first (vLLM 0.32 v1/core/
block_pool.py). So the order of sessions by their last turn is the order of blocks, but for what several share.
"""

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf

from router.core.sessions.book import SessionState

# Sessions that one replica remembers; most caches hold fewer.
_MOST_HELD = 4096
# So many are priced: a prompt pushes out a few sessions' blocks, and further ones are taken to be like these.
_MOST_VICTIMS = 8

# For how long a session's chance is taken to stay.
_PRICED_FOR_S = 1.0

# Tokens that go next: (tokens, the chance that they are read again, the context that computing them attends to).
Victim = tuple[float, float, float]


@dataclass(slots=True, eq=False)
class _HeldSession:
    """One session's KV at one engine.

    tokens   that no other session shares
    shared   first tokens of its prompt, which others have, too
    """

    state: SessionState
    engine_name: str
    tokens: float
    shared: float


@dataclass(slots=True)
class HeldSessions:
    """The sessions of one engine.

    most_tokens  that its cache holds of this router's sessions
    tokens       of all of them together
    residents    the adapters that the engine has: KV of another one, such as a retired version, is worth nothing
    """

    most_tokens: float = inf
    tokens: float = 0.0
    residents: Collection[str] = ()
    _order: OrderedDict[int, _HeldSession] = field(default_factory=OrderedDict)
    _priced: dict[int, Victim] = field(default_factory=dict)
    _priced_at: float = -inf

    def __len__(self) -> int:
        return len(self._order)

    def place(self, state: SessionState, engine_name: str, prompt_tokens: int, uncached_tokens: int) -> None:
        """Record that a turn goes to this engine: its session is used last, and pushes out those used first."""
        if state.key in self._priced:
            self._priced_at = -inf
        before = self._order.pop(state.key, None)
        shared: float = prompt_tokens - uncached_tokens
        if before is not None:
            self.tokens -= before.tokens
            shared = min(shared, before.shared)
        held = self._order[state.key] = _HeldSession(state, engine_name, prompt_tokens - shared, shared)
        self.tokens += held.tokens
        while self.tokens > self.most_tokens or len(self._order) > _MOST_HELD:
            key, oldest = next(iter(self._order.items()))
            over = self.tokens - self.most_tokens
            if over < oldest.tokens and len(self._order) <= _MOST_HELD:
                oldest.tokens -= over
                self.tokens -= over
            else:
                del self._order[key]
                self.tokens -= oldest.tokens
                self._priced_at = -inf

    def end_turn(self, state: SessionState) -> None:
        """Record that a turn has ended: its blocks may go from now on, after all others."""
        if state.key in self._order:
            self._order.move_to_end(state.key)

    def victims(self, now: float) -> tuple[Victim, ...]:
        """What goes next, the first one first; blocks of running requests cannot go. Unused blocks are lost by nobody.

        Empty where the size of the cache is not known.
        """
        if self.most_tokens == inf:
            return ()
        if now - self._priced_at > _PRICED_FOR_S:
            self._price(now)
        return (max(0.0, self.most_tokens - self.tokens), 0.0, 0.0), *self._priced.values()

    def _price(self, now: float) -> None:
        """Find the sessions that go next, and the chance of each."""
        self._priced, self._priced_at = {}, now
        for key, held in self._order.items():
            if held.state.in_flight:
                continue
            name = held.engine_name
            chance = held.state.return_chance(now) if not name or name in self.residents else 0.0
            self._priced[key] = held.tokens, chance, held.shared + held.tokens / 2
            if len(self._priced) == _MOST_VICTIMS:
                return
