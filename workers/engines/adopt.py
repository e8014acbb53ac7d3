"""Settings and a command of one's own (or `engine_args`) that speak of the same thing: one word for both, or no start.

The engine does what its command says. An agent that believed otherwise would count slots that are not there.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import structlog

from lorafleet.engine import arguments
from lorafleet.engine.arguments import EngineArgumentsError, value_of
from workers.config import WorkerSettings

log = structlog.get_logger()


class CommandError(Exception):
    """The engine's command cannot go with this agent; the message says which word of it, and what to do."""


def adopted(settings: WorkerSettings, own_command: Sequence[str], environment: Mapping[str, str]) -> WorkerSettings:
    """The settings with what the command says for itself; raises CommandError where both say something else."""
    if settings.engine_url:
        if own_command:
            raise CommandError(f"engine_url {settings.engine_url} and an engine command: one engine; leave one out")
        return settings
    words = (*own_command, *settings.engine_args)
    try:
        arguments.refuse(words, settings.engine, environment)
    except EngineArgumentsError as exc:
        raise CommandError(str(exc)) from exc
    flags = {name: flag for flag, name in arguments.SAME[settings.engine].items()}
    changes: dict[str, Any] = {}
    for name, said in arguments.said(words, settings.engine).items():
        ours = getattr(settings, name)
        if said == str(ours):
            continue
        if name in settings.model_fields_set:
            raise CommandError(
                f"the engine's command says {flags[name]} {said}, the setting {name} is {ours}: give only one"
            )
        changes[name] = said
        log.info("taken from the engine's command", setting=name, value=said)
    if settings.engine != "sglang" and _has_ranks(words) and value_of(words, "--api-server-count") is None:
        # Its default is the number of ranks, and then vLLM refuses to load at run time.
        log.info("added to the engine's command", flag="--api-server-count 1")
        changes["engine_args"] = (*settings.engine_args, "--api-server-count", "1")
    given = {name: getattr(settings, name) for name in settings.model_fields_set}
    try:
        return WorkerSettings(**given | changes) if changes else settings
    except ValueError as exc:
        raise CommandError(f"the engine's command cannot go with the agent's settings: {exc}") from exc


def _has_ranks(words: Sequence[str]) -> bool:
    sizes = (value_of(words, "--data-parallel-size"), value_of(words, "-dp"))
    return any(size not in {None, "1"} for size in sizes)
