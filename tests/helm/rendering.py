"""What helm makes of the chart, for the values in `cases/`; each is rendered once a run."""

import re
from base64 import b64decode
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.kube.binaries import helm, run

CHART = Path(__file__).parents[2] / "helm" / "lorafleet"
CASES = Path(__file__).parent / "cases"
RELEASE, NAMESPACE = "fleet", "ml"
# Before all other values; without it a render that sees no cluster is refused.
DRAWN = ("--values", str(Path(__file__).parent / "drawn.yaml"))

Manifest = dict[str, Any]

# values of the chart, and those of a case on top
VALUES: dict[str, tuple[Path, ...]] = {
    "defaults": (),
    "cpu": (CHART / "values-cpu.yaml",),
    "sim": (CHART / "values-sim.yaml",),
    **{path.stem: (path,) for path in sorted(CASES.glob("*.yaml"))},
}


def helm_template(*words: str) -> tuple[bool, str]:
    """Whether helm succeeded, and its output."""
    done = run(helm(), "template", RELEASE, str(CHART), "--namespace", NAMESPACE, *DRAWN, *words)
    return done.returncode == 0, done.stdout if done.returncode == 0 else done.stderr


@cache
def _all() -> dict[str, str]:
    def text(case: str) -> str:
        worked, output = helm_template(*(word for path in VALUES[case] for word in ("--values", str(path))))
        assert worked, f"{case}: {output}"
        return output

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(VALUES, pool.map(text, VALUES), strict=True))


def rendered(case: str) -> str:
    """The manifests as helm prints them."""
    return _all()[case]


@cache
def manifests(case: str) -> tuple[Manifest, ...]:
    return tuple(found for found in yaml.load_all(rendered(case), yaml.CSafeLoader) if found)


def of_kind(case: str, *kinds: str) -> list[Manifest]:
    return [found for found in manifests(case) if found["kind"] in kinds]


def one(case: str, kind: str, name: str) -> Manifest:
    found = [found for found in of_kind(case, kind) if found["metadata"]["name"] == name]
    assert len(found) == 1, f"{case}: {len(found)} of {kind} {name}"
    return found[0]


def pod_templates(case: str) -> list[tuple[str, Manifest]]:
    """Everything that becomes a pod: (kind/name, its template with metadata and spec)."""
    found = []
    for item in manifests(case):
        name = f"{item['kind']}/{item['metadata']['name']}"
        if item["kind"] == "Pod":
            found.append((name, item))
        elif "template" in item.get("spec", {}):
            found.append((name, item["spec"]["template"]))
    return found


def containers(spec: Manifest) -> list[Manifest]:
    return [*spec.get("initContainers", ()), *spec["containers"]]


def secret(case: str, name: str) -> dict[str, str]:
    """A Secret's values, decoded."""
    found = one(case, "Secret", name)
    coded = {key: b64decode(value).decode() for key, value in found.get("data", {}).items()}
    return coded | found.get("stringData", {})


def steady(text: str) -> str:
    """The manifests without random tokens and their hashes."""
    text = re.sub(r"^(  [a-z-]+\.[0-9]+): [A-Za-z0-9+/]{62}==$", r"\1: DRAWN", text, flags=re.MULTILINE)
    return re.sub(r"sha256: [0-9a-f]{64}", "sha256: DRAWN", text)
