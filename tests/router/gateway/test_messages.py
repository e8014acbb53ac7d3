"""The table of messages against Envoy's own classes, as PyPI has them."""

import warnings
from dataclasses import fields as fields_of

import pytest

from router.gateway.messages import FULL_DUPLEX_STREAMED, MESSAGES, OVERWRITE_OR_ADD

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its validators are written for an older pydantic
    from envoy_data_plane.envoy.config.core.v3 import HeaderMap, HeaderValue, HeaderValueOption, Metadata
    from envoy_data_plane.envoy.config.core.v3 import HeaderValueOptionHeaderAppendAction as AppendAction
    from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import ProcessingModeBodySendMode as BodyMode
    from envoy_data_plane.envoy.service.ext_proc import v3 as ext_proc
    from envoy_data_plane.envoy.type.v3 import HttpStatus

_OTHERS = {each.__name__: each for each in (HeaderMap, HeaderValue, HeaderValueOption, HttpStatus, Metadata)}
_KINDS = {"bool": "bool", "bytes": "bytes", "enum": "enum", "string": "string"}
_OF_GRPC = {"HealthCheckRequest", "HealthCheckResponse"}


@pytest.mark.parametrize("name", sorted(MESSAGES.keys() - _OF_GRPC - {"MetadataEntry"}))
def test_each_field_has_envoys_name_number_and_type(name):
    theirs = _OTHERS.get(name) or getattr(ext_proc, name)
    known = {field.name: field.metadata["betterproto"] for field in fields_of(theirs)}
    for field, shape in MESSAGES[name].items():
        number, kind = known[field].number, known[field].proto_type
        assert number == shape.number, field
        if field == "filter_metadata":
            assert kind == "map"  # on the wire: repeated entries of a key (1) and a value (2)
        else:
            assert kind == _KINDS.get(shape.type, "message"), field
            assert bool(known[field].repeated) is shape.many, field
        if shape.one_of:
            assert known[field].group, field


def test_named_numbers_are_envoys():
    assert BodyMode.FULL_DUPLEX_STREAMED == FULL_DUPLEX_STREAMED
    assert AppendAction.OVERWRITE_IF_EXISTS_OR_ADD == OVERWRITE_OR_ADD
