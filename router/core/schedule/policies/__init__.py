"""Policies by name, one file each. `kv_lora` is ours; the others are there to compare with, and for who wants them."""

from router.core.schedule.decision import RoutingPolicy
from router.core.schedule.policies.kv_lora import KvLora
from router.core.schedule.policies.least_loaded import LeastLoaded
from router.core.schedule.policies.prefix_hash import PrefixHash
from router.core.schedule.policies.round_robin import RoundRobin
from router.core.schedule.policies.session import Session

POLICIES: dict[str, type[RoutingPolicy]] = {
    policy.name: policy for policy in (KvLora, RoundRobin, LeastLoaded, Session, PrefixHash)
}
