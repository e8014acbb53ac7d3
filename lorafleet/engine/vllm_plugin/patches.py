"""Patches of vLLM in its processes: reports on adapters and their kernels, and loads of what is offered.

After a load it reports which modules of the adapter vLLM's LoRA manager really has. vLLM 0.32 drops a module without a
word if its own name table maps the module's name to none of its layers, and then answers by the base model. After the
first pass with an adapter it reports which of these modules run at all.
"""

import importlib
import importlib.abc
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from lorafleet.engine.vllm_plugin.catalog_offers import URL_VARIABLE, OfferReader
from lorafleet.engine.vllm_plugin.engine_reports import EngineProcessReport, PoolMissCounter, write_engine_report
from lorafleet.engine.vllm_plugin.lora_reports import REPORTS_VARIABLE, LoraReport, is_of_experts, write_report
from lorafleet.engine.vllm_plugin.module_calls import ModuleCalls, runs_hooks
from lorafleet.engine.vllm_plugin.offers import mark_as_taking_offers

log = logging.getLogger(__name__)

_WORKER_MANAGER = "vllm.lora.worker_manager"
_RESOLVERS = "vllm.lora.resolver"
_WEIGHTS = "adapter_model.safetensors"
# What vLLM 0.32 lora/utils.py parse_fine_tuned_lora_name takes off a tensor's name, and `.weight` of a whole module.
_SUFFIX = re.compile(r"\.(?:lora_[AB]\.weight|lora_embedding_[AB]|weight|bias)$")
# Of the adapters with which vLLM 0.32 warms up (v1/worker/lora_model_runner_mixin.py maybe_setup_dummy_loras).
_DUMMY_PATH = "/not/a/real/path"
_FIRST_EXPERT_LAYER = ".base_layer"


def report_loads() -> None:
    """Report each load of this process, if the environment names a folder for reports.

    vLLM's module is patched when it is imported: importing it here would load torch's kernels in processes without
    adapters, too.
    """
    if folder := os.environ.get(REPORTS_VARIABLE):
        after_import(_WORKER_MANAGER, lambda module: patch_worker_manager(module, Path(folder)))


def take_offers() -> None:
    """Load what the agent or the orchestrator offers with its first request, if the environment names one of them."""
    if os.environ.get(REPORTS_VARIABLE) or os.environ.get(URL_VARIABLE):
        after_import(_RESOLVERS, lambda module: register_resolver(module, OfferReader.of(os.environ)))
        if folder := os.environ.get(REPORTS_VARIABLE):
            try:
                mark_as_taking_offers(Path(folder))
            except OSError:
                log.exception("lorafleet: this engine takes no offers of adapters")


def after_import(name: str, act: Callable[[ModuleType], None]) -> None:
    """Call `act` with a module: now if it is imported already, else right after its import."""
    if (module := sys.modules.get(name)) is not None:
        act(module)
    else:
        sys.meta_path.insert(0, _ImportHook(name, act))


class _ImportHook(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds one module as all other finders do, and acts on it after its import; then it is gone from `sys`."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._act = act
        self._loader: importlib.abc.Loader | None = None

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec with this object as its loader; None for another module."""
        if fullname != self._name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the module's own loader does."""
        assert self._loader is not None
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module by its own loader, which is also what it keeps, then act on it."""
        assert self._loader is not None
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._act(module)


def patch_worker_manager(module: Any, folder: Path) -> None:
    """Patch vLLM's module `lora.worker_manager` so that each load is reported below `folder`.

    A version without the patched methods stays as it is, and reports nothing.
    """
    loads = getattr(module, "WorkerLoRAManager", None)
    adds = getattr(module, "LRUCacheWorkerLoRAManager", None)
    if not hasattr(loads, "_load_adapter") or not hasattr(adds, "add_adapter"):
        log.warning("lorafleet cannot ask this vLLM for an adapter's modules: its LoRA manager has another shape")
        return
    load, add = loads._load_adapter, adds.add_adapter  # type: ignore[union-attr]
    if hasattr(adds, "create_lora_manager") and hasattr(adds, "_apply_adapters"):
        _patch_pool(adds, folder)

    def load_adapter(self: Any, lora_request: Any) -> Any:
        """Load an adapter from its files, and keep its modules' names: vLLM merges some of them afterwards."""
        lora = load(self, lora_request)
        lora.lorafleet_names = frozenset(lora.loras)
        return lora

    def add_adapter(self: Any, lora_request: Any) -> Any:
        """Load an adapter, or mark it as used; report the modules of a new one."""
        is_added = add(self, lora_request)
        try:
            _write_report_once(self, lora_request, folder)
        except Exception:
            # The adapter is loaded; the agent finds no report, and asks the engine in another way.
            log.exception("lorafleet: no report on adapter %s", lora_request.lora_name)
        return is_added

    loads._load_adapter, adds.add_adapter = load_adapter, add_adapter  # type: ignore[union-attr]


def register_resolver(module: Any, offers: OfferReader) -> None:
    """Let vLLM load the adapters that are offered with their first request.

    module  vLLM's `lora.resolver`, which only the API process imports, before it reads the registry
    source  0.32 entrypoints/openai/models/serving.py resolve_lora: one call at a time for each name, under the lock of
            loads and unloads; the number of the request is replaced, and a failed load is a 400
    """

    class OfferResolver(module.LoRAResolver):  # type: ignore[misc]
        """Resolves the names that are offered, and no others."""

        async def resolve_lora(self, base_model_name: str, lora_name: str) -> Any:  # noqa: ARG002
            """vLLM's request for an offered adapter's files; None makes vLLM answer 404."""
            offer = await offers.find(lora_name)
            if offer is None:
                return None
            return module.LoRARequest(lora_name=lora_name, lora_int_id=1, lora_path=offer.path)

    module.LoRAResolverRegistry.register_resolver("lorafleet", OfferResolver())


def _patch_pool(manager_class: Any, folder: Path) -> None:
    """Patch vLLM's class of adapters so that its process says what it runs them with, and counts pool misses."""
    create, apply = manager_class.create_lora_manager, manager_class._apply_adapters

    def create_lora_manager(self: Any, *args: Any, **named: Any) -> Any:
        """Create the manager of a model's adapters, and report on it."""
        model = create(self, *args, **named)
        try:
            write_engine_report(folder, _engine_report(self._adapter_manager))
            if sys.modules["vllm.distributed.parallel_state"].get_world_group().rank_in_group == 0:
                self.lorafleet_misses = PoolMissCounter(folder)
            vllm_config = named.get("vllm_config") or args[1]
            self.lorafleet_calls = ModuleCalls(self._adapter_manager, can_see=runs_hooks(vllm_config))
        except Exception:
            log.exception("lorafleet: no report on the LoRA kernels")  # it works all the same
        return model

    def apply_adapters(self: Any, lora_requests: Any) -> None:
        """Put a batch's adapters into slots; count those that are in none, and watch a first pass."""
        misses: PoolMissCounter | None = getattr(self, "lorafleet_misses", None)
        calls: ModuleCalls | None = getattr(self, "lorafleet_calls", None)
        if misses is not None or calls is not None:
            wanted = {each.lora_int_id for each in lora_requests if each and each.lora_path != _DUMMY_PATH}
            manager = self._adapter_manager
            if misses is not None:
                misses.count(wanted, manager._active_adapters, manager._registered_adapters)
            if calls is not None:
                calls.before_pass(wanted)
        apply(self, lora_requests)

    manager_class.create_lora_manager, manager_class._apply_adapters = create_lora_manager, apply_adapters


def _engine_report(manager: Any) -> EngineProcessReport:
    """What a process runs adapters with: vLLM allocates every slot at its start, padded to `max_lora_rank`.

    source  0.32 lora/layers: the attributes `..._stacked` of a layer, of which those of experts share their memory
    """
    storages: dict[int, int] = {}
    for layer in manager.modules.values():
        for name, value in vars(layer).items():
            if name.endswith("_stacked"):
                for tensor in _tensors_in(value):
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    wrappers = {type(wrapper).__name__ for wrapper in manager.punica_wrapper_mapping.values()}
    slots = manager.lora_slots
    return EngineProcessReport(", ".join(sorted(wrappers)), str(manager.device.type), sum(storages.values()) // slots)


def _host_bytes(lora: Any) -> int:
    """Bytes of an adapter's copy in host memory."""
    tensors = {
        id(tensor): tensor.numel() * tensor.element_size()
        for weights in lora.loras.values()
        for tensor in (*_tensors_in(getattr(weights, "lora_a", None)), *_tensors_in(getattr(weights, "lora_b", None)))
    }
    return sum(tensors.values())


def _tensors_in(value: Any) -> Iterator[Any]:
    """The tensors of a tensor, or of a list with gaps."""
    if isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_in(each)
    elif value is not None:
        yield value


def _write_report_once(worker_manager: Any, lora_request: Any, folder: Path) -> None:
    """Write this process's report on an adapter that it has just read; no-op for one that it had already.

    It is written again after the first pass that shows which layers run.
    """
    manager = worker_manager._adapter_manager
    lora = manager.get_adapter(lora_request.lora_int_id)
    names: frozenset[str] | None = getattr(lora, "lorafleet_names", None)
    if lora is None or names is None:
        return
    lora.lorafleet_names = None
    calls: ModuleCalls | None = getattr(worker_manager, "lorafleet_calls", None)
    write = partial(_write_report, manager, lora, names, lora_request, folder, calls)
    write()
    if calls is not None:
        calls.expect(lora_request.lora_int_id, write)


def _write_report(
    manager: Any, lora: Any, names: frozenset[str], lora_request: Any, folder: Path, calls: ModuleCalls | None
) -> None:
    """Write this process's report on an adapter, by what is known now of the layers that run.

    names  of its modules, as they were before merging
    """
    heads = {name for name in lora.modules_to_save if {name, f"model.{name}"} & manager.modules.keys()}
    taken = taken_names(manager, lora, names) | heads
    idle = set() if calls is None else names_in_layers(manager, calls.idle_layers()) - heads
    in_engine: Mapping[str, str] = {name: name for name in names | set(lora.modules_to_save)}
    # Some modules of the file never become part of `lora`: skipped prefixes, experts of other processes.
    skips = getattr(manager.model, "lora_skip_prefixes", None) or getattr(manager, "moe_ep_load_spec", None)
    if skips or idle & names or any(name not in taken for name in in_engine):
        in_engine = _engine_names(lora_request.lora_path, manager.model)
    group = sys.modules["vllm.distributed.parallel_state"].get_world_group()
    report = LoraReport(
        group.rank_in_group,
        group.world_size,
        len(in_engine),
        tuple(sorted(name for name, full in in_engine.items() if full not in taken)),
        sum(map(is_of_experts, in_engine)),
        lora_request.lora_int_id,
        _host_bytes(lora),
        tuple(sorted(name for name, full in in_engine.items() if full in taken and full in idle)),
        "no" if calls is None else calls.seen,
    )
    write_report(folder, lora_request.lora_name, report)


def names_in_layers(manager: Any, layers: Iterable[str]) -> set[str]:
    """The names under which an adapter's modules may go into these of vLLM's layers.

    The parts of a packed layer have names of their own, a pooling model's also without its prefix, and experts in one
    tensor a second one.
    """
    names = {part for layer in layers for part in (layer, *manager.packed_modules.get(layer, ()))}
    names |= {f"{name}{_FIRST_EXPERT_LAYER}" for name in names if is_of_experts(name)}
    return names | {name.removeprefix("model.") for name in names} if manager.is_pooling_model else names


def taken_names(manager: Any, lora: Any, names: Iterable[str]) -> set[str]:
    """Those of an adapter's module names, as they were before merging, whose weights vLLM's layers get.

    manager, lora  vLLM's `LoRAModelManager`, and its `LoRAModel` after it was added
    source         0.32 lora/model_manager.py `activate_adapter` (each layer looks its weights up by name),
                   `_create_merged_loras_inplace` (the parts of a packed layer are replaced by one entry)
    """
    weights_of = partial(manager._get_lora_layer_weights, lora)
    layers = [layer for layer in manager.modules if weights_of(layer) is not None]
    # A pooling model's parts keep their entries when they are merged, if their names lack its prefix.
    parts = [part for layer in layers for part in manager.packed_modules.get(layer, ())]
    used = {id(weights_of(name)) for name in (*layers, *parts)} - {id(None)}
    taken = {name for name, weights in lora.loras.items() if id(weights) in used}
    # PEFT's form of experts that are one tensor: their first layer is `experts.base_layer`, merged into `experts`.
    taken |= {name for name in lora.loras if name.removesuffix(_FIRST_EXPERT_LAYER) in taken}
    return {name for name in names if name in taken or name not in lora.loras}


def _engine_names(path: str, model: Any) -> Mapping[str, str]:
    """Module names of an adapter's file -> names in the engine, by vLLM's own rule. Reads the file's header."""
    utils, library = importlib.import_module("vllm.lora.utils"), importlib.import_module("safetensors")
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    if hasattr(mapper, "get_rename_mapper"):
        mapper = mapper.get_rename_mapper()
    with library.safe_open(str(Path(path) / _WEIGHTS), framework="pt") as file:
        tensors = list(file.keys())
    names: dict[str, str] = {}
    for tensor in tensors:
        if not utils.is_base_embedding_weights(tensor):
            in_file = _SUFFIX.sub("", tensor).removeprefix("base_model.model.")
            names[in_file] = utils.parse_fine_tuned_lora_name(tensor, mapper)[0]
    return names
