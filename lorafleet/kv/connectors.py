"""vLLM's KV connectors: whether a connector can return one adapter's KV for another adapter's request.

vLLM asks its connector for blocks that its own prefix cache lacks, and the connector finds them by its own key. A key
of tokens alone finds the KV of the adapter that computed these tokens first.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

Separation = Literal["safe", "salted", "refused"]
"""`safe`: the key has the adapter. `salted`: it has the request's `cache_salt`. `refused`: it has neither."""
EngineSalt = Literal["auto", "always", "never", "no_adapters"]
"""The operator's setting for an engine, see `apply_setting`."""

_ORDER: tuple[Separation, ...] = ("safe", "salted", "refused")
_MULTI = "MultiConnector"
_SETTING = "engine_salt"


@dataclass(frozen=True, slots=True)
class KvConnector:
    """One connector.

    key     what its stored blocks are found by
    source  of that fact: a path below vllm/distributed/kv_transfer/kv_connector/v1 of vLLM 0.32, or of another package
    module  its `kv_connector_module_path`; empty if it is in vLLM's own registry
    """

    separation: Separation
    key: str
    source: str
    module: str = ""


_HASHES = "vLLM's block hashes: adapter, `cache_salt`, tokens"
_REQUEST = "the block ids of one request, which its `kv_transfer_params` name; no router sends any"
_TOKENS_AND_SALT = "tokens and `cache_salt`"
_LMCACHE_MODULE = "lmcache.integration.vllm.lmcache_mp_connector"

# v1/core/kv_cache_utils.py generate_block_hash_extra_keys: an adapter's name and path are in each block's hash.
CONNECTORS: Mapping[str, KvConnector] = MappingProxyType(
    {
        "OffloadingConnector": KvConnector("safe", _HASHES, "offloading/scheduler.py make_offload_key"),
        "SimpleCPUOffloadConnector": KvConnector(
            "safe", _HASHES, "simple_cpu_offload_connector.py, and v1/simple_kv_offload/manager.py"
        ),
        "MooncakeStoreConnector": KvConnector("safe", _HASHES, "mooncake/store/data.py process_tokens"),
        "NixlConnector": KvConnector("safe", _REQUEST, "nixl/pull_scheduler.py get_num_new_matched_tokens"),
        "NixlPullConnector": KvConnector("safe", _REQUEST, "nixl/pull_scheduler.py get_num_new_matched_tokens"),
        "NixlPushConnector": KvConnector("safe", _REQUEST, "nixl/push_scheduler.py get_num_new_matched_tokens"),
        "MooncakeConnector": KvConnector("safe", _REQUEST, "mooncake/mooncake_connector.py get_num_new_matched_tokens"),
        "HiSparseConnector": KvConnector(
            "safe", "none: it moves a running request's own blocks", "hisparse/connector.py get_num_new_matched_tokens"
        ),
        "ExampleHiddenStatesConnector": KvConnector(
            "safe", "none: it stores and never loads", "example_hidden_states_connector.py get_num_new_matched_tokens"
        ),
        "LMCacheMPConnector": KvConnector(
            "salted",
            _TOKENS_AND_SALT,
            "lmcache_mp_connector.py, and LMCache 0.5.6 v1/multiprocess/custom_types.py IPCCacheServerKey",
        ),
        "LMCacheConnectorV1": KvConnector(
            "refused", "tokens", "lmcache_connector.py, and LMCache 0.5.6 v1/token_database.py _hash_tokens"
        ),
        "ExampleConnector": KvConnector(
            "refused", "tokens and images", "example_connector.py _generate_foldername_debug"
        ),
        # The example connector's name in older versions.
        "SharedStorageConnector": KvConnector(
            "refused", "tokens and images", "example_connector.py _generate_foldername_debug"
        ),
        "HF3FSKVConnector": KvConnector("refused", "tokens", "hf3fs/hf3fs_connector.py _compute_prefix_hash"),
        "FlexKVConnectorV1": KvConnector(
            "refused",
            "tokens; adapter and `cache_salt` in versions since February 2026, and vLLM does not say which one runs",
            "flexkv_connector.py, and FlexKV integration/vllm/vllm_v1_adapter.py _extract_namespace",
        ),
        "MoRIIOConnector": KvConnector(
            "refused",
            "none: in READ mode a consumer takes every prompt for transferred",
            "moriio/moriio_connector.py get_num_new_matched_tokens",
        ),
        "DecodeBenchConnector": KvConnector(
            "refused",
            "none: it fills every prompt's blocks with the same values",
            "decode_bench_connector.py get_num_new_matched_tokens",
        ),
        # It loads from the first part that has the blocks, and stores into all parts.
        _MULTI: KvConnector("refused", "its parts'", "multi_connector.py"),
    }
)

# Connectors of other packages, by their module.
OTHER_PACKAGES: Mapping[str, Mapping[str, KvConnector]] = MappingProxyType(
    {
        _LMCACHE_MODULE: MappingProxyType(
            {
                "LMCacheMPConnector": KvConnector(
                    "salted",
                    _TOKENS_AND_SALT,
                    "LMCache 0.5.6 integration/vllm/lmcache_mp_connector.py",
                    module=_LMCACHE_MODULE,
                )
            }
        )
    }
)


@dataclass(frozen=True, slots=True)
class ConnectorVerdict:
    """How adapters can be served on one engine.

    reason    for people; empty if the engine has no connector
    is_known  whether `CONNECTORS` or `OTHER_PACKAGES` has the connector
    """

    separation: Separation = "safe"
    reason: str = ""
    is_known: bool = True

    @property
    def refusal(self) -> str:
        """Why this engine takes no adapters; empty if it takes them."""
        return self.reason if self.separation == "refused" else ""


NO_CONNECTOR = ConnectorVerdict()


def connector_verdict(config: Mapping[str, Any]) -> ConnectorVerdict:
    """The verdict on a `--kv-transfer-config`.

    A MultiConnector gets its worst part's verdict. Connectors that are not in the tables are refused.
    source  vLLM 0.32 kv_connector/factory.py get_connector_class: a module path comes before the registry
    """
    name, module = config.get("kv_connector"), config.get("kv_connector_module_path")
    if name is None:
        return NO_CONNECTOR
    if name == _MULTI and not module:
        return _multi_verdict(config)
    known = OTHER_PACKAGES.get(str(module), {}).get(str(name)) if module else CONNECTORS.get(str(name))
    if known is None:
        of_module = f" of {module}" if module else ""
        return ConnectorVerdict(
            "refused", f"it is not known how KV connector {name}{of_module} keeps adapters apart", is_known=False
        )
    return _known_verdict(str(name), known)


def _known_verdict(name: str, connector: KvConnector) -> ConnectorVerdict:
    """The verdict on a connector in the tables."""
    if connector.separation == "safe":
        return ConnectorVerdict("safe", f"KV connector {name}: its key holds the adapter")
    if connector.separation == "salted":
        return ConnectorVerdict("salted", f"KV connector {name} finds blocks by {connector.key}, without the adapter")
    return ConnectorVerdict("refused", f"KV connector {name} gives one adapter another's KV; its key: {connector.key}")


def _multi_verdict(config: Mapping[str, Any]) -> ConnectorVerdict:
    """The worst verdict of a MultiConnector's parts; refused if `connectors` is not a list of connectors."""
    extra = config.get("kv_connector_extra_config")
    parts = extra.get("connectors") if isinstance(extra, Mapping) else None
    if not isinstance(parts, list) or not parts or not all(isinstance(part, Mapping) for part in parts):
        shown = json.dumps(parts)[:200]
        return ConnectorVerdict(
            "refused", f"{_MULTI}: `connectors` must be a list of connectors, found {shown}", is_known=False
        )
    found = max(
        (connector_verdict(part) for part in parts), key=lambda each: (_ORDER.index(each.separation), not each.is_known)
    )
    return replace(found, reason=f"{_MULTI}: {found.reason}") if found.reason else found


def verdict_of_running_engine(
    config: Mapping[str, Any] | None, *, offloading: str, has_connector: bool, has_answered: bool = True
) -> ConnectorVerdict:
    """The verdict on a running vLLM's connector.

    config         `kv_transfer_config` of its `/server_info`, which needs VLLM_SERVER_DEV_MODE=1; None if unknown
    offloading     its `--kv-offloading-backend`, if it has a `--kv-offloading-size`
    has_connector  whether its metrics show a connector that loads
    has_answered   whether it has answered the question for its configuration since its start; False: it is asked again
    source         vLLM 0.32 config/vllm.py _post_init_kv_transfer_config, v1/metrics/loggers.py
    """
    if config is not None:
        return connector_verdict(config)
    if offloading:
        return connector_verdict(offloading_config(offloading))
    if not has_connector:
        return NO_CONNECTOR
    how = f"set {_SETTING} to say what keeps adapters apart there, see docs/engines.md"
    if not has_answered:
        why = "the engine has a KV connector and has not answered yet which"
        return ConnectorVerdict("refused", f"{why}; it is asked again, and if that goes on, {how}", is_known=False)
    return ConnectorVerdict(
        "refused", f"the engine has a KV connector and does not report which; {how}", is_known=False
    )


def offloading_config(backend: str) -> Mapping[str, Any]:
    """The connector's name, as a `--kv-transfer-config`, for `--kv-offloading-size` with this backend.

    An unknown backend gives a placeholder that names the option.
    """
    names = {"native": "OffloadingConnector", "lmcache": "LMCacheMPConnector"}
    return {"kv_connector": names.get(backend, f"of --kv-offloading-backend {backend}")}


def apply_setting(setting: EngineSalt, verdict: ConnectorVerdict) -> ConnectorVerdict:
    """The verdict after the operator's setting.

    auto         the verdict as found
    always       every request for an adapter is salted; a known connector that ignores salts is still refused
    never        nothing is salted or refused: the operator vouches for the separation
    no_adapters  the engine serves its base model alone
    """
    if setting == "never":
        return replace(verdict, separation="safe")
    if setting == "no_adapters":
        return ConnectorVerdict("refused", f"{_SETTING} is no_adapters")
    if setting == "always" and not (verdict.separation == "refused" and verdict.is_known):
        return replace(verdict, separation="salted", reason=verdict.reason or f"{_SETTING} is always")
    return verdict
