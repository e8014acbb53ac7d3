"""`make release`: its rules, and a whole release in a clone, whose wheel runs in an environment of its own."""

import hashlib
import os
import re
import subprocess
import sys

import pytest

from tests.kube.binaries import helm, run
from tests.patience import patience
from tests.tools.release import (
    ROOT,
    VERSION_FILES,
    ReleaseRefused,
    checked_version,
    release,
    released_changelog,
    with_version,
    without_agreements,
)

CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n### Added\n- A thing.\n\n## [0.1.0] - 2026-01-01\n- Older.\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("new", "is no version"),
        ("1.0", "MAJOR.MINOR.PATCH"),
        ("1.0.0rc1", "MAJOR.MINOR.PATCH"),
        ("0.1.0", "not later than 0.2.0"),
        ("0.2.0", "not later than 0.2.0"),
    ],
)
def test_a_version_of_another_form_or_not_later_than_the_last_is_refused(text, says):
    with pytest.raises(ReleaseRefused, match=re.escape(says)):
        checked_version(text, ["v0.1.0", "v0.2.0", "v9-old", "nightly"])


def test_a_later_version_is_accepted():
    assert str(checked_version("0.10.0", ["v0.2.0", "v0.9.1"])) == "0.10.0"


def test_only_whole_versions_are_replaced():
    text = 'tag: 0.1.0\nold: 10.1.0\nrc: 0.1.0-rc1\nname: x-0.1.0.tgz\nnext: 0.1.0.1\n"0.1.0".'
    expected = 'tag: 0.2.0\nold: 10.1.0\nrc: 0.1.0-rc1\nname: x-0.2.0.tgz\nnext: 0.1.0.1\n"0.2.0".'
    assert with_version(text, "0.1.0", "0.2.0") == expected
    with pytest.raises(ReleaseRefused, match="take it from that list"):
        with_version("nothing here", "0.1.0", "0.2.0")


def test_unreleased_changes_go_under_the_version_and_none_are_lost():
    text = released_changelog(CHANGELOG, "0.2.0", "2026-02-03")
    assert text == CHANGELOG.replace("## [Unreleased]\n", "## [Unreleased]\n\n## [0.2.0] - 2026-02-03\n")
    with pytest.raises(ReleaseRefused, match="nothing under"):
        released_changelog(text, "0.3.0", "2026-02-04")


def test_agreements_on_the_wire_end_with_a_release():
    text = 'AGREED: dict[str, str] = {\n    "A.b": "why",\n}\n"""Doc."""\n\nADDED_CALLS: dict[str, str] = {}\n'
    assert without_agreements(text) == 'AGREED: dict[str, str] = {}\n"""Doc."""\n\nADDED_CALLS: dict[str, str] = {}\n'


def test_every_file_with_the_version_is_known():
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    command = ["git", "grep", "--name-only", "--perl-regexp", rf"(?<![\d.]){re.escape(version)}(?![\d-]|\.\d)"]
    places = ("*.toml", "*.yaml", "docker", "docs", "helm", "lorafleet", "orchestrator", "router", "workers")
    done = subprocess.run(
        [*command, "--", *places], cwd=ROOT, capture_output=True, text=True, timeout=patience(60), check=True
    )
    found = done.stdout.split()
    assert set(found) - {"docker/constraints.txt"} <= set(VERSION_FILES)


@pytest.mark.thorough
@pytest.mark.fleet
def test_a_release_is_tagged_and_its_wheel_alone_runs_a_fleet_and_renders_the_chart(tmp_path):
    clone, out = tmp_path / "clone", tmp_path / "out"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], timeout=60, check=True)
    for key, value in (("user.name", "A Releaser"), ("user.email", "releaser@example.com")):
        subprocess.run(["git", "-C", str(clone), "config", key, value], timeout=60, check=True)
    artifacts = {path.name: path for path in release(clone, "99.0.0", out, with_tag=True)}
    tagged = subprocess.run(
        ["git", "describe", "--exact-match"], cwd=clone, capture_output=True, text=True, timeout=60, check=True
    )
    assert tagged.stdout.strip() == "v99.0.0"
    wheel = artifacts["lorafleet-99.0.0-py3-none-any.whl"]
    sums = dict(line.split("  ")[::-1] for line in artifacts["SHA256SUMS"].read_text().splitlines())
    assert sums == {
        name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in artifacts.items() if name != "SHA256SUMS"
    }
    assert {"lorafleet-99.0.0.tar.gz", "lorafleet-99.0.0.tgz", "lorafleet.cdx.json"} < artifacts.keys()

    venv = tmp_path / "venv"
    clean = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "VIRTUAL_ENV"}}

    def succeed(*words: str) -> str:
        done = subprocess.run(
            words, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=patience(240), check=False
        )
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    succeed(sys.executable, "-m", "venv", str(venv))
    succeed(str(venv / "bin" / "pip"), "install", "-q", f"lorafleet[demo] @ {wheel.as_uri()}")
    lorafleet = str(venv / "bin" / "lorafleet")
    assert succeed(lorafleet, "--version") == "lorafleet 99.0.0\n"
    fleet = ("--engine", "sim", "--demo", "--once", "--router-port", "0", "--orchestrator-port", "0")
    assert "ready router=" in succeed(lorafleet, "up", *fleet, "--state-dir", str(tmp_path / "state"))
    succeed(lorafleet, "chart", "save", "chart")
    values = ("-f", str(tmp_path / "chart" / "values-sim.yaml"), "--set", "auth.drawWithoutCluster=true")
    rendered = run(helm(), "template", "fleet", str(tmp_path / "chart"), *values)
    assert "kind: StatefulSet" in rendered.stdout, rendered.stderr
