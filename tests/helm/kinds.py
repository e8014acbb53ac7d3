"""What of the kinds that Kubernetes itself does not have may be in a manifest: as much of each CRD as the chart uses.

Strict, as the real ones are about what they know.
source  prometheus-operator 0.80 api.md, KEDA 2.17 scaledobject-spec, Gateway API 1.2 HTTPRoute, cert-manager 1.18
        Certificate
"""

from typing import Any


def _object(required: tuple[str, ...] = (), /, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(required),
        "properties": properties,
    }


_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
_COUNT = {"type": "integer", "minimum": 0}
_DURATION = {"type": "string", "pattern": "^([0-9]+(ms|s|m|h))+$"}
_SELECTOR = _object((), matchLabels=_TEXTS)


def _list(of: Any) -> dict[str, Any]:
    return {"type": "array", "items": of, "minItems": 1}


def _kind(api_version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = _object(("name",), name=_TEXT, namespace=_TEXT, labels=_TEXTS, annotations=_TEXTS)
    return _object(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": api_version},
        kind={"const": kind},
        metadata=metadata,
        spec=spec,
    )


# Without `type` it is Bearer; the Secret is one of the monitor's own namespace.
_AUTHORIZATION = _object(("credentials",), credentials=_object(("name", "key"), name=_TEXT, key=_TEXT))
_CA = _object(("secret",), secret=_object(("name", "key"), name=_TEXT, key=_TEXT))
_ENDPOINT = _object(
    ("port",),
    port=_TEXT,
    path={"const": "/metrics"},
    interval=_DURATION,
    authorization=_AUTHORIZATION,
    scheme={"const": "https"},
    tlsConfig=_object(("ca", "serverName"), ca=_CA, serverName=_TEXT),
    scrapeTimeout=_DURATION,
    relabelings=_list({"type": "object"}),
    metricRelabelings=_list({"type": "object"}),
)
_RULE = _object(
    ("alert", "expr", "labels", "annotations"),
    **{"alert": _TEXT, "expr": _TEXT, "for": _DURATION, "labels": _TEXTS, "annotations": _TEXTS},
)
_TRIGGER = _object(
    ("type", "metadata"),
    type={"const": "prometheus"},
    name=_TEXT,
    metricType={"enum": ["AverageValue", "Value"]},
    # Strings only, whatever they mean: KEDA refuses a number.
    metadata=_object(
        ("serverAddress", "query", "threshold", "ignoreNullValues"),
        serverAddress=_TEXT,
        query=_TEXT,
        threshold=_TEXT,
        activationThreshold=_TEXT,
        ignoreNullValues={"const": "false"},  # KEDA's own default takes an empty answer for 0, and scales down
    ),
)
_BEHAVIOUR = _object(
    (),
    stabilizationWindowSeconds=_COUNT,
    policies=_list(_object(("type", "value", "periodSeconds"), type=_TEXT, value=_COUNT, periodSeconds=_COUNT)),
)
_BACKEND = _object(("name", "port"), name=_TEXT, port=_COUNT)
_MATCH = _object(("path",), path=_object(("type", "value"), type={"const": "PathPrefix"}, value=_TEXT))

KINDS = {
    "ServiceMonitor": _kind(
        "monitoring.coreos.com/v1", "ServiceMonitor",
        _object(("selector", "endpoints"), selector=_SELECTOR, endpoints=_list(_ENDPOINT)),
    ),
    "PodMonitor": _kind(
        "monitoring.coreos.com/v1", "PodMonitor",
        _object(("selector", "podMetricsEndpoints"), selector=_SELECTOR, podMetricsEndpoints=_list(_ENDPOINT)),
    ),
    "PrometheusRule": _kind(
        "monitoring.coreos.com/v1", "PrometheusRule",
        _object(("groups",), groups=_list(_object(("name", "rules"), name=_TEXT, rules=_list(_RULE)))),
    ),
    "ScaledObject": _kind(
        "keda.sh/v1alpha1", "ScaledObject",
        _object(
            ("scaleTargetRef", "triggers"),
            scaleTargetRef=_object(("name",), apiVersion=_TEXT, kind=_TEXT, name=_TEXT),
            minReplicaCount=_COUNT,
            maxReplicaCount=_COUNT,
            pollingInterval=_COUNT,
            cooldownPeriod=_COUNT,
            advanced=_object((), horizontalPodAutoscalerConfig=_object(
                (), behavior=_object((), scaleUp=_BEHAVIOUR, scaleDown=_BEHAVIOUR),
            )),
            triggers=_list(_TRIGGER),
        ),
    ),
    "Certificate": _kind(
        "cert-manager.io/v1", "Certificate",
        _object(
            ("secretName", "dnsNames", "issuerRef", "usages"),
            secretName=_TEXT,
            duration=_DURATION,
            renewBefore=_DURATION,
            privateKey=_object((), algorithm={"const": "ECDSA"}, size={"const": 256}, rotationPolicy=_TEXT),
            usages=_list({"enum": ["digital signature", "server auth", "client auth"]}),
            dnsNames=_list({"type": "string", "pattern": r"^(\*\.)?[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 253}),
            issuerRef=_object(("name",), name=_TEXT, kind=_TEXT, group=_TEXT),
        ),
    ),
    "HTTPRoute": _kind(
        "gateway.networking.k8s.io/v1", "HTTPRoute",
        _object(
            ("parentRefs", "rules"),
            parentRefs=_list(_object(("name",), name=_TEXT, namespace=_TEXT, sectionName=_TEXT, port=_COUNT)),
            hostnames=_list(_TEXT),
            rules=_list(_object(
                ("backendRefs",),
                matches=_list(_MATCH),
                timeouts=_object((), request=_DURATION, backendRequest=_DURATION),
                backendRefs=_list(_BACKEND),
            )),
        ),
    ),
}  # fmt: skip
