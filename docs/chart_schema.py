"""The services' settings as JSON Schema of the chart's values: Helm refuses a typing error before an install."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from pydantic import TypeAdapter

from lorafleet.keys.issuers import Issuer
from lorafleet.keys.roles import SCOPES
from lorafleet.service.settings import ServiceSettings
from orchestrator.config import OrchestratorSettings
from orchestrator.model.adapters import AdapterSpec
from orchestrator.model.changes import reader_of
from orchestrator.model.ledger import PriceList
from orchestrator.model.limits import AccountLimits
from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.served_names import AliasSpec
from router.config import RouterSettings
from workers.config import WorkerSettings

Manifest = dict[str, Any]

SERVICES: dict[str, type[ServiceSettings]] = {
    "router": RouterSettings,
    "orchestrator": OrchestratorSettings,
    "workers": WorkerSettings,
}
_CHART = Path(__file__).parents[1] / "helm" / "lorafleet"
SCHEMA = _CHART / "values.schema.json"
VALUES = _CHART / "values.yaml"
DEFAULTS = _CHART / "files" / "defaults.json"
_ALERTS = _CHART / "files" / "alerts.yaml"

# Settings that the chart itself sets from other values, or that make no sense in a pod.
_EVERYWHERE = {"host", "port", "key_files", "token", "token_file", "config", "port_file", "allow_open"}
_EVERYWHERE |= {"metrics_need_key", "tls_cert", "tls_key", "tls_ca"}
GIVEN = {
    "router": _EVERYWHERE
    | {"orchestrator_url", "router_id", "state_dir", "zone", "engines", "processes", "drain_s", "grace_s"}
    | {"kube_selector", "kube_namespaces", "kubeconfig", "scale_from_zero"} | {"engine_key", "engine_salt"},
    "orchestrator": _EVERYWHERE
    | {"advertise_url", "backend", "lease", "lease_duration_s", "lease_renew_s", "lease_margin_s", "stop_grace_s"}
    | {"peer_fleets", "peer_token_file", "price_file"}
    | {"store", "store_file", "record", "engines", "engine_slots", "engine_roots", "engine_key", "engine_salt"}
    | {"kube_selector", "kube_namespaces", "kube_namespace", "kube_name", "kubeconfig", "scale_from_zero"},
    "workers": _EVERYWHERE
    | {"instance_id", "zone", "node", "namespace", "pool", "orchestrator_url", "advertise_url", "stop_grace_s"}
    | {"engine", "engine_url", "engine_host", "engine_port", "engine_advertise_url", "engine_args", "engine_shutdown_s"}
    | {"model", "served_model_name", "base_model", "device_profile", "max_loras", "max_cpu_loras", "max_lora_rank"}
    | {"lora_path", "ipc_dir", "secrets_dir", "cache_dir", "state_dir", "start_deadline_s"},
}  # fmt: skip

# The keys of pydantic's schema that Helm understands; the rest is prose.
_SCHEMA_KEYS = {"type", "enum", "const", "minimum", "exclusiveMinimum", "maximum", "pattern", "minLength", "maxLength"}
_SCHEMA_KEYS |= {"items", "additionalProperties", "minItems", "maxItems"}


# As orchestrator/model/names.py checks it, without the words and digests that a name may not end in.
_PART = "[A-Za-z0-9._-]([A-Za-z0-9._:@-]*[A-Za-z0-9._-])?"
_LORA_ID = {"pattern": f"^{_PART}(/{_PART})*$", "maxLength": 200}


def settable(service: str) -> dict[str, Any]:
    """JSON Schema by name, for the settings that values may set."""
    known = SERVICES[service].model_json_schema()["properties"]
    return {name: _short(known[name]) for name in sorted(known.keys() - GIVEN[service])}


def schema_with_settings() -> str:
    """The text of values.schema.json with the current settings."""
    schema = json.loads(SCHEMA.read_text())
    for service in SERVICES:
        definition = {"workers": "worker"}.get(service, service) + "Settings"
        schema["definitions"][definition]["properties"] = settable(service)
    schema["definitions"]["scope"] = {"enum": list(SCOPES)}
    schema["definitions"]["adapter"] = _body(reader_of(AdapterSpec).json_schema())
    fields = schema["definitions"]["adapter"]["properties"]
    fields["lora_id"] |= _LORA_ID
    fields["secretRef"] = fields["secret_ref"]  # as Kubernetes writes it
    schema["definitions"]["limits"] = _body(reader_of(AccountLimits).json_schema())
    schema["definitions"]["key"]["properties"]["limits"] = {"$ref": "#/definitions/limits"}
    alias = _body(reader_of(AliasSpec).json_schema())
    alias["properties"]["targets"]["items"]["properties"]["lora_id"] |= _LORA_ID
    schema["definitions"]["alias"] = alias | {"type": ["object", "null"]}  # a later file takes one out by null
    schema["definitions"]["policy"] = _body(reader_of(PlacementPolicy).json_schema())
    schema["definitions"]["prices"] = _prices(reader_of(PriceList).json_schema())
    schema["definitions"]["alert"] = {"enum": [rule["alert"] for rule in yaml.safe_load(_ALERTS.read_text())]}
    schema["definitions"]["grant"] = _grant(schema["definitions"]["key"])
    schema["definitions"]["issuer"] = _issuer(TypeAdapter(Issuer).json_schema())
    return json.dumps(schema, indent=1) + "\n"


# Maps that values give as a whole: a field that is taken out of one stays out.
_WHOLE = {"resources", "demoModelResources", "security"}


def defaults_by_path() -> str:
    """The text of files/defaults.json: each default of values.yaml with the path to it."""
    schema = json.loads(SCHEMA.read_text())
    # Empty in values.yaml, where Helm would merge them with what users and umbrella charts give.
    empty = {"enabled": True, "pools": {}, "aliases": {}}
    given = (
        empty | {key: value for key, value in yaml.safe_load(VALUES.read_text()).items() if value is not None}
    ).items()

    def walk(path: tuple[str, ...], value: Any, part: Manifest) -> Iterator[Manifest]:
        part = schema["definitions"][part["$ref"].rsplit("/", 1)[1]] if "$ref" in part else part
        if isinstance(value, dict) and value and "properties" in part and path[-1] not in _WHOLE:
            for name, below in value.items():
                yield from walk((*path, name), below, part["properties"][name])
        elif value is not None:
            yield {"path": path, "value": value}

    entries = [entry for name, value in given for entry in walk((name,), value, schema["properties"][name])]
    return "[\n" + ",\n".join(f" {json.dumps(entry)}" for entry in entries) + "\n]\n"


def _prices(own: Manifest) -> Manifest:
    """JSON Schema of a price list. A base model has the fields of `default`; an empty list is none."""
    short = _body({**own, "required": []})
    short["properties"]["base_models"]["additionalProperties"] = short["properties"]["default"]
    return short


def _issuer(own: Manifest) -> Manifest:
    """JSON Schema of an issuer, whose grants have a definition of their own."""
    login = own["$defs"]["ConsoleLogin"]
    fields = {name: field for name, field in own["properties"].items() if name != "grants"}
    short = _body({**own, "$defs": {"ConsoleLogin": login}, "properties": fields})
    short["properties"]["grants"] = {"type": "array", "minItems": 1, "items": {"$ref": "#/definitions/grant"}}
    return short


def _grant(key: Manifest) -> Manifest:
    """JSON Schema of an issuer's grant: the fields of a key without those of the key itself, and claims."""
    fields = {name: field for name, field in key["properties"].items() if name not in {"sha256", "expires"}}
    claims = {"type": "object", "minProperties": 1, "additionalProperties": {"type": ["string", "boolean"]}}
    fields["namespace"] = {"type": "string", "minLength": 1}  # its pattern would refuse a `{name}`
    return key | {"required": ["claims", "scopes"], "properties": {"claims": claims} | fields}


def _body(own: Manifest) -> Manifest:
    """JSON Schema of a body that people write: other fields are refused."""
    inner = {name: _object(found) for name, found in own.get("$defs", {}).items()}
    return _object(own, inner)


def _object(own: Manifest, inner: Mapping[str, Manifest] = MappingProxyType({})) -> Manifest:
    def field(schema: Manifest) -> Manifest:
        options = [option["$ref"] for option in (schema, *schema.get("anyOf", ())) if "$ref" in option]
        if options:
            return inner[options[0].rsplit("/", 1)[1]]
        short = _short(schema)
        item = schema.get("items", {}).get("$ref", "").rsplit("/", 1)[-1]
        return short | {"items": inner[item]} if item else short

    fields = {name: field(schema) for name, schema in own["properties"].items()}
    required = {"required": own["required"]} if "required" in own else {}
    return {"type": "object", "additionalProperties": False, **required, "properties": fields}


def _short(schema: Manifest) -> Manifest:
    """The schema without null: omitting a setting gives its default."""
    options = [option for option in schema.get("anyOf", ()) if option.get("type") != "null"]
    if len(options) == 1:
        schema = options[0]
    return {
        key: _short(value) if isinstance(value, dict) else value for key, value in schema.items() if key in _SCHEMA_KEYS
    }
