"""Layers with PyTorch's hooks, and vLLM's configuration, as far as the plugin uses them."""

from collections.abc import Callable
from types import SimpleNamespace


class HookedLayer:
    """A module that calls its hooks when it runs, with further attributes."""

    def __init__(self, **attributes: object) -> None:
        vars(self).update(attributes)
        self.hooks: list[Callable[..., None]] = []

    def _register(self, hook: Callable[..., None]) -> SimpleNamespace:
        self.hooks.append(hook)
        return SimpleNamespace(remove=lambda: self.hooks.remove(hook))

    register_forward_pre_hook = register_forward_hook = _register

    def run(self) -> None:
        """A call of the module."""
        for hook in list(self.hooks):
            hook(self, ())


def config_of(mode: int = 0, graphs: int = 0, *, has_encoder: bool = False) -> SimpleNamespace:
    """vLLM's configuration of an engine that is compiled so."""
    return SimpleNamespace(
        compilation_config=SimpleNamespace(mode=mode, cudagraph_mode=SimpleNamespace(value=graphs)),
        model_config=SimpleNamespace(is_encoder_decoder=has_encoder),
    )
