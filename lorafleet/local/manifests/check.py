"""The chart with someone's values, rendered by helm and checked as an API server would check it."""

import difflib
import functools
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lorafleet.local.manifests.origins import origin
from lorafleet.local.manifests.problems import FieldPath, Manifest, ManifestProblem
from lorafleet.local.manifests.rules import object_problems
from lorafleet.service.failure import CommandFailed
from lorafleet.service.yamls import InvalidYaml, read_yaml

_RENDER_TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class ChartCheck:
    """The result of a check. `unchecked`: kinds that Kubernetes itself does not have."""

    objects: int
    problems: tuple[str, ...]
    unchecked: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartRelease:
    """A release to be: which chart, under which name, with which values, on which Kubernetes."""

    chart: Path
    name: str
    namespace: str
    values: tuple[Path, ...]
    kubernetes: str


def checked(release: ChartRelease, *, helm: str) -> ChartCheck:
    """Render the release and check its objects. Raises CommandFailed for values that the chart itself refuses."""
    values: Manifest = functools.reduce(_merged, map(_read, release.values), {})
    objects = [item for item in yaml.safe_load_all(_rendered(release, helm)) if item]
    problems: list[str] = []
    unchecked: set[str] = set()
    for item in objects:
        try:
            found = [*_schema_problems(item, release.kubernetes), *object_problems(item)]
        except LookupError:
            unchecked.add(item["kind"])
            found = list(object_problems(item))
        problems += [_problem_text(item, problem, values) for problem in found]
    return ChartCheck(len(objects), tuple(dict.fromkeys(problems)), tuple(sorted(unchecked)))


def _problem_text(item: Manifest, problem: ManifestProblem, values: Manifest) -> str:
    """A problem as a line for users: the value that the field came from, what was found and expected, an example."""
    where = origin(item, problem.path, values)
    return f"{where}: found {problem.found}; expected {problem.expected}. Example: {problem.example}"


def _rendered(release: ChartRelease, helm: str) -> str:
    """The manifests. Raises CommandFailed."""
    program = shutil.which(helm)
    if program is None:
        raise CommandFailed(f"{helm}: no such program; install Helm (https://helm.sh), or name it: --helm PATH")
    words = [program, "template", release.name, str(release.chart), "--namespace", release.namespace]
    words += ["--kube-version", release.kubernetes, "--set", "auth.drawWithoutCluster=true"]
    words += [word for path in release.values for word in ("--values", str(path))]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_RENDER_TIMEOUT_S)  # noqa: S603
    except subprocess.TimeoutExpired as exc:
        raise CommandFailed(f"{helm} template has not ended in {_RENDER_TIMEOUT_S} s; run it by hand") from exc
    if done.returncode != 0:
        raise CommandFailed(f"the chart refuses these values: {done.stderr.strip().removeprefix('Error: ')}")
    return done.stdout


def _read(path: Path) -> Manifest:
    """The values in a file. Raises CommandFailed."""
    try:
        found = read_yaml(path, last_wins=True) or {}  # as helm reads it
    except OSError as exc:
        raise CommandFailed(f"{path}: {exc.strerror}; name a file of values") from exc
    except InvalidYaml as exc:
        raise CommandFailed(f"{path}: no YAML: {exc}") from exc
    if not isinstance(found, dict):
        raise CommandFailed(f"{path}: found {type(found).__name__}; expected values by their names, such as `router:`")
    return found


def _merged(below: Manifest, over: Manifest) -> Manifest:
    """The values of two files, the second over the first, as helm merges them: maps merge, all else is replaced."""
    merged = dict(below)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _schema_problems(item: Manifest, version: str) -> Iterator[ManifestProblem]:
    """What the strict schema of the object's kind refuses. Raises LookupError for a kind without one."""
    validate = _validator()
    try:
        validate.validate(item, version, strict=True)
    except validate.SchemaNotFoundError as exc:
        raise LookupError(item["kind"]) from exc
    except validate.VersionNotSupportedError as exc:
        raise CommandFailed(f"{exc.message}; pip install -U kubernetes-validate, or name an older version") from exc
    except validate.ValidationError as exc:
        yield _schema_problem(exc)


def _schema_problem(error: Any) -> ManifestProblem:
    """A schema's error in our words: an unknown field with the nearest known one, or a wrong type."""
    path: FieldPath = tuple(error.absolute_path)
    known = list(error.schema.get("properties", ()))
    unknown = [name for name in error.instance if name not in known] if isinstance(error.instance, dict) else []
    if error.validator == "additionalProperties" and unknown:
        near = _nearest(unknown[0], known)
        example = yaml.safe_dump({near[0]: error.instance[unknown[0]]}, default_flow_style=True, width=1000).strip()
        return ManifestProblem((*path, unknown[0]), "an unknown field", f"one of {', '.join(near)}", example)
    if error.validator == "required":
        missing = next(name for name in error.validator_value if name not in error.instance)
        return ManifestProblem(path, f"no {missing}", f"a value for {missing}", f"{missing}: ...")
    expected = f"{error.validator} {error.validator_value}"
    return ManifestProblem(path, error.instance, expected, str(error.schema.get("description", ""))[:120])


def _nearest(name: str, known: Sequence[str]) -> list[str]:
    """The known names that are meant most likely: `pvc` is persistentVolumeClaim, `operater` operator."""
    short = [long for long in known if "".join(re.findall("^.|[A-Z]", long)).lower() == name.lower()]
    return short or difflib.get_close_matches(name, known, n=3, cutoff=0.4) or [*known[:5], "metadata"]


@functools.cache
def _validator() -> Any:
    """The package of Kubernetes' schemas. Raises CommandFailed without it."""
    try:
        from kubernetes_validate import utils  # noqa: PLC0415  (an extra)
    except ImportError as exc:
        raise CommandFailed("Kubernetes' schemas are missing; pip install 'lorafleet[chart]'") from exc
    # It reads all definitions of a version, 1 MB, for each object.
    utils.schema_contents = functools.cache(utils.schema_contents)
    return utils
