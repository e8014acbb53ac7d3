"""Which value of the chart a field of a rendered object came from, as a path that users write."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lorafleet.local.manifests.problems import FieldPath, Manifest

# The chart's own container of each component; what is about another one came by an overlay.
_CONTAINERS = {"router": "router", "orchestrator": "orchestrator", "worker": "worker", "test": "completion"}
_PODS_VALUES = (
    "affinity", "nodeSelector", "priorityClassName", "runtimeClassName", "tolerations", "topologySpreadConstraints",
    "volumes",
)  # fmt: skip
_VOLUMES = {"[models]": "modelVolume", "[adapters]": "adapterVolume"}
_CONTAINERS_VALUES = ("env", "envFrom", "resources", "volumeMounts")
_OVERLAYS = {
    "Deployment": "workload", "StatefulSet": "workload", "Service": "service", "Ingress": "ingress",
    "HTTPRoute": "httpRoute", "PodDisruptionBudget": "disruptionBudget", "HorizontalPodAutoscaler": "autoscaler",
    "ScaledObject": "autoscaler", "ServiceAccount": "serviceAccount", "Pod": "pod",
}  # fmt: skip
# By kind: the head of a field's path and the value that it is made of.
_FIELDS: dict[str, tuple[tuple[FieldPath, FieldPath], ...]] = {
    "PodDisruptionBudget": ((("spec", "maxUnavailable"), ("maxUnavailable",)),),
    "Deployment": ((("spec", "strategy", "rollingUpdate"), ("rollingUpdate",)),),
    "Ingress": ((("spec", "rules"), ("ingress", "hosts")), (("spec", "tls"), ("ingress", "tls"))),
    "HTTPRoute": ((("spec", "hostnames"), ("httpRoute", "hostnames")),),
    "Service": ((("spec", "type"), ("service", "type")),),
    "HorizontalPodAutoscaler": (
        (("spec", "minReplicas"), ("autoscaling", "minReplicas")),
        (("spec", "behavior", "scaleDown", "stabilizationWindowSeconds"), ("autoscaling", "scaleDownAfterSeconds")),
    ),
}
_ITEM_NAMES = ("name", "mountPath")


def shown(path: FieldPath) -> str:
    """The path as users write it: `pools.l40s.volumes[models].nfs`."""
    steps = (f"[{step}]" if isinstance(step, int) else step if step.startswith("[") else f".{step}" for step in path)
    return "".join(steps).removeprefix(".")


def origin(item: Manifest, path: FieldPath, values: Manifest) -> str:
    """The path of the value that a field of an object came from; the object and the field if no value has it.

    values  what the user has given
    """
    named = _named(item, path)
    for candidate in _candidates(item, named):
        if _has(values, candidate):
            return shown(candidate)
    return f"{item['kind']} {item['metadata']['name']}, {shown(named)}"


def _named(item: Manifest, path: FieldPath) -> FieldPath:
    """The path with the names of items that have one in place of their positions."""
    node: Any = item
    steps: list[str | int] = []
    for step in path:
        node = _below(node, step)
        name = next((node[key] for key in _ITEM_NAMES if key in node), None) if isinstance(node, Mapping) else None
        steps.append(f"[{name}]" if isinstance(step, int) and name is not None else step)
    return tuple(steps)


def _candidates(item: Manifest, path: FieldPath) -> Iterator[FieldPath]:
    """Paths of values that may be a field's origin, the likeliest first."""
    labels = item["metadata"].get("labels") or {}
    component, pool = labels.get("app.kubernetes.io/component"), labels.get("lorafleet.io/pool")
    part = {"worker": "poolDefaults", "test": "tests"}.get(str(component), component)
    parts: list[FieldPath] = [("pools", pool), ("pools", f"[{pool}]")] if pool else []
    parts += [(part,)] if part else []
    for at in parts:
        yield from ((*at, *below) for below in _below_part(item["kind"], component, path))
    if item["kind"] == "NetworkPolicy":
        yield ("networkPolicy",)


def _below_part(kind: str, component: Any, path: FieldPath) -> Iterator[FieldPath]:
    in_pod = path[2:] if path[:2] == ("spec", "template") else path if kind == "Pod" else None
    if in_pod is not None:
        own = ("spec", "containers", f"[{_CONTAINERS.get(component)}]")
        if in_pod[:3] == own and in_pod[3:4] and in_pod[3] in _CONTAINERS_VALUES:
            yield in_pod[3:]
            yield in_pod[3:-1]
        if in_pod[:1] == ("spec",) and in_pod[1:2] and in_pod[1] in _PODS_VALUES:
            yield in_pod[1:]
        if in_pod[:2] == ("spec", "volumes") and in_pod[2] in _VOLUMES:
            yield (_VOLUMES[str(in_pod[2])], *in_pod[3:])
        if in_pod[:2] == ("metadata", "labels"):
            yield ("podLabels", *in_pod[2:])
        yield ("overlays", "pod", *in_pod)
        yield ("overlays", "pod", *in_pod[:-1])
    if kind in _OVERLAYS:
        yield ("overlays", _OVERLAYS[kind], *path)
    for head, value in _FIELDS.get(kind, ()):
        if path[: len(head)] == head:
            yield (*value, *path[len(head) :])
            yield value


def _has(values: Any, path: FieldPath) -> bool:
    node = values
    for step in path:
        node = _below(node, step)
        if node is None:
            return False
    return True


def _below(node: Any, step: str | int) -> Any:
    """What is below a node: a field, an item by position, or an item by `[name]`; None without it."""
    if isinstance(node, Mapping):
        return node.get(step)
    if not isinstance(node, Sequence) or isinstance(node, str):
        return None
    if isinstance(step, int):
        return node[step] if step < len(node) else None
    return next((entry for entry in node if step in _names_of(entry)), None)


def _names_of(entry: Any) -> list[str]:
    return [f"[{entry[key]}]" for key in _ITEM_NAMES if key in entry] if isinstance(entry, Mapping) else []
