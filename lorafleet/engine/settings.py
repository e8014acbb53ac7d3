"""Settings that router and orchestrator share: where the fleet's workers are found."""

from pathlib import Path

import structlog
from pydantic import BaseModel, ConfigDict, Field

from lorafleet.keys.own_key import OwnKey
from lorafleet.kv.connectors import EngineSalt
from lorafleet.service.settings import Key, ServiceSettings

log = structlog.get_logger()


class PoolFromZero(BaseModel):
    """A pool that an autoscaler may scale to zero workers.

    start_s   seconds from that until its first worker is ready
    workload  the pool's workload in our namespace, as `statefulsets/fleet-lorafleet-l40s`; empty: only an autoscaler
              scales it from zero
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    base_model: str = Field(min_length=1)
    start_s: float = Field(default=120.0, gt=0, allow_inf_nan=False)
    workload: str = Field(default="", pattern=r"^((deployments|statefulsets)/[a-z0-9]([-.a-z0-9]*[a-z0-9])?)?$")


class WorkerDiscoverySettings(ServiceSettings):
    """Agentless engines by URL, and workers in Kubernetes by label."""

    engines: tuple[str, ...] = Field(
        default=(), description="engines without an agent, each as http://host:port or id=http://host:port"
    )
    agent_token: Key = Field(
        default="",
        repr=False,
        description="bearer key for calls to agents: scope `agent` for an orchestrator, `agent-load` for a router."
        " `token` is never sent to them",
    )
    agent_token_file: Path | None = Field(
        default=None, description="file with that key, used in place of `agent_token`; re-read when it changes"
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
    scale_from_zero: dict[str, PoolFromZero] = Field(
        default={},
        description="pools that may have no worker, by name: {base_model, start_s, workload}. Routers hold requests for"
        " their base models, and the orchestrator scales `workload` to one worker, if it is given (docs/kubernetes.md)",
    )
    kubeconfig: Path | None = Field(
        default=None,
        description="kubeconfig of the API server; default: the files of KUBECONFIG, else the pod's service account",
    )


def agent_key_of(settings: WorkerDiscoverySettings) -> OwnKey:
    """The key for calls to agents; a service with a key of its own and none for agents logs what to do.

    Raises KeyFileError.
    """
    has_own = bool(settings.token or settings.token_file)
    if has_own and not (settings.agent_token or settings.agent_token_file):
        advice = (
            "`token` is never sent to them: where agents have key files, give --agent-token-file a key that `lorafleet"
            " keys new --scopes agent` (orchestrator) or `agent-load` (router) makes, in the agents' key files"
        )
        log.warning("agents are called without a key", advice=advice)
    return OwnKey(settings.agent_token, settings.agent_token_file)
