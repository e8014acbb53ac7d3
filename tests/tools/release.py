"""A release: `python -m tests.tools.release VERSION` builds one, and with `--tag` commits and tags it.

Everything happens in a git worktree of its own, from the last commit: the version in every file that has one, the
changelog, the recorded wire, then wheel, sdist, chart, bill of materials and checksums. Without `--tag` nothing but the
folder of artifacts is left. With it the commit and the tag `vVERSION` are in this checkout; nothing is pushed.
"""

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from packaging.version import InvalidVersion, Version

from tests.kube.binaries import helm

ROOT = Path(__file__).parents[2]
VERSION_FILES = (
    "pyproject.toml",
    "helm/lorafleet/Chart.yaml",
    "helm/lorafleet/values-cpu.yaml",
    "helm/lorafleet/examples/argocd/Chart.yaml",
    "docker/Dockerfile",
    "docker/Dockerfile.agent",
    "docs/kubernetes.md",
    "orchestrator/api/examples.py",
    "orchestrator/api/routers.py",
    "tests/helm/test_values.py",
    "tests/helm/golden/cpu.yaml",
    "tests/helm/golden/everything.yaml",
)
"""Files that name the version; the goldens are helm's output, which names the chart's."""
SUMS = "SHA256SUMS"
_TIMEOUT_S = 600.0


class ReleaseRefused(Exception):
    """The release cannot be made; the text says why and what to do."""


def checked_version(text: str, tags: Sequence[str]) -> Version:
    """The version, in the form that Python and Helm share. Raises ReleaseRefused.

    tags  of earlier releases, such as `v0.1.0`; others are ignored
    """
    try:
        version = Version(text)
    except InvalidVersion as exc:
        raise ReleaseRefused(f"{text!r} is no version; give one such as 0.2.0") from exc
    if not re.fullmatch(r"\d+\.\d+\.\d+", text):
        raise ReleaseRefused(
            f"{text!r} has another form than MAJOR.MINOR.PATCH, which Helm needs; give one such as 0.2.0"
        )
    earlier = [Version(tag[1:]) for tag in tags if re.fullmatch(r"v\d+\.\d+\.\d+", tag)]
    if earlier and version <= max(earlier):
        raise ReleaseRefused(f"{text} is not later than {max(earlier)}, which is released; give a later one")
    return version


def with_version(text: str, old: str, new: str) -> str:
    """The text with the new version in place of the old one, which must be in it. Raises ReleaseRefused."""
    changed, count = re.subn(rf"(?<![\d.]){re.escape(old)}(?![\d-]|\.\d)", new, text)
    if not count:
        raise ReleaseRefused(f"a file of VERSION_FILES does not name {old} any longer; take it from that list")
    return changed


def released_changelog(text: str, version: str, day: str) -> str:
    """The changelog with what is unreleased under the version. Raises ReleaseRefused where nothing is unreleased."""
    head, found, rest = text.partition("## [Unreleased]\n")
    unreleased = re.split(r"^## ", rest, maxsplit=1, flags=re.MULTILINE)[0]
    if not found or not re.search(r"^- ", unreleased, re.MULTILINE):
        raise ReleaseRefused("CHANGELOG.md has nothing under [Unreleased]; say there what is new")
    return f"{head}{found}\n## [{version}] - {day}\n{rest}"


def without_agreements(text: str) -> str:
    """tests/wire/agreed.py with empty lists: the recorded wire is the agreement now."""
    return re.sub(r"^((?:AGREED|ADDED_CALLS): [^=\n]+ = )\{[^}]*\}", r"\1{}", text, flags=re.MULTILINE)


def prepare(tree: Path, version: str, day: str) -> None:
    """Give a checkout the version, its changelog and its recorded wire. Raises ReleaseRefused."""
    found = re.search(r'^version = "(.+)"$', (tree / "pyproject.toml").read_text(), re.MULTILINE)
    if found is None:
        raise ReleaseRefused("pyproject.toml has no line `version = ...`")
    for name in VERSION_FILES:
        path = tree / name
        path.write_text(with_version(path.read_text(), found[1], version))
    changelog = tree / "CHANGELOG.md"
    changelog.write_text(released_changelog(changelog.read_text(), version, day))
    agreed = tree / "tests" / "wire" / "agreed.py"
    agreed.write_text(without_agreements(agreed.read_text()))
    _run([sys.executable, "-m", "tests.wire.record"], tree)


def build(tree: Path, out: Path) -> Sequence[Path]:
    """Build the release of a prepared checkout into a folder, and return its files. Raises ReleaseRefused."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.iterdir():
        old.unlink()
    _run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", str(out.resolve())], tree)
    _run([str(helm()), "package", "helm/lorafleet", "--destination", str(out.resolve())], tree)
    bill = out.resolve() / "lorafleet.cdx.json"
    _run([
        sys.executable, "-m", "cyclonedx_py", "requirements", "--pyproject", "pyproject.toml", "--output-reproducible",
        "-o", str(bill), "docker/constraints.txt",
    ], tree)  # fmt: skip
    files = sorted(out.iterdir())
    (out / SUMS).write_text(checksums(files))
    return [*files, out / SUMS]


def checksums(files: Sequence[Path]) -> str:
    """The lines of `sha256sum` for the files."""
    return "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)


@contextmanager
def worktree(repository: Path) -> Iterator[Path]:
    """A second checkout of the last commit, for the time of the block."""
    with tempfile.TemporaryDirectory(prefix="lorafleet-release-") as name:
        tree = Path(name) / "lorafleet"
        _git(repository, "worktree", "add", "--detach", "--quiet", str(tree), "HEAD")
        try:
            yield tree
        finally:
            _git(repository, "worktree", "remove", "--force", str(tree))


def release(repository: Path, version: str, out: Path, *, with_tag: bool) -> Sequence[Path]:
    """Build the version into a folder; with a tag also commit and tag it. Returns the artifacts.

    Raises ReleaseRefused for a wrong version, and with a tag for a checkout that has changes.
    """
    checked_version(version, _git(repository, "tag", "--list", "v*").split())
    if with_tag and _git(repository, "status", "--porcelain", "--untracked-files=no"):
        raise ReleaseRefused("this checkout has changes that are not committed; commit or stash them")
    with worktree(repository) as tree:
        prepare(tree, version, datetime.now(UTC).strftime("%Y-%m-%d"))
        _git(tree, "add", "--all")
        print(_git(tree, "diff", "--cached", "--stat"), end="", flush=True)
        artifacts = build(tree, out)
        if with_tag:
            _git(tree, "commit", "--quiet", "--message", f"release: {version}")
            _git(tree, "tag", "--annotate", f"v{version}", "--message", f"lorafleet {version}")
    if with_tag:
        _git(repository, "merge", "--ff-only", "--quiet", f"v{version}")
    return artifacts


def _git(folder: Path, *words: str) -> str:
    """The output of a git command in a checkout. Raises ReleaseRefused."""
    return _run(["git", *words], folder)


def _run(command: Sequence[str], folder: Path) -> str:
    """The output of a program. Raises ReleaseRefused with its last lines when it fails."""
    done = subprocess.run(
        command, cwd=folder, env=_environment(folder), capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    if done.returncode:
        words = " ".join(command[:4])
        raise ReleaseRefused(f"`{words} ...` ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def _environment(folder: Path) -> Mapping[str, str]:
    """The environment of programs: their times are those of the commit, and their modules the checkout's."""
    at = subprocess.run(
        ["git", "log", "-1", "--format=%ct"], cwd=folder, capture_output=True, text=True, timeout=60, check=True
    )
    return {**os.environ, "SOURCE_DATE_EPOCH": at.stdout.strip(), "PYTHONPATH": str(folder)}


def main() -> None:
    """Release what the command line names, and say what is next."""
    parser = argparse.ArgumentParser(prog="make release", description=__doc__.partition("\n")[0])
    parser.add_argument("version", help="such as 0.2.0")
    parser.add_argument("--tag", action="store_true", help="commit and tag; without it nothing in the checkout changes")
    parser.add_argument("--out", type=Path, default=ROOT / ".release", help="folder of the artifacts")
    given = parser.parse_args()
    out: Path = given.out / given.version
    try:
        artifacts = release(ROOT, given.version, out, with_tag=given.tag)
    except ReleaseRefused as exc:
        raise SystemExit(f"release: {exc}") from exc
    for file in artifacts:
        print(f"{file}: {file.stat().st_size:,} bytes")
    if given.tag:
        print(f"Next: git push origin HEAD v{given.version}, then upload the files of {out} and push the images")
    else:
        print(f"A dry run: nothing but {out} was written. Next: make release VERSION={given.version} TAG=yes")


if __name__ == "__main__":
    main()
