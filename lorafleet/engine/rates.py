"""Prefill and decode speed of an engine, learned from its own counters.

A step of the engine takes `tokens prefilled / prefill rate`, and one token's time more when somebody decodes in it. A
real engine takes about one token's time for any step, however few its prompt tokens: the weights are read in each.
So the seconds of a short prefill, or of one beside decodes, say little of the prefill rate. What says little gives no
rate: 0.0 means that nothing is known, and the caller's own guess stays. Five kinds of evidence:

- alone: prefill tokens by prefill seconds of requests that ended, and had nobody beside them all the while: no step
  gave tokens to two. With others beside, their prefills are in the seconds too.
- device: an engine that counts the seconds of its prefill steps has told all.
- calm: seconds by step while no prompt was computed: one token's time.
- busy: over seconds in which the engine never rested, tokens computed = rate x (seconds - steps x one token's time).
  Its two unknowns come from a least-squares fit, or, where calm seconds have told one token's time, from a division.
  Tokens are the dependent variable because they are what is inexact: a prompt counts when its prefill ends.
- shown: tokens by seconds of any prefill. The rate is never below that.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from math import inf, sqrt

# Ends of a window cut steps and prefills in two; at 4 s that is a few percent of it. Tried 1, 3 and 5 s on the sim.
_BUSY_WINDOW_S = 4.0
# An engine that has just begun is in its first prefill more often than not, and a window that opens there would count
# all of its tokens and half of its time.
_BUSY_AFTER = 2
_KEPT = 75  # busy windows: five minutes
_KEPT_PREFILLS = 60
_KEPT_CALM = 40
_KEPT_ENDED = 60
_KEPT_GAPS = 60
_MIN_WINDOWS = 8
_MIN_CALM = 3
# Readings after a calm second that must show no prefill either; a prompt that takes longer makes it look calm, and
# slow. So calm seconds that are slower than a fit by this much are not believed.
_CALM_AFTER = 2
_MAX_CALM_RATIO = 1.25
# A fit whose own standard error is larger says nothing.
_MAX_ERROR = 0.12
_MAX_SCATTER = 0.05
# Less of the busy time than this spent on prefill, and the rest of a subtraction would be noise.
_MIN_PREFILL_SHARE = 0.05
# A window with less work than this share of its seconds, by the fit, had rested.
_MIN_WORK_SHARE = 0.7
# Below so many prompt tokens a real engine's step takes the time of its weights, whatever the prefill rate is: a GPU
# computes some hundred tokens, a CPU some tens, in the time in which it reads them once.
_MIN_TOKENS = 64.0
# A prefill's seconds tell its rate when they are longer than so many of one token's times, or clearly shorter than one:
# then the engine has no such cost, or nobody decoded beside. In between they may be mostly that cost.
_MIN_TOKEN_TIMES = 1.5
_MAX_TOKEN_TIMES = 0.8
# Of one token's time so much is taken off a long prefill: all of it may be in there, or nothing.
_COST_SHARE = 1 / 3
# Shorter than that are a scheduler's and a clock's own times.
_MIN_PREFILL_S = 0.006
# And so many tokens in all: vLLM on a CPU took 80 ms for its first 70 tokens, and a tenth of that later.
_MIN_TOLD_TOKENS = 512.0
# One token's time before any was seen: slower than most engines, so that less counts as evidence.
_UNKNOWN_TOKEN_S = 0.05
_ROUNDING = 1e-6
# Of busy seconds so much must be prefill for certain before tokens by seconds are a rate.
_MIN_CERTAIN_SHARE = 0.5
# Prompts of a busy window: one counts in the window in which it ends, though it may have been computed in the one
# before.
_MIN_WINDOW_PROMPTS = 3
# `Costs.prefill_tokens_per_s` of the router's core, which may not import this module; a test holds the two equal.
USUAL_PREFILL_TOKENS_PER_S = 10_000.0


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """An engine's counters at one time. Totals from its start, but for `running`.

    computed_tokens  prompt tokens computed (not cached), counted when their prefill ends
    steps            engine steps that gave tokens
    ended_*          of requests that ended: how many, their prompt tokens computed, their seconds in prefill, their
                     output tokens, and their seconds from scheduled to the last token
    token_gaps, gap_seconds  gaps between two tokens of a request: how many, and their sum
    first_tokens     of requests: how many; 0 where the engine does not count them
    prefill_seconds  in which the device prefilled; 0 where the engine does not count them
    """

    at_s: float
    running: int
    computed_tokens: float = 0.0
    steps: float = 0.0
    ended: float = 0.0
    ended_prefill_tokens: float = 0.0
    ended_prefill_seconds: float = 0.0
    ended_output_tokens: float = 0.0
    ended_seconds: float = 0.0
    token_gaps: float = 0.0
    gap_seconds: float = 0.0
    first_tokens: float = 0.0
    prefill_seconds: float = 0.0


# Totals of a Reading; a Scrape has them by the same names.
COUNTERS = tuple(f.name for f in fields(EngineCounters) if f.name not in {"at_s", "running"})


@dataclass(frozen=True, slots=True)
class _RateWindow:
    """Prompt tokens computed in some seconds of some steps; of prefills that ended, one step each."""

    seconds: float
    steps: float
    tokens: float
    prompts: float = 1.0


class EngineRates:
    """What readings about a second apart have told. Every figure is 0.0 until measured."""

    def __init__(self) -> None:
        self.prefill_tokens_per_s = 0.0
        """New prompt tokens of a prefill that has the engine for itself; 0.0 also where prefills were too short to
        tell.
        """
        self.decode_tokens_per_s = 0.0
        """Of one request, with no prefill beside it."""
        self.inter_token_s = 0.0
        """Between two tokens of a request, as the batch of the last seconds made it."""
        self._last: EngineCounters | None = None
        self._opened: EngineCounters | None = None
        self._busy_readings = 0
        self._prefills: deque[_RateWindow] = deque(maxlen=_KEPT_PREFILLS)
        self._shown: deque[float] = deque(maxlen=_KEPT_PREFILLS)
        self._device: deque[float] = deque(maxlen=_KEPT_PREFILLS)
        self._crowded_at = self._ended_after = self._idle_at = -inf
        self._calm: deque[float] = deque(maxlen=_KEPT_CALM)
        self._pending_calm: deque[float | None] = deque()
        self._told = self._fitted_token_s = 0.0
        self._gaps: deque[float] = deque(maxlen=_KEPT_GAPS)
        self._busy: deque[_RateWindow] = deque(maxlen=_KEPT)
        self._ended: deque[tuple[float, float, float]] = deque(maxlen=_KEPT_ENDED)

    @property
    def mean_output_tokens(self) -> float:
        """Output tokens of a request, over those that ended lately."""
        return _ratio(sum(tokens for _, tokens, _ in self._ended), sum(ended for ended, _, _ in self._ended))

    @property
    def mean_request_s(self) -> float:
        """Seconds of a request from scheduled to its last token, over those that ended lately; no queueing."""
        return _ratio(sum(seconds for _, _, seconds in self._ended), sum(ended for ended, _, _ in self._ended))

    def add(self, now: EngineCounters) -> None:
        """Learn from the next reading. Totals that fell belong to a restarted engine: what was learned stays."""
        last, self._last = self._last, now
        if last is not None and last.running == 0:
            self._idle_at = last.at_s
        if last is None or now.at_s <= last.at_s or _fell(last, now):
            self._opened, self._busy_readings = None, 0
            self._pending_calm.clear()
            self._crowded_at, self._idle_at = now.at_s, -inf
            return
        self._add_ended(last, now)
        self._add_calm(last, now)
        self._add_busy(last, now)
        if now.token_gaps > last.token_gaps:
            self.inter_token_s = (now.gap_seconds - last.gap_seconds) / (now.token_gaps - last.token_gaps)
            self._gaps.append(self.inter_token_s)
        self._estimate()

    def _add_ended(self, last: EngineCounters, now: EngineCounters) -> None:
        tokens = now.ended_prefill_tokens - last.ended_prefill_tokens
        seconds = now.ended_prefill_seconds - last.ended_prefill_seconds
        ended = now.ended - last.ended
        ended_seconds = now.ended_seconds - last.ended_seconds
        # A step gives each request one token, the first or one after a gap.
        given = now.first_tokens - last.first_tokens + now.token_gaps - last.token_gaps
        if given > now.steps - last.steps + 0.5:
            self._crowded_at = now.at_s
        if ended > 0 and tokens > 0 and seconds > 0:
            self._shown.append(tokens / seconds)
            # One after the other they took no longer than since the ones before them.
            is_in_turn = ended_seconds <= now.at_s - self._ended_after
            began_at = max(self._idle_at, last.at_s - ended_seconds)
            if now.first_tokens > 0 and is_in_turn and began_at >= self._crowded_at:
                self._prefills.append(_RateWindow(seconds, ended, tokens))
        in_prefill, computed = now.prefill_seconds - last.prefill_seconds, now.computed_tokens - last.computed_tokens
        if in_prefill > 0 and computed >= _MIN_TOKENS:
            self._device.append(computed / in_prefill)
        if ended > 0:
            self._ended_after = last.at_s
            output = now.ended_output_tokens - last.ended_output_tokens
            self._ended.append((ended, output, ended_seconds))

    def _add_calm(self, last: EngineCounters, now: EngineCounters) -> None:
        """Seconds without any prefill: no prompt was counted in them, nor in the readings after, which would show a
        prefill that had begun in them."""
        if now.computed_tokens > last.computed_tokens:
            self._pending_calm.clear()
            return
        steps = now.steps - last.steps
        is_busy = steps >= 1 and last.running > 0 and now.running > 0
        self._pending_calm.append((now.at_s - last.at_s) / steps if is_busy else None)
        if len(self._pending_calm) > _CALM_AFTER:
            step_s = self._pending_calm.popleft()
            if step_s is not None:
                self._calm.append(step_s)

    def _add_busy(self, last: EngineCounters, now: EngineCounters) -> None:
        if last.running == 0 or now.running == 0:
            self._opened, self._busy_readings = None, 0
            return
        self._busy_readings += 1
        if self._busy_readings < _BUSY_AFTER:
            return
        opened = self._opened = self._opened or now
        if now.at_s - opened.at_s >= _BUSY_WINDOW_S:
            window = _RateWindow(
                now.at_s - opened.at_s,
                now.steps - opened.steps,
                now.computed_tokens - opened.computed_tokens,
                now.first_tokens - opened.first_tokens,
            )
            if window.steps > 0:
                self._busy.append(window)
            self._opened = now

    def _estimate(self) -> None:
        windows = self._busy if _has_prompts(self._busy) else ()
        fit = _fit(windows)
        if fit is not None:
            self._fitted_token_s = fit.token_s
        # A window may have rested between its readings, which only adds to its time: the lower end is the truth.
        token_s = _quantile(self._calm, 0.25) if len(self._calm) >= _MIN_CALM else 0.0
        is_calm = token_s > 0 and (self._fitted_token_s == 0 or token_s < _MAX_CALM_RATIO * self._fitted_token_s)
        if not is_calm:
            token_s = self._fitted_token_s
        busy = _rate(windows, token_s) if is_calm and len(windows) >= _MIN_WINDOWS else 0.0
        if fit is not None and busy == 0.0:
            busy = fit.prefill_tokens_per_s
        # Never calm, and too little or too even for a fit: the fastest tokens seen, whatever ran beside them.
        token_s = token_s or _quantile(self._gaps, 0.1)
        self.decode_tokens_per_s = _ratio(1.0, token_s)
        if _is_mostly_prefill(windows, token_s or _UNKNOWN_TOKEN_S):
            busy = max(busy, _rate(windows, 0.0))
        self.prefill_tokens_per_s = self._prefill_rate(busy, token_s)

    def _prefill_rate(self, busy: float, token_s: float) -> float:
        """Each kind of evidence can only read low, but for its noise: the highest counts."""
        alone = max(_alone_rate(self._prefills, token_s), _fitted_rate(self._prefills, token_s))
        told = max(busy, alone, _quantile(self._device, 0.9))
        # Requests that tell nothing do not undo what earlier ones told.
        self._told = told = told or self._told
        shown = max(self._shown, default=0.0)
        return max(told, shown) if told or shown > USUAL_PREFILL_TOKENS_PER_S else 0.0


@dataclass(frozen=True, slots=True)
class _RateFit:
    prefill_tokens_per_s: float
    token_s: float
    error: float
    """Standard error of the prefill rate, as a share of it."""


def _alone_rate(prefills: Iterable[_RateWindow], token_s: float) -> float:
    """The upper end of what those prefills say that say something, by their tokens; 0.0 where none does.

    token_s  one token's time; 0.0: not known
    """
    told = []
    for prefill in prefills:
        each_s, cost_s = prefill.seconds / prefill.steps, token_s or _UNKNOWN_TOKEN_S
        if each_s < _MIN_PREFILL_S:
            continue
        if token_s and each_s <= _MAX_TOKEN_TIMES * token_s:
            told.append((prefill.tokens / prefill.seconds, prefill.tokens))
        elif each_s >= _MIN_TOKEN_TIMES * cost_s and prefill.tokens >= _MIN_TOKENS * prefill.steps:
            seconds = prefill.seconds - _COST_SHARE * token_s * prefill.steps
            told.append((prefill.tokens / seconds, prefill.tokens))
    total = sum(tokens for _, tokens in told)
    if total < _MIN_TOLD_TOKENS:
        return 0.0
    left = 0.1 * total
    for rate, tokens in sorted(told, reverse=True):
        left -= tokens
        if left <= 0:
            return rate
    return 0.0


def _fitted_rate(prefills: Iterable[_RateWindow], token_s: float) -> float:
    """From prefills of different lengths, with what each costs besides; 0.0 where they do not tell both."""
    kept = [prefill for prefill in prefills if prefill.seconds >= _MIN_PREFILL_S * prefill.steps]
    fit = _least_squares(kept) if sum(prefill.tokens for prefill in kept) >= _MIN_TOLD_TOKENS else None
    if fit is None or fit.error > _MAX_ERROR or not token_s or fit.token_s > _MIN_TOKEN_TIMES * token_s:
        return 0.0
    return fit.prefill_tokens_per_s


def _has_prompts(windows: Iterable[_RateWindow]) -> bool:
    """Whether enough prompts ended in each, on average, for their tokens to be those that were computed in it."""
    prompts = [window.prompts for window in windows]
    return sum(prompts) >= _MIN_WINDOW_PROMPTS * len(prompts)


def _is_mostly_prefill(windows: Sequence[_RateWindow], token_s: float) -> bool:
    """Whether these seconds are prefill even if somebody decoded in each of their steps."""
    seconds, steps = sum(w.seconds for w in windows), sum(w.steps for w in windows)
    return seconds > 0 and seconds - token_s * steps >= _MIN_CERTAIN_SHARE * seconds


def _fit(windows: Iterable[_RateWindow]) -> _RateFit | None:
    """Both unknowns from busy windows, once more without those that had rested; None where they do not tell."""
    kept = list(windows)
    first = _least_squares(kept)
    if first is None:
        return None
    kept = [window for window in kept if _work_s(window, first) >= _MIN_WORK_SHARE * window.seconds]
    fit = _least_squares(kept)
    return fit if fit is not None and fit.error <= _MAX_ERROR else None


def _work_s(window: _RateWindow, fit: _RateFit) -> float:
    return window.steps * fit.token_s + window.tokens / fit.prefill_tokens_per_s


def _least_squares(windows: Sequence[_RateWindow]) -> _RateFit | None:
    """tokens = rate * seconds - (rate * token_s) * steps, through the origin."""
    if len(windows) < _MIN_WINDOWS:
        return None
    seconds_2 = sum(w.seconds * w.seconds for w in windows)
    steps_2 = sum(w.steps * w.steps for w in windows)
    mixed = sum(w.seconds * w.steps for w in windows)
    by_seconds = sum(w.seconds * w.tokens for w in windows)
    by_steps = sum(w.steps * w.tokens for w in windows)
    determinant = seconds_2 * steps_2 - mixed * mixed
    if determinant <= 1e-9 * seconds_2 * steps_2:
        return None  # every window alike: one equation for two unknowns
    rate = (by_seconds * steps_2 - by_steps * mixed) / determinant
    lost = (by_seconds * mixed - by_steps * seconds_2) / determinant
    # A step that costs nothing besides comes out as a little more or less than nothing.
    if rate <= 0 or lost * steps_2 < -_ROUNDING * by_steps:
        return None
    lost = max(0.0, lost)
    residual = sum((w.tokens - rate * w.seconds + lost * w.steps) ** 2 for w in windows) / (len(windows) - 2)
    return _RateFit(rate, lost / rate, sqrt(residual * steps_2 / determinant) / rate)


def _rate(windows: Sequence[_RateWindow], token_s: float) -> float:
    """Tokens by the seconds that their steps leave for prefill; 0.0 where that is too little to divide by.

    A few long prompts, counted in the window in which they end, scatter too much: then 0.0 as well.
    """
    kept = [(w.tokens, w.seconds - token_s * w.steps) for w in windows]
    tokens, left = sum(part for part, _ in kept), sum(part for _, part in kept)
    if tokens == 0 or left < _MIN_PREFILL_SHARE * sum(w.seconds for w in windows):
        return 0.0
    rate = tokens / left
    scatter = sqrt(sum((part - rate * part_s) ** 2 for part, part_s in kept)) / tokens
    return rate if token_s == 0.0 or scatter <= _MAX_SCATTER else 0.0


def _quantile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _fell(last: EngineCounters, now: EngineCounters) -> bool:
    return any(getattr(now, name) < getattr(last, name) for name in COUNTERS)
