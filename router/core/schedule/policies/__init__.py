"""Routing policies by name, one file each. `kv_lora` is the default."""

from router.core.schedule.policies.kv_lora import KvLoraPolicy
from router.core.schedule.policies.least_loaded import LeastLoadedPolicy
from router.core.schedule.policies.prefix_hash import PrefixHashPolicy
from router.core.schedule.policies.round_robin import RoundRobinPolicy
from router.core.schedule.policies.session import SessionPolicy
from router.core.schedule.policy import RoutingPolicy

POLICIES: dict[str, type[RoutingPolicy]] = {
    policy.name: policy
    for policy in (KvLoraPolicy, RoundRobinPolicy, LeastLoadedPolicy, SessionPolicy, PrefixHashPolicy)
}
