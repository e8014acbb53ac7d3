"""The subresources scale and eviction."""

from typing import Any

from aiohttp import web

from tests.kube import status
from tests.kube.kinds import BY_PLURAL
from tests.kube.managers import FieldWriter
from tests.kube.registry import ObjectRegistry
from tests.kube.store import Object
from tests.kube.wire import PathTarget, body_of, change_of

NAMES = ("scale", "eviction")


async def answer(
    registry: ObjectRegistry, request: web.Request, verb: str, target: PathTarget, by: FieldWriter
) -> tuple[int, Any]:
    """Handles evictions, and scales, of which only the number of replicas counts."""
    obj = registry.get(target.resource, target.namespace, target.name)
    match target.part, verb:
        case "eviction", "create":
            return _evict(registry, target, await body_of(request))
        case "scale", "get":
            return 200, scale_of(obj)
        case "scale", "patch":
            scale = (await change_of(request))(scale_of(obj))
        case "scale", "update":
            scale = await body_of(request)
        case _:
            raise status.method_not_allowed()
    new = obj | {"spec": obj["spec"] | {"replicas": scale["spec"]["replicas"]}}
    stored, _ = registry.replace(target.resource, target.namespace, target.name, new, by=by)
    return 200, scale_of(stored)


def scale_of(obj: Object) -> Object:
    """The Scale of a Deployment or StatefulSet."""
    meta = {key: obj["metadata"][key] for key in ("name", "namespace", "uid", "resourceVersion")}
    has = (obj.get("status") or {}).get("replicas", 0)
    spec = {"replicas": obj["spec"].get("replicas", 1)}
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": meta,
        "spec": spec,
        "status": {"replicas": has},
    }


def _evict(registry: ObjectRegistry, target: PathTarget, eviction: Any) -> tuple[int, Any]:
    """Delete a pod unless a disruption budget forbids it: then 429."""
    pod = registry.get(target.resource, target.namespace, target.name)
    labels = pod["metadata"].get("labels") or {}
    budgets = registry.store.find(BY_PLURAL["poddisruptionbudgets"], target.namespace)
    for budget in budgets:
        wanted = budget["spec"]["selector"].get("matchLabels") or {}
        if wanted.items() <= labels.items() and not budget["status"].get("disruptionsAllowed"):
            said = "Cannot evict pod as it would violate the pod's disruption budget."
            cause = f"The disruption budget {budget['metadata']['name']} needs more healthy pods"
            causes = [{"reason": "DisruptionBudget", "message": cause}]
            raise status.ApiError(429, "TooManyRequests", said, {"causes": causes})
    registry.delete(target.resource, target.namespace, target.name, eviction.get("deleteOptions") or {})
    return 201, {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
