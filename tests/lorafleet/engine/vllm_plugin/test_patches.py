"""The plugin reports what vLLM's LoRA manager has of an adapter: after packing, prefixes and experts' two layers."""

import importlib
import sys
import tomllib
import warnings
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lorafleet.engine import vllm_plugin
from lorafleet.engine.vllm_plugin import patches
from lorafleet.engine.vllm_plugin.catalog_offers import OfferReader
from lorafleet.engine.vllm_plugin.engine_reports import (
    EngineProcessReport,
    PoolMisses,
    read_engine_reports,
    read_pool_misses,
)
from lorafleet.engine.vllm_plugin.lora_reports import LoraReport, ask_for_reports, read_reports
from lorafleet.engine.vllm_plugin.offers import write_offer
from orchestrator.model.offers import AdapterOffer
from tests.lorafleet.engine.vllm_plugin.hooked_layers import HookedLayer, config_of
from tests.workers.broken import safetensors

ROOT = Path(__file__).parents[4]
LAYER = "model.layers.0"


class Manager:
    """vLLM's manager of adapters, as far as the plugin reads it: layers, packed parts, and the lookup of weights."""

    def __init__(self, layers: list[str], packed: dict[str, list[str]], *, is_pooling: bool = False) -> None:
        self.modules: dict[str, object] = {name: HookedLayer() for name in layers}
        self.packed_modules = packed
        self.model = HookedLayer()
        self.adapters: dict[int, SimpleNamespace] = {}
        self.is_pooling_model = self._is_pooling = is_pooling

    def _get_lora_layer_weights(self, lora: SimpleNamespace, name: str) -> object | None:
        if self._is_pooling and name not in lora.loras:
            name = name.removeprefix("model.")
        return lora.loras.get(name)

    def get_adapter(self, number: int) -> SimpleNamespace | None:
        return self.adapters.get(number)

    def merge(self, lora: SimpleNamespace) -> None:
        for layer, parts in self.packed_modules.items():
            if any(self._get_lora_layer_weights(lora, part) for part in parts):
                lora.loras[layer] = object()
                for part in parts:
                    lora.loras.pop(part, None)


def fresh_lora(*names: str) -> SimpleNamespace:
    return SimpleNamespace(loras={name: object() for name in names}, modules_to_save={})


def taken(manager: Manager, *names: str) -> set[str]:
    lora = fresh_lora(*names)
    manager.merge(lora)
    return patches.taken_names(manager, lora, names)


PARTS = [f"{LAYER}.self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj")]
PACKED = {f"{LAYER}.self_attn.qkv_proj": PARTS}
LAYERS = [*PACKED, f"{LAYER}.self_attn.o_proj"]


def test_parts_of_a_packed_layer_are_taken_with_it_and_unknown_names_are_not():
    names = (PARTS[0], PARTS[2], f"{LAYER}.self_attn.o_proj", "visual.blocks.0.qkv")
    assert taken(Manager(LAYERS, PACKED), *names) == set(names[:3])


def test_names_without_the_pooling_models_prefix_are_taken():
    names = [name.removeprefix("model.") for name in (*PARTS, f"{LAYER}.self_attn.o_proj")]
    assert taken(Manager(LAYERS, PACKED, is_pooling=True), *names) == set(names)
    assert taken(Manager(LAYERS, PACKED), *names) == set()


def test_both_layers_of_experts_in_one_tensor_are_taken_or_not():
    experts = f"{LAYER}.mlp.experts"
    assert taken(Manager([experts], {}), experts, f"{experts}.base_layer") == {experts, f"{experts}.base_layer"}
    other = f"{LAYER}.block_sparse_moe.experts"
    assert taken(Manager([other], {}), experts, f"{experts}.base_layer") == set()


class WorkerLoRAManager:
    """vLLM's adapters of one worker process: `_load_adapter` reads one, `add_adapter` adds it to the manager."""

    def __init__(self, manager: Manager, files: dict[int, SimpleNamespace]) -> None:
        self._adapter_manager = manager
        self.files = files
        self.applied: list[int] = []

    def _load_adapter(self, request: SimpleNamespace) -> SimpleNamespace:
        return self.files[request.lora_int_id]


class Tensor:
    """A tensor of 2-byte numbers as far as the plugin reads it. A view has the storage of all its tensor's numbers."""

    def __init__(self, storage: int, count: int, of: int = 0) -> None:
        self.storage, self.count, self.of = storage, count, of or count

    def untyped_storage(self) -> SimpleNamespace:
        return SimpleNamespace(data_ptr=lambda: self.storage, nbytes=lambda: 2 * self.of)

    def numel(self) -> int:
        return self.count

    def element_size(self) -> int:
        return 2


class PunicaWrapperCPU:
    """By its name alone."""


class LRUCacheWorkerLoRAManager(WorkerLoRAManager):
    def create_lora_manager(self, model: object, vllm_config: object) -> object:
        assert vllm_config
        experts = Tensor(3, 1000)
        manager = self._adapter_manager
        manager.modules |= {
            "q": HookedLayer(lora_a_stacked=(Tensor(1, 40),), lora_b_stacked=(Tensor(2, 60),), other=Tensor(9, 7)),
            "experts": HookedLayer(w13_lora_a_stacked=(experts,), lora_a_stacked=[Tensor(3, 500, of=1000), None]),
        }
        manager.punica_wrapper_mapping = {"language_model": PunicaWrapperCPU()}
        manager.device, manager.lora_slots = SimpleNamespace(type="cpu"), 4
        manager._active_adapters, manager._registered_adapters = {1: None}, {1: None, 2: None}
        return model

    def _apply_adapters(self, requests: set[SimpleNamespace]) -> None:
        self.applied += sorted(each.lora_int_id for each in requests)

    def add_adapter(self, request: SimpleNamespace) -> bool:
        if request.lora_int_id not in self._adapter_manager.adapters:
            lora = self._load_adapter(request)
            self._adapter_manager.merge(lora)
            self._adapter_manager.adapters[request.lora_int_id] = lora
        return True


@pytest.fixture
def patched(monkeypatch, tmp_path) -> type[LRUCacheWorkerLoRAManager]:
    group = SimpleNamespace(rank_in_group=1, world_size=2)
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", SimpleNamespace(get_world_group=lambda: group))
    methods = ("add_adapter", "create_lora_manager", "_apply_adapters")
    for owner, name in ((WorkerLoRAManager, "_load_adapter"), *((LRUCacheWorkerLoRAManager, name) for name in methods)):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    shape = SimpleNamespace(WorkerLoRAManager=WorkerLoRAManager, LRUCacheWorkerLoRAManager=LRUCacheWorkerLoRAManager)
    patches.patch_worker_manager(shape, tmp_path)
    return LRUCacheWorkerLoRAManager


def test_each_load_is_reported_once_where_it_was_asked_for(patched, tmp_path):
    manager = patched(Manager(LAYERS, PACKED), {1: fresh_lora(*PARTS), 2: fresh_lora(*PARTS)})
    asked, other = (SimpleNamespace(lora_int_id=i, lora_name=f"a{i}", lora_path="/none") for i in (1, 2))
    ask_for_reports(tmp_path, "a1")
    assert manager.add_adapter(asked)
    assert manager.add_adapter(other)
    assert read_reports(tmp_path, "a1") == [LoraReport(1, 2, 3, (), lora_int_id=1)]
    assert read_reports(tmp_path, "a2") == []
    ask_for_reports(tmp_path, "a1")
    assert manager.add_adapter(asked)
    assert read_reports(tmp_path, "a1") == [], "a further request reads no file again"


def test_a_process_says_what_it_runs_adapters_with_and_what_a_slot_takes(patched, tmp_path):
    manager = patched(Manager(LAYERS, PACKED), {})
    assert manager.create_lora_manager("model", config_of()) == "model"
    # Four slots of 100 numbers in one layer and 1,000 in another, whose views count once; two bytes each.
    assert read_engine_reports(tmp_path) == (EngineProcessReport("PunicaWrapperCPU", "cpu", 2 * 1100 // 4),)
    assert read_pool_misses(tmp_path) == {}, "the first process alone counts"


def test_misses_of_the_pool_are_counted_where_they_happen(patched, tmp_path):
    sys.modules["vllm.distributed.parallel_state"].get_world_group().rank_in_group = 0
    manager = patched(Manager(LAYERS, PACKED), {})
    manager.create_lora_manager("model", config_of())
    wanted = [SimpleNamespace(lora_int_id=number, lora_path="/a") for number in (1, 2, 3)]
    warm_up = SimpleNamespace(lora_int_id=4, lora_path="/not/a/real/path")
    manager._apply_adapters([*wanted, warm_up])
    assert manager.applied == [1, 2, 3, 4]
    assert list(read_pool_misses(tmp_path).values()) == [PoolMisses(host=1, disk=1)]


def test_a_report_on_kernels_that_fails_costs_the_engine_nothing(patched, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(Tensor, "untyped_storage", None)
    assert patched(Manager(LAYERS, PACKED), {}).create_lora_manager("model", config_of()) == "model"
    assert read_engine_reports(tmp_path) == ()
    assert "no report on the LoRA kernels" in caplog.text


@pytest.fixture
def vllm_names():
    """vLLM's own rule of names, imported before `patched` replaces what it imports."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's imports warn
        importlib.import_module("vllm.lora.utils")


@pytest.mark.vllm
def test_a_layer_that_the_model_reads_past_its_wrapper_is_reported_after_the_first_pass(vllm_names, patched, tmp_path):
    inner = Manager(LAYERS, PACKED)
    projection, packed = inner.modules[LAYERS[1]], inner.modules[LAYERS[0]]
    header = dict.fromkeys(
        (f"base_model.model.{name}.lora_{half}.weight" for name in (*PARTS, LAYERS[1]) for half in "AB"),
        ("F32", (8, 8)),
    )
    (tmp_path / "adapter_model.safetensors").write_bytes(safetensors(header))
    manager = patched(inner, {number: fresh_lora(*PARTS, LAYERS[1]) for number in (1, 2)})
    manager.create_lora_manager("model", config_of())
    first, second = (SimpleNamespace(lora_int_id=i, lora_name=f"a{i}", lora_path=str(tmp_path)) for i in (1, 2))
    ask_for_reports(tmp_path, "a1")
    assert manager.add_adapter(first)
    (before,) = read_reports(tmp_path, "a1")
    assert (before.ignored, before.uncalled, before.calls_seen) == ((), (), "not yet")
    manager._apply_adapters([first])
    projection.run()
    inner.model.run()
    (after,) = read_reports(tmp_path, "a1")
    assert (after.modules, after.ignored, after.uncalled) == (4, (), tuple(sorted(PARTS)))
    assert after.calls_seen == "yes"
    ask_for_reports(tmp_path, "a2")
    assert manager.add_adapter(second)
    assert read_reports(tmp_path, "a2")[0].uncalled == after.uncalled, "a later adapter needs no pass of its own"
    manager._apply_adapters([second])
    assert not any(layer.hooks for layer in (projection, packed, inner.model)), "later passes cost nothing"


def test_a_report_that_fails_costs_the_engine_nothing(patched, tmp_path, caplog):
    manager = patched(Manager(LAYERS, PACKED), {1: fresh_lora("other.q_proj")})  # its file is read, and is not there
    ask_for_reports(tmp_path, "a1")
    assert manager.add_adapter(SimpleNamespace(lora_int_id=1, lora_name="a1", lora_path="/none"))
    assert read_reports(tmp_path, "a1") == []
    assert "no report on adapter a1" in caplog.text


async def test_vllm_resolves_what_is_offered_and_nothing_else(tmp_path):
    module = SimpleNamespace(LoRAResolver=object, LoRARequest=SimpleNamespace, LoRAResolverRegistry=Registry())
    patches.register_resolver(module, OfferReader(tmp_path, None))
    (resolver,) = module.LoRAResolverRegistry.resolvers.values()
    assert await resolver.resolve_lora("base", "a@1") is None
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "adapter_config.json").touch()
    write_offer(tmp_path, AdapterOffer("a@1", str(tmp_path / "files"), "ab"))
    request = await resolver.resolve_lora("base", "a@1")
    assert (request.lora_name, request.lora_path) == ("a@1", str(tmp_path / "files"))
    assert await resolver.resolve_lora("base", "files") is None


class Registry:
    """vLLM's registry of resolvers, as far as the plugin uses it."""

    def __init__(self) -> None:
        self.resolvers: dict[str, Any] = {}

    def register_resolver(self, name: str, resolver: Any) -> None:
        self.resolvers[name] = resolver


def test_a_manager_of_another_shape_stays_as_it_is(tmp_path, caplog):
    shape = SimpleNamespace(WorkerLoRAManager=SimpleNamespace())
    patches.patch_worker_manager(shape, tmp_path)
    assert vars(shape.WorkerLoRAManager) == {}
    assert "another shape" in caplog.text


def test_a_module_is_acted_on_once_it_is_imported(tmp_path, monkeypatch):
    (tmp_path / "late_module.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    acted: list[ModuleType] = []
    patches.after_import("late_module", acted.append)
    assert acted == []
    module = import_module("late_module")
    assert (acted, module.VALUE) == ([module], 1)
    assert type(module.__spec__.loader).__name__ == "SourceFileLoader"
    patches.after_import("late_module", acted.append)
    assert acted == [module, module]
    monkeypatch.delitem(sys.modules, "late_module")
    import_module("late_module")
    assert len(acted) == 2


def test_vllm_finds_the_plugin_under_its_name():
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    (where,) = named.values()
    module, _, function = where.partition(":")
    assert getattr(import_module(module), function) is vllm_plugin.register


@pytest.fixture(scope="module")
def weights_mapper() -> type:
    """vLLM's own class of name mappings, imported before a test replaces a module of vLLM."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_module("vllm.lora.utils")
        return import_module("vllm.model_executor.models.utils").WeightsMapper


@pytest.mark.vllm
def test_ignored_modules_have_their_names_in_the_file_by_vllms_own_mapping(weights_mapper, patched, tmp_path):
    mapper = weights_mapper(
        orig_to_new_prefix={"model.language_model.": "language_model.model.", "model.vision_tower.": "vision_tower."}
    )
    in_file = [
        *("model.language_model.layers.0.self_attn.q_proj", "model.language_model.layers.0.self_attn.o_proj"),
        *("model.vision_tower.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj"),
    ]
    in_engine = [
        *("language_model.model.layers.0.self_attn.q_proj", "language_model.model.layers.0.self_attn.o_proj"),
        *("vision_tower.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj"),
    ]
    halves = [f"base_model.model.{name}.lora_{half}.weight" for name in in_file for half in "AB"]
    (tmp_path / "adapter_model.safetensors").write_bytes(safetensors(dict.fromkeys(halves, ("F32", (8, 8)))))
    packed = {"language_model.model.layers.0.self_attn.qkv_proj": [in_engine[0]]}
    inner = Manager([*packed, in_engine[1]], packed)
    inner.model = SimpleNamespace(hf_to_vllm_mapper=mapper)
    manager = patched(inner, {1: fresh_lora(*in_engine)})
    ask_for_reports(tmp_path, "a1")
    assert manager.add_adapter(SimpleNamespace(lora_int_id=1, lora_name="a1", lora_path=str(tmp_path)))
    assert read_reports(tmp_path, "a1") == [LoraReport(1, 2, 4, tuple(sorted(in_file[2:])), lora_int_id=1)]
