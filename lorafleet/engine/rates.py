"""Learns an engine's prefill and decode speed from its own counters.

A step takes `prefilled tokens / prefill rate`, and one token's time more if requests decode in it. A real engine takes
about one token's time for any step, because it reads the weights in each. So a short prefill, or one beside decodes,
shows little of the prefill rate. Without enough evidence the rate is 0.0, and the caller's own guess stays. There are
five kinds of evidence:

- alone: prefill tokens over prefill seconds of ended requests that ran alone: no step produced tokens for two. With
  other requests beside, the seconds would include their prefills.
- device: an engine may count the seconds of its prefill steps itself.
- calm: seconds per step while no prompt was computed, which is one token's time in the usual batch. `decode_step.py`
  splits it into what the step, its sequences and their context take.
- busy: over seconds without idle time, tokens computed = rate x (seconds - steps x one token's time). A least-squares
  fit gives both unknowns, or, if calm seconds gave one token's time, a division. Tokens are the dependent variable
  because they are inexact: a prompt counts when its prefill ends.
- shown: tokens over seconds of any prefill, a lower bound of the rate.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, sqrt

from lorafleet.engine.decode_step import CalmSecond, DecodeStep, fit_decode_step
from lorafleet.engine.metrics_page import EngineMetrics

# Long enough that steps and prefills cut at a window's ends are a few percent of it.
_BUSY_WINDOW_S = 4.0
# An engine that has just become busy is usually in a first prefill. A window that opens there would count all of that
# prefill's tokens and half of its time.
_BUSY_AFTER = 2
_KEPT = 75  # busy windows: five minutes
_KEPT_PREFILLS = 60
_KEPT_CALM = 40
_KEPT_ENDED = 60
_KEPT_GAPS = 60
_MIN_WINDOWS = 8
_MIN_CALM = 3
# Readings after a calm second that must show no prefill either. A longer prefill still makes a second look calm and
# slow, so calm seconds slower than a fit by this ratio are ignored.
_CALM_AFTER = 2
_MAX_CALM_RATIO = 1.25
# Fits with a larger standard error are ignored.
_MAX_ERROR = 0.12
_MAX_SCATTER = 0.05
# With a smaller share of prefill in the busy time, the subtraction would leave noise.
_MIN_PREFILL_SHARE = 0.05
# A window with less work than this share of its seconds, by the fit, had idle time.
_MIN_WORK_SHARE = 0.7
# With fewer prompt tokens a step takes the time of reading the weights, whatever the prefill rate: a GPU computes some
# hundred tokens in that time, a CPU some tens.
_MIN_TOKENS = 64.0
# A prefill shows its rate if it takes more than this many token times, or clearly less than one: then the engine has no
# such cost, or no request decoded beside. In between that cost may dominate.
_MIN_TOKEN_TIMES = 1.5
_MAX_TOKEN_TIMES = 0.8
# Share of one token's time that is subtracted from a long prefill, which may include all or none of it.
_COST_SHARE = 1 / 3
# Shorter prefills are dominated by the scheduler's time and the clock's resolution.
_MIN_PREFILL_S = 0.006
# Least tokens in total: the first prefills of an engine are far slower than later ones.
_MIN_TOLD_TOKENS = 512.0
# One token's time before any was measured: slower than most engines, so that less counts as evidence.
_UNKNOWN_TOKEN_S = 0.05
_ROUNDING = 1e-6
# Share of busy seconds that must certainly be prefill before tokens over seconds are a rate.
_MIN_CERTAIN_SHARE = 0.5
# Least prompts in a busy window: a prompt counts where it ends, though an earlier window may have computed it.
_MIN_WINDOW_PROMPTS = 3
# `Costs.prefill_tokens_per_s` of the router's core, which may not import this module; a test holds the two equal.
USUAL_PREFILL_TOKENS_PER_S = 10_000.0


# The totals among an engine's metrics, from which the rates are learned.
COUNTERS = (
    "computed_tokens",
    "steps",
    "ended",
    "ended_prefill_tokens",
    "ended_prefill_seconds",
    "ended_output_tokens",
    "ended_seconds",
    "token_gaps",
    "gap_seconds",
    "first_tokens",
    "prefill_seconds",
)


@dataclass(frozen=True, slots=True)
class _RateWindow:
    """Prompt tokens computed in a time and number of steps; for ended prefills one step each."""

    seconds: float
    steps: float
    tokens: float
    prompts: float = 1.0


class EngineRates:
    """Rates learned from counters read about once a second. Every rate is 0.0 until measured."""

    def __init__(self) -> None:
        self.prefill_tokens_per_s = 0.0
        """New prompt tokens of a prefill that runs alone; 0.0 also if all prefills were too short to measure."""
        self.decode_step = DecodeStep()
        """A step without prefill, by its batch."""
        self.inter_token_s = 0.0
        """Time between two tokens of a request in the batches of the last seconds."""
        self._last: EngineMetrics | None = None
        self._window_start: EngineMetrics | None = None
        self._busy_readings = 0
        self._prefills: deque[_RateWindow] = deque(maxlen=_KEPT_PREFILLS)
        self._lower_bounds: deque[float] = deque(maxlen=_KEPT_PREFILLS)
        self._device: deque[float] = deque(maxlen=_KEPT_PREFILLS)
        self._shared_at = self._ended_after = self._idle_at = -inf
        self._calm: deque[CalmSecond] = deque(maxlen=_KEPT_CALM)
        self._pending_calm: deque[CalmSecond | None] = deque()
        self._has_new_calm = False
        self._last_evidence = self._fitted_token_s = 0.0
        self._gaps: deque[float] = deque(maxlen=_KEPT_GAPS)
        self._busy: deque[_RateWindow] = deque(maxlen=_KEPT)
        self._ended: deque[tuple[float, float, float]] = deque(maxlen=_KEPT_ENDED)

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens per second of one request alone with little context, without a prefill beside it."""
        return _ratio_or_zero(1.0, self.decode_step.seconds(1, 0))

    @property
    def mean_output_tokens(self) -> float:
        """Mean output tokens of requests that ended lately."""
        return _ratio_or_zero(sum(tokens for _, tokens, _ in self._ended), sum(ended for ended, _, _ in self._ended))

    @property
    def mean_request_s(self) -> float:
        """Mean seconds from scheduled to the last token, of requests that ended lately."""
        return _ratio_or_zero(sum(seconds for _, _, seconds in self._ended), sum(ended for ended, _, _ in self._ended))

    def add(self, now: EngineMetrics) -> None:
        """Add the next reading and update all rates. The first, an older one or lower totals only begin a new window.

        Lower totals mean that the engine restarted; rates stay.
        """
        last, self._last = self._last, now
        if last is not None and last.running == 0:
            self._idle_at = last.at_s
        if last is None or now.at_s <= last.at_s or _has_decreased(last, now):
            self._window_start, self._busy_readings = None, 0
            self._pending_calm.clear()
            self._shared_at, self._idle_at = now.at_s, -inf
            return
        self._add_ended(last, now)
        self._add_calm(last, now)
        self._add_busy(last, now)
        if now.token_gaps > last.token_gaps:
            self.inter_token_s = (now.gap_seconds - last.gap_seconds) / (now.token_gaps - last.token_gaps)
            self._gaps.append(self.inter_token_s)
        self._update_rates()

    def _add_ended(self, last: EngineMetrics, now: EngineMetrics) -> None:
        """Add what ended between two readings: requests, prefills that ran alone, seconds of prefill on the device.

        Notes when requests last shared the engine. Nothing is added for a kind of which none ended.
        """
        tokens = now.ended_prefill_tokens - last.ended_prefill_tokens
        seconds = now.ended_prefill_seconds - last.ended_prefill_seconds
        ended = now.ended - last.ended
        ended_seconds = now.ended_seconds - last.ended_seconds
        # A step produces one token for each request: its first, or one after a gap.
        tokens_produced = now.first_tokens - last.first_tokens + now.token_gaps - last.token_gaps
        if tokens_produced > now.steps - last.steps + 0.5:
            self._shared_at = now.at_s
        if ended > 0 and tokens > 0 and seconds > 0:
            self._lower_bounds.append(tokens / seconds)
            # Run one after the other, they fit into the time since the requests before them.
            is_in_turn = ended_seconds <= now.at_s - self._ended_after
            began_at = max(self._idle_at, last.at_s - ended_seconds)
            if now.first_tokens > 0 and is_in_turn and began_at >= self._shared_at:
                self._prefills.append(_RateWindow(seconds, ended, tokens))
        in_prefill, computed = now.prefill_seconds - last.prefill_seconds, now.computed_tokens - last.computed_tokens
        if in_prefill > 0 and computed >= _MIN_TOKENS:
            self._device.append(computed / in_prefill)
        if ended > 0:
            self._ended_after = last.at_s
            output = now.ended_output_tokens - last.ended_output_tokens
            self._ended.append((ended, output, ended_seconds))

    def _add_calm(self, last: EngineMetrics, now: EngineMetrics) -> None:
        """Keep a second's mean step as calm once two more readings show no prefill; a prefill discards it.

        A prompt counts when its prefill ends, so later readings would show a prefill that began in that second. A
        longer one shows as a sequence that runs and gets no tokens.
        """
        if now.computed_tokens > last.computed_tokens:
            self._pending_calm.clear()
            return
        self._pending_calm.append(_calm_second(last, now))
        if len(self._pending_calm) > _CALM_AFTER:
            second = self._pending_calm.popleft()
            if second is not None:
                self._calm.append(second)
                self._has_new_calm = True

    def _add_busy(self, last: EngineMetrics, now: EngineMetrics) -> None:
        """Extend the current busy window, and close it once it is long enough.

        An idle reading drops it. The first busy readings belong to no window.
        """
        if last.running == 0 or now.running == 0:
            self._window_start, self._busy_readings = None, 0
            return
        self._busy_readings += 1
        if self._busy_readings < _BUSY_AFTER:
            return
        start = self._window_start = self._window_start or now
        if now.at_s - start.at_s >= _BUSY_WINDOW_S:
            window = _RateWindow(
                now.at_s - start.at_s,
                now.steps - start.steps,
                now.computed_tokens - start.computed_tokens,
                now.first_tokens - start.first_tokens,
            )
            if window.steps > 0:
                self._busy.append(window)
            self._window_start = now

    def _update_rates(self) -> None:
        """Set the prefill and the decode rate from all evidence kept."""
        windows = self._busy if _has_prompts(self._busy) else ()
        fit = _fit_rates(windows)
        if fit is not None:
            self._fitted_token_s = fit.token_s
        # Idle time between readings only adds to a window's time, so the lower quantile is right.
        token_s = _quantile_or_zero([s.step_s for s in self._calm], 0.25) if len(self._calm) >= _MIN_CALM else 0.0
        is_calm = token_s > 0 and (self._fitted_token_s == 0 or token_s < _MAX_CALM_RATIO * self._fitted_token_s)
        if not is_calm:
            token_s = self._fitted_token_s
        busy = _busy_rate(windows, token_s) if is_calm and len(windows) >= _MIN_WINDOWS else 0.0
        if fit is not None and busy == 0.0:
            busy = fit.prefill_tokens_per_s
        # Without calm seconds and without a fit: the fastest tokens measured.
        token_s = token_s or _quantile_or_zero(self._gaps, 0.1)
        if not is_calm:
            self.decode_step = DecodeStep.usual(token_s)
        elif self._has_new_calm:
            self.decode_step, self._has_new_calm = fit_decode_step(self._calm), False
        if _is_mostly_prefill(windows, token_s or _UNKNOWN_TOKEN_S):
            busy = max(busy, _busy_rate(windows, 0.0))
        self.prefill_tokens_per_s = self._prefill_rate(busy, token_s)

    def _prefill_rate(self, busy: float, token_s: float) -> float:
        """The highest of all evidence, since each kind can only underestimate, apart from noise.

        Keeps the evidence for later calls without any.

        busy     rate by the busy windows; 0.0 without evidence
        token_s  one token's time; 0.0 if unknown
        """
        alone = max(_alone_rate(self._prefills, token_s), _fitted_rate(self._prefills, token_s))
        evidence = max(busy, alone, _quantile_or_zero(self._device, 0.9))
        # Requests without evidence do not undo earlier evidence.
        self._last_evidence = evidence = evidence or self._last_evidence
        lower_bound = max(self._lower_bounds, default=0.0)
        return max(evidence, lower_bound) if evidence or lower_bound > USUAL_PREFILL_TOKENS_PER_S else 0.0


@dataclass(frozen=True, slots=True)
class _RateFit:
    """A fitted prefill rate and one token's time."""

    prefill_tokens_per_s: float
    token_s: float
    error: float
    """Standard error of the prefill rate, as a share of it."""


def _calm_second(last: EngineMetrics, now: EngineMetrics) -> CalmSecond | None:
    """The mean step between two readings without a prompt computed; None where the engine may have prefilled."""
    steps, gaps = now.steps - last.steps, now.token_gaps - last.token_gaps
    gap_seconds = now.gap_seconds - last.gap_seconds
    if steps < 1 or last.running == 0 or now.running == 0:
        return None
    in_use = (last.tokens_in_use + now.tokens_in_use) / 2
    if gaps < 1 or gap_seconds <= 0:  # it does not count them
        return CalmSecond((now.at_s - last.at_s) / steps, now.running, in_use)
    sequences = gaps / steps
    return CalmSecond(gap_seconds / gaps, sequences, in_use) if now.running <= sequences + 0.5 else None


def _alone_rate(prefills: Iterable[_RateWindow], token_s: float) -> float:
    """Rate of prefills that ran alone: of the fastest tenth of their tokens, the slowest; 0.0 without evidence.

    token_s  one token's time; 0.0 if unknown
    """
    evidence = []
    for prefill in prefills:
        each_s, cost_s = prefill.seconds / prefill.steps, token_s or _UNKNOWN_TOKEN_S
        if each_s < _MIN_PREFILL_S:
            continue
        if token_s and each_s <= _MAX_TOKEN_TIMES * token_s:
            evidence.append((prefill.tokens / prefill.seconds, prefill.tokens))
        elif each_s >= _MIN_TOKEN_TIMES * cost_s and prefill.tokens >= _MIN_TOKENS * prefill.steps:
            seconds = prefill.seconds - _COST_SHARE * token_s * prefill.steps
            evidence.append((prefill.tokens / seconds, prefill.tokens))
    total = sum(tokens for _, tokens in evidence)
    if total < _MIN_TOLD_TOKENS:
        return 0.0
    left = 0.1 * total
    for rate, tokens in sorted(evidence, reverse=True):
        left -= tokens
        if left <= 0:
            return rate
    return 0.0


def _fitted_rate(prefills: Iterable[_RateWindow], token_s: float) -> float:
    """The rate fitted to prefills of different lengths, with a cost for each.

    0.0 if the fit is poor, the tokens are few or a token's time is unknown.
    """
    used = [prefill for prefill in prefills if prefill.seconds >= _MIN_PREFILL_S * prefill.steps]
    fit = _least_squares(used) if sum(prefill.tokens for prefill in used) >= _MIN_TOLD_TOKENS else None
    if fit is None or fit.error > _MAX_ERROR or not token_s or fit.token_s > _MIN_TOKEN_TIMES * token_s:
        return 0.0
    return fit.prefill_tokens_per_s


def _has_prompts(windows: Iterable[_RateWindow]) -> bool:
    """Whether enough prompts ended in each window, on average, for its tokens to be those computed in it."""
    prompts = [window.prompts for window in windows]
    return sum(prompts) >= _MIN_WINDOW_PROMPTS * len(prompts)


def _is_mostly_prefill(windows: Sequence[_RateWindow], token_s: float) -> bool:
    """Whether most of these seconds are prefill, even if every step also decoded."""
    seconds, steps = sum(w.seconds for w in windows), sum(w.steps for w in windows)
    return seconds > 0 and seconds - token_s * steps >= _MIN_CERTAIN_SHARE * seconds


def _fit_rates(windows: Iterable[_RateWindow]) -> _RateFit | None:
    """A fit of prefill rate and token time to busy windows, repeated without windows with idle time; None if poor."""
    used = list(windows)
    first = _least_squares(used)
    if first is None:
        return None
    used = [window for window in used if _work_s(window, first) >= _MIN_WORK_SHARE * window.seconds]
    fit = _least_squares(used)
    return fit if fit is not None and fit.error <= _MAX_ERROR else None


def _work_s(window: _RateWindow, fit: _RateFit) -> float:
    """Seconds of work in a window by a fit."""
    return window.steps * fit.token_s + window.tokens / fit.prefill_tokens_per_s


def _least_squares(windows: Sequence[_RateWindow]) -> _RateFit | None:
    """Fit tokens = rate * seconds - (rate * token_s) * steps, through the origin; None if the fit fails."""
    if len(windows) < _MIN_WINDOWS:
        return None
    seconds_2 = sum(w.seconds * w.seconds for w in windows)
    steps_2 = sum(w.steps * w.steps for w in windows)
    mixed = sum(w.seconds * w.steps for w in windows)
    by_seconds = sum(w.seconds * w.tokens for w in windows)
    by_steps = sum(w.steps * w.tokens for w in windows)
    determinant = seconds_2 * steps_2 - mixed * mixed
    if determinant <= 1e-9 * seconds_2 * steps_2:
        return None  # all windows alike: one equation for two unknowns
    rate = (by_seconds * steps_2 - by_steps * mixed) / determinant
    lost = (by_seconds * mixed - by_steps * seconds_2) / determinant
    # A step without further cost comes out as slightly more or less than 0.
    if rate <= 0 or lost * steps_2 < -_ROUNDING * by_steps:
        return None
    lost = max(0.0, lost)
    residual = sum((w.tokens - rate * w.seconds + lost * w.steps) ** 2 for w in windows) / (len(windows) - 2)
    return _RateFit(rate, lost / rate, sqrt(residual * steps_2 / determinant) / rate)


def _busy_rate(windows: Sequence[_RateWindow], token_s: float) -> float:
    """Tokens over the seconds that decoding leaves for prefill; 0.0 if these are too few or scatter too much.

    A few long prompts scatter, since each counts in the window in which it ends.
    """
    used = [(w.tokens, w.seconds - token_s * w.steps) for w in windows]
    tokens, left = sum(part for part, _ in used), sum(part for _, part in used)
    if tokens == 0 or left < _MIN_PREFILL_SHARE * sum(w.seconds for w in windows):
        return 0.0
    rate = tokens / left
    scatter = sqrt(sum((part - rate * part_s) ** 2 for part, part_s in used)) / tokens
    return rate if token_s == 0.0 or scatter <= _MAX_SCATTER else 0.0


def _quantile_or_zero(values: Iterable[float], share: float) -> float:
    """The value at this share of the sorted values; 0.0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _ratio_or_zero(part: float, whole: float) -> float:
    """`part / whole`; 0.0 unless `whole` is positive."""
    return part / whole if whole > 0 else 0.0


def _has_decreased(last: EngineMetrics, now: EngineMetrics) -> bool:
    """Whether a total has decreased, as after a restart of the engine."""
    return any(getattr(now, name) < getattr(last, name) for name in COUNTERS)
