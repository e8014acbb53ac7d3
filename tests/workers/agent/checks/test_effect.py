"""Which adapters may be served without the modules that an engine ignores."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.engine.vllm_plugin.lora_reports import LoadedModules
from workers.agent.checks.effect import NAMES_SHOWN, check_ignored, ignored_note, uncalled_modules
from workers.core.errors import EngineError
from workers.verification.base_check import ModuleVerdict
from workers.verification.manifest import AdapterDescription

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


LATENT = tuple(f"model.layers.{layer}.self_attn.kv_b_proj" for layer in range(2))


def test_message_and_note_say_that_the_engine_has_a_module_and_never_runs_it():
    with pytest.raises(EngineError, match=r"uses 0 of its 2 modules.*runs this layer past what adapters change"):
        check_ignored(2, LATENT, experts=0, ignored_experts=0, policy="accept", uncalled=LATENT)
    assert "past what adapters change" in ignored_note(8, LATENT, LATENT)
    assert f", of {LATENT[0]})" in ignored_note(8, LATENT, LATENT[:1])
    assert "past" not in ignored_note(8, LATENT)


def described(uncalled=(), measured=()) -> AdapterDescription:
    return AdapterDescription(
        rank=8, alpha=8, target_modules=(), dtype="F32", base_model="", modules=2,
        verdict=ModuleVerdict(uncalled=uncalled, measured=frozenset(measured)),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("seen", "by_hooks", "by_description", "expected"),
    [
        ("no", (), described(uncalled=LATENT), LATENT),
        ("not yet", (), described(uncalled=LATENT), LATENT),
        ("yes", (), described(uncalled=LATENT), ()),
        ("yes", LATENT, None, LATENT),
        ("yes", LATENT, described(), LATENT),
        ("yes", LATENT, described(measured=LATENT[:1]), LATENT[1:]),
        ("yes", (), described(uncalled=LATENT, measured=LATENT[:1]), LATENT[:1]),
    ],
    ids=["table", "table, not seen yet", "seen before table", "seen", "seen again", "measured before seen", "both"],
)
def test_what_was_measured_counts_before_what_was_seen_and_that_before_the_table(
    seen, by_hooks, by_description, expected
):
    loaded = LoadedModules(2, (), uncalled=by_hooks, calls_seen=seen)
    assert uncalled_modules(loaded, by_description) == expected
