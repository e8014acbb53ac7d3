"""What an API server refuses in an object, beyond its schema.

source  kubernetes 1.37 pkg/apis/*/validation; each rule names its function there
"""

import ipaddress
import re
from collections.abc import Callable
from itertools import chain

from lorafleet.local.manifests.pods import pod_problems
from lorafleet.local.manifests.problems import (
    FieldPath,
    Manifest,
    ManifestProblem,
    Problems,
    is_label,
    is_label_key,
    is_label_value,
    is_subdomain,
    one_of,
    quantity,
)

_PERCENT = re.compile(r"[0-9]+%")


def object_problems(item: Manifest) -> Problems:
    """Problems of one rendered object, in the order of its fields."""
    yield from _metadata(item)
    own = _RULES.get(item["kind"])
    if own is not None:
        yield from own(item)


def _metadata(item: Manifest) -> Problems:
    """ValidateObjectMeta; ValidateLabels; ValidateAnnotations."""
    meta = item["metadata"]
    name = str(meta.get("name") or "")
    is_name = is_label(name) if item["kind"] in {"Service", "Namespace"} else is_subdomain(name)
    # Names of Roles are paths' segments, and custom kinds have rules of their own.
    if not is_name and "rbac" not in item["apiVersion"]:
        yield ManifestProblem(
            ("metadata", "name"), name, "lower-case letters, digits and '-'", "fullnameOverride: fleet"
        )
    for key, value in (meta.get("labels") or {}).items():
        if not is_label_key(key) or not is_label_value(str(value)):
            expected = "letters, digits, '-', '_' and '.', at most 63"
            yield ManifestProblem(("metadata", "labels", key), value, expected, "labels: {team: ml-platform}")
    for key in meta.get("annotations") or {}:
        if not is_label_key(key.lower()):
            yield ManifestProblem(
                ("metadata", "annotations", key), key, "[DOMAIN/]NAME", "annotations: {example.com/a: b}"
            )


def _workload(item: Manifest) -> Problems:
    """ValidateDeploymentSpec, ValidateStatefulSetSpec."""
    spec = item["spec"]
    claimed = tuple(claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates") or ())
    for problem in chain(_metadata_of_pods(spec), pod_problems(spec["template"], claimed=claimed)):
        yield problem.below("spec", "template")
    strategy = spec.get("strategy") or {}
    rolling = strategy.get("rollingUpdate") or {}
    path: FieldPath = ("spec", "strategy", "rollingUpdate")
    yield from one_of(("spec", "strategy", "type"), strategy.get("type"), ("RollingUpdate", "Recreate"))
    if strategy.get("type") == "Recreate" and rolling:
        yield ManifestProblem(path, "rollingUpdate with type Recreate", "one of the two", "strategy: {type: Recreate}")
    for field in ("maxSurge", "maxUnavailable"):
        yield from _share((*path, field), rolling.get(field), most=100 if field == "maxUnavailable" else None)
    kinds = ("RollingUpdate", "OnDelete")
    yield from one_of(("spec", "updateStrategy", "type"), (spec.get("updateStrategy") or {}).get("type"), kinds)


def _metadata_of_pods(spec: Manifest) -> Problems:
    template = spec["template"]
    labels = template["metadata"].get("labels") or {}
    yield from _metadata({"apiVersion": "v1", "kind": "Pod", "metadata": {**template["metadata"], "name": "pod"}})
    for key, value in (spec["selector"].get("matchLabels") or {}).items():
        if labels.get(key) != value:
            yield ManifestProblem(
                ("metadata", "labels", key), labels.get(key), f"the selector's {value}", f"{key}: {value}"
            )


def _pod(item: Manifest) -> Problems:
    return pod_problems(item)


def _budget(item: Manifest) -> Problems:
    """ValidatePodDisruptionBudgetSpec."""
    spec = item["spec"]
    if spec.get("minAvailable") is not None and spec.get("maxUnavailable") is not None:
        found = "minAvailable and maxUnavailable"
        yield ManifestProblem(("spec",), found, "one of the two", "spec: {minAvailable: 1, maxUnavailable: null}")
    for field in ("minAvailable", "maxUnavailable"):
        yield from _share(("spec", field), spec.get(field), most=100)


def _share(path: FieldPath, value: object, *, most: int | None) -> Problems:
    """ValidatePositiveIntOrPercent, IsNotMoreThan100Percent."""
    text = str(value)
    is_number = isinstance(value, int) and value >= 0
    if value is None or is_number:
        return
    if not _PERCENT.fullmatch(text) or (most is not None and int(text[:-1]) > most):
        yield ManifestProblem(path, value, "a number, or a share of at most 100%", f"{path[-1]}: 25%")


def _ingress(item: Manifest) -> Problems:
    """validateIngressRules, validateHTTPIngressPath, ValidateIngressTLS."""
    spec = item["spec"]
    for at, rule in enumerate(spec.get("rules") or ()):
        yield from _host(("spec", "rules", at, "host"), rule.get("host"))
        for number, path in enumerate((rule.get("http") or {}).get("paths") or ()):
            where = ("spec", "rules", at, "http", "paths", number)
            yield from one_of((*where, "pathType"), path.get("pathType"), ("Exact", "Prefix", "ImplementationSpecific"))
            if path.get("pathType") in {"Exact", "Prefix"} and not str(path.get("path") or "").startswith("/"):
                yield ManifestProblem((*where, "path"), path.get("path"), "an absolute path", "path: /")
    for at, entry in enumerate(spec.get("tls") or ()):
        for number, host in enumerate(entry.get("hosts") or ()):
            yield from _host(("spec", "tls", at, "hosts", number), host)


def _route(item: Manifest) -> Problems:
    """Hostname of Gateway API 1.4 apis/v1/shared_types.go."""
    for at, host in enumerate(item["spec"].get("hostnames") or ()):
        yield from _host(("spec", "hostnames", at), host)


def _host(path: FieldPath, host: object) -> Problems:
    text = str(host or "")
    if not text:
        return
    try:
        ipaddress.ip_address(text)
    except ValueError:
        if is_subdomain(text.removeprefix("*.")):
            return
    yield ManifestProblem(path, text, "a DNS name without scheme, port or path, not an address", "llm.example.com")


def _service(item: Manifest) -> Problems:
    """ValidateService."""
    spec = item["spec"]
    kinds = ("ClusterIP", "NodePort", "LoadBalancer", "ExternalName")
    yield from one_of(("spec", "type"), spec.get("type"), kinds)
    families = ("SingleStack", "PreferDualStack", "RequireDualStack")
    yield from one_of(("spec", "ipFamilyPolicy"), spec.get("ipFamilyPolicy"), families)
    names = [port.get("name") for port in spec.get("ports") or ()]
    if len(names) > 1 and (None in names or len(set(names)) < len(names)):
        yield ManifestProblem(
            ("spec", "ports"), names, "a name of its own for each port", "ports: [{name: http, port: 80}]"
        )
    for at, port in enumerate(spec.get("ports") or ()):
        if port.get("nodePort") is not None and spec.get("type") not in {"NodePort", "LoadBalancer"}:
            found = f"{port['nodePort']} with type {spec.get('type', 'ClusterIP')}"
            yield ManifestProblem(
                ("spec", "ports", at, "nodePort"), found, "type NodePort or LoadBalancer", "type: NodePort"
            )


def _policy(item: Manifest) -> Problems:
    """ValidateNetworkPolicyPeer."""
    for kind, peers in (("ingress", "from"), ("egress", "to")):
        for at, rule in enumerate(item["spec"].get(kind) or ()):
            for number, peer in enumerate(rule.get(peers) or ()):
                path: FieldPath = ("spec", kind, at, peers, number)
                selectors = [field for field in ("podSelector", "namespaceSelector") if field in peer]
                if not peer or ("ipBlock" in peer and selectors):
                    found = " and ".join(["ipBlock", *selectors]) if peer else "an empty peer"
                    yield ManifestProblem(
                        path, found, "selectors, or an ipBlock alone", "{ipBlock: {cidr: 10.0.0.0/8}}"
                    )
                block = (peer.get("ipBlock") or {}).get("cidr")
                if block is not None and not _is_network(block):
                    expected = "an address and the length of its prefix"
                    yield ManifestProblem((*path, "ipBlock", "cidr"), block, expected, "cidr: 10.0.0.0/8")


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text)
    except ValueError:
        return False
    return "/" in text


def _autoscaler(item: Manifest) -> Problems:
    """validateHorizontalPodAutoscalerSpec, validateScalingRules."""
    spec = item["spec"]
    least, most = spec.get("minReplicas", 1), spec.get("maxReplicas", 1)
    if not 1 <= least <= most:
        yield ManifestProblem(("spec", "minReplicas"), least, f"1 to maxReplicas {most}", "minReplicas: 1")
    for kind in ("scaleUp", "scaleDown"):
        rules = (spec.get("behavior") or {}).get(kind) or {}
        path: FieldPath = ("spec", "behavior", kind)
        yield from one_of((*path, "selectPolicy"), rules.get("selectPolicy"), ("Max", "Min", "Disabled"))
        window = rules.get("stabilizationWindowSeconds")
        if window is not None and not 0 <= window <= 3600:
            expected = "0 to 3600 seconds"
            yield ManifestProblem(
                (*path, "stabilizationWindowSeconds"), window, expected, "stabilizationWindowSeconds: 900"
            )


def _claim(item: Manifest) -> Problems:
    """ValidatePersistentVolumeClaimSpec."""
    modes = ("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod")
    for at, mode in enumerate(item["spec"].get("accessModes") or ()):
        yield from one_of(("spec", "accessModes", at), mode, modes)
    storage = ((item["spec"].get("resources") or {}).get("requests") or {}).get("storage")
    if quantity(storage) is None:
        yield ManifestProblem(
            ("spec", "resources", "requests", "storage"), storage, "a quantity: 100Gi", "storage: 100Gi"
        )


def _binding(item: Manifest) -> Problems:
    """ValidateRoleBindingSubject."""
    for at, subject in enumerate(item.get("subjects") or ()):
        kinds = ("ServiceAccount", "User", "Group")
        yield from one_of(("subjects", at, "kind"), subject.get("kind"), kinds)


_RULES: dict[str, Callable[[Manifest], Problems]] = {
    "Deployment": _workload,
    "StatefulSet": _workload,
    "Pod": _pod,
    "PodDisruptionBudget": _budget,
    "Ingress": _ingress,
    "HTTPRoute": _route,
    "Service": _service,
    "NetworkPolicy": _policy,
    "HorizontalPodAutoscaler": _autoscaler,
    "PersistentVolumeClaim": _claim,
    "RoleBinding": _binding,
}
