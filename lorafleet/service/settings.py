"""Settings of a service: flag > environment `LORAFLEET_<SERVICE>_<NAME>` > `--config file.yaml` > default."""

import argparse
import difflib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar, cast, get_origin

from pydantic import AfterValidator, Field, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)
from pydantic_settings.exceptions import SettingsError as Unparsed

from lorafleet.service import yamls
from lorafleet.service.network.tls import TlsFiles
from lorafleet.service.network.urls import checked_key, is_http, without_secrets
from lorafleet.service.other_names import OtherName, refusals, translated
from lorafleet.telemetry.request_log import AccessLogMode

S = TypeVar("S", bound="ServiceSettings")


class SettingsError(Exception):
    """A setting is unknown or invalid. The message names it and says what is valid."""


def checked_url(text: str) -> str:
    """The URL itself; raises ValueError for an invalid one. Empty is valid and means none."""
    if text and not is_http(text):
        raise ValueError(f"{without_secrets(text)!r} must be an address, such as http://host:port or https://host:port")
    return text


Url = Annotated[str, AfterValidator(checked_url)]
Key = Annotated[str, AfterValidator(checked_key)]


class ServiceSettings(BaseSettings):
    """Settings that every service has. Subclasses set `env_prefix` and add their own; all are frozen.

    file_section  the key of a file for several services that has this service's settings; empty: none
    other_names   variables, keys and flags of other systems, and what they mean here
    """

    file_section: ClassVar[str] = ""
    other_names: ClassVar[Mapping[str, OtherName]] = {}

    model_config = SettingsConfigDict(frozen=True, extra="forbid", nested_model_default_partial_update=True)

    config: Path | None = Field(default=None, description="YAML file with any of these settings")
    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=0, ge=0, le=65535, description="port to listen on; 0 picks a free one")
    key_files: tuple[Path, ...] = Field(default=(), description="hashed API keys; re-read when they change")
    allow_open: bool = Field(
        default=False, description="serve without keys on addresses other than loopback, and under any host name"
    )
    metrics_need_key: bool = Field(
        default=True,
        description="with key files: `/metrics` needs a key with the scope `metrics`; else it is open to everybody",
    )
    token: Key = Field(default="", description="bearer key for calls to other services", repr=False)
    token_file: Path | None = Field(
        default=None, description="file with that key, used in place of `token`; re-read when it changes"
    )
    tls_cert: Path | None = Field(
        default=None,
        description="PEM file with this server's certificate and its chain: serve HTTPS; re-read when it changes",
    )
    tls_key: Path | None = Field(default=None, description="PEM file with the certificate's key; re-read likewise")
    tls_ca: Path | None = Field(
        default=None,
        description="PEM file with the authorities of the fleet's own certificates: calls to other services and engines"
        " trust them alone and show `tls_cert`, and calls between services need a certificate (docs/security.md);"
        " re-read likewise",
    )
    log_format: str = Field(default="json", pattern="^(json|console)$", description="json or console")
    log_level: str = Field(
        default="info", pattern="^(debug|info|warning|error)$", description="lowest level that is logged"
    )
    access_log: AccessLogMode = Field(
        default="off", description="requests to write to stderr, one JSON object a line: off, errors (4xx, 5xx) or all"
    )
    port_file: Path | None = Field(default=None, description="write the listening port here once serving")

    @model_validator(mode="after")
    def _tls_files_fit(self) -> Self:
        """Raises ValueError for a certificate without its key, or a key without a certificate."""
        if (self.tls_cert is None) != (self.tls_key is None):
            missing = "tls_key" if self.tls_key is None else "tls_cert"
            raise ValueError(f"{missing}: give it too: certificate and key belong together")
        return self

    @property
    def tls_files(self) -> TlsFiles:
        """The files of certificate, key and authorities."""
        return TlsFiles(cert=self.tls_cert, key=self.tls_key, ca=self.tls_ca)

    @property
    def scheme(self) -> str:
        """What this server speaks: `https` with a certificate, else `http`."""
        return "http" if self.tls_cert is None else "https"


class _MappingSource(PydanticBaseSettingsSource):
    """Settings from an already parsed mapping."""

    def __init__(self, settings_cls: type[BaseSettings], values: dict[str, Any]) -> None:
        super().__init__(settings_cls)
        self._values = values

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:  # noqa: ARG002  (the base's signature)
        """A field's value as pydantic_settings expects it: value, name, whether it is JSON text."""
        return self._values.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        """All values of the mapping."""
        return self._values


class _EnvironmentSource(EnvSettingsSource):
    """Settings from environment variables; raises SettingsError for a list or mapping that is not JSON."""

    def decode_complex_value(self, field_name: str, field: Any, value: Any) -> Any:
        """Parse a list or mapping from JSON; raises SettingsError."""
        try:
            return super().decode_complex_value(field_name, field, value)
        except ValueError as exc:
            is_mapping = get_origin(field.annotation) is dict
            expected = (
                """a mapping is JSON: '{"NAME": VALUE}'"""
                if is_mapping
                else f"a list is JSON: '{_as_json_list(value)}'"
            )
            raise SettingsError(f"{self.env_prefix}{field_name.upper()}: {expected}, found {value!r}") from exc


def _as_json_list(text: str) -> str:
    """The JSON list for a text with commas, for an error message."""
    return json.dumps([item.strip() for item in text.strip("[]").split(",")])


def load(cls: type[S], argv: Sequence[str], *, prog: str) -> S:
    """Read the settings from flags, environment and file; `--help` prints and exits 0.

    An unknown variable with the settings' prefix is refused.
    raises  SettingsError naming every unknown or invalid setting
    """
    prefix = cls.model_config["env_prefix"]
    _refuse_unknown_environment(cls, prefix)
    peek = argparse.ArgumentParser(add_help=False)
    peek.add_argument("--config", default=os.environ.get(f"{prefix}CONFIG"))
    path = peek.parse_known_args(list(argv))[0].config
    from_file = _own_names(cls, _own_section(cls, read_file(Path(path))), f"--config {path}: ") if path else {}
    from_others = _own_names(cls, {name: os.environ[name] for name in os.environ if name in cls.other_names})

    class Sourced(cls):  # type: ignore[valid-type,misc]
        @classmethod
        def settings_customise_sources(cls, settings_cls: Any, init_settings: Any, **_: Any) -> tuple[Any, ...]:
            """The sources of settings, the first wins: arguments, flags, environment, file."""
            flags: Any = CliSettingsSource(
                settings_cls,
                cli_prog_name=prog,
                cli_parse_args=list(argv),
                cli_kebab_case=True,
                cli_implicit_flags=True,
                cli_hide_none_type=True,
                cli_avoid_json=True,
                cli_exit_on_error=False,  # argparse would print all flags before the error
            )
            environment = _EnvironmentSource(settings_cls), _MappingSource(settings_cls, from_others)
            return init_settings, flags, *environment, _MappingSource(settings_cls, from_file)

    Sourced.__doc__ = cls.__doc__
    try:
        found = Sourced()
    except ValidationError as exc:
        problems = "; ".join(_problem(error, cls.model_fields) for error in exc.errors())
        raise SettingsError(f"{problems} (see `{prog} --help`)") from exc
    except Unparsed as exc:  # an unknown flag, a missing value, or an invalid list or mapping
        raise SettingsError(f"{_flag_problem(str(exc), cls)} (see `{prog} --help`)") from exc
    return cast("S", found)


def load_or_exit(cls: type[S], argv: Sequence[str], *, prog: str) -> S:
    """`load` for a process's main: an invalid setting is one line on stderr and SystemExit with status 2."""
    try:
        return load(cls, argv, prog=prog)
    except SettingsError as exc:
        print(f"{prog}: {exc}", file=sys.stderr)  # noqa: T201  (logging is not set up before the settings are)
        raise SystemExit(2) from exc


# In place of pydantic's messages, which speak of Python to people who write JSON or YAML.
_PLAIN_MESSAGES = {"tuple_type": "Input should be a list"}
_UNKNOWN_FIELD = ("extra_forbidden", "unexpected_keyword_argument")
"""pydantic's names of an unknown field: of a model, and of a dataclass."""


def is_unknown_field(error: Mapping[str, Any]) -> bool:
    """Whether one of pydantic's findings is a field that does not exist."""
    return error["type"] in _UNKNOWN_FIELD


def finding_message(error: Mapping[str, Any]) -> str:
    """The message of one of pydantic's findings; for our own checks without pydantic's prefix."""
    if is_unknown_field(error):
        return "there is no such field"
    if error["type"] in _PLAIN_MESSAGES:
        return _PLAIN_MESSAGES[error["type"]]
    return str(error["ctx"]["error"] if error["type"] == "value_error" else error["msg"])


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean ...?` with the most similar known name; empty if none is similar."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _problem(error: Mapping[str, Any], known: Iterable[str]) -> str:
    """One of pydantic's findings as a message with the setting's name."""
    name = _flag_name(error["loc"])
    if is_unknown_field(error):
        return f"{name}: there is no such setting{did_you_mean(name, map(_kebab, known))}"
    return ": ".join(filter(None, (name, finding_message(error))))


def _flag_problem(found: str, cls: type[ServiceSettings]) -> str:
    """argparse's error, with the flag that may have been meant, or what to use for another system's."""
    name, no_pair, _ = found.removeprefix("Parsing error encountered for ").partition(": not enough values")
    if no_pair:
        return f"{_kebab(name)}: expected NAME=VALUE, the flag once for each"
    message = found.removeprefix("error parsing CLI: ")
    _, _, unrecognized = message.partition("unrecognized arguments: ")
    name = unrecognized.partition("=")[0].partition(" ")[0]
    if other := cls.other_names.get(name.removeprefix("--").replace("-", "_")):
        return f"{name}: {other.advice or f'give --{_kebab(other.setting)}'}"
    # Dashes would make any two names alike.
    meant = did_you_mean(name.removeprefix("--"), map(_kebab, cls.model_fields))
    return message + meant.replace("mean ", "mean --")


def _kebab(name: str) -> str:
    """A setting's name as its flag has it, without dashes in front."""
    return name.replace("_", "-")


def _flag_name(loc: tuple[int | str, ...]) -> str:
    """The location of a finding in a flag's form."""
    return ".".join(_kebab(str(part)) for part in loc)


def read_file(path: Path, source: str = "--config") -> dict[str, Any]:
    """The settings of a file, by name with underscores. Raises SettingsError.

    source  the flag or variable that names the file, for messages
    """
    try:
        found = yamls.read_yaml(path)
    except (OSError, ValueError) as exc:  # ValueError: no text, or no YAML
        raise SettingsError(f"{source} {path}: {exc}") from exc
    values = {} if found is None else found  # an empty file
    if not isinstance(values, dict):
        raise SettingsError(f"{source} {path}: expected a mapping of settings, found {type(values).__name__}")
    return {str(name).replace("-", "_"): value for name, value in values.items()}


_SECTIONS = frozenset({"worker", "lora_orchestrator"})


def _own_section(cls: type[ServiceSettings], values: dict[str, Any]) -> dict[str, Any]:
    """This service's settings in a file with a section for each service; all of a file without sections.

    Raises SettingsError for a section that is no mapping.
    """
    if not values or not values.keys() <= _SECTIONS:
        return values
    section = values.get(cls.file_section) or {}
    if not isinstance(section, dict):
        raise SettingsError(f"{cls.file_section}: expected a mapping of settings, found {type(section).__name__}")
    return section


def _own_names(cls: type[ServiceSettings], found: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """The values found by our settings' names; texts of lists are divided at commas.

    Raises SettingsError, which names every one of another system that has no meaning here, and what to use.
    """
    if refused := refusals(found, cls.other_names):
        raise SettingsError(where + "; ".join(refused))
    ours = translated(found, cls.other_names)
    lists = {name for name in ours if name in cls.model_fields and _is_list(cls.model_fields[name].annotation)}
    return {
        name: [item.strip() for item in value.split(",")] if name in lists and isinstance(value, str) else value
        for name, value in ours.items()
    }


def _is_list(annotation: Any) -> bool:
    """Whether a setting of this type is a list."""
    return get_origin(annotation) is tuple


def _refuse_unknown_environment(cls: type[ServiceSettings], prefix: str) -> None:
    """Raises SettingsError for variables with the service's prefix that are no settings."""
    known = {prefix + name.upper() for name in cls.model_fields}
    unknown = sorted(name for name in os.environ if name.startswith(prefix) and name not in known)
    if unknown:
        meant = did_you_mean(unknown[0].removeprefix(prefix), map(str.upper, cls.model_fields))
        hint = meant.replace("mean ", f"mean {prefix}") or f"; known: {', '.join(sorted(known))}"
        raise SettingsError(f"unknown environment {', '.join(unknown)}{hint}")
