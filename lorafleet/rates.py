"""Prefill and decode speed of an engine, learned from its own counters.

What is measured: a step of the engine takes `tokens prefilled / prefill rate`, and one token's time more when somebody
decodes in it. Prefills overlap each other and the decodes, so a request's own times tell the truth only when it was
alone; a busy engine's totals tell it always. Three ways, each good where the others are not:

- alone: prefill tokens by prefill seconds of the requests that ended. Others beside them can only lower it, so the
  upper end of what was seen counts. Right at light load, far too low when busy.
- calm: seconds by step while no prompt was computed: one token's time.
- busy: over seconds in which the engine never rested, tokens computed = rate x (seconds - steps x one token's time).
  Its two unknowns come from a least-squares fit, or, where calm seconds have told one token's time, from a division.
  Tokens are the dependent variable because they are what is inexact: a prompt counts when its prefill ends.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from math import sqrt

# Ends of a window cut steps and prefills in two; at 4 s that is a few percent of it. Tried 1, 3 and 5 s on the sim.
_BUSY_WINDOW_S = 4.0
# An engine that has just begun is in its first prefill more often than not, and a window that opens there would count
# all of its tokens and half of its time.
_BUSY_AFTER = 2
_KEPT = 75  # busy windows: five minutes
_KEPT_ALONE = 60
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
_MIN_ALONE_TOKENS = 64.0


@dataclass(frozen=True, slots=True)
class Reading:
    """An engine's counters at one time. Totals from its start, but for `running`.

    computed_tokens  prompt tokens computed (not cached), counted when their prefill ends
    steps            engine steps that gave tokens
    ended_*          of requests that ended: how many, their prompt tokens computed, their seconds in prefill, their
                     output tokens, and their seconds from scheduled to the last token
    token_gaps, gap_seconds  gaps between two tokens of a request: how many, and their sum
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


# Totals of a Reading; a Scrape has them by the same names.
COUNTERS = tuple(f.name for f in fields(Reading) if f.name not in {"at_s", "running"})


@dataclass(frozen=True, slots=True)
class _Window:
    seconds: float
    steps: float
    tokens: float


class Rates:
    """What readings about a second apart have told. Every figure is 0.0 until measured."""

    def __init__(self) -> None:
        self.prefill_tokens_per_s = 0.0
        """New prompt tokens of a prefill that has the engine for itself."""
        self.decode_tokens_per_s = 0.0
        """Of one request, with no prefill beside it."""
        self.inter_token_s = 0.0
        """Between two tokens of a request, as the batch of the last seconds made it."""
        self._last: Reading | None = None
        self._opened: Reading | None = None
        self._busy_readings = 0
        self._alone: deque[float] = deque(maxlen=_KEPT_ALONE)
        self._calm: deque[float] = deque(maxlen=_KEPT_CALM)
        self._pending_calm: deque[float | None] = deque()
        self._fitted_token_s = 0.0
        self._gaps: deque[float] = deque(maxlen=_KEPT_GAPS)
        self._busy: deque[_Window] = deque(maxlen=_KEPT)
        self._ended: deque[tuple[float, float, float]] = deque(maxlen=_KEPT_ENDED)

    @property
    def mean_output_tokens(self) -> float:
        """Output tokens of a request, over those that ended lately."""
        return _ratio(sum(tokens for _, tokens, _ in self._ended), sum(ended for ended, _, _ in self._ended))

    @property
    def mean_request_s(self) -> float:
        """Seconds of a request from scheduled to its last token, over those that ended lately; no queueing."""
        return _ratio(sum(seconds for _, _, seconds in self._ended), sum(ended for ended, _, _ in self._ended))

    def add(self, now: Reading) -> None:
        """Learn from the next reading. Totals that fell belong to a restarted engine: what was learned stays."""
        last, self._last = self._last, now
        if last is None or now.at_s <= last.at_s or _fell(last, now):
            self._opened, self._busy_readings = None, 0
            self._pending_calm.clear()
            return
        self._add_ended(last, now)
        self._add_calm(last, now)
        self._add_busy(last, now)
        if now.token_gaps > last.token_gaps:
            self.inter_token_s = (now.gap_seconds - last.gap_seconds) / (now.token_gaps - last.token_gaps)
            self._gaps.append(self.inter_token_s)
        self._estimate()

    def _add_ended(self, last: Reading, now: Reading) -> None:
        tokens = now.ended_prefill_tokens - last.ended_prefill_tokens
        seconds = now.ended_prefill_seconds - last.ended_prefill_seconds
        if tokens >= _MIN_ALONE_TOKENS and seconds > 0:
            self._alone.append(tokens / seconds)
        if now.ended > last.ended:
            output = now.ended_output_tokens - last.ended_output_tokens
            self._ended.append((now.ended - last.ended, output, now.ended_seconds - last.ended_seconds))

    def _add_calm(self, last: Reading, now: Reading) -> None:
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

    def _add_busy(self, last: Reading, now: Reading) -> None:
        if last.running == 0 or now.running == 0:
            self._opened, self._busy_readings = None, 0
            return
        self._busy_readings += 1
        if self._busy_readings < _BUSY_AFTER:
            return
        opened = self._opened = self._opened or now
        if now.at_s - opened.at_s >= _BUSY_WINDOW_S:
            window = _Window(
                now.at_s - opened.at_s, now.steps - opened.steps, now.computed_tokens - opened.computed_tokens
            )
            if window.steps > 0:
                self._busy.append(window)
            self._opened = now

    def _estimate(self) -> None:
        fit = _fit(self._busy)
        if fit is not None:
            self._fitted_token_s = fit.token_s
        # A window may have rested between its readings, which only adds to its time: the lower end is the truth.
        token_s = _quantile(self._calm, 0.25) if len(self._calm) >= _MIN_CALM else 0.0
        is_calm = token_s > 0 and (self._fitted_token_s == 0 or token_s < _MAX_CALM_RATIO * self._fitted_token_s)
        if not is_calm:
            token_s = self._fitted_token_s
        # Each of these can only read low, but for its noise.
        busy = _rate(self._busy, token_s) if is_calm and len(self._busy) >= _MIN_WINDOWS else 0.0
        if fit is not None and busy == 0.0:
            busy = fit.prefill_tokens_per_s
        self.prefill_tokens_per_s = max(_quantile(self._alone, 0.9), _rate(self._busy, 0.0), busy)
        # Never calm, and too little or too even for a fit: the fastest tokens seen, whatever ran beside them.
        token_s = token_s or _quantile(self._gaps, 0.1)
        self.decode_tokens_per_s = _ratio(1.0, token_s)


@dataclass(frozen=True, slots=True)
class _Fit:
    prefill_tokens_per_s: float
    token_s: float
    error: float
    """Standard error of the prefill rate, as a share of it."""


def _fit(windows: Iterable[_Window]) -> _Fit | None:
    """Both unknowns from busy windows, once more without those that had rested; None where they do not tell."""
    kept = list(windows)
    first = _least_squares(kept)
    if first is None:
        return None
    kept = [window for window in kept if _work_s(window, first) >= _MIN_WORK_SHARE * window.seconds]
    fit = _least_squares(kept)
    return fit if fit is not None and fit.error <= _MAX_ERROR else None


def _work_s(window: _Window, fit: _Fit) -> float:
    return window.steps * fit.token_s + window.tokens / fit.prefill_tokens_per_s


def _least_squares(windows: Sequence[_Window]) -> _Fit | None:
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
    if rate <= 0 or lost <= 0:
        return None
    residual = sum((w.tokens - rate * w.seconds + lost * w.steps) ** 2 for w in windows) / (len(windows) - 2)
    return _Fit(rate, lost / rate, sqrt(residual * steps_2 / determinant) / rate)


def _rate(windows: Sequence[_Window], token_s: float) -> float:
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


def _fell(last: Reading, now: Reading) -> bool:
    return any(getattr(now, name) < getattr(last, name) for name in COUNTERS)
