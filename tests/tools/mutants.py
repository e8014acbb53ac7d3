"""Break the product one line at a time, and say which breaks the tests notice.

`python -m tests.tools.mutants --seed 1 --count 120` draws single-line mutants of the four packages, runs the tests of
each mutated file, and prints one line a mutant and the share that was caught. Draw once with `--save FILE`, and give
that file with `--plan FILE` in another checkout: both are then judged by the same mutants.

The tests of a file are the test modules that import the file, directly or through the tests' own helpers. Where fewer
than three do, those that import the file's importers are added, and so on; of more than sixteen (or `--files`), the
nearest are taken.
`--marks` says which of their tests run: by default those of `make test` that need no real vLLM.
"""

import argparse
import ast
import contextlib
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from shutil import copytree, ignore_patterns
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Literal

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("router", "orchestrator", "workers", "lorafleet")
DEFAULT_MARKS = "not vllm and not thorough"
FLIPPED: dict[type[ast.cmpop], str] = {
    ast.Lt: ">=", ast.LtE: ">", ast.Gt: "<=", ast.GtE: "<", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
CLEANUPS = {"close", "aclose", "cancel", "release", "discard", "unlink", "terminate", "kill", "rmtree", "pop", "clear"}
Kind = Literal["comparison", "constant", "branch", "await", "cleanup"]
# "unfinished": no test had failed when the time was over. That counts as not caught.
Verdict = Literal["caught", "survived", "unfinished"]
WHOLE_FLEETS = ("tests.e2e.", "tests.test_docs")  # they know of every file, and of none in particular
ENOUGH_TEST_FILES = 3
MOST_TEST_FILES = 16
WALL_S_A_CPU_S = 15  # tests wait, and other processes share the cores
TEST_TIMEOUT_S = 100  # a mutant that hangs is caught by the test that hangs


@dataclass(frozen=True, slots=True)
class Mutant:
    """One changed line of one file."""

    file: str
    line: int  # from 1
    kind: Kind
    before: str
    after: str


def changes_of(node: ast.AST) -> Iterator[tuple[Kind, ast.AST, str]]:
    """How a node may be broken: the kind, the part of the node to replace, and the text to put there."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in FLIPPED:
            between = ast.Pass(
                lineno=left.end_lineno, end_lineno=right.lineno,
                col_offset=left.end_col_offset, end_col_offset=right.col_offset,
            )  # fmt: skip
            yield "comparison", between, f" {FLIPPED[type(op)]} "
        case ast.Constant(value=bool(value)):
            yield "constant", node, str(not value)
        case ast.Constant(value=int(value)):
            yield "constant", node, str(value + 1)
        case ast.Constant(value=float(value)):
            yield "constant", node, str(value * 2 + 1)
        case ast.Expr(value=ast.Await()):
            yield "await", node, "pass"
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))) if name in CLEANUPS:
            yield "cleanup", node, "pass"
        case ast.Continue() | ast.Return(value=None):
            yield "branch", node, "pass"
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            yield "branch", test, "False"


def mutants_of(source: str, file: str) -> list[Mutant]:
    """All mutants of a file that change one line and still parse, in the order of the file."""
    lines = source.splitlines()
    found: list[Mutant] = []
    for node in ast.walk(ast.parse(source)):
        for kind, part, text in changes_of(node):
            at, end = part.lineno, part.end_lineno  # type: ignore[attr-defined]
            before = lines[at - 1]
            # ast counts bytes of UTF-8: a line with other characters is not worth the conversion.
            if at != end or not before.isascii():
                continue
            after = before[: part.col_offset] + text + before[part.end_col_offset :]  # type: ignore[attr-defined]
            try:
                ast.parse("\n".join([*lines[: at - 1], after, *lines[at:]]))
            except SyntaxError:
                continue
            found.append(Mutant(file, at, kind, before, after))
    return sorted(found, key=lambda one: (one.line, one.kind, one.after))


def draw(root: Path, count: int, rng: random.Random) -> list[Mutant]:
    """`count` mutants, equally many of each package, no two of one line, kinds as evenly as the files allow."""
    chosen: list[Mutant] = []
    for at, package in enumerate(PACKAGES):
        wanted = count // len(PACKAGES) + (at < count % len(PACKAGES))
        pools: dict[Kind, list[Mutant]] = {}
        for path in sorted((root / package).rglob("*.py")):
            file = str(path.relative_to(root))
            for mutant in mutants_of(path.read_text(), file):
                pools.setdefault(mutant.kind, []).append(mutant)
        for pool in pools.values():
            rng.shuffle(pool)
        taken: set[tuple[str, int]] = set()
        while wanted and any(pools.values()):
            for kind in sorted(pools):
                if not wanted or not pools[kind]:
                    continue
                mutant = pools[kind].pop()
                if (mutant.file, mutant.line) not in taken:
                    taken.add((mutant.file, mutant.line))
                    chosen.append(mutant)
                    wanted -= 1
    return chosen


# --- which tests a file has


def module_of(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path, root: Path, known: set[str]) -> set[str]:
    """The project's modules that a file imports or names in a string (to start as a process)."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            found |= {node.value, f"{node.value}.__main__"}
    return found & known


class Importers:
    """Who imports whom in a checkout."""

    def __init__(self, root: Path) -> None:
        files = [path for name in (*PACKAGES, "tests", "benchmarks") for path in (root / name).rglob("*.py")]
        self._files = {module_of(path, root): str(path.relative_to(root)) for path in files}
        self._importers: dict[str, set[str]] = {}
        for path in files:
            for imported in imports_of(path, root, set(self._files)):
                self._importers.setdefault(imported, set()).add(module_of(path, root))

    def tests_of(self, file: str, most: int = MOST_TEST_FILES) -> list[str]:
        """The test files nearest to `file`, nearest first: at least three, where so many know of the file at all."""
        start = file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        # Imports of the product on the way, and then those of the tests' helpers.
        far = {start: (0, 0)}
        todo = deque([start])
        while todo:
            module = todo.popleft()
            of_product, of_tests = far[module]
            for importer in self._importers.get(module, ()):
                is_test = importer.startswith("tests.")
                distance = of_product + (not is_test), of_tests + is_test
                if distance < far.get(importer, (99, 0)):
                    far[importer] = distance
                    todo.append(importer)
        tests: dict[tuple[int, int], list[str]] = {}
        for name, distance in far.items():
            if name.startswith("tests.") and ".test_" in name and not name.startswith(WHOLE_FLEETS):
                tests.setdefault(distance, []).append(self._files[name])
        found: list[str] = []
        last = 0
        for distance in sorted(tests):
            is_another_import = bool(found) and distance[0] > last
            if len(found) >= most or (is_another_import and len(found) >= ENOUGH_TEST_FILES):
                break
            files, last = sorted(tests[distance]), distance[0]
            found += random.Random(file).sample(files, min(len(files), most - len(found)))
        return found


# --- running


def judge(checkout: Path, mutant: Mutant, tests: Sequence[str], *, marks: str, cpu_s: int) -> tuple[Verdict, str]:
    """What the tests say of the mutant, and which test failed; the file is as before afterwards."""
    path = checkout / mutant.file
    source = path.read_text()
    lines = source.splitlines(keepends=True)
    if lines[mutant.line - 1].rstrip("\n") != mutant.before:
        raise SystemExit(f"{mutant.file}:{mutant.line} is not {mutant.before!r} here: was the plan drawn elsewhere?")
    lines[mutant.line - 1] = mutant.after + "\n"
    _write(path, "".join(lines))
    flags = f"-x -q -p no:cacheprovider --timeout {TEST_TIMEOUT_S}".split()
    command = [sys.executable, "-P", "-m", "pytest", *flags, "-m", marks, *tests]
    limited = ["sh", "-c", f'ulimit -t {cpu_s}; exec "$@"', "sh", *command]
    # Bytecode is kept, or each mutant compiles and rewrites every test again.
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": ""}
    with (
        TemporaryFile("w+") as said,
        subprocess.Popen(
            limited,
            cwd=checkout,
            env=environment,
            stdout=said,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as run,
    ):
        try:
            status = run.wait(cpu_s * WALL_S_A_CPU_S)
        except subprocess.TimeoutExpired:
            return "unfinished", ""
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            _write(path, source)
        said.seek(0)
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", said.read(), re.MULTILINE)
    if status in {-signal.SIGXCPU, -signal.SIGKILL}:  # the second where the limit is the hard one as well
        return "unfinished", ""
    if status == pytest.ExitCode.USAGE_ERROR:
        raise SystemExit(
            f"pytest does not take {shlex.join(command)} in {checkout}: is a marker of --marks unknown there?"
        )
    if status in {0, 5}:
        return "survived", ""
    return "caught", failed[0] if failed else f"pytest ended with status {status}"


def _write(path: Path, text: str) -> None:
    """Write the file with a time that it never had: Python takes old bytecode where time and size are the same."""
    at = int(path.stat().st_mtime) + 1
    path.write_text(text)
    os.utime(path, (at, at))


def run_all(
    root: Path, mutants: Sequence[Mutant], *, jobs: int, marks: str, cpu_s: int, files: int
) -> Iterator[tuple[Mutant, Verdict, str, float]]:
    """Each mutant with its verdict, the test that failed, and seconds, in the order of the plan.

    Every job has a copy of the checkout.
    """
    importers = Importers(root)
    with TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        free: SimpleQueue[Path] = SimpleQueue()
        for job in range(jobs):
            copy = Path(folder, str(job))
            copytree(root, copy, ignore=ignore_patterns(".venv", ".git", ".*_cache", "__pycache__", ".state"))
            free.put(copy)

        def one(mutant: Mutant) -> tuple[Mutant, Verdict, str, float]:
            checkout = free.get()
            began = time.monotonic()
            try:
                tests = importers.tests_of(mutant.file, files)
                verdict, failed = judge(checkout, mutant, tests, marks=marks, cpu_s=cpu_s)
            finally:
                free.put(checkout)
            return mutant, verdict, failed, time.monotonic() - began

        yield from pool.map(one, mutants)


def report(results: Iterable[tuple[Mutant, Verdict, str, float]], total: int) -> None:
    counts: Counter[tuple[str, str]] = Counter()
    for at, (mutant, verdict, failed, seconds) in enumerate(results, 1):
        counts["all", verdict] += 1
        counts[mutant.file.partition("/")[0], verdict] += 1
        counts[mutant.kind, verdict] += 1
        print(
            f"{at}/{total} {verdict:9} {seconds:5.0f} s  {mutant.file}:{mutant.line} {mutant.kind}: {failed}",
            flush=True,
        )
        print(f"    - {mutant.before.strip()}\n    + {mutant.after.strip()}", flush=True)
    for name in dict.fromkeys(name for name, _ in sorted(counts)):
        caught, of = counts[name, "caught"], sum(n for (other, _), n in counts.items() if other == name)
        print(f"{name:12} {caught} of {of} caught ({caught / of:.1%})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=120, help="how many mutants to draw (default: 120)")
    parser.add_argument("--jobs", type=int, default=1, help="how many run side by side (default: 1)")
    parser.add_argument("--cpu-s", type=int, default=60, help="CPU seconds of pytest a mutant (default: 60)")
    parser.add_argument("--files", type=int, default=MOST_TEST_FILES, help="test files a mutant, at most")
    parser.add_argument("--marks", default=DEFAULT_MARKS, help=f"pytest's -m (default: {DEFAULT_MARKS!r})")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the drawn mutants, and run none")
    parser.add_argument("--plan", type=Path, metavar="FILE", help="take the mutants from a saved file")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to break (default: this one)")
    args = parser.parse_args()
    if args.plan:
        mutants = [Mutant(**row) for row in json.loads(args.plan.read_text())]
    else:
        mutants = draw(args.root, args.count, random.Random(args.seed))
    if args.save:
        args.save.write_text(json.dumps([asdict(mutant) for mutant in mutants], indent=1))
        return
    results = run_all(args.root, mutants, jobs=args.jobs, marks=args.marks, cpu_s=args.cpu_s, files=args.files)
    report(results, len(mutants))


if __name__ == "__main__":
    main()
