"""Engine arguments: how they map to settings of an agent, and which ones an agent's engine may not have.

The same rules hold for an agent's engine command, its `engine_args`, and the engine arguments of `lorafleet up`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from lorafleet.service import yamls

# Engine flag -> the agent's setting with the same meaning.
# vLLM 0.32, and the sim
_VLLM = {
    "--max-loras": "max_loras",
    "--max-cpu-loras": "max_cpu_loras",
    "--max-lora-rank": "max_lora_rank",
    "--max-num-seqs": "max_num_seqs",
    "--max-num-batched-tokens": "max_num_batched_tokens",
    "--served-model-name": "served_model_name",
}
BASE_INCLUDED = "--max-loras-per-batch"  # the count includes the base model
LORA_PATHS = "--lora-paths"  # sgl-jax's adapters: `name=folder`, or a folder
# SGLang 0.5.23
_SGLANG = {
    BASE_INCLUDED: "max_loras",
    "--max-loaded-loras": "max_cpu_loras",
    "--max-lora-rank": "max_lora_rank",
    "--max-running-requests": "max_num_seqs",
    "--chunked-prefill-size": "max_num_batched_tokens",
    "--served-model-name": "served_model_name",
}
# sgl-jax keeps no adapters besides those on the device.
_SGL_JAX = {flag: name for flag, name in _SGLANG.items() if name != "max_cpu_loras"}
SETTING_OF_FLAG: Mapping[str, Mapping[str, str]] = {
    "vllm": _VLLM,
    "sim": _VLLM,
    "sglang": _SGLANG,
    "sgl-jax": _SGL_JAX,
}
# A running engine reports its block size, block count and longest request itself, so these need not agree.
_VLLM_SHAPE = {
    "--block-size": "block_size",
    "--num-gpu-blocks-override": "num_gpu_blocks_override",
    "--max-model-len": "max_model_len",
}
_SGLANG_SHAPE = {
    "--page-size": "block_size",
    "--max-total-tokens": "num_gpu_blocks_override",
    "--context-length": "max_model_len",
}
_SHAPE_SETTING_OF_FLAG: Mapping[str, Mapping[str, str]] = {
    "vllm": _VLLM_SHAPE,
    "sim": _VLLM_SHAPE,
    "sglang": _SGLANG_SHAPE,
    "sgl-jax": _SGLANG_SHAPE,
}

_OF_THE_AGENT = "the agent passes its own certificate on: give the agent --tls-cert and --tls-key"
_FORBIDDEN_FLAGS = {
    "--kv-events-config": "the agent binds the sockets itself, with a topic for each start",
    "--no-enable-lora": "a worker serves adapters",
    "--api-key": "the agent and the routers have no key for the engine; bind it to loopback or fence it",
    "--uds": "the agent and the routers reach the engine by host and port",
    "--ssl-keyfile": _OF_THE_AGENT,
    "--ssl-certfile": _OF_THE_AGENT,
    "--ssl-ca-certs": _OF_THE_AGENT,
    "--ssl-cert-reqs": _OF_THE_AGENT,
    "--headless": "the agent needs the engine's API server",
}
_RUNTIME_LORA_VARIABLE = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
_API_KEY_VARIABLE = "VLLM_API_KEY"  # entrypoints/serve/middleware/register.py: used if there is no --api-key


class EngineArgumentsError(ValueError):
    """Arguments that an agent's engine may not have. The message says which, why, and what to do."""


def check_engine_arguments(arguments: Sequence[str], engine: str, environment: Mapping[str, str]) -> None:
    """Raises EngineArgumentsError for the first forbidden argument, or variable of the engine's environment."""
    for flag, why in _FORBIDDEN_FLAGS.items():
        if has_flag(arguments, flag):
            raise EngineArgumentsError(f"the engine's command may not have {flag}: {why}; leave it out")
    if (servers := value_of(arguments, "--api-server-count")) not in {None, "1"}:
        raise EngineArgumentsError(f"--api-server-count {servers}: vLLM loads adapters at run time with 1 only")
    if len(names := values_of(arguments, "--served-model-name")) > 1:
        raise EngineArgumentsError(
            f"--served-model-name {' '.join(names)}: the fleet knows a base model by one name; give one"
        )
    if environment.get(_RUNTIME_LORA_VARIABLE, "1").lower() not in {"1", "true"}:
        raise EngineArgumentsError(
            f"{_RUNTIME_LORA_VARIABLE}={environment[_RUNTIME_LORA_VARIABLE]} in the environment: no adapter can be"
            " loaded then; unset it"
        )
    if engine == "vllm" and environment.get(_API_KEY_VARIABLE):
        raise EngineArgumentsError(
            f"{_API_KEY_VARIABLE} in the environment makes the engine require a key, which the agent and the routers"
            " do not have; unset it"
        )


def settings_in_arguments(arguments: Sequence[str], engine: str) -> dict[str, str]:
    """The agent's settings that the engine's arguments set, as text: those that agent and engine must agree on.

    SGLang and sgl-jax count the base model as an adapter; `max_loras` is without it.
    """
    found = {
        name: text for flag, name in SETTING_OF_FLAG[engine].items() if (text := value_of(arguments, flag)) is not None
    }
    of_both = value_of(arguments, BASE_INCLUDED) if BASE_INCLUDED in SETTING_OF_FLAG[engine] else None
    if of_both is not None and of_both.isdigit():
        found["max_loras"] = str(int(of_both) - 1)
    return found


def shape_settings_in_arguments(arguments: Sequence[str], engine: str) -> set[str]:
    """Names of the settings for block size, block count and longest request that the engine's arguments set."""
    return {name for flag, name in _SHAPE_SETTING_OF_FLAG[engine].items() if has_flag(arguments, flag)}


def flag_of(argument: str) -> str:
    """The flag in an argument; empty if the argument is a value.

    source   vLLM 0.32 utils/argparse_utils.py: `--max_loras` is `--max-loras`, and `--a.b=1` is one field of `--a`
    """
    if not argument.startswith("-"):
        return ""
    name = argument.partition("=")[0].partition(".")[0]
    return name.replace("_", "-") if name.startswith("--") else name


def has_flag(arguments: Sequence[str], flag: str) -> bool:
    """Whether the flag is given: alone, with `=`, with underscores, or as one field such as `--a.b`."""
    return any(flag_of(argument) == flag for argument in arguments)


def values_of(arguments: Sequence[str], flag: str) -> list[str]:
    """All values of the last such flag, up to the next flag; empty if the flag is not given."""
    found: list[str] = []
    for at, argument in enumerate(arguments):
        if flag_of(argument) == flag:
            _, is_joined, value = argument.partition("=")
            found = (
                [value] if is_joined else list(takewhile(lambda each: not each.startswith("-"), arguments[at + 1 :]))
            )
    return found


def without_flag(arguments: Sequence[str], flag: str) -> tuple[str, ...]:
    """The arguments without this flag and its values, up to the next flag."""
    kept: list[str] = []
    is_dropping = False
    for argument in arguments:
        if argument.startswith("-"):
            is_dropping = flag_of(argument) == flag
        if not is_dropping:
            kept.append(argument)
    return tuple(kept)


def value_of(arguments: Sequence[str], flag: str) -> str | None:
    """The value of the last such flag, as the last one counts; None if the flag is not given."""
    return last_value(arguments, lambda argument: flag_of(argument) == flag)


def last_value(arguments: Sequence[str], is_flag: Callable[[str], bool]) -> str | None:
    """The value of the last argument that is a flag: the part after its `=`, or else the next argument; or None."""
    found = None
    for argument, following in pairwise((*arguments, "")):
        if is_flag(argument):
            _, is_joined, value = argument.partition("=")
            found = value if is_joined else following
    return found


_FLAG = "--config"


def with_config_file(arguments: Sequence[str]) -> tuple[str, ...]:
    """The arguments of the engine's `--config` file, then the given ones, so that the last of a flag counts.

    Engines read the file only if its name is a separate argument.

    raises  EngineArgumentsError for a file that cannot be read or is no mapping
    """
    name = next((following for argument, following in pairwise((*arguments, "")) if argument == _FLAG), None)
    return tuple(arguments) if name is None else (*_arguments_in(name), *arguments)


def _arguments_in(name: str) -> list[str]:
    """The arguments in the file; raises EngineArgumentsError."""
    if not name:
        raise EngineArgumentsError(f"{_FLAG} names no file: give a YAML file of the engine's arguments behind it")
    try:
        content = yamls.read_yaml(Path(name), last_wins=True) or {}  # as engines read it
    except (OSError, ValueError) as exc:  # ValueError: no text, or no YAML
        raise EngineArgumentsError(
            f"{_FLAG} {name}: {exc}; give a YAML file of the engine's arguments that this process can read"
        ) from exc
    if not isinstance(content, dict):
        raise EngineArgumentsError(
            f"{_FLAG} {name}: expected a mapping of the engine's arguments, found {type(content).__name__}"
        )
    return [argument for flag, value in content.items() for argument in _arguments_of(str(flag), value)]


def _arguments_of(flag: str, value: Any) -> list[str]:
    """One entry of the file as arguments."""
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    if isinstance(value, list):
        return [f"--{flag}", *map(str, value)] if value else []
    return [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
