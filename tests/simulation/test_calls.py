"""How many calls the services of a fleet send each other for one change."""

import asyncio
import re
from collections import Counter

from tests.simulation.programs import EngineFlags

POLL_S = 20.0
QUIET = {"catalog_poll_s": POLL_S, "metadata_poll_s": POLL_S}
"""Settings of a router that reads for some time at events alone."""
BY_THE_CLOCK = ("/health", "/metrics", "/v1/models", "/v1/usage", "/v1/workers/register", "/v1/completions")
"""Paths of calls that services make every second or so, whatever happens."""
REST_S = 3.0


async def calls_of(simulation, act):
    """The calls that follow from one act until the fleet is at rest, with digests left out."""
    requests = simulation.loop.network.requests
    before = Counter(requests)
    await act()
    await asyncio.sleep(REST_S)
    sent = Counter()
    for (process, call), count in (requests - before).items():
        if not process.startswith("test") and not call.endswith(BY_THE_CLOCK):
            sent[re.sub(r"\d+$", "", process), re.sub(r"[0-9a-f]{64}", "DIGEST", call)] += count
    return dict(sent)


async def test_publish_to_two_workers_takes_one_inspection_two_loads_and_at_most_one_copy_beside(simulation):
    flags = EngineFlags(load_s=0.03, max_loras=4, max_cpu_loras=8)
    fleet = await simulation.fleet(workers=2, engine=flags, router=QUIET, pass_interval_s=600.0)
    steps = [simulation.adapter(f"step-{number}", seed=number) for number in range(3)]
    await asyncio.sleep(2 * POLL_S)  # the router follows the events, the workers' settings are read

    async def publish(step):
        (await fleet.http.post("/v1/published/policy", json={"source": f"file://{step}"})).raise_for_status()

    for step in steps[:-1]:  # what a load takes is known then
        await publish(step)
    sent = await calls_of(simulation, lambda: publish(steps[-1]))
    # A copy that begins just before the second load fetches beside it, or with it: without one each load keeps its own
    # files.
    copies = sent.pop(("orch", "POST /v1/admin/mark_files"), 0)
    fetches = sent["w", "GET /v1/files/DIGEST"]
    assert copies <= 1
    assert 1 <= fetches <= 1 + copies
    assert sent == {
        ("orch", "POST /v1/admin/inspect_lora"): 1,
        ("orch", "POST /v1/admin/load_lora"): 2,
        ("w", "GET /v1/files/DIGEST"): fetches,
        ("w", "GET /v1/files/DIGEST/adapter_config.json"): fetches,
        ("w", "GET /v1/files/DIGEST/adapter_model.safetensors"): fetches,
        ("w", "POST /v1/load_lora_adapter"): 2,
        ("router", "GET /metadata"): 2,
        ("router", "GET /v1/catalog"): 4,  # the version is registered, the name points at it: read, and confirmed
    }
