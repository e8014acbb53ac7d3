"""The houses' settings as the chart's schema has them: a typing error is refused before anything is installed."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from lorafleet.service.settings import ServiceSettings
from orchestrator.config import OrchestratorSettings
from orchestrator.wire import AdapterSpec
from router.config import RouterSettings
from workers.config import WorkerSettings

Manifest = dict[str, Any]

HOUSES: dict[str, type[ServiceSettings]] = {
    "router": RouterSettings,
    "orchestrator": OrchestratorSettings,
    "workers": WorkerSettings,
}
SCHEMA = Path(__file__).parents[1] / "helm" / "lorafleet" / "values.schema.json"

# Those that the chart itself gives, from values of its own, or that make no sense in a pod.
_EVERYWHERE = {"host", "port", "key_files", "token", "token_file", "config", "port_file", "allow_open"}
_EVERYWHERE |= {"metrics_need_key"}
GIVEN = {
    "router": _EVERYWHERE
    | {"orchestrator_url", "router_id", "state_dir", "zone", "engines", "processes", "drain_s", "grace_s"}
    | {"kube_selector", "kube_namespaces", "kubeconfig", "engine_key", "engine_salt"},
    "orchestrator": _EVERYWHERE
    | {"advertise_url", "backend", "lease", "lease_duration_s", "lease_renew_s", "lease_margin_s", "stop_grace_s"}
    | {"store", "engines", "engine_slots", "engine_roots", "engine_key", "engine_salt"}
    | {"kube_selector", "kube_namespaces", "kube_namespace", "kube_name", "kubeconfig"},
    "workers": _EVERYWHERE
    | {"instance_id", "zone", "node", "namespace", "pool", "orchestrator_url", "advertise_url", "stop_grace_s"}
    | {"engine", "engine_url", "engine_host", "engine_port", "engine_advertise_url", "engine_args", "engine_shutdown_s"}
    | {"model", "served_model_name", "base_model", "device_profile", "max_loras", "max_cpu_loras", "max_lora_rank"}
    | {"lora_path", "ipc_dir", "secrets_dir", "cache_dir", "state_dir", "start_deadline_s"},
}  # fmt: skip

# Of what pydantic says about a field; the rest is prose, or nothing that helm knows.
_SAID = {"type", "enum", "const", "minimum", "exclusiveMinimum", "maximum", "pattern", "minLength", "maxLength"}
_SAID |= {"items", "additionalProperties"}


# Checked by code in orchestrator/wire.py; all of it but the last part's reserved words.
_LORA_ID = {"pattern": "^[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*$", "maxLength": 200}


def free(house: str) -> dict[str, Any]:
    """name -> schema, of the settings that values may name."""
    known = HOUSES[house].model_json_schema()["properties"]
    return {name: _short(known[name]) for name in sorted(known.keys() - GIVEN[house])}


def schema_with_settings() -> str:
    """values.schema.json as it should be."""
    schema = json.loads(SCHEMA.read_text())
    for house in HOUSES:
        definition = {"workers": "worker"}.get(house, house) + "Settings"
        schema["definitions"][definition]["properties"] = free(house)
    schema["definitions"]["adapter"] = _body(AdapterSpec)
    fields = schema["definitions"]["adapter"]["properties"]
    fields["lora_id"] |= _LORA_ID
    fields["secretRef"] = fields["secret_ref"]  # as Kubernetes writes it
    return json.dumps(schema, indent=1) + "\n"


def _body(model: type[BaseModel]) -> Manifest:
    """What people write: no other field than the model's."""
    own = model.model_json_schema()
    inner = {name: _object(found) for name, found in own.get("$defs", {}).items()}
    return _object(own, inner)


def _object(own: Manifest, inner: Mapping[str, Manifest] = MappingProxyType({})) -> Manifest:
    def field(said: Manifest) -> Manifest:
        options = [option["$ref"] for option in (said, *said.get("anyOf", ())) if "$ref" in option]
        return inner[options[0].rsplit("/", 1)[1]] if options else _short(said)

    fields = {name: field(said) for name, said in own["properties"].items()}
    required = {"required": own["required"]} if "required" in own else {}
    return {"type": "object", "additionalProperties": False, **required, "properties": fields}


def _short(said: Manifest) -> Manifest:
    """Without null: who wants the default leaves the setting out."""
    options = [option for option in said.get("anyOf", ()) if option.get("type") != "null"]
    if len(options) == 1:
        said = options[0]
    return {key: _short(value) if isinstance(value, dict) else value for key, value in said.items() if key in _SAID}
