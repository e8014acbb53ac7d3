"""Which of a model's wrapped layers run: seen once in an engine's process, in a pass with an adapter.

vLLM wraps a layer for adapters by replacing it in the tree of modules. What holds the layer itself, or reads its
weights, goes on without the wrapper: an adapter there has no effect. The attention of DeepSeek's models does so with
`kv_b_proj`. Hooks of PyTorch run in eager mode alone: a compiled model, or a CUDA graph, runs without them.
"""

import logging
from collections.abc import Callable, Collection, Iterable
from enum import Enum
from functools import partial
from typing import Any, Literal

log = logging.getLogger(__name__)

CallsSeen = Literal["yes", "not yet", "no"]
"""Whether a process has seen which layers run; no: it cannot see it."""


class _Watch(Enum):
    """Where the observation is."""

    WAITING = 1
    WATCHING = 2
    OVER = 3
    IMPOSSIBLE = 4


class ModuleCalls:
    """The layers that ran in the first pass with an adapter of `expect`; later adapters need no pass of their own.

    All wrapped layers of the language model run in every pass, whatever adapter is asked for.
    """

    def __init__(self, manager: Any, *, can_see: bool) -> None:
        """`manager` is vLLM's `LoRAModelManager`; `can_see`: hooks run in this process."""
        self._manager = manager
        self._watch = _Watch.WAITING if can_see else _Watch.IMPOSSIBLE
        self._ran: set[str] = set()
        self._has_passed = False
        self._hooks: list[Any] = []
        self._expected: dict[int, Callable[[], None]] = {}

    @property
    def seen(self) -> CallsSeen:
        """Whether it is known which layers run."""
        if self._watch is _Watch.IMPOSSIBLE:
            return "no"
        return "yes" if self._has_passed else "not yet"

    def idle_layers(self) -> Collection[str]:
        """The layers of the language model that do not run; none until it is known."""
        return language_layers(self._manager) - self._ran if self._has_passed else frozenset()

    def expect(self, adapter: int, on_pass: Callable[[], None]) -> None:
        """Watch the next pass with this adapter, and call `on_pass` after it; no-op if the layers are known."""
        if self._watch in {_Watch.WAITING, _Watch.WATCHING}:
            self._expected[adapter] = on_pass

    def before_pass(self, adapters: Collection[int]) -> None:
        """Begin to watch if one of these adapters is expected; end it after the watched pass. Cheap otherwise."""
        if self._watch is _Watch.WAITING and not self._expected.keys().isdisjoint(adapters):
            self._begin()
        elif self._watch is _Watch.WATCHING and self._has_passed:
            self._end()

    def _begin(self) -> None:
        """Hook every wrapped layer, and the model. Where that fails, nothing is seen, and the engine goes on."""
        self._watch = _Watch.WATCHING
        try:
            for name, layer in self._manager.modules.items():
                self._hooks.append(layer.register_forward_pre_hook(partial(self._note_call, name)))
            self._hooks.append(self._manager.model.register_forward_hook(self._note_pass))
        except Exception:
            log.exception("lorafleet cannot see which layers of this vLLM run")
            self._end(_Watch.IMPOSSIBLE)

    def _end(self, watch: _Watch = _Watch.OVER) -> None:
        """Take the hooks off, so that later passes cost nothing."""
        self._watch = watch
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._expected.clear()

    def _note_call(self, name: str, *_called: Any) -> None:
        """Note that a layer runs. The head of a model runs after its pass, so what is known changes then."""
        if name not in self._ran:
            self._ran.add(name)
            if self._has_passed:
                self._tell()

    def _note_pass(self, *_called: Any) -> None:
        """Note that a pass is over."""
        self._has_passed = True
        self._tell()

    def _tell(self) -> None:
        """Tell who expects it; an error there must not reach the engine."""
        for on_pass in self._expected.values():
            try:
                on_pass()
            except Exception:
                log.exception("lorafleet: no report on the layers that run")


def language_layers(manager: Any) -> frozenset[str]:
    """The wrapped layers that a prompt of text runs through: without towers and connectors of a multimodal model."""
    mapping = getattr(manager, "mm_mapping", None)
    others = () if mapping is None else (*_prefixes(mapping.tower_model), *_prefixes(mapping.connector))
    return frozenset(name for name in manager.modules if not name.startswith(others))


def _prefixes(names: Iterable[str] | str | None) -> tuple[str, ...]:
    """One or several beginnings of names, as vLLM's `MultiModelKeys` holds them."""
    return (names,) if isinstance(names, str) else tuple(names or ())


def runs_hooks(vllm_config: Any) -> bool:
    """Whether an engine of this configuration runs its model as it is, so that each layer's hooks are called.

    source  vLLM 0.32 config/compilation.py CompilationMode.NONE, CUDAGraphMode.NONE: both are 0. An encoder of its own
            gets no input from a prompt, so its layers would seem not to run.
    """
    compilation = vllm_config.compilation_config
    modes = (compilation.mode, compilation.cudagraph_mode)
    is_eager = all(mode is None or getattr(mode, "value", mode) == 0 for mode in modes)
    return is_eager and not vllm_config.model_config.is_encoder_decoder
