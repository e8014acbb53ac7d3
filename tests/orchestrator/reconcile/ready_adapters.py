"""An adapter that tests bring to a worker."""

from lorafleet.identity import engine_name
from tests.orchestrator.doubles import digest_of

SQL = "file:///sql/v1"


SQL_ENGINE = engine_name("sql/v1", digest_of(SQL))


async def ready(service, lora_id="sql/v1", **spec):
    """Register the adapter and load it."""
    await service.register(lora_id, **spec)
    await service.ensure(lora_id)
    await service.settle()
    assert (await service.adapter(lora_id))["status"]["state"] == "ready"
