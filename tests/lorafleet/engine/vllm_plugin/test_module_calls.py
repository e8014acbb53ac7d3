"""Hooks show which wrapped layers run, in one pass with an adapter; a compiled engine shows nothing."""

from types import SimpleNamespace

import pytest

from lorafleet.engine.vllm_plugin.module_calls import ModuleCalls, runs_hooks
from tests.lorafleet.engine.vllm_plugin.hooked_layers import HookedLayer, config_of


def manager_of(*layers: str, towers: tuple[str, ...] = ()) -> SimpleNamespace:
    mapping = SimpleNamespace(tower_model=list(towers), connector=None)
    modules = {name: HookedLayer() for name in layers}
    return SimpleNamespace(modules=modules, model=HookedLayer(), **({"mm_mapping": mapping} if towers else {}))


def test_layers_that_do_not_run_with_an_expected_adapter_are_idle():
    manager, told = manager_of("q", "kv_b", "lm_head"), []
    calls = ModuleCalls(manager, can_see=True)
    calls.before_pass({1})
    calls.expect(1, lambda: told.append(calls.idle_layers()))
    calls.before_pass({2})
    assert (calls.seen, manager.model.hooks) == ("not yet", []), "a pass of another adapter is not watched"
    calls.before_pass({1})
    manager.modules["q"].run()
    assert calls.idle_layers() == frozenset(), "nothing is said before the pass is over"
    manager.model.run()
    manager.modules["lm_head"].run()
    assert told == [{"kv_b", "lm_head"}, {"kv_b"}], "the head runs after the pass"
    assert calls.seen == "yes"
    calls.before_pass({1})
    assert not any(layer.hooks for layer in (*manager.modules.values(), manager.model))
    calls.expect(3, lambda: told.append(frozenset()))
    calls.before_pass({3})
    assert len(told) == 2


def test_several_mappings_of_one_step_are_one_pass():
    manager = manager_of("q")
    calls = ModuleCalls(manager, can_see=True)
    calls.expect(1, lambda: None)
    calls.before_pass({1})  # of the tower
    calls.before_pass({1})  # of the language model
    manager.modules["q"].run()
    manager.model.run()
    assert (calls.seen, calls.idle_layers()) == ("yes", frozenset())


def test_a_prompt_of_text_says_nothing_of_towers():
    manager = manager_of("language.q", "vision.q", towers=("vision.",))
    calls = ModuleCalls(manager, can_see=True)
    calls.expect(1, lambda: None)
    calls.before_pass({1})
    manager.model.run()
    assert calls.idle_layers() == {"language.q"}


def test_a_process_that_cannot_see_says_so_and_hooks_nothing():
    manager = manager_of("q")
    calls = ModuleCalls(manager, can_see=False)
    calls.expect(1, lambda: None)
    calls.before_pass({1})
    assert (calls.seen, calls.idle_layers(), manager.model.hooks) == ("no", frozenset(), [])


def test_an_error_of_who_expects_a_pass_does_not_reach_the_engine(caplog):
    manager = manager_of("q")
    calls = ModuleCalls(manager, can_see=True)
    calls.expect(1, lambda: 1 / 0)
    calls.before_pass({1})
    manager.model.run()
    assert calls.seen == "yes"
    assert "no report on the layers that run" in caplog.text


def test_layers_without_hooks_cost_the_engine_nothing(caplog):
    manager = manager_of("q")
    manager.modules["w"] = SimpleNamespace()
    calls = ModuleCalls(manager, can_see=True)
    calls.expect(1, lambda: None)
    calls.before_pass({1})
    assert (calls.seen, manager.modules["q"].hooks) == ("no", [])
    assert "cannot see which layers" in caplog.text


@pytest.mark.parametrize(
    ("config", "can_see"),
    [
        (config_of(), True),
        (config_of(mode=3), False),
        (config_of(graphs=2), False),
        (config_of(graphs=(2, 1)), False),
        (config_of(has_encoder=True), False),
    ],
    ids=["eager", "compiled", "graphs", "graphs of two kinds", "encoder"],
)
def test_hooks_run_in_an_eager_decoder_alone(config, can_see):
    assert runs_hooks(config) is can_see
