"""A router of a test: it counts as a router does, and its reports bring what its cumulative counts have grown by."""

import msgspec

from lorafleet.identity import asked_version
from orchestrator.model.usage import CountBatch, CountedRow, RequestCounts, UsageReport

DIGEST12 = "abababababab"


def loaded_name(lora_id):
    return f"{lora_id}@{DIGEST12}"


class CountingRouter:
    """`total` is set by the test, in any way; `report` numbers reports and batches, and sends the growth of `total`.

    total  (lora_id, worker_id) -> counts since the boot
    """

    def __init__(self, router_id="r0", boot_id="b0"):
        self.router_id, self.boot_id = router_id, boot_id
        self.total, self._told = {}, {}
        self.seq = 0
        self.unsent = ()

    def count(self, lora_id="a", worker_id="w0", **counts):
        """Set the counts of an adapter since the boot."""
        self.total[lora_id, worker_id] = counts

    def body(self, revision_seen, uses, seq=None, **more):
        """A report as JSON. `uses`: cumulative counts of an engine name on a worker, those that run included."""
        in_flight, ages_s = {}, {}
        for use in uses:
            name, worker_id, running = use["engine_name"], use["worker_id"], use.get("in_flight", 0)
            version = asked_version(name)
            if running:
                in_flight.setdefault(worker_id, {})[name] = running
            if version is None:
                continue
            before = self.total.get((version[0], worker_id), {})
            sent = max(before.get("sent", 0), use.get("requests", 0) - running)  # what has ended has ended
            first_tokens = use.get("first_tokens", 0)
            self.count(
                version[0],
                worker_id,
                requests=sent,
                sent=sent,
                work_s=use.get("work_s", 0.0),
                engine_errors=use.get("errors", 0),
                first_token={10: first_tokens} if first_tokens else {},
                engine_first_token_s=use.get("first_token_s", 0.0),
            )
            if "last_dispatch_age_s" in use or sent > before.get("sent", 0):
                ages_s[version[0]] = use.get("last_dispatch_age_s", 0.0)
        report = self.report(revision_seen, seq, in_flight=in_flight, asked_age_s=ages_s, **more)
        return msgspec.to_builtins(report, str_keys=True)

    def report(self, revision_seen=0, seq=None, is_lost=False, age_s=0.0, **more):
        """The next report. `is_lost`: it will not be accepted, and its batches come again."""
        self.seq = self.seq + 1 if seq is None else seq
        rows = []
        for (lora_id, worker_id), counts in self.total.items():
            told = self._told.get((lora_id, worker_id), {})
            grown = {name: _growth(value, told.get(name)) for name, value in counts.items()}
            if any(any(value.values()) if isinstance(value, dict) else value for value in grown.values()):
                rows.append(CountedRow(adapter=lora_id, worker=worker_id, counts=RequestCounts(**grown)))
            self._told[lora_id, worker_id] = counts
        batches = self.unsent
        if rows:
            batches += (CountBatch(number=self.seq, age_s=age_s, rows=tuple(rows)),)
        self.unsent = batches if is_lost else ()
        return UsageReport(
            router_id=self.router_id,
            boot_id=self.boot_id,
            seq=self.seq,
            revision_seen=revision_seen,
            batches=batches,
            **more,
        )


def _growth(value, before):
    """What a count, or counts by bucket, have grown by."""
    if isinstance(value, dict):
        return {key: count - (before or {}).get(key, 0) for key, count in value.items()}
    return value - (before or 0)
