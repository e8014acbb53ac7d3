"""Token ids that a request gives itself, its sampling parameters for vLLM, and the weights that an answer names."""

import itertools
import json
from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.kv.pictures import PlacedPicture
from router.core.errors import BadBody
from router.http.sse import ModelRenamer, WeightSigner
from router.protocols.routes import GENERATE_TOKENS, ROUTES
from router.protocols.usage import EngineUsage, UsageFilter, usage_of, usage_of_events
from router.request.engine_body import (
    Body,
    EngineOptions,
    drop_nvext,
    refuse_steering,
    sampling_fields,
    sglang_native_body,
    vllm_body,
)
from router.tokenizing.given import given_prompt
from router.tokenizing.tokens import NO_TOKENS, Tokens

GENERATE = EngineOptions(prompt="token_ids")
FULL = EngineOptions(prompt="token_ids", report_full=True)


def fields_of(**body) -> Body:
    return msgspec.json.decode(json.dumps(body), type=Body)


# --- ids and pictures


def generate_tokens(**body) -> Tokens:
    found = given_prompt(body, "token_ids")
    assert isinstance(found, Tokens)
    return found


def test_token_ids_are_the_prompt_and_wrong_ones_are_left_to_the_engine():
    assert generate_tokens(token_ids=[1, 2]) == Tokens(array("I", [1, 2]), "given")
    assert generate_tokens(token_ids=[1], content_parts=[], features=None).ids == array("I", [1])
    for wrong in ([], [1, "a"], [-1], [2**32], [True], "ab", None):
        assert generate_tokens(token_ids=wrong) is NO_TOKENS
    assert generate_tokens(token_ids=[1], content_parts=[{"type": "image_url"}]) is NO_TOKENS


def test_features_place_their_pictures_in_the_order_of_the_prompt():
    places = {"image": [{"offset": 4, "length": 2}, {"offset": 1, "length": 2}], "video": [{"offset": 7, "length": 1}]}
    features = {"mm_hashes": {"image": ["b", "a"], "video": ["c"]}, "mm_placeholders": places, "kwargs_data": None}
    pictures = (PlacedPicture("a", 1, 2), PlacedPicture("b", 4, 2), PlacedPicture("c", 7, 1))
    assert generate_tokens(token_ids=list(range(8)), features=features).pictures == pictures
    for wrong in (
        3,
        {},
        {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {}},
        {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": []}},
        {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [{"offset": 7, "length": 2}]}},
        {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [{"offset": -1, "length": 2}]}},
    ):
        assert generate_tokens(token_ids=list(range(8)), features=wrong) is NO_TOKENS


def test_features_that_overlap_more_than_sound_in_its_video_are_left_to_the_engine():
    def overlapping(count: int) -> Tokens:
        """The tokens of a prompt all of whose ids are said to be of so many pictures."""
        names = [str(number) for number in range(count)]
        places = [{"offset": 0, "length": 64}] * count
        features = {"mm_hashes": {"video": names}, "mm_placeholders": {"video": places}}
        return generate_tokens(token_ids=list(range(64)), features=features)

    assert len(overlapping(2).pictures) == 2
    assert overlapping(3) is NO_TOKENS


def test_completions_give_one_list_or_a_list_of_one():
    assert given_prompt({"prompt": [[1, 2]]}, "completion") == given_prompt({"prompt": [1, 2]}, None)
    assert given_prompt({"prompt": ["a"]}, "completion") == "a"
    assert given_prompt({"prompt": "a"}, "completion") is None
    assert given_prompt({"prompt": [[1], [2]]}, "completion") is NO_TOKENS
    assert given_prompt({"prompt": [1], "truncate_prompt_tokens": 1}, "completion") is NO_TOKENS
    assert given_prompt({"prompt": [1]}, "chat") is None


# --- sampling parameters


JSON = st.recursive(st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3), st.lists, max_leaves=4)
NAMES = st.sampled_from(["n", "logprobs", "temperature", "stop", "output_kind"])


@given(st.dictionaries(NAMES, JSON), st.none() | st.dictionaries(st.sampled_from(["a", "b", "session_id"]), JSON))
def test_sampling_parameters_reach_the_engine_as_they_are_but_for_its_session(sampling, extra_args):
    given_params = sampling | ({} if extra_args is None else {"extra_args": extra_args})
    body = fields_of(token_ids=[1], sampling_params=given_params, lora_id="x")
    kept = None if extra_args is None else {name: value for name, value in extra_args.items() if name != "session_id"}
    sent = json.loads(vllm_body(body, "m@1", GENERATE))
    own = {} if kept is None else {"extra_args": kept}
    assert sent == {"token_ids": [1], "sampling_params": sampling | own, "model": "m@1"}
    full = json.loads(vllm_body(body, "m@1", FULL))["sampling_params"]
    assert full == sampling | {"extra_args": (kept or {}) | {"kv_cache_report_mode": "full"}}


@pytest.mark.parametrize("sampling", [None, 3, "x", [1], {"extra_args": 3}])
def test_sampling_parameters_of_another_type_are_left_to_the_engine(sampling):
    body = fields_of(token_ids=[1], sampling_params=sampling)
    assert sampling_fields(body, sampling) == {}
    for options in (GENERATE, FULL):
        sent = json.loads(vllm_body(body, "m", options))["sampling_params"]
        assert sent == sampling or (sampling is None and options is FULL)


def test_what_routing_needs_is_read_from_the_sampling_parameters_and_orders_are_refused():
    sampling = {"n": 2, "max_tokens": 5, "temperature": 1, "extra_args": {"kv_transfer_params": None, "mine": 1}}
    body = fields_of(token_ids=[1], sampling_params=sampling)
    assert sampling_fields(body, sampling) == {"n": 2, "max_tokens": 5}
    assert json.loads(bytes(body["sampling_params"]))["extra_args"] == {"mine": 1}
    for name in ("kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode"):
        with pytest.raises(BadBody) as refused:
            sampling_fields(body, {"extra_args": {name: {"a": 1}}})
        assert refused.value.param == f"sampling_params.extra_args.{name}"


def test_sglangs_own_body_chooses_the_adapter_by_its_engine_name():
    native, rid = {"sampling_params": {}}, {"rid": "r-0"}
    text, ids = msgspec.Raw(b'"x"'), msgspec.Raw(b"[1,2]")
    chosen = {"text": "x", "lora_path": "m@1"}
    assert json.loads(sglang_native_body(native, text, "m@1", "", "r-0")) == native | rid | chosen
    assert json.loads(sglang_native_body(native, ids, "", "", "r-0")) == native | rid | {"input_ids": [1, 2]}
    salted = json.loads(sglang_native_body(native, text, "", "pepper", "r-0"))
    assert salted == native | rid | {"text": "x", "extra_key": "pepper"}


@pytest.mark.parametrize(
    ("nvext", "is_dropped"),
    [
        ({"extra_fields": ["engine_data"]}, True),
        ({"annotations": ["x"], "agent_hints": {"osl": 5}, "backend_instance_id": None}, True),
        ({"extra_fields": ["engine_data"], "backend_instance_id": 1}, False),
        ({"token_data": [1]}, False),
        (3, False),
    ],
)
def test_hints_of_nvext_are_dropped_and_orders_stay_to_be_refused(nvext, is_dropped):
    body = fields_of(model="m", nvext=nvext)
    assert drop_nvext(body) is is_dropped
    assert ("nvext" in body) is not is_dropped
    if not is_dropped:
        with pytest.raises(BadBody, match="nvext"):
            refuse_steering(body, None)


# --- answers


USAGE = {"prompt_tokens": 9, "completion_tokens": 4}


def test_usage_is_read_from_sglangs_own_answers():
    meta = USAGE | {"cached_tokens": 5, "finish_reason": None}
    one = json.dumps({"text": "", "meta_info": meta}).encode()
    assert usage_of("sglang", one) == EngineUsage(9, 4, 5)
    assert usage_of("sglang", b"[" + one + b"," + one + b"]") == EngineUsage(9, 8, 5)
    assert usage_of_events("sglang", b"data: " + one + b"\n\ndata: [DONE]\n\n") == EngineUsage(9, 4, 5)
    for wrong in (b"[]", b'{"meta_info":{}}', b"{}"):
        assert usage_of("sglang", wrong) is None


def test_a_stream_of_token_ids_loses_the_usage_that_was_not_asked_for_and_gets_no_fingerprint():
    assert not ROUTES["POST", GENERATE_TOKENS].signs
    ends = b'data: {"request_id":"1","choices":[{"index":0,"finish_reason":"stop"}]}\n\n'
    usage = b'data: {"request_id":"1","usage":{"prompt_tokens":3},"choices":[]}\n\n'
    hidden = UsageFilter(None, "w0")
    assert b"".join(map(hidden.events, (ends, usage, b"data: [DONE]\n\n"))) == ends + b"data: [DONE]\n\n"


CHOICES = st.lists(st.text(max_size=4), max_size=2)
FINGERPRINTS = st.sampled_from([None, "vllm-0.32", 'a"b', "absent"])


def an_event(texts, fingerprint) -> dict:
    event = {"id": "1", "model": "m@1", "choices": [{"text": text} for text in texts], "usage": {"a": {}}}
    return event if fingerprint == "absent" else event | {"system_fingerprint": fingerprint}


@given(
    st.lists(st.tuples(CHOICES, FINGERPRINTS.filter(lambda it: it != 'a"b')), min_size=1, max_size=5),
    st.sampled_from([b"\n\n", b"\r\n\r\n"]),
    st.booleans(),
    st.data(),
)
def test_each_event_names_the_weights_once_however_its_bytes_are_cut(parts, line_end, spaced, data):
    separators = (", ", ": ") if spaced else (",", ":")
    events = [json.dumps(an_event(*part), separators=separators).encode() for part in parts]
    whole = b"".join(b"data: " + event + line_end for event in events) + b"data: [DONE]" + line_end
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, len(whole) - 1), max_size=6))), len(whole)]
    signer = WeightSigner("m@1", "m", "lora/v1@0123456789ab")
    found = b"".join(signer.rewrite(whole[a:b]) for a, b in itertools.pairwise(cuts)) + signer.end()
    lines = [line.removeprefix(b"data: ") for line in found.split(line_end) if line]
    assert lines.pop() == b"[DONE]"
    for line, (texts, _) in zip(lines, parts, strict=True):
        assert line.count(b"system_fingerprint") == 1 + sum("system_fingerprint" in text for text in texts)
        expected = an_event(texts, "lora/v1@0123456789ab") | {"model": "m"}
        assert json.loads(line) == expected


def test_errors_and_bodies_without_choices_name_no_weights():
    signer, plain = WeightSigner("m@1", "m", "w"), ModelRenamer("m@1", "m")
    for body in (b'{"error":{"message":"no"}}', b'{"data":[],"model":"m@1"}', b"data: [DONE]\n\n", b"", b'"choices"'):
        assert signer.whole(body) == plain.whole(body)
