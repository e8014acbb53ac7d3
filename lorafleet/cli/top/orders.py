"""What `lorafleet top` sorts by."""

from enum import StrEnum


class AdapterOrder(StrEnum):
    requests = "requests"
    tokens = "tokens"
    first_token = "first_token"  # noqa: S105  (no password)
    errors = "errors"
    hit_share = "hit_share"
    name = "name"


class WorkerOrder(StrEnum):
    load = "load"
    kv = "kv"
    waiting = "waiting"
    name = "name"
