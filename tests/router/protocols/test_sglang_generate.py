import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.errors import BadBody, ReplicaUnreachable, StreamBroken
from router.http.sse import CumulativeRewriter
from router.protocols.bodies import ItemAnswer
from router.protocols.sglang_generate import CumulativeStream, join_answers, split_batch
from router.protocols.sglang_logprobs import check_for_completions

SQL = "sql-expert/v1"
WEIGHTS = f"{SQL}@{'a' * 12}"


def items(**body) -> list[dict]:
    return [json.loads(item) for item in split_batch(json.dumps(body).encode()).items]


def refused(param: str, **body) -> str:
    with pytest.raises(BadBody) as caught:
        split_batch(json.dumps(body).encode())
    assert caught.value.param == param
    return str(caught.value)


def answer(*texts: str, **more) -> ItemAnswer:
    choices = [
        {"text": text, "token_ids": [7, 8], "finish_reason": "length", "stop_reason": None} | more for text in texts
    ]
    usage = {"prompt_tokens": 3, "completion_tokens": 2 * len(texts), "prompt_tokens_details": {"cached_tokens": 2}}
    return ItemAnswer(json.dumps({"id": "cmpl-1", "choices": choices, "usage": usage}).encode(), WEIGHTS)


# --- taking apart


def test_one_text_is_one_completion_on_the_base_model_with_sglangs_default_length():
    assert items(text="hello") == [{"prompt": "hello", "return_token_ids": True, "max_tokens": 128}]


def test_a_batch_may_mix_adapters_and_the_base_model():
    first, second, third = items(text=["a", "b", "c"], lora_path=[SQL, None, "legal/v2"])
    assert (first["lora_id"], "lora_id" in second, third["lora_id"]) == (SQL, False, "legal/v2")
    assert [one["prompt"] for one in (first, second, third)] == ["a", "b", "c"]


def test_one_adapter_and_one_set_of_parameters_are_for_all():
    made = items(text=["a", "b"], lora_path=SQL, sampling_params={"max_new_tokens": 4})
    assert [(one["lora_id"], one["max_tokens"]) for one in made] == [(SQL, 4)] * 2


def test_each_text_may_have_parameters_of_its_own():
    made = items(text=["a", "b"], sampling_params=[{"max_new_tokens": 1}, {"temperature": 0}])
    assert [(one["max_tokens"], one.get("temperature")) for one in made] == [(1, None), (128, 0)]


def test_token_ids_are_a_prompt_and_a_list_of_them_is_a_batch():
    assert [one["prompt"] for one in items(input_ids=[1, 2])] == [[1, 2]]
    assert [one["prompt"] for one in items(input_ids=[[1], [2, 3]])] == [[1], [2, 3]]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"max_new_tokens": 5}, {"max_tokens": 5}),
        ({"min_new_tokens": 2}, {"min_tokens": 2}),
        ({"no_stop_trim": True}, {"include_stop_str_in_output": True}),
        ({"sampling_seed": 1}, {"seed": 1}),
        ({"regex": "a+"}, {"structured_outputs": {"regex": "a+"}}),
        ({"json_schema": "{}"}, {"structured_outputs": {"json": "{}"}}),
        ({"ebnf": "x"}, {"structured_outputs": {"grammar": "x"}}),
        ({"structural_tag": "x"}, {"structured_outputs": {"structural_tag": "x"}}),
        ({"stop": ["a"], "stop_token_ids": [1]}, {"stop": ["a"], "stop_token_ids": [1]}),
        ({"temperature": 0, "top_p": 0.5, "top_k": -1, "min_p": 0.1}, {"temperature": 0, "top_p": 0.5, "top_k": -1}),
        ({"n": 2, "ignore_eos": True}, {"n": 2, "ignore_eos": True}),
        ({"custom_params": None, "stop_regex": None}, {}),
    ],
)
def test_sampling_parameters_are_translated_to_vllms(theirs, ours):
    (made,) = items(text="x", sampling_params=theirs)
    assert made.items() >= ours.items()
    assert not made.keys() & (theirs.keys() - ours.keys() - {"min_p"})


def test_an_invalid_field_is_refused_by_name():
    assert "no counterpart" in refused("sampling_params.stop_regex", text="x", sampling_params={"stop_regex": "a"})
    assert "one of json_schema" in refused("sampling_params", text="x", sampling_params={"regex": "a", "ebnf": "b"})
    assert "not offered" in refused("image_data", text="x", image_data="file:///etc/passwd")
    assert "not offered" in refused("session_params", text="x", session_params={"id": "1"})
    assert "encode routed experts differently" in refused("return_routed_experts", text="x", return_routed_experts=True)
    assert "ask for top_logprobs_num" in refused("token_ids_logprob", text="x", token_ids_logprob=[1])
    assert "true or false, null" in refused("return_logprob", text="x", return_logprob="yes")
    assert "an integer, null" in refused("top_logprobs_num", text="x", return_logprob=True, top_logprobs_num="2")
    assert "0 or more" in refused("top_logprobs_num", text="x", return_logprob=True, top_logprobs_num=-1)
    assert "2 entries for 1" in refused("logprob_start_len", text=["x"], return_logprob=True, logprob_start_len=[0, 0])
    asked = {"text": "x", "return_logprob": True, "return_text_in_logprobs": True}
    assert "true or false" in refused("return_text_in_logprobs", **asked | {"return_text_in_logprobs": 3})
    assert "3 entries for 2 prompts" in refused("lora_path", text=["a", "b"], lora_path=[SQL] * 3)
    assert "1 entries for 2 prompts" in refused("sampling_params", text=["a", "b"], sampling_params=[{}])
    assert "there is one prompt" in refused("lora_path", text="a", lora_path=[SQL])
    assert "must be a text" in refused("lora_path", text="a", lora_path=3)
    assert "must be there" in refused("text")
    assert "must be there" in refused("text", text="a", input_ids=[1])
    assert "1 to 1024" in refused("text", text=[])
    assert "found 1025" in refused("text", text=["a"] * 1025)
    assert len(items(text=["a"] * 1024)) == 1024
    assert "must be a text, null, or a list" in refused("lora_path", text=["a", "b"], lora_path=["x", 3])
    assert "must be text" in refused("text", text=["a", 1])
    assert "must be token ids" in refused("input_ids", input_ids=[True])
    assert "streams one text" in refused("stream", text=["a", "b"], stream=True)
    assert "streams one text" in refused("stream", text="a", stream=True, sampling_params={"n": 2})
    for stream in ("true", "false", 1, 0, []):
        assert f"true or false, found {type(stream).__name__}" in refused("stream", text="a", stream=stream)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b"3", b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(body):
    with pytest.raises(BadBody, match="not a JSON object"):
        split_batch(body)


def test_a_switched_off_field_is_ignored():
    assert items(text="x", return_logprob=False, image_data=None) == items(text="x")


# --- putting together


def test_one_text_is_answered_by_one_output_and_a_list_by_a_list():
    output = {"text": "out", "output_ids": [7, 8]}
    meta = {"id": "cmpl-1", "finish_reason": {"type": "length", "length": 2}}
    meta |= {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 2, "weight_version": WEIGHTS}
    whole = output | {"meta_info": meta}
    assert json.loads(join_answers(split_batch(b'{"text":"a"}'), [answer("out")])) == whole
    assert json.loads(join_answers(split_batch(b'{"text":["a"]}'), [answer("out")])) == [whole]


def test_outputs_are_in_the_order_of_the_texts_with_the_callers_ids():
    batch = split_batch(b'{"text":["a","b"],"rid":["x","y"]}')
    made = json.loads(join_answers(batch, [answer("one"), answer("two")]))
    assert [(one["text"], one["meta_info"]["id"]) for one in made] == [("one", "x"), ("two", "y")]
    assert split_batch(b'{"text":["a","b"],"rid":"z"}').names == ("z_0", "z_1")
    assert split_batch(b'{"text":"a","rid":"z"}').names == ("z",)


def test_several_choices_are_several_outputs_each_with_its_own_count():
    batch = split_batch(b'{"text":"a","sampling_params":{"n":2}}')
    made = json.loads(join_answers(batch, [answer("one", "two")]))
    assert [(one["text"], one["meta_info"]["completion_tokens"]) for one in made] == [("one", 2), ("two", 2)]


def test_a_stop_says_what_matched_or_which_token_ended_it():
    batch = split_batch(b'{"text":"a"}')

    def reason(**more) -> dict:
        return json.loads(join_answers(batch, [answer("x", **more)]))["meta_info"]["finish_reason"]

    assert reason(finish_reason="stop", stop_reason="END") == {"type": "stop", "matched": "END"}
    assert reason(finish_reason="stop", stop_reason=None) == {"type": "stop", "matched": 8}
    assert reason(finish_reason="abort") == {"type": "abort"}


# --- streaming


def chunk(text: str, ids: list[int], reason: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "token_ids": ids, "finish_reason": reason, "stop_reason": None}
    usage = {"prompt_tokens": 3, "completion_tokens": 1}
    return b"data: " + json.dumps({"id": "cmpl-1", "choices": [choice], "usage": usage}).encode() + b"\n\n"


def last_chunk() -> bytes:
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 2}}
    return b"data: " + json.dumps({"id": "cmpl-1", "choices": [], "usage": usage}).encode() + b"\n\n"


def told(events: bytes) -> list:
    parts = [part.removeprefix("data: ") for part in events.decode().split("\n\n") if part]
    return [part if part == "[DONE]" else json.loads(part) for part in parts]


def test_each_event_of_a_stream_has_all_of_the_text_so_far():
    growing = CumulativeStream("")
    (first,) = told(growing.events(chunk("one", [7])))
    assert (first["text"], first["output_ids"], first["meta_info"]["finish_reason"]) == ("one", [7], None)
    assert growing.events(chunk(" two", [8], "length")) == b"", "the end waits for what was cached"
    last, done = told(growing.events(last_chunk() + b"data: [DONE]\n\n"))
    assert (last["text"], last["output_ids"], done) == ("one two", [7, 8], "[DONE]")
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 2}
    assert last["meta_info"]["cached_tokens"] == 2


def test_a_stream_that_ends_without_its_usage_still_ends_with_its_text():
    growing = CumulativeStream("z")
    growing.events(chunk("one", [7], "length"))
    last, done = told(growing.events(b"data: [DONE]\n\n"))
    assert (last["text"], last["meta_info"]["id"], done) == ("one", "z", "[DONE]")


def test_an_error_in_a_stream_is_passed_on():
    error = b'data: {"error":{"message":"dead"}}\n\n'
    growing = CumulativeStream("")
    assert growing.events(error) == error
    assert growing.events(last_chunk()) == b""


@pytest.mark.parametrize("data", [b"nonsense", b"[]", b'{"choices":' + b"[" * 100_000], ids=["none", "list", "nested"])
def test_an_answer_that_is_no_completion_is_an_error(data):
    with pytest.raises(StreamBroken, match="no completion's event"):
        CumulativeStream("").events(b"data: " + data + b"\n\n")
    with pytest.raises(ReplicaUnreachable, match="no completion"):
        join_answers(split_batch(b'{"text":"a"}'), [ItemAnswer(data, WEIGHTS)])


# --- log-probabilities


VALUES = st.floats(-20, 0, allow_nan=False)
PLACES = st.lists(
    st.tuples(st.integers(0, 50), st.dictionaries(st.integers(51, 99), VALUES, min_size=3, max_size=5), VALUES),
    min_size=1,
    max_size=6,
)


def vllm_logprobs(places, top: int, *, with_text: bool) -> dict:
    """As vLLM writes them: the sampled token first, then the likeliest."""
    rows = []
    for sampled, others, value in places:
        likeliest = sorted(others.items(), key=lambda entry: -entry[1])[:top]
        rows.append({f"token_id:{token}": found for token, found in [(sampled, value), *likeliest]})
    tokens = [f"<{sampled}>" if with_text else f"token_id:{sampled}" for sampled, _, _ in places]
    numbers = [value for _, _, value in places]
    return {"tokens": tokens, "token_logprobs": numbers, "top_logprobs": rows, "text_offset": [0] * len(places)}


def vllm_choice(places, top: int, *, with_text: bool = False, prompt=((1, -1.0), (2, -2.0))) -> dict:
    ids = [token for token, _ in prompt]
    numbers = [
        {str(token): {"logprob": value, "rank": 2, "decoded_token": f"<{token}>"}, "99": {"logprob": 0.0, "rank": 1}}
        for token, value in prompt
    ]
    return {
        "index": 0,
        "text": "x",
        "token_ids": [sampled for sampled, _, _ in places],
        "logprobs": vllm_logprobs(places, top, with_text=with_text),
        "prompt_token_ids": ids,
        "prompt_logprobs": [None, *numbers[1:]],
        "finish_reason": "length",
        "stop_reason": None,
    }


@given(PLACES, st.integers(0, 2), st.booleans())
def test_logprobs_have_the_token_ids_and_numbers_of_the_engine(places, top, with_text):
    with_text = with_text and not top
    asked = {"text": "a", "return_logprob": True, "top_logprobs_num": top, "return_text_in_logprobs": with_text}
    batch = split_batch(json.dumps(asked).encode())
    item = json.loads(batch.items[0])
    assert (item["logprobs"], "prompt_logprobs" in item, item["return_token_ids"]) == (top, False, True)
    assert item.get("return_tokens_as_token_ids", False) is not with_text
    body = {"id": "1", "choices": [vllm_choice(places, top, with_text=with_text)], "usage": {"prompt_tokens": 2}}
    meta = json.loads(join_answers(batch, [ItemAnswer(json.dumps(body).encode(), WEIGHTS)]))["meta_info"]
    texts = [f"<{sampled}>" if with_text else None for sampled, _, _ in places]
    expected = [[value, sampled, text] for (sampled, _, value), text in zip(places, texts, strict=True)]
    assert meta["output_token_logprobs"] == expected
    assert meta["input_token_logprobs"] == []
    assert ("output_top_logprobs" in meta) == bool(top)
    for (sampled, others, value), found in zip(places, meta.get("output_top_logprobs", ()), strict=False):
        best = sorted([value, *others.values()], reverse=True)[:top]
        assert [number for number, _, _ in found] == best
        assert all((others | {sampled: value})[token] == number for number, token, _ in found)


@pytest.mark.parametrize(
    ("start", "triples"),
    [
        (0, [[None, 1, None], [-2.0, 2, None], [-3.0, 3, None]]),
        (1, [[None, 2, None], [-3.0, 3, None]]),
        (2, [[None, 3, None]]),
        (-1, []),
        (9, []),
    ],
)
def test_logprobs_of_the_prompt_begin_at_the_token_that_was_asked_for(start, triples):
    batch = split_batch(json.dumps({"text": "a", "return_logprob": True, "logprob_start_len": start}).encode())
    assert ("prompt_logprobs" in json.loads(batch.items[0])) == (start >= 0)
    choice = vllm_choice([(7, {}, -0.5)], 0, prompt=((1, -1.0), (2, -2.0), (3, -3.0)))
    body = {"id": "1", "choices": [choice], "usage": {"prompt_tokens": 3}}
    meta = json.loads(join_answers(batch, [ItemAnswer(json.dumps(body).encode(), WEIGHTS)]))["meta_info"]
    assert meta["input_token_logprobs"] == triples


def test_each_text_of_a_batch_has_its_own_logprobs_and_names_its_own_weights():
    batch = split_batch(b'{"text":["a","b","c"],"return_logprob":[true,false,true],"top_logprobs_num":[1,0,0]}')
    assert [json.loads(item).get("logprobs") for item in batch.items] == [1, None, 0]
    places = [(7, {60: -3.0}, -0.5)]
    bodies = [vllm_choice(places, 1), vllm_choice(places, 0) | {"logprobs": None}, vllm_choice(places, 0)]
    answers = [
        ItemAnswer(json.dumps({"id": "1", "choices": [body], "usage": {"prompt_tokens": 2}}).encode(), f"w{number}")
        for number, body in enumerate(bodies)
    ]
    metas = [output["meta_info"] for output in json.loads(join_answers(batch, answers))]
    assert [meta["weight_version"] for meta in metas] == ["w0", "w1", "w2"]
    assert ["output_token_logprobs" in meta for meta in metas] == [True, False, True]
    assert ["output_top_logprobs" in meta for meta in metas] == [True, False, False]


@given(PLACES, st.integers(0, 2), st.data())
def test_a_streams_last_event_equals_the_whole_answer_however_its_bytes_are_cut(places, top, data):
    asked = {"text": "a", "return_logprob": True, "top_logprobs_num": top}
    batch = split_batch(json.dumps(asked).encode())
    usage = {"prompt_tokens": 2, "completion_tokens": len(places)}
    whole = vllm_choice(places, top) | {"prompt_logprobs": None, "text": "x" * len(places)}
    body = json.dumps({"id": "1", "choices": [whole], "usage": usage}).encode()
    expected = json.loads(join_answers(batch, [ItemAnswer(body, WEIGHTS)]))
    events = b""
    for at, place in enumerate(places):
        choice = vllm_choice([place], top) | {"prompt_logprobs": None}
        choice["finish_reason"] = "length" if at == len(places) - 1 else None
        events += b"data: " + json.dumps({"id": "1", "choices": [choice], "usage": usage}).encode() + b"\n\n"
    events += b"data: " + json.dumps({"id": "1", "choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n"
    growing = CumulativeStream("", batch.logprobs[0])
    growing.weights = WEIGHTS
    rewriter = CumulativeRewriter(growing.events)
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, len(events) - 1), max_size=6))), len(events)]
    found = told(b"".join(rewriter.rewrite(events[a:b]) for a, b in itertools.pairwise(cuts)) + rewriter.end())
    assert found[-1] == "[DONE]"
    assert found[-2] == expected
    counts = [len(event["meta_info"]["output_token_logprobs"]) for event in found[:-1]]
    assert counts == list(range(1, len(places) + 1)), "each event has all of the tokens so far"


def test_an_sglangs_own_answer_keeps_everything_but_its_id_and_the_name_of_its_weights():
    meta = {"id": "ours-0", "weight_version": "default", "output_token_logprobs": [[-0.1, 7, None]], "e2e_latency": 1.5}
    output = {"text": "x", "output_ids": [7], "meta_info": meta}
    batch = split_batch(b'{"text":["a"],"rid":["theirs"],"return_logprob":true}')
    (found,) = json.loads(join_answers(batch, [ItemAnswer(json.dumps(output).encode(), WEIGHTS)]))
    signed = output | {"meta_info": meta | {"id": "theirs", "weight_version": WEIGHTS}}
    assert found == signed
    growing = CumulativeStream("theirs")
    growing.weights = WEIGHTS
    event, done = told(growing.events(b"data: " + json.dumps(output).encode() + b"\n\ndata: [DONE]\n\n"))
    assert (event, done) == (signed, "[DONE]")


def test_an_item_in_sglangs_form_has_the_clients_sampling_parameters_untranslated():
    body = {"input_ids": [[1], [2]], "sampling_params": {"max_new_tokens": 3, "regex": "a"}, "return_logprob": True}
    natives = split_batch(json.dumps(body | {"lora_path": SQL, "cache_salt": "s"}).encode()).natives
    logprobs = {"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": 0}
    own = {"sampling_params": body["sampling_params"], "stream": False}
    assert [dict(native) for native in natives] == [own | logprobs | {"return_text_in_logprobs": False}] * 2


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"return_text_in_logprobs": True, "top_logprobs_num": 1}, "return_text_in_logprobs"),
        ({"logprob_start_len": 0, "stream": True}, "logprob_start_len"),
    ],
)
def test_logprobs_that_only_sglang_has_are_refused_for_vllm_by_name(body, param):
    (native,) = split_batch(json.dumps({"text": "x", "return_logprob": True} | body).encode()).natives
    with pytest.raises(BadBody, match="vLLM") as refused:
        check_for_completions(native, "vllm")
    assert refused.value.param == param
    with pytest.raises(BadBody, match="sgl-jax"):
        check_for_completions(native | {"stream": False, "top_logprobs_num": 0}, "sgl-jax")
    (unused,) = split_batch(json.dumps({"text": "x"} | body).encode()).natives
    check_for_completions(unused, "vllm")
    check_for_completions(unused, "sgl-jax")
