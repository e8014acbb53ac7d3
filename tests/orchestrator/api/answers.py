"""Parts of answers of the orchestrator, and an adapter to register."""

SPEC = {"lora_id": "sql/v1", "source": "file:///sql/v1"}


def code_of(answer):
    return answer.json()["error"]["code"]


async def next_event(lines):
    event = {}
    async for line in lines:
        if not line and event:
            return event
        name, _, value = line.partition(": ")
        if name in ("id", "event", "data"):
            event[name] = value
    return None
