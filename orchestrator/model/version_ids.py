"""Which lora_ids were versions of published names that are retired: nothing needs to be remembered of these."""

from collections.abc import Container, Mapping

from lorafleet.identity import split_version_id


def is_retired_version(lora_id: str, next_numbers: Mapping[str, int], registered: Container[str]) -> bool:
    """Whether this was the version of a published name: its number has been used, and it is not registered any more.

    next_numbers  published name -> number of its next version
    registered    registered lora_ids
    """
    found = split_version_id(lora_id)
    return found is not None and found[1] < next_numbers.get(found[0], 0) and lora_id not in registered
