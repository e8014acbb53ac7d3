import json

import pytest

from router.core.errors import BadBody, ReplicaUnreachable, StreamBroken
from router.protocols.sglang_generate import CumulativeStream, join_answers, split_batch

SQL = "sql-expert/v1"


def items(**body) -> list[dict]:
    return [json.loads(item) for item in split_batch(json.dumps(body).encode()).items]


def refused(param: str, **body) -> str:
    with pytest.raises(BadBody) as caught:
        split_batch(json.dumps(body).encode())
    assert caught.value.param == param
    return str(caught.value)


def answer(*texts: str, **more) -> bytes:
    choices = [
        {"text": text, "token_ids": [7, 8], "finish_reason": "length", "stop_reason": None} | more for text in texts
    ]
    usage = {"prompt_tokens": 3, "completion_tokens": 2 * len(texts), "prompt_tokens_details": {"cached_tokens": 2}}
    return json.dumps({"id": "cmpl-1", "choices": choices, "usage": usage}).encode()


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
    assert "not offered" in refused("return_logprob", text="x", return_logprob=True)
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
    meta |= {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 2}
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
        join_answers(split_batch(b'{"text":"a"}'), [data])
