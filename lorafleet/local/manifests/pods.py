"""What an API server refuses in a pod, beyond its schema.

source  kubernetes 1.37 pkg/apis/core/validation/validation.go; each rule names its function there
"""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any

from lorafleet.local.manifests.problems import (
    FieldPath,
    Manifest,
    ManifestProblem,
    Problems,
    exactly_one,
    is_label,
    is_label_key,
    is_label_value,
    is_subdomain,
    one_of,
    quantity,
)

_PLAIN_RESOURCES = ("cpu", "memory", "ephemeral-storage")
_CONFIG_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")
_VALUE_SOURCES = ("fieldRef", "resourceFieldRef", "configMapKeyRef", "secretKeyRef", "fileKeyRef")
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


def pod_problems(pod: Manifest, *, claimed: tuple[str, ...] = ()) -> Problems:
    """Problems of a pod or a pod template. `claimed`: volumes that a StatefulSet makes for each pod."""
    spec = pod.get("spec") or {}
    for problem in chain(_scheduling(spec), _volumes(spec), _containers(spec, claimed)):
        yield problem.below("spec")


def _containers(spec: Manifest, claimed: tuple[str, ...]) -> Problems:
    volumes = {volume.get("name") for volume in spec.get("volumes") or ()} | {*claimed}
    claims = {claim.get("name") for claim in spec.get("resourceClaims") or ()}
    for field in ("initContainers", "containers"):
        for at, container in enumerate(spec.get(field) or ()):
            rules = (
                _resources(container, claims),
                _environment(container),
                _mounts(container, volumes),
                _ports(container),
                _probes(container),
                one_of(("imagePullPolicy",), container.get("imagePullPolicy"), ("Always", "IfNotPresent", "Never")),
            )
            for problem in chain(*rules):
                yield problem.below(field, at)
        yield from _twice((field,), spec.get(field), "name")


def _resources(container: Manifest, claims: set[Any]) -> Problems:
    """ValidateContainerResourceRequirements, validateResourceClaimNames."""
    given = container.get("resources") or {}
    requests, limits = given.get("requests") or {}, given.get("limits") or {}
    for kind, listed in (("requests", requests), ("limits", limits)):
        for name, value in listed.items():
            path: FieldPath = ("resources", kind, name)
            if quantity(value) is None:
                yield ManifestProblem(path, value, "a quantity: 500m, 4, 64Gi", f"{name}: 4Gi")
            if not _is_resource(name):
                example = f"{kind}: {{nvidia.com/gpu: 1}}"
                yield ManifestProblem(
                    path, name, "cpu, memory, ephemeral-storage, hugepages-SIZE or DOMAIN/NAME", example
                )
    for name, value in requests.items():
        request, limit = quantity(value), quantity(limits.get(name))
        path = ("resources", "requests", name)
        is_plain = name in _PLAIN_RESOURCES
        if name not in limits and not is_plain:
            example = f"limits: {{{name}: {value}}}"
            yield ManifestProblem(path, f"{value} without a limit", f"the same number in limits.{name}", example)
        elif request is not None and limit is not None and not is_plain and request != limit:
            found = f"{value}, and limits.{name} {limits[name]}"
            yield ManifestProblem(path, found, "the same number in both", f"requests and limits: {{{name}: {value}}}")
        elif request is not None and limit is not None and request > limit:
            example = f"requests: {{{name}: {limits[name]}}}, limits: {{{name}: {limits[name]}}}"
            yield ManifestProblem(
                path, f"{value}, more than limits.{name} {limits[name]}", "at most the limit", example
            )
    for at, claim in enumerate(given.get("claims") or ()):
        if claim.get("name") not in claims:
            example = "resourceClaims: [{name: gpu, resourceClaimTemplateName: one-gpu}] in the pod's overlay"
            expected = "a claim of the pod's resourceClaims"
            yield ManifestProblem(("resources", "claims", at), claim.get("name"), expected, example)


def _is_resource(name: str) -> bool:
    """validateContainerResourceName."""
    return name in _PLAIN_RESOURCES or name.startswith("hugepages-") or ("/" in name and is_label_key(name))


def _environment(container: Manifest) -> Problems:
    """ValidateEnv, validateEnvVarValueFrom, ValidateEnvFrom."""
    for at, variable in enumerate(container.get("env") or ()):
        source = variable.get("valueFrom")
        if source is not None:
            path: FieldPath = ("env", at)
            if variable.get("value"):
                example = "{name: A, value: text}, or {name: A, valueFrom: {secretKeyRef: {name: s, key: k}}}"
                yield ManifestProblem(path, "value and valueFrom", "one of the two", example)
            example = "valueFrom: {secretKeyRef: {name: s, key: k}}"
            yield from exactly_one((*path, "valueFrom"), source, _VALUE_SOURCES, example)
            for kind in ("configMapKeyRef", "secretKeyRef"):
                yield from _config_key((*path, "valueFrom", kind, "key"), (source.get(kind) or {}).get("key"))
    for at, entry in enumerate(container.get("envFrom") or ()):
        example = "envFrom: [{secretRef: {name: s}}]"
        yield from exactly_one(("envFrom", at), entry, ("configMapRef", "secretRef"), example)


def _config_key(path: FieldPath, key: object) -> Problems:
    """IsConfigMapKey of apimachinery's validation."""
    if key is not None and (not _CONFIG_KEY.fullmatch(str(key)) or str(key).startswith("..") or key == "."):
        yield ManifestProblem(path, key, "a key of letters, digits, '-', '_' and '.'", "key: token")


def _mounts(container: Manifest, volumes: set[Any]) -> Problems:
    """ValidateVolumeMounts."""
    for at, mount in enumerate(container.get("volumeMounts") or ()):
        if mount.get("name") not in volumes:
            example = f"volumes: [{{name: {mount.get('name')}, emptyDir: {{}}}}]"
            yield ManifestProblem(("volumeMounts", at), mount.get("name"), "the name of a volume of the pod", example)
        for field in ("subPath", "subPathExpr"):
            path = str(mount.get(field) or "")
            if path.startswith("/") or ".." in path.split("/"):
                expected = "a path below the volume, without '..'"
                yield ManifestProblem(("volumeMounts", at, field), path, expected, f"{field}: models")
    yield from _twice(("volumeMounts",), container.get("volumeMounts"), "mountPath")


def _ports(container: Manifest) -> Problems:
    """validateContainerPorts."""
    for at, port in enumerate(container.get("ports") or ()):
        name = port.get("name")
        if name is not None and not (len(name) <= 15 and is_label(name) and re.search("[a-z]", name)):
            expected = "at most 15 lower-case letters, digits and '-'"
            yield ManifestProblem(("ports", at, "name"), name, expected, "name: metrics")
        if not 1 <= int(port.get("containerPort", 1)) <= 65535:
            expected = "1 to 65535"
            yield ManifestProblem(
                ("ports", at, "containerPort"), port["containerPort"], expected, "containerPort: 9000"
            )
    named = [port for port in container.get("ports") or () if "name" in port]
    yield from _twice(("ports",), named, "name")


def _probes(container: Manifest) -> Problems:
    """validateProbe, validateLivenessProbe, validateStartupProbe."""
    for field in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container.get(field)
        if not probe:
            continue
        example = "httpGet: {path: /health, port: 8080}"
        yield from exactly_one((field,), probe, ("exec", "httpGet", "tcpSocket", "grpc"), example)
        if field != "readinessProbe" and probe.get("successThreshold", 1) != 1:
            yield ManifestProblem((field, "successThreshold"), probe["successThreshold"], "1", "successThreshold: 1")
        for number in ("periodSeconds", "timeoutSeconds", "failureThreshold", "initialDelaySeconds"):
            if int(probe.get(number) or 0) < 0:
                yield ManifestProblem((field, number), probe[number], "0 or more", f"{number}: 10")


def _volumes(spec: Manifest) -> Problems:
    """ValidateVolumes, validateVolumeSource."""
    for at, volume in enumerate(spec.get("volumes") or ()):
        path: FieldPath = ("volumes", at)
        name = volume.get("name")
        sources = [field for field in volume if field != "name"]
        if len(sources) != 1:
            found = " and ".join(sources) or "no source"
            yield ManifestProblem(path, found, "exactly one source", f"{{name: {name}, emptyDir: {{}}}}")
        if not is_label(str(name)):
            yield ManifestProblem((*path, "name"), name, "lower-case letters, digits and '-'", "name: models")
        items = (volume.get("secret") or volume.get("configMap") or {}).get("items") or ()
        for number, item in enumerate(items):
            yield from _config_key((*path, sources[0], "items", number, "key"), item.get("key"))
        limit = (volume.get("emptyDir") or {}).get("sizeLimit")
        if limit is not None and quantity(limit) is None:
            yield ManifestProblem((*path, "emptyDir", "sizeLimit"), limit, "a quantity: 500Mi, 20Gi", "sizeLimit: 20Gi")
    yield from _twice(("volumes",), spec.get("volumes"), "name")
    example = "resourceClaims: [{name: gpu, resourceClaimTemplateName: one-gpu}]"
    for at, claim in enumerate(spec.get("resourceClaims") or ()):
        known = ("resourceClaimName", "resourceClaimTemplateName")
        yield from exactly_one(("resourceClaims", at), claim, known, example)


def _scheduling(spec: Manifest) -> Problems:
    """ValidateNodeSelector, validateTolerations, validateTopologySpreadConstraints, ValidateNodeSelectorRequirement."""
    for key, value in (spec.get("nodeSelector") or {}).items():
        if not is_label_key(key) or not is_label_value(str(value)):
            expected = "a label: letters, digits, '-', '_' and '.', at most 63"
            yield ManifestProblem(
                ("nodeSelector", key), value, expected, "nodeSelector: {nvidia.com/gpu.product: L40S}"
            )
    yield from _tolerations(spec)
    for at, spread in enumerate(spec.get("topologySpreadConstraints") or ()):
        path: FieldPath = ("topologySpreadConstraints", at)
        found = spread.get("whenUnsatisfiable")
        yield from one_of((*path, "whenUnsatisfiable"), found, ("DoNotSchedule", "ScheduleAnyway"))
        if int(spread.get("maxSkew", 1)) < 1:
            yield ManifestProblem((*path, "maxSkew"), spread["maxSkew"], "1 or more", "maxSkew: 1")
        if spread.get("minDomains") is not None and found != "DoNotSchedule":
            expected = "only with whenUnsatisfiable: DoNotSchedule"
            yield ManifestProblem(
                (*path, "minDomains"), spread["minDomains"], expected, "whenUnsatisfiable: DoNotSchedule"
            )
    for path, term in _node_terms(spec):
        operator, values = term.get("operator"), term.get("values") or ()
        yield from one_of((*path, "operator"), operator, ("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"))
        if operator in {"In", "NotIn"} and not values:
            yield ManifestProblem((*path, "values"), "none", f"at least one value for {operator}", "values: [a100]")
        if operator in {"Exists", "DoesNotExist"} and values:
            yield ManifestProblem((*path, "values"), values, f"no values for {operator}", f"operator: {operator}")
    yield from one_of(("restartPolicy",), spec.get("restartPolicy"), ("Always", "OnFailure", "Never"))
    dns = ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None")
    yield from one_of(("dnsPolicy",), spec.get("dnsPolicy"), dns)
    for field in ("serviceAccountName", "priorityClassName", "runtimeClassName"):
        name = spec.get(field)
        if name is not None and not is_subdomain(str(name)):
            yield ManifestProblem((field,), name, "lower-case letters, digits, '-' and '.'", f"{field}: gpu")


def _tolerations(spec: Manifest) -> Problems:
    for at, toleration in enumerate(spec.get("tolerations") or ()):
        path: FieldPath = ("tolerations", at)
        operator, effect = toleration.get("operator") or "Equal", toleration.get("effect") or None
        yield from one_of((*path, "operator"), operator, ("Equal", "Exists", "Lt", "Gt"))
        yield from one_of((*path, "effect"), effect, _EFFECTS)
        example = "{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}"
        if operator == "Exists" and toleration.get("value"):
            yield ManifestProblem((*path, "value"), toleration["value"], "no value with operator Exists", example)
        if not toleration.get("key") and operator != "Exists":
            yield ManifestProblem(path, "no key", "a key, or operator Exists", example)
        if toleration.get("tolerationSeconds") is not None and effect != "NoExecute":
            found = f"tolerationSeconds with effect {effect}"
            yield ManifestProblem(path, found, "effect NoExecute", "{key: k, operator: Exists, effect: NoExecute}")


def _node_terms(spec: Manifest) -> Iterator[tuple[FieldPath, Manifest]]:
    """Each expression of the node affinity, with its path."""
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    path: FieldPath = ("affinity", "nodeAffinity")
    wanted = "requiredDuringSchedulingIgnoredDuringExecution", "preferredDuringSchedulingIgnoredDuringExecution"
    terms = [
        ((*path, wanted[0], "nodeSelectorTerms", at), term)
        for at, term in enumerate((affinity.get(wanted[0]) or {}).get("nodeSelectorTerms") or ())
    ]
    terms += [
        ((*path, wanted[1], at, "preference"), entry.get("preference") or {})
        for at, entry in enumerate(affinity.get(wanted[1]) or ())
    ]
    for where, term in terms:
        for at, expression in enumerate(term.get("matchExpressions") or ()):
            yield (*where, "matchExpressions", at), expression


def _twice(path: FieldPath, items: Any, key: str) -> Problems:
    """A problem for each value of the key that two items have."""
    counts = Counter(item.get(key) for item in items or ())
    for value, count in counts.items():
        if count > 1:
            yield ManifestProblem(
                path, f"{count} items with {key} {value}", f"one {key} once", f"leave one {value} out"
            )
