"""Which adapters may be served without the modules that an engine ignores."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.core.errors import EngineError
from workers.verification.effect import NAMES_SHOWN, check_ignored, ignored_note

TOWER = tuple(f"model.vision_tower.layers.{layer}.q_proj" for layer in range(12))


def verdict(modules: int, ignored: tuple[str, ...], policy: str, *, experts: int = 0, ignored_experts: int = 0) -> str:
    try:
        check_ignored(modules, ignored, experts=experts, ignored_experts=ignored_experts, policy=policy)
    except EngineError as exc:
        return f"{exc.code}: {exc}"
    return "served"


@pytest.mark.parametrize(
    ("policy", "part", "all_experts", "everything"),
    [
        ("auto", "served", "modules_ignored", "adapter_no_effect"),
        ("accept", "served", "served", "adapter_no_effect"),
        ("refuse", "modules_ignored", "modules_ignored", "adapter_no_effect"),
    ],
)
def test_each_policy_on_a_tower_all_experts_and_everything(policy, part, all_experts, everything):
    assert verdict(36, (), policy) == "served"
    assert verdict(36, TOWER, policy).startswith(part)
    assert verdict(36, TOWER, policy, experts=13, ignored_experts=12).startswith(part)
    assert verdict(36, TOWER, policy, experts=12, ignored_experts=12).startswith(all_experts)
    assert verdict(12, TOWER, policy).startswith(f"{everything}: the engine has 0 of its 12 modules")


@given(st.sets(st.text("abc.", min_size=1), min_size=1))
def test_message_and_note_have_the_first_names_and_how_many_more(names):
    note = ignored_note(100, sorted(names))
    assert f"ignores {len(names)} of its 100 modules" in note
    assert all(name in note for name in sorted(names)[:NAMES_SHOWN])
    assert (" more" in note) == (len(names) > NAMES_SHOWN)
