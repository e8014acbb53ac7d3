"""Registered adapters for tests, from fields of their spec, their policy and what inspection found, side by side."""

from dataclasses import fields, replace
from typing import Any

from orchestrator.model.adapters import AdapterSpec, RegisteredAdapter, SecretRef
from orchestrator.model.cards import AdapterCard
from orchestrator.model.policy import AdapterPolicy

_POLICY = {field.name for field in fields(AdapterPolicy)}
_CARD = {"rank", "size_bytes"}
_SPEC = {field.name for field in fields(AdapterSpec)}


def registered(lora_id: str, source: str = "s", **given: Any) -> RegisteredAdapter:
    """A registered adapter with these fields."""
    return changed(RegisteredAdapter(spec=AdapterSpec(lora_id=lora_id, source=source)), **given)


def changed(adapter: RegisteredAdapter, **given: Any) -> RegisteredAdapter:
    """The adapter with these fields."""
    if isinstance(secret := given.pop("secret", None), str):
        name, _, key = secret.partition("/")
        given["secret_ref"] = SecretRef(name=name, key=key)
    policy = {name: value for name, value in given.items() if name in _POLICY}
    spec = {name: value for name, value in given.items() if name in _SPEC}
    card = {name: value for name, value in given.items() if name in _CARD}
    found = {name: value for name, value in given.items() if name not in _POLICY | _SPEC | _CARD}
    if card:
        found["card"] = None if card.get("rank", 0) is None else replace(adapter.card or AdapterCard(), **card)
    return replace(adapter.with_policy(**policy).with_spec(**spec), **found)
