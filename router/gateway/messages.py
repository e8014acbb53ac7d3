"""Envoy's messages of external processing, and gRPC's of health: the fields that a picker reads or writes.

protobuf makes the classes from the table below, so that there is nothing to compile, and no generated file that fits
one version of protobuf alone. Fields that the table leaves out are skipped in what Envoy sends.

Source: Envoy 1.40 service/ext_proc/v3/external_processor.proto, config/core/v3/base.proto, type/v3/http_status.proto;
grpc/health/v1/health.proto. The package of PyPI that has Envoy's own classes (xds-protos) overwrites files of
opentelemetry-proto and googleapis-common-protos.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH_SERVICE: Final = "grpc.health.v1.Health"

FULL_DUPLEX_STREAMED: Final = 4
"""ProcessingMode.BodySendMode: pieces of a body go both ways, and none waits for an answer."""
OVERWRITE_OR_ADD: Final = 2
"""HeaderValueOption.HeaderAppendAction: the header has this value alone."""
SERVING: Final = 1
NOT_SERVING: Final = 2
SERVICE_UNKNOWN: Final = 3

_PACKAGE = "lorafleet.gateway"
_Descriptor = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bool": _Descriptor.TYPE_BOOL,
    "bytes": _Descriptor.TYPE_BYTES,
    "enum": _Descriptor.TYPE_INT32,  # the same bytes
    "string": _Descriptor.TYPE_STRING,
}


class MessageField(NamedTuple):
    """A field of a message: its number, and its type: a scalar's, or a message's name.

    many    repeated
    one_of  the field is one of several, of which a message has one at most
    """

    number: int
    type: str
    many: bool = False
    one_of: bool = False


MESSAGES: Final[Mapping[str, Mapping[str, MessageField]]] = {
    "HeaderValue": {
        "key": MessageField(1, "string"),
        "value": MessageField(2, "string"),
        "raw_value": MessageField(3, "bytes"),
    },
    "HeaderMap": {"headers": MessageField(1, "HeaderValue", many=True)},
    "HeaderValueOption": {"header": MessageField(1, "HeaderValue"), "append_action": MessageField(3, "enum")},
    "HeaderMutation": {
        "set_headers": MessageField(1, "HeaderValueOption", many=True),
        "remove_headers": MessageField(2, "string", many=True),
    },
    "MetadataEntry": {"key": MessageField(1, "string"), "value": MessageField(2, "google.protobuf.Struct")},
    "Metadata": {"filter_metadata": MessageField(1, "MetadataEntry", many=True)},
    "HttpStatus": {"code": MessageField(1, "enum")},
    "HttpHeaders": {"headers": MessageField(1, "HeaderMap"), "end_of_stream": MessageField(3, "bool")},
    "HttpBody": {"body": MessageField(1, "bytes"), "end_of_stream": MessageField(2, "bool")},
    "HttpTrailers": {"trailers": MessageField(1, "HeaderMap")},
    "ProtocolConfiguration": {
        "request_body_mode": MessageField(1, "enum"),
        "response_body_mode": MessageField(2, "enum"),
    },
    "StreamedBodyResponse": {"body": MessageField(1, "bytes"), "end_of_stream": MessageField(2, "bool")},
    "BodyMutation": {"streamed_response": MessageField(3, "StreamedBodyResponse", one_of=True)},
    "CommonResponse": {
        "header_mutation": MessageField(2, "HeaderMutation"),
        "body_mutation": MessageField(3, "BodyMutation"),
    },
    "HeadersResponse": {"response": MessageField(1, "CommonResponse")},
    "BodyResponse": {"response": MessageField(1, "CommonResponse")},
    "TrailersResponse": {"header_mutation": MessageField(1, "HeaderMutation")},
    "ImmediateResponse": {
        "status": MessageField(1, "HttpStatus"),
        "headers": MessageField(2, "HeaderMutation"),
        "body": MessageField(3, "bytes"),
        "details": MessageField(5, "string"),
    },
    "ProcessingRequest": {
        "request_headers": MessageField(2, "HttpHeaders", one_of=True),
        "response_headers": MessageField(3, "HttpHeaders", one_of=True),
        "request_body": MessageField(4, "HttpBody", one_of=True),
        "response_body": MessageField(5, "HttpBody", one_of=True),
        "request_trailers": MessageField(6, "HttpTrailers", one_of=True),
        "response_trailers": MessageField(7, "HttpTrailers", one_of=True),
        "metadata_context": MessageField(8, "Metadata"),
        "protocol_config": MessageField(11, "ProtocolConfiguration"),
    },
    "ProcessingResponse": {
        "request_headers": MessageField(1, "HeadersResponse", one_of=True),
        "response_headers": MessageField(2, "HeadersResponse", one_of=True),
        "request_body": MessageField(3, "BodyResponse", one_of=True),
        "response_body": MessageField(4, "BodyResponse", one_of=True),
        "request_trailers": MessageField(5, "TrailersResponse", one_of=True),
        "response_trailers": MessageField(6, "TrailersResponse", one_of=True),
        "immediate_response": MessageField(7, "ImmediateResponse", one_of=True),
        "dynamic_metadata": MessageField(8, "google.protobuf.Struct"),
    },
    "HealthCheckRequest": {"service": MessageField(1, "string")},
    "HealthCheckResponse": {"status": MessageField(1, "enum")},
}
"""Message -> field -> its number and type."""


def _make_classes() -> dict[str, Any]:
    """Name -> class of each message of the table, from a pool of their own."""
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    file = descriptor_pb2.FileDescriptorProto(
        name="lorafleet/gateway.proto", package=_PACKAGE, syntax="proto3", dependency=[struct_pb2.DESCRIPTOR.name]
    )
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, shape in fields.items():
            added = message.field.add(
                name=field,
                number=shape.number,
                label=_Descriptor.LABEL_REPEATED if shape.many else _Descriptor.LABEL_OPTIONAL,
            )
            if shape.type in _SCALARS:
                added.type = _SCALARS[shape.type]
            else:
                added.type = _Descriptor.TYPE_MESSAGE
                added.type_name = f".{shape.type}" if "." in shape.type else f".{_PACKAGE}.{shape.type}"
            if shape.one_of:
                if not message.oneof_decl:
                    message.oneof_decl.add(name="kind")
                added.oneof_index = 0
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in MESSAGES
    }


_classes = _make_classes()
ProcessingRequest: Any = _classes["ProcessingRequest"]
ProcessingResponse: Any = _classes["ProcessingResponse"]
HealthCheckRequest: Any = _classes["HealthCheckRequest"]
HealthCheckResponse: Any = _classes["HealthCheckResponse"]
