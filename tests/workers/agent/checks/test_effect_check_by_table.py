"""Where an engine does not report on an adapter, its table of modules says what the engine ignores."""

from pathlib import Path
from unittest.mock import sentinel

import pytest

from workers.agent.checks.effect_check import EffectCheck
from workers.config import WorkerSettings
from workers.core.errors import EngineError
from workers.metrics import WorkerMetrics
from workers.verification.base_check import ModuleVerdict
from workers.verification.manifest import AdapterDescription
from workers.wire import IgnoredModules, WorkerAdapter

TOWER = ("visual.blocks.0.attn.proj", "visual.blocks.1.attn.proj")
EXPERTS = ("model.layers.0.mlp.experts", "model.layers.0.mlp.experts.base_layer")
UNCOMPARED = "4 of 4 modules were not compared with the base model's shapes: its weights are packed (awq)"


def check_of(folder: Path, described: AdapterDescription | None, **settings) -> EffectCheck:
    return EffectCheck(
        settings=WorkerSettings(model=str(folder), state_dir=folder, canary="off", **settings),
        engine=sentinel.never_asked,
        metrics=WorkerMetrics("w0"),
        describe=lambda _folder: described,
    )


def adapter(folder: Path, policy: str = "") -> WorkerAdapter:
    return WorkerAdapter(
        lora_id="a",
        digest="d",
        engine_name="a@d",
        path=str(folder),
        source="",
        base_model="",
        rank=8,
        size_bytes=100,
        ignored_policy=policy,
    )


def described(ignored=(), experts=0, modules=6) -> AdapterDescription:
    why = (f"{len(ignored)} of its {modules} modules are ignored",) if ignored else ()
    return AdapterDescription(
        rank=8,
        alpha=16,
        target_modules=(),
        dtype="BF16",
        base_model="",
        modules=modules,
        experts=experts,
        verdict=ModuleVerdict(ignored=ignored, why=why, notes=(UNCOMPARED,)),
    )


async def test_modules_that_the_table_calls_ignored_are_listed_with_the_adapter(tmp_path):
    check = check_of(tmp_path, described(TOWER))
    found = await check.check(sentinel.client, adapter(tmp_path))
    assert found.ignored_modules == IgnoredModules(count=2, names=TOWER)
    assert found.note == f"2 of its 6 modules are ignored; {UNCOMPARED}"


async def test_adapter_that_loses_all_its_experts_is_refused_unless_accepted(tmp_path):
    check = check_of(tmp_path, described(EXPERTS, experts=2))
    with pytest.raises(EngineError, match="none of its experts") as refused:
        await check.check(sentinel.client, adapter(tmp_path))
    assert refused.value.code == "modules_ignored"
    assert (await check.check(sentinel.client, adapter(tmp_path, "accept"))).ignored_modules.count == 2


async def test_adapter_whose_files_cannot_be_read_again_has_no_note(tmp_path):
    found = await check_of(tmp_path, None).check(sentinel.client, adapter(tmp_path))
    assert (found.note, found.ignored_modules) == ("", None)
