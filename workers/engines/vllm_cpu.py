"""vLLM's plugin for the CPU: a request of the base model gets no adapter's weights."""

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

_MASKED = ("bgmv_shrink", "sgmv_shrink")
_GIVEN = {"lora_indices_tensor", "output_tensor"}


def register() -> None:
    """Called in each process of any vLLM in this environment: entry point `lorafleet` of `vllm.general_plugins`.

    "No adapter" is index -1, which the kernels for the CPU take for the last slot (0.32 lora/ops/torch_ops/lora_ops.py;
    those for GPUs leave such rows out). So beside an adapter's request the base model answered as the adapter in that
    slot, and what it computed stayed in the prefix cache under the base model's name. With nothing shrunk there is
    nothing to expand. Kernels that look different are left as they are; those of 0.33 leave them out.
    """
    if not import_module("vllm.platforms").current_platform.is_cpu():
        return
    kernels = import_module("vllm.lora.punica_wrapper.punica_cpu")
    for name in _MASKED:
        kernel = getattr(kernels, name, None)
        if kernel is not None and inspect.signature(kernel).parameters.keys() >= _GIVEN:
            setattr(kernels, name, _masked(kernel))


def _masked(kernel: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(kernel)

    def masked(*args: Any, **kwargs: Any) -> None:
        kernel(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        indices = given["lora_indices_tensor"]
        if "seq_len_tensor" in given:  # one index a request, not a token
            indices = indices.repeat_interleave(given["seq_len_tensor"])
        given["output_tensor"].masked_fill_((indices < 0).unsqueeze(-1), 0)

    return masked
