import json
from array import array
from random import Random

import msgspec
import pytest

from orchestrator.model.catalog import CatalogAdapter
from router.core.errors import BadBody, ModelNotFound, ReplicaUnreachable
from router.core.fleet import Replica, RouterFleet
from router.core.resolve import resolve
from router.request.engine_body import (
    FORWARDED_HEADERS,
    REFUSED_EXTRA_ARGS,
    REFUSED_FIELDS,
    STRIPPED_EXTRA_ARGS,
    STRIPPED_FIELDS,
    Body,
    EngineOptions,
    asks_for_usage,
    dialect_of,
    may_send_ids,
    refuse_steering,
    sglang_body,
    vllm_body,
)

FULL = {"kv_cache_report_mode": "full"}
IDS = array("I", [5, 6, 70000])


def body(text: str) -> Body:
    return msgspec.json.decode(text, type=Body)


def engine_body_of(text: str, **more) -> dict:
    return json.loads(vllm_body(body(text), "m", EngineOptions(**more)))


def spellings(name: str) -> list[str]:
    """The name as a client may write it in JSON, and said twice."""
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in name)
    return [f'{{"{name}":"full"}}', f'{{"{escaped}":0}}', f'{{"{name}":null,"a":2,"{name}":1}}']


# Said again here, so that no name leaves the tables unseen.
STEERING = (
    "bootstrap_host bootstrap_pair_key bootstrap_port bootstrap_room custom_logit_processor data_parallel_rank "
    "disagg_prefill_dp_rank disagg_transfer_id dp_rank ec_transfer_params extra_key http_worker_ipc id_slot "
    "kv_cache_report_mode kv_router_hint kv_transfer_params nvext routed_dp_rank session_params"
)


# --- what a client may not say


def test_no_name_has_left_the_tables():
    assert " ".join(sorted(REFUSED_FIELDS)) == STEERING
    assert set(REFUSED_EXTRA_ARGS) == {"ec_transfer_params", "kv_cache_report_mode", "kv_transfer_params"}
    assert set(STRIPPED_FIELDS) == {"lora_id", "lora_path", "session_id"}
    assert set(STRIPPED_EXTRA_ARGS) == {"session_id"}


@pytest.mark.parametrize("name", sorted(REFUSED_FIELDS))
def test_steering_field_is_refused_in_every_spelling(name):
    for text in spellings(name):
        with pytest.raises(BadBody, match=f"^{name} is not accepted: ") as caught:
            refuse_steering(body(text), None)
        assert caught.value.param == name


@pytest.mark.parametrize("name", REFUSED_EXTRA_ARGS)
def test_client_cannot_set_the_routers_own_options(name):
    for text in spellings(name):
        with pytest.raises(BadBody, match=f"vllm_xargs.{name} is not accepted"):
            refuse_steering({}, msgspec.json.decode(text))


@pytest.mark.parametrize("nothing", ["null", "false", "[]", "[ ]", "{}", '""'])
@pytest.mark.parametrize("name", REFUSED_FIELDS)
def test_a_steering_field_that_says_nothing_is_taken_and_not_sent_on(name, nothing):
    taken = body(f'{{"{name}":{nothing},"a":2}}')
    refuse_steering(taken, None)
    assert json.loads(vllm_body(taken, "m")) == {"a": 2, "model": "m"}
    # Of one that is said twice engines hear what was decided on.
    taken = body(f'{{"{name}":"x","{name}":{nothing}}}')
    refuse_steering(taken, None)
    assert json.loads(vllm_body(taken, "m")) == {"model": "m"}


@pytest.mark.parametrize("nothing", ["null", "false", "[]", "{}", '""'])
@pytest.mark.parametrize("name", REFUSED_EXTRA_ARGS)
def test_a_steering_extra_argument_that_says_nothing_is_not_sent_on(name, nothing):
    taken = body(f'{{"vllm_xargs":{{"{name}":{nothing},"theirs":1}}}}')
    refuse_steering(taken, msgspec.json.decode(taken["vllm_xargs"]))
    assert json.loads(vllm_body(taken, "m")) == {"model": "m", "vllm_xargs": {"theirs": 1}}


@pytest.mark.parametrize("name", sorted(STRIPPED_FIELDS))
def test_stripped_field_does_not_reach_the_engine(name):
    for text in spellings(name):
        refuse_steering(body(text), None)
        assert name not in engine_body_of(text)
        assert name not in json.loads(sglang_body(body(text), "m"))


@pytest.mark.parametrize("name", sorted(STRIPPED_EXTRA_ARGS))
def test_stripped_extra_argument_does_not_reach_the_engine(name):
    for text in spellings(name):
        refuse_steering({}, msgspec.json.decode(text))
        given = f'{{"vllm_xargs":{text[:-1]},"b":1e-7}}}}'
        assert engine_body_of(given)["vllm_xargs"].keys() <= {"a", "b"}
        assert b'"b":1e-7' in vllm_body(body(given), "m")


@pytest.mark.parametrize("header", ["x-data-parallel-rank", "x-session-id", "x-vllm-priority", "x-request-id"])
def test_no_header_that_vllm_takes_orders_from_is_forwarded(header):
    assert header.encode() not in FORWARDED_HEADERS
    assert set(FORWARDED_HEADERS) == {b"traceparent", b"tracestate"}


def test_what_steers_nothing_travels_byte_for_byte():
    given = '{"model":"x","cache_salt":"s","prompt_embeds":"e","priority":1,"a":1.50,"b":[1 , 2],"c":"\\u00e9","n":1e2}'
    refuse_steering(body(given), None)
    sent = vllm_body(body(given), "m")
    assert sent == given.replace('"x"', '"m"').encode()


def test_engine_gets_the_value_that_the_router_read_of_two():
    given = body('{"model":"a","prompt":"x","model":"b"}')
    assert msgspec.json.decode(given["model"]) == "b"
    sent = vllm_body(given, "b@1")
    assert sent.count(b'"model"') == 1
    assert json.loads(sent)["model"] == "b@1"


@pytest.mark.parametrize("field", ["model", "lora_id"])
@pytest.mark.parametrize(
    "name",
    ["sql/v1@0123456789a", "tiny:sql/v1@0123456789AB", "sql/v1@ffffffffffff", "@", "sql/v1@", "tiny@0123456789ab"],
)
def test_name_with_another_digest_or_none_is_unknown(field, name):
    replica = Replica("w0", "tiny", "http://e", "http://a", "vllm", "ready", 16, 4, 8, 2048)
    adapter = CatalogAdapter(lora_id="sql/v1", base_model="tiny", digest="0123456789abcdef")
    fleet = RouterFleet(replicas={"w0": replica}, adapters={"sql/v1": adapter})
    names = {"model": None, "lora_id": None} | {field: name}
    with pytest.raises(ModelNotFound, match=r"does not exist|is not kept"):
        resolve(fleet, **names, visible=lambda _: True, rng=Random(0))


# --- what the router says


def test_a_full_report_is_asked_for_beside_the_clients_own_extra_arguments():
    assert engine_body_of('{"model":"x"}', report_full=True) == {"model": "m", "vllm_xargs": FULL}
    assert engine_body_of('{"vllm_xargs":null}', report_full=True)["vllm_xargs"] == FULL
    assert engine_body_of('{"vllm_xargs":{}}', report_full=True)["vllm_xargs"] == FULL
    assert (
        engine_body_of('{"vllm_xargs":{"a":[1,"b"],"c":0}}', report_full=True)["vllm_xargs"]
        == {"a": [1, "b"], "c": 0} | FULL
    )


def test_a_clients_extra_arguments_stay_byte_for_byte():
    assert b'{"a":1e-7,"b":"\\u00e9",' in vllm_body(
        body('{"vllm_xargs":{"a":1e-7,"b":"\\u00e9"}}'), "m", EngineOptions(report_full=True)
    )


def test_without_the_wish_for_a_report_nothing_is_added():
    assert "vllm_xargs" not in engine_body_of('{"model":"x"}')
    assert engine_body_of('{"vllm_xargs":{"a":1}}')["vllm_xargs"] == {"a": 1}


@pytest.mark.parametrize("odd", ["[1]", '"x"', "3", "true"])
def test_extra_arguments_that_are_no_object_reach_the_engine(odd):
    assert engine_body_of(f'{{"vllm_xargs":{odd}}}', report_full=True)["vllm_xargs"] == json.loads(odd)


def test_dressing_does_not_change_the_body_that_a_second_attempt_will_send():
    given = body('{"model":"x","vllm_xargs":{"a":1,"session_id":"s"},"prompt":"p"}')
    before = dict(given)
    options = EngineOptions(report_full=True, ask_usage=True, response_id="r", prompt="completion", prompt_ids=IDS)
    vllm_body(given, "m", options=options)
    assert given == before


def test_a_response_gets_the_id_that_says_where_it_is_kept():
    assert engine_body_of('{"input":"x","request_id":"theirs"}', response_id="r.1")["request_id"] == "r.1"
    assert "request_id" not in engine_body_of('{"input":"x"}')


# --- ids in place of text


def test_a_completion_gets_the_ids_as_its_prompt():
    sent = engine_body_of('{"prompt":"x","n":1}', prompt="completion", prompt_ids=IDS)
    assert sent == {"prompt": [5, 6, 70000], "n": 1, "model": "m"}


@pytest.mark.parametrize("kind", ["chat", "responses", "messages"])
def test_a_conversation_gets_the_ids_beside_its_messages(kind):
    sent = engine_body_of('{"messages":[]}', prompt=kind, prompt_ids=IDS)
    assert sent == {"messages": [], "model": "m", "kv_transfer_params": {"prompt_token_ids": [5, 6, 70000]}}


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("completion", '"echo":true'),
        ("completion", '"suffix":""'),
        ("completion", '"prompt_embeds":"x"'),
        ("completion", '"truncate_prompt_tokens":-1'),
        ("chat", '"echo":true'),
        ("chat", '"return_prompt_text":true'),
        ("chat", '"truncate_prompt_tokens":5'),
        ("chat", '"reasoning_effort":"medium"'),
        ("responses", '"enable_response_messages":true'),
        ("responses", '"reasoning":{"effort":"medium"}'),
        ("messages", '"output_config":{"effort":"medium"}'),
        ("messages", '"thinking":{"type":"disabled"}'),
    ],
)
def test_ids_are_not_sent_where_the_answer_would_show_it(kind, field):
    assert not may_send_ids(kind, body("{" + field + "}"), prompt_tokens=10, max_model_len=100)
    name = field.partition(":")[0]
    for unset in ("null", "false"):
        assert may_send_ids(kind, body(f"{{{name}:{unset}}}"), prompt_tokens=10, max_model_len=100)


def test_ids_are_not_sent_for_refused_or_empty_prompts():
    assert may_send_ids("chat", {}, prompt_tokens=99, max_model_len=100)
    assert not may_send_ids("chat", {}, prompt_tokens=100, max_model_len=100)
    assert not may_send_ids("completion", {}, prompt_tokens=0, max_model_len=100)
    assert not may_send_ids("none", {}, prompt_tokens=10, max_model_len=100)


@pytest.mark.parametrize(
    ("options", "asks"),
    [
        (None, False),
        ({}, False),
        ({"include_usage": False}, False),
        ({"include_usage": True}, True),
        ({"include_usage": 0}, False),
        ({"include_usage": []}, True),
        ({"include_usage": ""}, True),
        ({"continuous_usage_stats": True}, True),
        ("odd", True),
    ],
)
def test_a_client_asks_for_usage_in_whatever_form_an_engine_takes(options, asks):
    assert asks_for_usage(options) is asks


# --- kinds of engines


def test_each_engine_is_told_the_name_in_its_own_way():
    vllm, sglang = dialect_of("vllm", engine_name=""), dialect_of("sglang", engine_name="")
    assert (vllm.model("base", "sql/v1@1"), vllm.model("base", "")) == ("sql/v1@1", "base")
    assert (sglang.model("base", "sql/v1@1"), sglang.model("base", "")) == ("base:sql/v1@1", "base")


def test_sglang_serves_its_base_model_everywhere_and_adapters_at_some_paths():
    assert dialect_of("sglang", engine_name="", path="/v1/responses").model("base", "") == "base"
    with pytest.raises(BadBody, match="runs no adapter at /v1/responses"):
        dialect_of("sglang", engine_name="sql/v1@1", path="/v1/responses")


def test_sgl_jax_gets_an_adapter_as_lora_path_at_completions_which_chats_become_and_nowhere_else():
    jax = dialect_of("sgl-jax", engine_name="sql/v1@1")
    options = EngineOptions(adapter="sql/v1@1", prompt_ids=IDS, report_full=True)
    sent = json.loads(jax.body(body('{"prompt":"x","cache_salt":"s"}'), jax.model("base", "sql/v1@1"), options))
    assert sent == {"prompt": "x", "model": "base", "lora_path": "sql/v1@1", "extra_key": "s"}
    assert "lora_path" not in json.loads(jax.body(body("{}"), "base", EngineOptions()))
    assert dialect_of("sgl-jax", engine_name="sql/v1@1", path="/v1/chat/completions").completes_chats
    for path in ("/v1/messages", "/v1/responses", "/v1/embeddings", "/tokenize"):
        assert dialect_of("sgl-jax", engine_name="", path=path).model("base", "") == "base"
        with pytest.raises(BadBody, match="there is /v1/chat/completions, /v1/completions"):
            dialect_of("sgl-jax", engine_name="sql/v1@1", path=path)


def test_sglang_hears_nothing_that_only_vllm_understands():
    options = EngineOptions(report_full=True, ask_usage=True, response_id="r", prompt="chat", prompt_ids=IDS)
    sent = json.loads(sglang_body(body('{"lora_id":"x","messages":[]}'), "base:a", options=options))
    assert sent == {"messages": [], "model": "base:a", "stream_options": {"include_usage": True}}


def test_base_model_named_like_an_sglang_adapter_is_not_sent():
    with pytest.raises(ReplicaUnreachable, match="under another name"):
        dialect_of("sglang", engine_name="").model("qwen:7b", "")


def test_an_unknown_kind_of_engine_gets_no_adapter_but_the_base_model():
    with pytest.raises(ReplicaUnreachable, match="kind 'mlx'; known: sgl-jax, sglang, vllm"):
        dialect_of("mlx", engine_name="sql/v1@1")
    plain = dialect_of("mlx", engine_name="")
    assert json.loads(plain.body(body("{}"), plain.model("base", ""), options=EngineOptions(report_full=True))) == {
        "model": "base"
    }
