"""Bodies as the sim engine reads them."""

import pytest

from lorafleet.sim.bodies import ChatBody, CompletionBody, ErrorAnswer, GenerateTokensBody

MESSAGES = [{"role": "user", "content": "hello"}]


def chat(**more):
    return ChatBody(messages=MESSAGES, **more)


@pytest.mark.parametrize(
    ("given", "count"),
    [({}, None), ({"top_logprobs": 3}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 3}, 3)],
)
def test_a_chat_has_logprobs_only_if_it_asks_for_them(given, count):
    assert chat(**given).logprobs_count == count


@pytest.mark.parametrize(("stop", "stops"), [(None, []), ("", []), ("end", ["end"]), (["a", "", "b"], ["a", "b"])])
def test_empty_stop_strings_are_none(stop, stops):
    assert CompletionBody(prompt="x", stop=stop).stops == stops


@pytest.mark.parametrize("ids", [[], [-1], [1.0], [True], "12"])
def test_prompt_ids_that_are_none_are_refused_by_their_name(ids):
    with pytest.raises(ErrorAnswer) as refused:
        _ = chat(kv_transfer_params={"prompt_token_ids": ids}).given_prompt_ids
    assert refused.value.param == "kv_transfer_params.prompt_token_ids"
    assert refused.value.body()["error"]["code"] == 400


def test_prompt_ids_are_ignored_with_an_echo():
    given = {"prompt_token_ids": [1, 2]}
    assert chat(kv_transfer_params=given).given_prompt_ids == [1, 2]
    assert chat(kv_transfer_params=given, echo=True).given_prompt_ids is None


def test_a_call_by_token_ids_is_a_completion_with_its_sampling():
    body = GenerateTokensBody(token_ids=[1, 2], sampling_params={"max_tokens": 3, "stop": "x"}, model="m")
    completion = body.as_completion()
    assert (completion.prompt, completion.max_tokens, completion.stops) == ([1, 2], 3, ["x"])
    assert (completion.model, completion.return_tokens_as_token_ids) == ("m", True)
    with pytest.raises(ErrorAnswer, match="prompt_logprobs"):
        GenerateTokensBody(token_ids=[1], sampling_params={"prompt_logprobs": 1}).as_completion()
