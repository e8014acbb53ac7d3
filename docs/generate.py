"""Write docs/configuration.md and the chart's schema from the settings.

Run `python docs/generate.py`.
"""

import os
import tempfile
from pathlib import Path

from docs.chart_schema import DEFAULTS, SCHEMA, SERVICES, defaults_by_path, schema_with_settings
from lorafleet.service.other_names import OtherName
from lorafleet.service.settings import ServiceSettings

_COMMANDS = {"workers": "agent"}
TARGET = Path(__file__).parent / "configuration.md"

_INTRO = """# Configuration

Generated from the code by `python docs/generate.py`; a test holds the two together.

Every setting is a flag, an environment variable and a key of a YAML file, in this order of precedence:

```
lorafleet router --cold-start-timeout-s 30
LORAFLEET_ROUTER_COLD_START_TIMEOUT_S=30 lorafleet router
lorafleet router --config router.yaml          # cold_start_timeout_s: 30
```

`python -P -m router`, `orchestrator` and `workers` are the same as `lorafleet router`, `orchestrator` and `agent`, with
the same flags. Without `-P` Python would run a `router.py` of the current folder.

Unknown flags, unknown `LORAFLEET_<SERVICE>_…` variables and unknown keys are refused at start, by name, and so is a key
that a file has twice. A typing error never falls back to the default. Lists repeat the flag, or are JSON in the
environment (`'["a", "b"]'`); so do mappings (`--costs kappa_min=1`, `'{"kappa_min": 1}'`). A service that cannot start
(its port is in use, a URL is invalid) prints one line on standard error and exits with status 2.

Some names of other systems are understood, or refused with what to use: the tables below the settings have them. A file
may have the keys `worker` and `lora_orchestrator`: an agent and an orchestrator read their own part of it.

`lorafleet up` accepts these variables and files for all its services, except those that it sets itself:
[the command line](cli.md#lorafleet-up).
"""


def _shown(value: object) -> str:
    if value is None or value in ("", ()):
        return ""
    # Defaults below a home or a temporary folder differ from user to user.
    here = {str(Path.home()): "~", tempfile.gettempdir(): "<tmp>", f"lorafleet-{os.getuid()}": "lorafleet-<uid>"}
    text = str(value)
    for mine, anyones in here.items():
        text = text.replace(mine, anyones)
    return f"`{text}`"


def section(service: str, settings: type[ServiceSettings]) -> str:
    """The table of one service's settings."""
    prefix = settings.model_config.get("env_prefix", "")
    heading = f"## `lorafleet {_COMMANDS.get(service, service)}`"
    rows = [
        f"| `--{name.replace('_', '-')}` | `{prefix}{name.upper()}` | {_shown(field.default)} | {field.description} |"
        for name, field in settings.model_fields.items()
    ]
    return "\n".join(
        [
            heading,
            "",
            "| flag | environment | default | meaning |",
            "|---|---|---|---|",
            *rows,
            "",
            *_other_names(settings),
        ]
    )


def _other_names(settings: type[ServiceSettings]) -> list[str]:
    """The table of other systems' names for a service's settings; [] without any."""
    if not settings.other_names:
        return []
    rows = [
        f"| `{name}` | {f'`{other.setting}`' if other.setting else _meaning(other)} |"
        for name, other in settings.other_names.items()
    ]
    return ["Names of other systems, as variables, keys or flags:", "", "| name | here |", "|---|---|", *rows, ""]


def _meaning(other: OtherName) -> str:
    """What another system's name means where no setting takes its value."""
    return f"`{other.only}`, or refused: {other.advice}" if other.only else f"refused: {other.advice}"


def document() -> str:
    """The text of docs/configuration.md."""
    return "\n".join([_INTRO, *(section(service, settings) for service, settings in SERVICES.items())])


if __name__ == "__main__":
    TARGET.write_text(document())
    SCHEMA.write_text(schema_with_settings())
    DEFAULTS.write_text(defaults_by_path())
