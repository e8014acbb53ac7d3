"""vLLM's KV connectors: whether the KV of one adapter can answer a request for another, and what keeps the two apart.

vLLM asks its connector for the blocks that its own prefix cache lacks. The connector finds them by a key of its own. A
key that is made of tokens alone finds the KV of whichever adapter computed these tokens first.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

Separation = Literal["safe", "salted", "refused"]
"""`safe`: the key holds the adapter. `salted`: it holds the request's `cache_salt`. `refused`: it holds neither."""
EngineSalt = Literal["auto", "always", "never", "no_adapters"]
"""What an operator says of an engine, see `decided`."""

_ORDER: tuple[Separation, ...] = ("safe", "salted", "refused")
_MULTI = "MultiConnector"
_SETTING = "engine_salt"


@dataclass(frozen=True, slots=True)
class KvConnector:
    """One connector.

    key     what its stored blocks are found by
    source  where that was read: a path below vllm/distributed/kv_transfer/kv_connector/v1 of vLLM 0.32, unless it
            begins with another package's name
    module  its `kv_connector_module_path`; empty: vLLM's own registry has it
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
        # It loads from the first of its parts that has anything, and stores into all.
        _MULTI: KvConnector("refused", "its parts'", "multi_connector.py"),
    }
)

# Connectors of other packages, by their module.
OUTSIDE: Mapping[str, Mapping[str, KvConnector]] = MappingProxyType(
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
    """What may be done with adapters on one engine.

    reason    what was found there, for people; empty where nothing was
    is_known  `CONNECTORS` or `OUTSIDE` has what was found
    """

    separation: Separation = "safe"
    reason: str = ""
    is_known: bool = True

    @property
    def refusal(self) -> str:
        """Why this engine takes no adapters; empty: it takes them."""
        return self.reason if self.separation == "refused" else ""


NO_CONNECTOR = ConnectorVerdict()


def judged(config: Mapping[str, Any]) -> ConnectorVerdict:
    """What vLLM does with adapters under this `--kv-transfer-config`.

    A MultiConnector is as its worst part. What is not in the tables is refused.
    source  vLLM 0.32 kv_connector/factory.py get_connector_class: a module path comes before the registry
    """
    name, module = config.get("kv_connector"), config.get("kv_connector_module_path")
    if name is None:
        return NO_CONNECTOR
    if name == _MULTI and not module:
        return _worst_part(config)
    known = OUTSIDE.get(str(module), {}).get(str(name)) if module else CONNECTORS.get(str(name))
    if known is None:
        where = f" of {module}" if module else ""
        return ConnectorVerdict(
            "refused", f"how KV connector {name}{where} keeps adapters apart is not known", is_known=False
        )
    return _judgement(str(name), known)


def _judgement(name: str, connector: KvConnector) -> ConnectorVerdict:
    if connector.separation == "safe":
        return ConnectorVerdict("safe", f"KV connector {name}: its key holds the adapter")
    if connector.separation == "salted":
        return ConnectorVerdict("salted", f"KV connector {name} finds blocks by {connector.key}, without the adapter")
    return ConnectorVerdict("refused", f"KV connector {name} gives one adapter another's KV; its key: {connector.key}")


def _worst_part(config: Mapping[str, Any]) -> ConnectorVerdict:
    extra = config.get("kv_connector_extra_config")
    parts = extra.get("connectors") if isinstance(extra, Mapping) else None
    if not isinstance(parts, list) or not parts or not all(isinstance(part, Mapping) for part in parts):
        said = json.dumps(parts)[:200]
        return ConnectorVerdict(
            "refused", f"{_MULTI}: `connectors` must be a list of connectors, found {said}", is_known=False
        )
    found = max((judged(part) for part in parts), key=lambda each: (_ORDER.index(each.separation), not each.is_known))
    return replace(found, reason=f"{_MULTI}: {found.reason}") if found.reason else found


def learned(config: Mapping[str, Any] | None, *, offloading: str, has_connector: bool) -> ConnectorVerdict:
    """What a running vLLM tells of its connector.

    config         `kv_transfer_config` of its `/server_info`, which only VLLM_SERVER_DEV_MODE=1 has; None: not told
    offloading     its `--kv-offloading-backend`, where it has a `--kv-offloading-size`
    has_connector  its metrics are those of an engine with some connector that loads
    source         vLLM 0.32 config/vllm.py _post_init_kv_transfer_config, v1/metrics/loggers.py
    """
    if config is not None:
        return judged(config)
    if offloading:
        return judged(offloaded(offloading))
    if not has_connector:
        return NO_CONNECTOR
    how = f"say with {_SETTING} what keeps adapters apart there, see docs/engines.md"
    return ConnectorVerdict("refused", f"the engine has a KV connector, and does not tell which; {how}", is_known=False)


def offloaded(backend: str) -> Mapping[str, Any]:
    """The `--kv-transfer-config` that vLLM makes of a `--kv-offloading-size` with this backend."""
    names = {"native": "OffloadingConnector", "lmcache": "LMCacheMPConnector"}
    return {"kv_connector": names.get(backend, f"of --kv-offloading-backend {backend}")}


def decided(setting: EngineSalt, found: ConnectorVerdict) -> ConnectorVerdict:
    """What the setting makes of what was found.

    auto         as it was found
    always       every request for an adapter is salted; a known connector that ignores salts is refused all the same
    never        nothing is salted or refused: somebody else keeps adapters apart
    no_adapters  the engine serves its base model alone
    """
    if setting == "never":
        return replace(found, separation="safe")
    if setting == "no_adapters":
        return ConnectorVerdict("refused", f"{_SETTING} is no_adapters")
    if setting == "always" and not (found.separation == "refused" and found.is_known):
        return replace(found, separation="salted", reason=found.reason or f"{_SETTING} is always")
    return found
