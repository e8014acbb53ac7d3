"""The figures of a benchmark: the table that `vllm bench serve` prints, with hit shares and errors by code."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import floor
from statistics import fmean

_WIDTH = 50
_MOST_MESSAGE = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutcome:
    """How one request ended.

    began_s, ended_s  seconds from the start of the run
    chunk_s           when each piece of the answer came; the first is the first token
    error             "" for a success, else the status and code, or the kind of a broken connection
    error_message     of an error answer
    predicted_tokens  cached tokens that the router predicted; None where it said nothing
    cached_tokens     cached tokens that the engine reported; None where it did not
    """

    model: str
    began_s: float
    ended_s: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    chunk_s: tuple[float, ...] = ()
    error: str = ""
    error_message: str = ""
    predicted_tokens: int | None = None
    cached_tokens: int | None = None

    @property
    def first_token_s(self) -> float:
        """Seconds to the first token."""
        return self.chunk_s[0] - self.began_s

    @property
    def time_per_token_s(self) -> float | None:
        """Seconds for each token after the first; None for an answer of one token."""
        if self.output_tokens <= 1:
            return None
        return (self.ended_s - self.chunk_s[0]) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between the pieces of the answer."""
        return [after - before for before, after in zip(self.chunk_s, self.chunk_s[1:], strict=False)]


def percentile(values: Iterable[float], share: float) -> float | None:
    """The value below which a share of them lies, between two neighbours as numpy does it; None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    low = floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def most_at_a_time(spans: Iterable[tuple[float, float]]) -> int:
    """The most spans that overlap; one that ends when another begins does not overlap it."""
    steps = sorted(step for began, ended in spans for step in ((began, 1), (ended, -1)))
    most = running = 0
    for _, step in steps:
        running += step
        most = max(most, running)
    return most


def figures(outcomes: Sequence[RequestOutcome], duration_s: float) -> dict[str, object]:
    """All figures of a run by name; None where nothing was measured."""
    good = [outcome for outcome in outcomes if not outcome.error]
    prompt = sum(outcome.prompt_tokens for outcome in good)
    output = sum(outcome.output_tokens for outcome in good)
    span_s = duration_s or 1e-9

    def summary_ms(values: Sequence[float]) -> dict[str, float | None]:
        """Mean, median and p99 in milliseconds."""
        if not values:
            return dict.fromkeys(("mean", "median", "p99"))
        found = {"mean": fmean(values), "median": percentile(values, 0.5), "p99": percentile(values, 0.99)}
        return {name: None if value is None else value * 1000 for name, value in found.items()}

    def hit_share(cached: Iterable[tuple[int | None, int]]) -> float | None:
        """Cached tokens / prompt tokens, of the requests where cached tokens are known."""
        known = [(tokens, of) for tokens, of in cached if tokens is not None]
        whole = sum(of for _, of in known)
        return sum(tokens for tokens, _ in known) / whole if whole else None

    return {
        "successful": len(good),
        "failed": len(outcomes) - len(good),
        "errors": dict(Counter(outcome.error for outcome in outcomes if outcome.error).most_common()),
        # Reversed, so that the first message of each error stays.
        "error_messages": {each.error: each.error_message for each in reversed(outcomes) if each.error_message},
        "duration_s": duration_s,
        "input_tokens": prompt,
        "output_tokens": output,
        "requests_per_s": len(good) / span_s,
        "output_tokens_per_s": output / span_s,
        "total_tokens_per_s": (prompt + output) / span_s,
        "peak_concurrent": most_at_a_time((outcome.began_s, outcome.ended_s) for outcome in outcomes),
        "ttft_ms": summary_ms([outcome.first_token_s for outcome in good]),
        "tpot_ms": summary_ms([each for outcome in good if (each := outcome.time_per_token_s) is not None]),
        "itl_ms": summary_ms([gap for outcome in good for gap in outcome.gaps_s]),
        "hit_share": hit_share((outcome.cached_tokens, outcome.prompt_tokens) for outcome in good),
        "hit_share_predicted": hit_share((outcome.predicted_tokens, outcome.prompt_tokens) for outcome in good),
        "models": dict(Counter(outcome.model for outcome in outcomes).most_common()),
    }


def report_lines(found: Mapping[str, object]) -> list[str]:
    """The table of a run's figures."""
    lines = [
        _section_heading(" Serving Benchmark Result ", "="),
        *_figure_rows(
            ("Successful requests:", found["successful"]),
            ("Failed requests:", found["failed"]),
            ("Benchmark duration (s):", found["duration_s"]),
            ("Total input tokens:", found["input_tokens"]),
            ("Total generated tokens:", found["output_tokens"]),
            ("Request throughput (req/s):", found["requests_per_s"]),
            ("Output token throughput (tok/s):", found["output_tokens_per_s"]),
            ("Total token throughput (tok/s):", found["total_tokens_per_s"]),
            ("Peak concurrent requests:", found["peak_concurrent"]),
        ),
    ]
    for field, short, title in (
        ("ttft_ms", "TTFT", "Time to First Token"),
        ("tpot_ms", "TPOT", "Time per Output Token (excl. 1st token)"),
        ("itl_ms", "ITL", "Inter-token Latency"),
    ):
        values = found[field]
        assert isinstance(values, dict)
        named = [(f"{name.capitalize()} {short} (ms):", values[name]) for name in ("mean", "median", "p99")]
        lines += [_section_heading(title, "-"), *_figure_rows(*named)]
    models, errors, messages = found["models"], found["errors"], found["error_messages"]
    assert isinstance(models, dict)
    assert isinstance(errors, dict)
    assert isinstance(messages, dict)
    lines += [
        _section_heading("Prefix Cache", "-"),
        *_figure_rows(
            ("Hit share, engines' (%):", _as_percent(found["hit_share"])),
            ("Hit share, predicted (%):", _as_percent(found["hit_share_predicted"])),
            ("Models asked for:", len(models)),
        ),
    ]
    if errors:
        lines += [
            _section_heading("Errors", "-"),
            *_figure_rows(*((f"{code}:", count) for code, count in errors.items())),
        ]
        lines += [f"first {code}: {_one_line_message(messages[code])}" for code in errors if code in messages]
    return [*lines, "=" * _WIDTH]


def _one_line_message(message: str) -> str:
    """A message in one line of at most 200 characters."""
    line = " ".join(message.split())
    return line if len(line) <= _MOST_MESSAGE else f"{line[: _MOST_MESSAGE - 1]}…"


def _section_heading(title: str, fill: str) -> str:
    """A title in the middle of a line."""
    return title.center(_WIDTH, fill)


def _figure_rows(*rows: tuple[str, object]) -> list[str]:
    """Names and their values; `-` where nothing was measured."""
    return [f"{name:<40} {_figure_text(value):<10}".rstrip() for name, value in rows]


def _figure_text(value: object) -> str:
    """A value with two decimals if it has any."""
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def _as_percent(share: object) -> float | None:
    """A share in per cent."""
    return share * 100 if isinstance(share, float) else None
