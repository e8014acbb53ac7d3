"""Settings and a command of one's own (or `engine_args`) that speak of the same thing: one word for both, or no start.

The engine does what its command says. An agent that believed otherwise would count slots that are not there.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise, takewhile
from typing import Any

import structlog

from workers.config import WorkerSettings

log = structlog.get_logger()

# An engine's flags -> the settings that say the same. Of its block size, count and longest request a running engine
# tells us itself.
# vLLM 0.32, and the sim
_VLLM = {
    "--max-loras": "max_loras",
    "--max-cpu-loras": "max_cpu_loras",
    "--max-lora-rank": "max_lora_rank",
    "--max-num-seqs": "max_num_seqs",
    "--max-num-batched-tokens": "max_num_batched_tokens",
    "--served-model-name": "served_model_name",
}
# SGLang 0.5.23
_BASE_INCLUDED = "--max-loras-per-batch"  # the base model is one of them
_SGLANG = {
    _BASE_INCLUDED: "max_loras",
    "--max-loaded-loras": "max_cpu_loras",
    "--max-lora-rank": "max_lora_rank",
    "--max-running-requests": "max_num_seqs",
    "--chunked-prefill-size": "max_num_batched_tokens",
    "--served-model-name": "served_model_name",
}
_SAME = {"vllm": _VLLM, "sim": _VLLM, "sglang": _SGLANG}
_OURS = {
    "--kv-events-config": "the agent binds the sockets itself, under a topic for each start",
    "--no-enable-lora": "a worker serves adapters",
    "--api-key": "the agent and the routers have no key for the engine; bind it to loopback or fence it",
}
_SWITCH = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"


class CommandError(Exception):
    """The engine's command cannot go with this agent; the message says which word of it, and what to do."""


def adopted(settings: WorkerSettings, own_command: Sequence[str], environment: Mapping[str, str]) -> WorkerSettings:
    """The settings with what the command says for itself; raises CommandError where both say something else."""
    if settings.engine_url:
        if own_command:
            raise CommandError(f"engine_url {settings.engine_url} and an engine command: one engine; leave one out")
        return settings
    words = (*own_command, *settings.engine_args)
    _refuse(words, environment)
    changes: dict[str, Any] = {}
    for flag, name in _SAME[settings.engine].items():
        said = _value(words, flag)
        if flag == _BASE_INCLUDED and said is not None and said.isdigit():
            said = str(int(said) - 1)
        if said is None or said == str(getattr(settings, name)):
            continue
        if name in settings.model_fields_set:
            ours = getattr(settings, name)
            raise CommandError(f"the engine's command says {flag} {said}, the setting {name} is {ours}: give only one")
        changes[name] = said
        log.info("taken from the engine's command", setting=name, value=said)
    if settings.engine != "sglang" and _has_ranks(words) and _value(words, "--api-server-count") is None:
        # Its default is the number of ranks, and then vLLM refuses to load at run time.
        log.info("added to the engine's command", flag="--api-server-count 1")
        changes["engine_args"] = (*settings.engine_args, "--api-server-count", "1")
    given = {name: getattr(settings, name) for name in settings.model_fields_set}
    try:
        return WorkerSettings(**given | changes) if changes else settings
    except ValueError as exc:
        raise CommandError(f"the engine's command cannot go with the agent's settings: {exc}") from exc


def _refuse(words: Sequence[str], environment: Mapping[str, str]) -> None:
    for flag, why in _OURS.items():
        if _has(words, flag):
            raise CommandError(f"the engine's command has {flag}, which it may not: {why}; leave it out")
    if (servers := _value(words, "--api-server-count")) not in {None, "1"}:
        raise CommandError(f"--api-server-count {servers}: vLLM loads adapters at run time with 1 only")
    if len(names := _values(words, "--served-model-name")) > 1:
        raise CommandError(f"--served-model-name {' '.join(names)}: the fleet knows a base model by one name; give one")
    if environment.get(_SWITCH, "1").lower() not in {"1", "true"}:
        raise CommandError(f"{_SWITCH}={environment[_SWITCH]} in the environment: without it no adapter can be loaded")


def _has_ranks(words: Sequence[str]) -> bool:
    sizes = (_value(words, "--data-parallel-size"), _value(words, "-dp"))
    return any(size not in {None, "1"} for size in sizes)


def _has(words: Sequence[str], flag: str) -> bool:
    return any(word == flag or word.startswith(f"{flag}=") for word in words)


def _values(words: Sequence[str], flag: str) -> list[str]:
    """All that the last such flag is given, up to the next flag."""
    found: list[str] = []
    for at, word in enumerate(words):
        if word == flag:
            found = list(takewhile(lambda each: not each.startswith("-"), words[at + 1 :]))
        elif word.startswith(f"{flag}="):
            found = [word.removeprefix(f"{flag}=")]
    return found


def _value(words: Sequence[str], flag: str) -> str | None:
    """What the last such flag says, which is the one that counts."""
    found = None
    for word, following in pairwise((*words, "")):
        if word == flag:
            found = following
        elif word.startswith(f"{flag}="):
            found = word.removeprefix(f"{flag}=")
    return found
