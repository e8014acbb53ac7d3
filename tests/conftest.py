"""What holds for every test: its timeout, its examples, the group it runs in, and how to run a failure again."""

import functools
import gc
import os
import random
import re
import shlex
import signal
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import certifi
import pytest
from hypothesis import settings

from tests.logs import log_plainly
from tests.patience import SLOWNESS, patience
from tests.progress import Progress
from tests.properties import THOROUGH

# Groups begin in this order: the longest first, so that no worker is left alone with one of them at the end.
_LONGEST_FIRST = (
    "tests/e2e/", "tests/founding/", "tests/simulation/", "tests/workers/",
    "tests/kube/", "tests/contract/", "tests/helm/", "tests/router/faults/",
    "tests/router/test_c", "tests/router/test_s", "tests/router/test_b", "tests/orchestrator/test_re",
    "tests/lorafleet/cli/", "tests/lorafleet/service/", "tests/benchmarks/",
)  # fmt: skip

# How long an example takes depends on who else uses the machine, and is no property of the code.
# quick: the same examples in each run, so that no failure is chance. thorough: other examples in each run.
settings.register_profile("quick", deadline=None, derandomize=True, database=None, max_examples=25)
settings.register_profile("thorough", deadline=None, database=None, print_blob=True, max_examples=100)
settings.load_profile("thorough" if THOROUGH else "quick")


_FEW_CERTIFICATES = pytest.StashKey[Any]()


def _trust_few() -> Any:
    """Let httpx find one certificate authority where it looks for some 140; the file, which is gone when it is closed.

    No test calls a public server, and reading all of them takes 25 ms for each client that a test makes.
    """
    file = tempfile.NamedTemporaryFile("w", suffix=".pem")  # noqa: SIM115  (open for as long as the run)
    end = "-----END CERTIFICATE-----\n"
    file.write(certifi.contents().partition(end)[0] + end)
    file.flush()
    certifi.where = lambda: file.name
    return file


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let tests take longer on a slow machine, and choose the seed of a thorough run, so that it can be printed."""
    config.stash[_FEW_CERTIFICATES] = _trust_few()
    log_plainly()
    os.environ.setdefault("PYTEST_TIMEOUT", str(patience(float(config.getini("timeout")))))
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        # Under nohup. An ignored signal would be ignored in every process that a test starts; a handled one is not.
        signal.signal(signal.SIGHUP, lambda *_: None)
    if THOROUGH:
        seed = os.environ.setdefault("LORAFLEET_TEST_SEED", str(random.SystemRandom().randrange(1 << 32)))
        config.option.hypothesis_seed = config.option.hypothesis_seed or seed


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Leave the garbage collector off while tests are collected: what is made stays. It took a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Tell how far the run is, in the process that a person started."""
    is_worker = hasattr(session.config, "workerinput")
    if not is_worker:
        workers = getattr(session.config.option, "numprocesses", None) or 1
        session.config.pluginmanager.register(Progress(session.config, workers=workers))


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Where the Kubernetes suites run, how slow the machine is, and a thorough run's seed."""
    real = os.environ.get("KUBECONFIG")
    lines = [f"kubernetes: the cluster of KUBECONFIG={real}" if real else "kubernetes: the tests' own API server"]
    lines.append(f"this machine is {SLOWNESS:.1f} times slower than a quiet one: deadlines grow as much")
    if THOROUGH:
        lines.append(f"hypothesis: thorough, --hypothesis-seed={config.option.hypothesis_seed}")
    return lines


# They import vLLM or Transformers: ten seconds of CPU for the first in each process.
_IMPORT_VLLM = ("tests/lorafleet/engine/vllm_plugin/test_patches.py", "tests/lorafleet/tokenizer/test_chat.py")


def group_of(test: str) -> str:
    """The group of a test by its id. Tests of one group run in one process, and share its fixtures.

    The contract's tests on real vLLM share one engine, and its imports with others; those of tests/founding/ share one
    fleet; every other group is a file.
    Ids alone tell, because xdist 3.8's mark `xdist_group` changes no id with pytest 9.2.
    """
    path = test.partition("::")[0]
    if path.startswith("tests/founding/"):
        return "founding"
    if path in _IMPORT_VLLM or (path.startswith("tests/contract/") and ("[vllm" in test or _is_all_on_vllm(path))):
        return "vllm"
    return path


@functools.cache
def _is_all_on_vllm(path: str) -> bool:
    """Whether all tests of a file carry the mark `vllm`."""
    text = (Path(__file__).parents[1] / path).read_text()
    return re.search(r"^pytestmark = .*\bpytest\.mark\.vllm\b", text, re.MULTILINE) is not None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the groups that take longest, and let tests with a timeout of their own be as patient as the others.

    The first test that uses a shared engine also waits for its start, which alone may take `patience(120)`.
    """
    for item in items:
        if mark := item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(patience(*mark.args)), append=False)

    def rank(item: pytest.Item) -> int:
        if item.get_closest_marker("vllm"):
            return -1
        found = [at for at, start in enumerate(_LONGEST_FIRST) if item.nodeid.startswith(start)]
        return found[0] if found else len(_LONGEST_FIRST)

    items.sort(key=rank)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run each group of tests in one process."""
    from xdist.scheduler.loadgroup import LoadGroupScheduling

    class NamedGroupScheduling(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return NamedGroupScheduling(config, log)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """For each failure, the command that runs this test alone."""
    failed = [*terminalreporter.stats.get("failed", ()), *terminalreporter.stats.get("error", ())]
    if not failed:
        return
    terminalreporter.section("to run one again")
    variables = "HYPOTHESIS_PROFILE=thorough " if THOROUGH else ""
    flags = f" --hypothesis-seed={terminalreporter.config.option.hypothesis_seed}" if THOROUGH else ""
    pytest_program = os.path.relpath(Path(sys.executable).with_name("pytest"))
    for test in dict.fromkeys(report.nodeid for report in failed):
        terminalreporter.line(f"{variables}{pytest_program}{flags} {shlex.quote(test)}")
