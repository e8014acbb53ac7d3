import json

import msgspec
import pytest

from router.core.errors import BadBody
from router.dress import REFUSED_EXTRA_ARGS, Body, dress_vllm, refuse_steering

FULL = {"kv_cache_report_mode": "full"}


def body(text: str) -> Body:
    return msgspec.json.decode(text, type=Body)


def dressed(text: str, **more) -> dict:
    return json.loads(dress_vllm(body(text), "m", **more))


def test_a_full_report_is_asked_for_beside_the_clients_own_extra_arguments():
    assert dressed('{"model":"x"}', report_full=True) == {"model": "m", "vllm_xargs": FULL}
    assert dressed('{"vllm_xargs":null}', report_full=True)["vllm_xargs"] == FULL
    assert dressed('{"vllm_xargs":{}}', report_full=True)["vllm_xargs"] == FULL
    assert (
        dressed('{"vllm_xargs":{"a":[1,"b"],"c":0}}', report_full=True)["vllm_xargs"] == {"a": [1, "b"], "c": 0} | FULL
    )


def test_a_clients_extra_arguments_stay_byte_for_byte():
    assert b'{"a":1e-7,"b":"\\u00e9",' in dress_vllm(
        body('{"vllm_xargs":{"a":1e-7,"b":"\\u00e9"}}'), "m", report_full=True
    )


def test_without_the_wish_for_a_report_nothing_is_added():
    assert "vllm_xargs" not in dressed('{"model":"x"}')
    assert dressed('{"vllm_xargs":{"a":1}}')["vllm_xargs"] == {"a": 1}


@pytest.mark.parametrize("odd", ["[1]", '"x"', "3", "true"])
def test_extra_arguments_that_are_no_object_are_left_for_the_engine_to_refuse(odd):
    assert dressed(f'{{"vllm_xargs":{odd}}}', report_full=True)["vllm_xargs"] == json.loads(odd)


def test_dressing_does_not_change_the_body_that_a_second_attempt_will_send():
    given = body('{"model":"x","vllm_xargs":{"a":1}}')
    before = dict(given)
    dress_vllm(given, "m", report_full=True)
    assert given == before


@pytest.mark.parametrize("name", REFUSED_EXTRA_ARGS)
def test_a_client_cannot_ask_for_what_the_router_asks_for_however_it_spells_it(name):
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in name)
    for text in (f'{{"{name}":"full"}}', f'{{"{escaped}":null}}', f'{{"{name}":1,"a":2,"{name}":3}}'):
        with pytest.raises(BadBody, match=f"vllm_xargs.{name} is not accepted"):
            refuse_steering({}, msgspec.json.decode(text))
