"""The sessions that this router serves: which requests are turns of one, and of which program.

A session is known by its name. A prompt without one continues the session whose last prompt it begins with: that is
the longest chain in common, found from where the prefix index has no more of the prompt.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from lorafleet.identity import BlockHash
from router.core.sessions.habits import ReturnHabit, ReturnHabits
from router.core.sessions.session import Session

# A session that was idle for so long has ended: busy engines keep no block for longer.
ENDED_S = 600.0
# After so long it counts as one without a next turn, until that comes: else a habit would be learned ten minutes late.
GIVEN_UP_S = 60.0
_MOST_SESSIONS = 20_000
# Blocks of an answer, or of a client's new message, behind the prompt of the turn before: 2,048 tokens at 16 a block.
_MOST_BEYOND = 128


@dataclass(slots=True, eq=False)
class AgentProgram:
    """All sessions of one task.

    service_s  seconds of engine work that it was given
    """

    key: int
    is_over: bool = False
    service_s: float = 0.0


@dataclass(slots=True, eq=False)
class SessionState:
    """One session.

    key        a hash of its name, or of its first prompt
    tail       the last block of its last prompt, by which its next turn is found; 0: it is found by its name
    used_at    when its last turn began or ended
    in_flight  its requests under way
    is_over    its client has said that no turn follows
    is_given_up  it counts as one without a next turn
    """

    key: int
    habit: ReturnHabit
    program: AgentProgram
    used_at: float
    tail: int = 0
    in_flight: int = 0
    is_over: bool = False
    is_given_up: bool = False

    def return_chance(self, now: float) -> float:
        """The chance that its KV is read again: that it has a next turn."""
        if self.in_flight:
            return 1.0
        return 0.0 if self.is_over or self.program.is_over else self.habit.chance(max(0.0, now - self.used_at))

    def end_turn(self, now: float) -> None:
        """Record that a turn has ended, well or badly."""
        self.in_flight -= 1
        self.used_at = now


class SessionBook:
    """The sessions of one router, the longest unused first."""

    def __init__(self, *, most_sessions: int = _MOST_SESSIONS, habits: ReturnHabits | None = None) -> None:
        self.habits = habits or ReturnHabits()
        self._most = most_sessions
        self._sessions: OrderedDict[int, SessionState] = OrderedDict()
        # Those that are not given up.
        self._expected: OrderedDict[int, SessionState] = OrderedDict()
        self._tails: dict[int, SessionState] = {}
        self._programs: OrderedDict[int, AgentProgram] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def find(self, session: Session, chain: Sequence[BlockHash], depth: int) -> SessionState | None:
        """The session of a request; None: it would begin one.

        chain  block hashes of its prompt
        depth  how many of its first blocks some replica has
        """
        if session.name:
            return self._sessions.get(_key_of(session.name))
        if not self._tails:
            return None
        # The turn before ended where the index ends, less its answer; with nothing cached, where its prompt was longer.
        end = min(depth, len(chain)) or len(chain)
        salt = _salt_of(session)
        for at in range(end - 1, max(-1, end - 1 - _MOST_BEYOND), -1):
            found = self._tails.get(chain[at] ^ salt)
            if found is not None:
                return found
        return None

    def service_s(self, session: Session, chain: Sequence[BlockHash], depth: int) -> float:
        """Seconds of engine work that the program of a request was given; its session may not have begun."""
        state = self.find(session, chain, depth)
        if state is not None:
            return state.program.service_s
        name = session.root or session.parent
        if not name:
            return 0.0
        key = _key_of(name)
        parent = self._sessions.get(key)
        program = self._programs.get(key) if parent is None else parent.program
        return 0.0 if program is None else program.service_s

    def begin_turn(
        self,
        session: Session,
        chain: Sequence[BlockHash],
        depth: int,
        lora_id: str,
        now: float,
        is_again: bool = False,
    ) -> SessionState | None:
        """Record that a turn of a session begins; None for a prompt that says nothing of its session.

        chain, depth  as in `find`
        lora_id       its adapter; empty: the base model
        is_again      the turn was begun before, and failed
        """
        self._forget_old(now)
        state = self.find(session, chain, depth)
        if state is None:
            if not session.name and not chain:
                return None
            key = _key_of(session.name) if session.name else chain[-1] ^ _salt_of(session)
            state = self._sessions.get(key)
        if state is None:
            habit = self.habits.habit(session.tenant, lora_id)
            state = self._sessions[key] = SessionState(key, habit, self._program(key, session), now)
        else:
            self._sessions.move_to_end(state.key)
            if state.is_given_up:
                state.habit.take_back_end()
                state.is_given_up = False
            if not state.in_flight and not is_again:
                state.habit.add_gap(now - state.used_at)
        self._expected[state.key] = state
        self._expected.move_to_end(state.key)
        if not session.name:
            self._drop_tail(state)
            state.tail = chain[-1] ^ _salt_of(session)
            self._tails[state.tail] = state
        state.in_flight += 1
        state.used_at, state.is_over = now, session.is_over
        if state.program.key == state.key:
            state.program.is_over = session.is_over
        return state

    def _program(self, key: int, session: Session) -> AgentProgram:
        """The program of a new session: its root's, else its parent's, else its own."""
        if session.root:
            key = _key_of(session.root)
        elif session.parent:
            key = _key_of(session.parent)
            parent = self._sessions.get(key)
            if parent is not None:
                return parent.program
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = AgentProgram(key)
            if len(self._programs) > self._most:
                self._programs.popitem(last=False)
        else:
            self._programs.move_to_end(key)
        return program

    def _forget_old(self, now: float) -> None:
        """Forget up to two of the longest unused sessions: those that have ended, and those beyond the most."""
        for _ in range(2):
            self._give_up_oldest(now)
            oldest = next(iter(self._sessions.values()), None)
            if oldest is None:
                return
            if oldest.in_flight and len(self._sessions) < self._most:
                self._sessions.move_to_end(oldest.key)
                return
            has_ended = not oldest.in_flight and now - oldest.used_at > ENDED_S
            if not has_ended and len(self._sessions) < self._most:
                return
            del self._sessions[oldest.key]
            self._expected.pop(oldest.key, None)
            self._drop_tail(oldest)

    def _give_up_oldest(self, now: float) -> None:
        """Count the longest unused session as one without a next turn, if it was idle for long."""
        oldest = next(iter(self._expected.values()), None)
        if oldest is None:
            return
        if oldest.in_flight:
            self._expected.move_to_end(oldest.key)
        elif now - oldest.used_at > GIVEN_UP_S:
            del self._expected[oldest.key]
            if not oldest.is_over:
                oldest.is_given_up = True
                oldest.habit.add_end()

    def _drop_tail(self, state: SessionState) -> None:
        """Forget where a session's last prompt ended, unless another session's ends there, too."""
        if self._tails.get(state.tail) is state:
            del self._tails[state.tail]


def _salt_of(session: Session) -> int:
    """What keeps apart the sessions of tenants that send one prompt."""
    return _key_of(session.tenant) if session.tenant else 0


def _key_of(name: str) -> int:
    """A hash of a name."""
    return xxh3_64_intdigest(name.encode())
