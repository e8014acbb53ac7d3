"""Settings that router and orchestrator share: where the fleet's workers are found."""

from pathlib import Path

from pydantic import Field

from lorafleet.kv.connectors import EngineSalt
from lorafleet.service.settings import Key, ServiceSettings


class WorkerDiscoverySettings(ServiceSettings):
    """Agentless engines by URL, and workers in Kubernetes by label."""

    engines: tuple[str, ...] = Field(
        default=(), description="engines without an agent, each as http://host:port or id=http://host:port"
    )
    engine_key: Key = Field(
        default="", repr=False, description="bearer key of engines without an agent: their vLLM --api-key"
    )
    engine_salt: EngineSalt = Field(
        default="auto",
        description="how engines without an agent that have a KV connector salt adapters (docs/engines.md): auto: as"
        " the engine reports; always; never; no_adapters",
    )
    kube_selector: str = Field(
        default="",
        description="label selector of the workers' Services in Kubernetes, whose EndpointSlices are followed;"
        " empty: none",
    )
    kube_namespaces: tuple[str, ...] = Field(default=(), description="namespaces of those Services; empty: our own")
    kubeconfig: Path | None = Field(
        default=None,
        description="kubeconfig of the API server; default: the files of KUBECONFIG, else the pod's service account",
    )
