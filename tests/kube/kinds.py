"""The resources that the server has, and how each behaves where they differ.

source  kubernetes 1.36 pkg/registry/*/strategy.go: AllowUnconditionalUpdate, AllowCreateOnUpdate
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ResourceKind:
    """One row of the table below.

    unconditional      PUT without a resourceVersion overwrites; otherwise it is 422
    created_by_update  PUT makes it where there is none; otherwise that is 404
    graceful           DELETE marks it first (pods)
    """

    group: str
    version: str
    plural: str
    kind: str
    short: tuple[str, ...] = ()
    namespaced: bool = True
    unconditional: bool = True
    created_by_update: bool = False
    graceful: bool = False
    has_status: bool = False
    has_generation: bool = False

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        """The name in messages: `leases.coordination.k8s.io`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of its subresources."""
        own = {"Pod": ("eviction",), "Deployment": ("scale",), "StatefulSet": ("scale",)}.get(self.kind, ())
        return (*(("status",) if self.has_status else ()), *own)

    @property
    def prefix(self) -> str:
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    def path(self, namespace: str = "", name: str = "") -> str:
        """The path of the collection, or of one object."""
        within = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        return f"{self.prefix}{within}/{self.plural}" + (f"/{name}" if name else "")


RESOURCES = (
    ResourceKind("", "v1", "configmaps", "ConfigMap", ("cm",)),
    ResourceKind("", "v1", "secrets", "Secret"),
    ResourceKind("", "v1", "pods", "Pod", ("po",), graceful=True, has_status=True),
    ResourceKind("", "v1", "services", "Service", ("svc",), has_status=True),
    ResourceKind("", "v1", "events", "Event", ("ev",), created_by_update=True),
    ResourceKind("", "v1", "serviceaccounts", "ServiceAccount", ("sa",), unconditional=False),
    ResourceKind("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim", ("pvc",), has_status=True),
    ResourceKind("", "v1", "namespaces", "Namespace", ("ns",), namespaced=False, unconditional=False, has_status=True),
    ResourceKind("", "v1", "nodes", "Node", ("no",), namespaced=False, has_status=True),
    ResourceKind("apps", "v1", "deployments", "Deployment", ("deploy",), has_status=True, has_generation=True),
    ResourceKind("apps", "v1", "statefulsets", "StatefulSet", ("sts",), has_status=True, has_generation=True),
    ResourceKind("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler", ("hpa",), has_status=True),
    ResourceKind("batch", "v1", "jobs", "Job", has_status=True, has_generation=True),
    ResourceKind("coordination.k8s.io", "v1", "leases", "Lease", unconditional=False, created_by_update=True),
    ResourceKind("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice", has_generation=True),
    ResourceKind("networking.k8s.io", "v1", "ingresses", "Ingress", ("ing",), has_status=True, has_generation=True),
    ResourceKind("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy", ("netpol",), has_generation=True),
    ResourceKind(
        "policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", ("pdb",),
        unconditional=False, has_status=True, has_generation=True,
    ),
    ResourceKind("rbac.authorization.k8s.io", "v1", "roles", "Role"),
    ResourceKind("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding"),
    ResourceKind("resource.k8s.io", "v1", "resourceclaimtemplates", "ResourceClaimTemplate"),
)  # fmt: skip

BY_PLURAL = {resource.plural: resource for resource in RESOURCES}
BY_KIND = {(resource.api_version, resource.kind): resource for resource in RESOURCES}
BY_PATH = {(resource.group, resource.version, resource.plural): resource for resource in RESOURCES}
