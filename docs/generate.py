"""Write what follows from the settings: docs/configuration.md, and the chart's schema. `python docs/generate.py`."""

import os
import tempfile
from pathlib import Path

from docs.chart_schema import HOUSES, SCHEMA, schema_with_settings
from lorafleet.service.settings import ServiceSettings

TARGET = Path(__file__).parent / "configuration.md"

_INTRO = """# Configuration

Generated from the code by `python docs/generate.py`; a test holds the two together.

Every setting is a flag, an environment variable and a key of a YAML file, in this order of precedence:

```
python -m router --cold-start-timeout-s 30
LORAFLEET_ROUTER_COLD_START_TIMEOUT_S=30 python -m router
python -m router --config router.yaml          # cold_start_timeout_s: 30
```

Unknown flags, unknown `LORAFLEET_<HOUSE>_…` variables and unknown keys are refused at start, by name: a typing error
never means the default. Lists repeat the flag, or are JSON in the environment (`'["a", "b"]'`); so do
mappings (`--costs kappa_min=1`, `'{"kappa_min": 1}'`). A house that cannot start as it is told (its port is in use, a
URL is none) says so in one line on standard error and ends with status 2.

`lorafleet up` takes variables and files for all its services, but for what it sets itself:
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


def section(house: str, settings: type[ServiceSettings]) -> str:
    """One house's table."""
    prefix = settings.model_config.get("env_prefix", "")
    rows = [
        f"| `--{name.replace('_', '-')}` | `{prefix}{name.upper()}` | {_shown(field.default)} | {field.description} |"
        for name, field in settings.model_fields.items()
    ]
    return "\n".join(
        [f"## `python -m {house}`", "", "| flag | environment | default | meaning |", "|---|---|---|---|", *rows, ""]
    )


def document() -> str:
    """The whole file."""
    return "\n".join([_INTRO, *(section(house, settings) for house, settings in HOUSES.items())])


if __name__ == "__main__":
    TARGET.write_text(document())
    SCHEMA.write_text(schema_with_settings())
