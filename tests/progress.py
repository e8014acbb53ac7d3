"""How far a run of tests is and how many minutes are left, once a minute, by what each file took in the last run."""

import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

_EVERY_S = 60.0
_KEY = "lorafleet/seconds-of-files"


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


class Progress:
    """Registered in the process that a person started; workers of pytest-xdist report to it."""

    def __init__(self, config: pytest.Config, *, workers: int) -> None:
        self._config, self._workers = config, workers
        self._cache: pytest.Cache | None = getattr(config, "cache", None)  # none with -p no:cacheprovider
        self._known: dict[str, float] = self._cache.get(_KEY, {}) if self._cache else {}
        self._seconds: Counter[str] = Counter()
        self._done: Counter[str] = Counter()
        self._all: Counter[str] = Counter()
        self._began = self._said_at = time.monotonic()

    def left_s(self) -> float | None:
        """Seconds until the end, if every worker is busy until then; None where no file's time is known."""
        rates = {file: self._known[file] / count for file, count in self._all.items() if file in self._known}
        if not rates:
            return None
        mean = sum(rates.values()) / len(rates)
        left = {file: count - self._done[file] for file, count in self._all.items()}
        return sum(count * rates.get(file, mean) for file, count in left.items()) / self._workers

    def _collected(self, nodeids: Iterable[str]) -> None:
        self._all = Counter(map(file_of, nodeids))
        left_s = self.left_s()
        if left_s is not None and left_s > _EVERY_S:
            self._say(f"{self._all.total():,} tests, about {left_s / 60:.0f} minutes by the last run here")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self._collected(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        if not self._all:
            self._collected(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = file_of(report.nodeid)
        self._seconds[file] += report.duration
        self._done[file] += report.when == "teardown"
        now = time.monotonic()
        if now - self._said_at < _EVERY_S:
            return
        self._said_at = now
        left_s = self.left_s()
        left = "" if left_s is None else f", about {max(1, round(left_s / 60))} left"
        minutes = (now - self._began) / 60
        self._say(f"{self._done.total():,} of {self._all.total():,} tests in {minutes:.0f} minutes{left}")

    def pytest_sessionfinish(self) -> None:
        # A file counts as known when all of its tests ran: one test says little about the others.
        whole = {file: self._seconds[file] for file, count in self._all.items() if self._done[file] == count}
        if self._cache:
            self._cache.set(_KEY, self._known | whole)

    def _say(self, line: str) -> None:
        reporter: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.ensure_newline()
            reporter.write_line(line)
