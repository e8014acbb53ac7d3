"""The peers' rules by name: by whose rule it is."""

from benchmarks.trace.learned_peers import LlmDPredicted, Lodestar
from benchmarks.trace.peers import (
    AiBrix,
    CacheAware,
    Dynamo,
    LlmD,
    LlmDPrecise,
    StackKvAware,
    StackPrefixAware,
    StackRoundRobin,
    StackSession,
)
from benchmarks.trace.rules import Rule
from benchmarks.trace.token_peers import DynamoSessions, LlmDTokenLoad, LMetric, RayPrefixAware, RayTokenLoad

PEERS: dict[str, type[Rule]] = {
    "production-stack roundrobin": StackRoundRobin,
    "production-stack session": StackSession,
    "production-stack prefixaware": StackPrefixAware,
    "production-stack kvaware": StackKvAware,
    "vllm-router cache_aware": CacheAware,
    "llm-d": LlmD,
    "llm-d precise": LlmDPrecise,
    "llm-d token load": LlmDTokenLoad,
    "llm-d predicted": LlmDPredicted,
    "dynamo": Dynamo,
    "dynamo sessions": DynamoSessions,
    "aibrix prefix-cache": AiBrix,
    "lmetric": LMetric,
    "ray token load": RayTokenLoad,
    "ray prefix-aware": RayPrefixAware,
    "lodestar": Lodestar,
}
