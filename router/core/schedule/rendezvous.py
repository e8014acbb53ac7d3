"""Rendezvous hashing: where something belongs when nobody decides, so that everybody means the same place."""

from collections.abc import Callable, Sequence

from xxhash import xxh3_64_intdigest

from router.core.fleet import Replica


def rendezvous_order(lora_id: str, replicas: Sequence[Replica]) -> list[Replica]:
    """The replicas by their claim on an adapter, highest first: its home, then where it belongs when that cannot.

    The orchestrator's placement uses the same claim, so that both mean the same home; a test holds them together.
    """
    return sorted(replicas, key=claim_on(lora_id), reverse=True)


def claim_on(key: str) -> Callable[[Replica], tuple[int, str]]:
    """What orders replicas by their claim on a key; losing one replica moves only the keys that were its own."""

    def claim(replica: Replica) -> tuple[int, str]:
        return xxh3_64_intdigest(f"{len(key)}:{key}{replica.id}".encode()), replica.id

    return claim
