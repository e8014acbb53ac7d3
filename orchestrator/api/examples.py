"""An example of every body and response for the OpenAPI document. A test parses each."""

from typing import Any

_DIGEST = "3f9a1c2b77aa" + "0" * 52
_AT = "2026-11-21T12:00:00.000Z"
_TARGETS = [{"lora_id": "sql-expert/v1", "weight": 9}, {"lora_id": "sql-expert/v2", "weight": 1}]
_SPEC = {
    "lora_id": "sql-expert/v1",
    "source": "file:///srv/adapters/sql-expert/v1",
    "base_model": "tiny-qwen",
    "policy": {"loading": "eager", "min_replicas": 2},
    "tenants": ["acme"],
}
_CARD = {
    "base_model": "tiny-qwen",
    "rank": 16,
    "alpha": 32.0,
    "target_modules": ["k_proj", "o_proj", "q_proj", "v_proj"],
    "dtype": "BF16",
    "size_bytes": 5_242_880,
    "digest": _DIGEST,
    "source": "file:///srv/adapters/sql-expert/v1",
}
_ADAPTER = {
    "lora_id": "sql-expert/v1",
    "spec": _SPEC | {"digest": _DIGEST},
    "status": {
        "state": "ready",
        "card": _CARD | {"effect": "applied"},
        "replicas": {"desired": 2, "ready": 2},
        "workers": ["w0", "w1"],
    },
}
_ALIAS = {"name": "sql-expert", "spec": {"targets": _TARGETS}, "status": {"targets": _TARGETS}}
_WORKER = {
    "id": "w0",
    "agent_url": "http://10.0.0.7:8090",
    "engine_url": "http://10.0.0.7:8100",
    "base_model": "tiny-qwen",
    "state": "ready",
    "zone": "a",
    "node": "node-7",
    "capacity": {"loaded_count": 1, "available_slots": 15, "max_lora_rank": 64},
    "adapters": ["sql-expert/v1"],
}
_PLACEMENT = {
    "lora_id": "sql-expert/v1",
    "digest": _DIGEST,
    "worker_id": "w0",
    "state": "ready",
    "location": "device",
    "desired": True,
}
_PUBLISHED = {
    "name": "rollout-policy",
    "spec": {"replicas": "all", "keep_versions": 2},
    "status": {
        "lora_id": "rollout-policy/v7",
        "digest": _DIGEST,
        "version": 7,
        "versions": [
            {"lora_id": "rollout-policy/v7", "version": 7, "digest": _DIGEST, "published_at": _AT},
            {
                "lora_id": "rollout-policy/v6",
                "version": 6,
                "digest": "b" * 64,
                "published_at": _AT,
                "superseded_at": _AT,
            },
        ],
        "workers": ["w0", "w1"],
        "is_new": True,
        "keep_versions": 2,
        "max_staleness_s": 3600,
        "shadows_base": False,
        "revision": 1794900000000,
    },
}
_HISTORY = {
    "id": 41,
    "at": _AT,
    "kind": "alias_set",
    "subject": "sql-expert",
    "actor": "tenant acme (key 9f86d081884c)",
    "body": {"targets": [["sql-expert/v2", 1.0]], "was": [["sql-expert/v1", 1.0]]},
}
_ORPHAN = {
    "lora_id": "sql-expert/v1",
    "card": _CARD,
    "engine_name": "sql-expert/v1@3f9a1c2b77aa",
    "workers": ["w0"],
}
_RECORD = {
    "adapters": [
        {
            "lora_id": "sql-expert/v1",
            "source": "file:///srv/adapters/sql-expert/v1",
            "base_model": "tiny-qwen",
            "digest": _DIGEST,
            "rank": 16,
        }
    ],
    "names": [{"name": "sql-expert", "targets": [{"lora_id": "sql-expert/v1"}]}],
    "revision": 1794900000000,
}
_TALLY = {"requests": 400, "errors": 1, "error_rate": 0.0025, "first_tokens": 399, "mean_first_token_s": 0.21}
_METADATA = {
    "instance_id": "w0",
    "agent_url": "http://10.0.0.7:8090",
    "model": {
        "name": "tiny-qwen",
        "base_model": "tiny-qwen",
        "runtime_config": {
            "block_size": 16,
            "total_kv_blocks": 24064,
            "max_num_seqs": 256,
            "max_num_batched_tokens": 2048,
            "max_model_len": 32768,
        },
    },
    "transport": {"engine_url": "http://10.0.0.7:8100"},
    "agent_boot_id": "a1",
    "engine_boot_id": "e1",
}

_PAUSE = {
    "scope": "tenant acme",
    "tenant": "acme",
    "namespace": "",
    "mode": "keep",
    "owner": "tenant acme (key 3f9a1c2b77aa)",
    "began_at": _AT,
    "expires_at": _AT,
    "running": 2,
    "routers_behind": 0,
}
EXAMPLES: dict[str, dict[str, Any]] = {
    "AdapterBatch": {"adapters": [_SPEC, {"lora_id": "legal/v2", "source": "s3://bucket/legal-v2"}]},
    "AdapterItem": _ADAPTER,
    "AdapterList": {"data": [_ADAPTER], "next": None},
    "AdapterSpec": _SPEC,
    "AdoptRequest": {"lora_ids": ["sql-expert/v1"]},
    "AliasItem": _ALIAS,
    "AliasList": {"data": [_ALIAS], "next": None},
    "AliasSpec": {"targets": _TARGETS},
    "BatchAnswer": {
        "data": [
            {"lora_id": "sql-expert/v1", "status": 201},
            {"lora_id": "legal/v2", "status": 409, "code": "immutable", "error": "'legal/v2' is registered with ..."},
        ]
    },
    "Catalog": {
        "revision": 1794900000000,
        "adapters": [
            {
                "lora_id": "sql-expert/v1",
                "digest": _DIGEST,
                "base_model": "tiny-qwen",
                "source": "file:///srv/adapters/sql-expert/v1",
                "state": "ready",
            }
        ],
        "aliases": [{"name": "sql-expert", "targets": _TARGETS}],
        "workers": [{"id": "w0", "agent_url": "http://10.0.0.7:8090", "state": "ready"}],
    },
    "EnsureAnswer": {
        "lora_id": "sql-expert/v1",
        "digest": _DIGEST,
        "state": "loading",
        "ready": [],
        "loading": ["w0"],
        "expected_s": 1.5,
    },
    "EnsureRequest": {"replicas": 1, "wait_s": 10.0},
    "Heartbeat": {"metadata": _METADATA, "files": {"disk_id": "5f3c", "since": 0, "upto": 1, "held": ["a" * 64]}},
    "HeartbeatAnswer": {"epoch": 7, "revision": 1794900000000, "interval_s": 1.0, "is_warm": True, "in_flight": 3},
    "HistoryList": {"data": [_HISTORY], "next": "41"},
    "OrphanList": {"data": [_ORPHAN], "next": None},
    "PlacementList": {"data": [_PLACEMENT], "next": None},
    "Plan": {
        "actions": [
            {
                "operation": "load",
                "lora_id": "sql-expert/v1",
                "worker_id": "w1",
                "reason": "replica 2 of 2 (eager); its home",
                "turn": 0,
                "size_bytes": 5_242_880,
                "seconds": 1.5,
            }
        ],
        "unplaced": ["tax/v1"],
        "reasons": {"tax/v1": "no free slot on 2 workers, and nothing there may be evicted"},
        "targets": {"sql-expert/v1": {"before": 1, "after": 2}},
        "cost": {"loads": 1, "unloads": 0, "bytes": 5_242_880, "seconds": 1.5},
        "is_settled": True,
    },
    "PlanRequest": {
        "demand": {"sql-expert/v1": {"factor": 10}},
        "workers_gone": ["w0"],
        "workers_more": [{"like": "w1", "count": 2}],
        "policy": {"reserve_slots": 0},
        "adapter_policies": {"legal/v2": {"min_replicas": 2}},
        "adapters": [{"lora_id": "tax/v1", "source": "file:///srv/adapters/tax/v1", "policy": {"loading": "eager"}}],
    },
    "UsageList": {
        "since": "2026-11-01T00:00:00.000Z",
        "until": "2026-12-01T00:00:00.000Z",
        "currency": "EUR",
        "data": [
            {
                "group": {"tenant": "acme"},
                "usage": {
                    "requests": 1200,
                    "succeeded": 1180,
                    "refused": 15,
                    "failed": 2,
                    "cancelled": 3,
                    "prompt_tokens": 1_440_000,
                    "cached_tokens": 900_000,
                    "completion_tokens": 270_000,
                    "prefill_s": 61.2,
                    "decode_s": 240.9,
                    "slot_s": 90_000.0,
                    "loads": 3,
                    "fetched_bytes": 15_728_640,
                },
                "cost": 12.5,
            }
        ],
        "next": None,
    },
    "PauseItem": _PAUSE,
    "PauseList": {"data": [_PAUSE]},
    "PauseSpec": {"mode": "keep", "lease_s": 60},
    "PlacementPolicy": {"loading": "lazy", "reserve_slots": 0, "loads_per_worker": 1},
    "PublishSpec": {"source": "/shared/runs/42/step-7", "replicas": "all", "keep_versions": 2},
    "PublishedItem": _PUBLISHED,
    "PublishedList": {"data": [_PUBLISHED], "next": None},
    "AcceptanceQuestion": {
        "file": '{"format": "lorafleet-acceptance/1", "model": "org/base", "dtype": "bfloat16"}\n...'
    },
    "AcceptanceAnswer": {
        "lora_id": "sql-expert/v2",
        "acceptance": {"w0": {"result": "equal", "distance": 0.0004, "noise": 0.0003, "scale": 1.0, "file": _DIGEST}},
        "errors": {"w1": "the engine did not answer within 10 s"},
    },
    "UploadedAdapter": _ADAPTER
    | {"spec": _SPEC | {"source": f"fleet:{_DIGEST}", "digest": _DIGEST}, "kept_on": ["w0", "w3"]},
    "UploadProgress": {
        "lora_id": "sql-expert/v2",
        "files": [{"name": "archive", "received_bytes": 1048576, "total_bytes": 4194304}],
        "missing": ["archive"],
        "received_bytes": 1048576,
    },
    "RolloutItem": {
        "name": "sql-expert",
        "spec": {"to": "sql-expert/v2", "steps": [{"weight": 0.05}, {"weight": 1.0, "for_s": 0}]},
        "status": {
            "before": [{"lora_id": "sql-expert/v1", "weight": 1}],
            "to": [{"lora_id": "sql-expert/v2", "weight": 1}],
            "steps": [{"weight": 0.05, "for_s": 300}, {"weight": 1.0, "for_s": 300}],
            "state": "watching",
            "paused": False,
            "step": 0,
            "weight": 0.05,
            "began_at": _AT,
            "since": _AT,
            "old": _TALLY,
            "new": _TALLY,
            "needed": 50,
        },
    },
    "RolloutPatch": {"paused": True},
    "RolloutSpec": {"to": "sql-expert/v2", "steps": [{"weight": 0.05, "for_s": 300}, {"weight": 1.0}]},
    "FleetRecord": _RECORD,
    "ImportRequest": {"record": _RECORD, "from_fleet": "https://orchestrator.eu.example", "parts": ["adapters"]},
    "ImportAnswer": {
        "changes": [
            {"subject": "adapter", "name": "sql-expert/v1", "change": "add", "fields": {"digest": [None, _DIGEST]}}
        ],
        "is_done": True,
    },
    "Status": {"status": "ready", "epoch": 7, "revision": 1794900000000},
    "UsageAnswer": {"accepted": True, "revision": 1794900000000},
    "UsageReport": {
        "router_id": "router-0",
        "boot_id": "7c1e",
        "seq": 12,
        "revision_seen": 1794900000000,
        "batches": [
            {
                "number": 3,
                "rows": [{"adapter": "sql-expert/v1", "worker": "w0", "counts": {"requests": 40, "sent": 40}}],
            }
        ],
        "in_flight": {"w0": {"sql-expert/v1@3f9a1c2b77aa": 2}},
    },
    "WorkerDrain": {"deadline_s": 60},
    "WorkerItem": _WORKER,
    "WorkerList": {"data": [_WORKER], "next": None},
}


_FIRST_TOKEN = {"p50": 0.21, "p95": 0.48, "p99": 0.9}
_WHOLE = {"p50": 1.9, "p95": 4.2, "p99": 6.6}
_TOTAL = {
    "name": "sql-expert/v1",
    "requests": 7200,
    "requests_per_s": 2.0,
    "errors": 3,
    "refusals": 40,
    "codes": {"429 rate_limited": 40, "502 engine_error": 3},
    "prompt_tokens": 8_600_000,
    "output_tokens": 1_600_000,
    "hit_predicted": 0.71,
    "hit_real": 0.69,
    "hit_lost": 0.04,
    "waited_s": 0.02,
    "cold_starts": 1,
    "cold_s": 4.4,
    "first_token_s": _FIRST_TOKEN,
    "whole_s": _WHOLE,
}
_COLUMN = [1.9, None]
EXAMPLES |= {
    "TrafficSeries": {
        "kind": "adapter",
        "name": "sql-expert/v1",
        "range_s": 3600,
        "step_s": 60,
        "total": _TOTAL,
        "points": {
            "at": [1_794_900_000, 1_794_900_060],
            "requests_per_s": _COLUMN,
            "errors_per_s": _COLUMN,
            "refusals_per_s": _COLUMN,
            "prompt_tokens_per_s": _COLUMN,
            "output_tokens_per_s": _COLUMN,
            "waited_s": _COLUMN,
            "cold_starts": [1, None],
            "hit_predicted": [0.7, None],
            "hit_real": [0.7, None],
            "first_token_s": {"p50": _COLUMN, "p95": _COLUMN, "p99": _COLUMN},
            "whole_s": {"p50": _COLUMN, "p95": _COLUMN, "p99": _COLUMN},
            "codes": {"429 rate_limited": _COLUMN},
            "gauges": {"waiting": _COLUMN},
        },
    },
    "TrafficTotals": {"kind": "adapter", "range_s": 3600, "data": [_TOTAL]},
    "TrafficShares": {
        "kind": "adapter",
        "name": "sql-expert/v1",
        "by": "worker",
        "range_s": 3600,
        "data": [
            {
                "name": "w0",
                "requests": 900,
                "share": 0.75,
                "errors": 2,
                "cold_starts": 1,
                "output_tokens": 91200,
                "hit_real": 0.81,
                "first_token_s": {"p50": 0.04, "p99": 0.31},
            }
        ],
    },
    "RouterList": {
        "data": [
            {
                "id": "router-0",
                "state": "live",
                "age_s": 0.4,
                "revision_seen": 1794900000000,
                "now": {"version": "0.1.0", "policy": "kv_lora", "in_flight": 2, "waiting": {"acme": 1}},
            }
        ],
        "next": None,
    },
}
_DECISION = {
    "request_id": "570e3466aa97f2ab",
    "at": _AT,
    "base_model": "tiny-qwen",
    "adapter": "sql-expert/v1@3f9a1c2b77aa",
    "policy": "kv_lora",
    "worker_id": "w0",
    "prompt_tokens": 104,
    "cached_tokens": 64,
}
_REQUEST = {
    "request_id": "570e3466aa97f2ab",
    "at": _AT,
    "status": 429,
    "code": "rate_limited",
    "limit": "concurrent_requests",
    "key": "2c26b46b68ff",
    "tenant": "acme",
    "asked": "sql-expert/v1",
    "duration_s": 0.0004,
    "stages": {"whole": 0.0004},
}
EXAMPLES |= {
    "AdapterOffer": {
        "engine_name": f"sql-expert/v1@{_DIGEST[:12]}",
        "path": "/srv/adapters/sql-expert/v1",
        "digest": _DIGEST,
    },
    "LogTail": {"lines": ['{"event": "ready", "component": "worker", "level": "info"}']},
    "Metadata": _METADATA,
    "RelayedDecision": _DECISION,
    "RelayedDecisions": {"data": [_DECISION], "next": None, "missing": []},
    "AliasComparison": {
        "name": "sql",
        "range_s": 3600,
        "baseline": "sql-expert/v1",
        "needed": 50,
        "data": [{"lora_id": "sql-expert/v1", "weight": 9, "share": 0.9, "worse": ""}],
    },
    "AskedAnswers": {
        "data": [
            {
                "model": "sql-expert/v1",
                "status": 200,
                "request_id": "570e3466aa97f2ab",
                "text": "SELECT customer_id FROM orders GROUP BY 1 HAVING count(*) > 1",
                "first_token_s": 0.04,
                "whole_s": 0.31,
                "prompt_tokens": 14,
                "output_tokens": 17,
            }
        ]
    },
    "RelayedRequests": {"data": [_REQUEST], "next": None, "missing": []},
    "RouterQuestions": {"data": [{"id": "9f2c-4", "kind": "decisions", "body": {"limit": 50}, "tenant": None}]},
    "RouterReply": {"router_id": "router-0", "id": "9f2c-4", "status": 200, "body": {"data": [_DECISION]}},
}


def add_examples(document: dict[str, Any]) -> None:
    """Add our examples to the schemas of an OpenAPI document that have none."""
    for name, schema in document["components"]["schemas"].items():
        example = EXAMPLES.get(name.removesuffix("-Input").removesuffix("-Output"))
        if example is not None and "examples" not in schema:
            schema["examples"] = [example]
