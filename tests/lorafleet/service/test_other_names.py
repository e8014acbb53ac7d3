"""Variables, keys and flags of other systems are taken as our settings, or refused with what to use."""

import re

import pytest

from lorafleet.service.settings import SettingsError, load
from orchestrator.config import OrchestratorSettings
from orchestrator.model.policy import PlacementPolicy
from workers.config import WorkerSettings


def test_names_of_other_systems_are_taken_after_our_own_variables_and_before_the_file(monkeypatch, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("worker: {max_loras: 7, vllm_server_url: 'http://e:1', enable_dynamic_loading: true}\n")
    given = ["--config", str(file)]
    assert load(WorkerSettings, given, prog="example").max_loras == 7
    monkeypatch.setenv("VLLM_MAX_LORAS", "6")
    monkeypatch.setenv("VLLM_PRELOAD_LORAS", "a/v1, b/v1")
    found = load(WorkerSettings, given, prog="example")
    assert (found.max_loras, found.preload_loras, found.engine_url) == (6, ("a/v1", "b/v1"), "http://e:1")
    monkeypatch.setenv("LORAFLEET_WORKERS_MAX_LORAS", "5")
    assert load(WorkerSettings, given, prog="example").max_loras == 5


@pytest.mark.parametrize(
    ("settings", "section", "says"),
    [
        (WorkerSettings, "worker: {enable_dynamic_loading: false}", "enable_dynamic_loading: an agent always loads"),
        (WorkerSettings, "worker: [a]", "worker: expected a mapping of settings, found list"),
        (OrchestratorSettings, "lora_orchestrator: {policy: lazy}", "`lorafleet policy set loading="),
        (OrchestratorSettings, "worker: {}\nother: 1", "worker: there is no such setting"),
    ],
)
def test_a_name_of_another_system_without_a_meaning_here_is_refused_with_what_to_use(tmp_path, settings, section, says):
    (tmp_path / "c.yaml").write_text(section)
    with pytest.raises(SettingsError, match=says):
        load(settings, ["--config", str(tmp_path / "c.yaml")], prog="example")


@pytest.mark.parametrize("settings", [WorkerSettings, OrchestratorSettings])
def test_every_name_of_another_system_has_one_of_our_settings_or_advice(settings):
    for name, other in settings.other_names.items():
        assert (other.setting in settings.model_fields) != bool(other.advice), name
        changed = re.findall(r"policy set ([a-z_]+)=", other.advice)
        assert set(changed) <= PlacementPolicy.__dataclass_fields__.keys()


def test_another_systems_flag_is_refused_with_ours():
    with pytest.raises(SettingsError, match=r"^--max-loras-per-batch: it counts the base model, too: give --max-loras"):
        load(WorkerSettings, ["--max-loras-per-batch", "8"], prog="example")
