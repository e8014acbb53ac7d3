"""The lora_ids of published names' versions: `name/v<number>`."""

from collections.abc import Container, Mapping


def version_id(name: str, number: int) -> str:
    """The lora_id of a name's version."""
    return f"{name}/v{number}"


def split_version_id(lora_id: str) -> tuple[str, int] | None:
    """(name, number) of a version's lora_id `name/v<number>`; None for any other."""
    name, found, number = lora_id.rpartition("/v")
    is_number = number.isascii() and number.isdigit() and number[0] != "0" and len(number) < 10
    return (name, int(number)) if found and name and is_number else None


def is_retired_version(lora_id: str, next_numbers: Mapping[str, int], registered: Container[str]) -> bool:
    """Whether this was the version of a published name: its number has been used, and it is not registered any more.

    next_numbers  published name -> number of its next version
    registered    registered lora_ids
    """
    found = split_version_id(lora_id)
    return found is not None and found[1] < next_numbers.get(found[0], 0) and lora_id not in registered
