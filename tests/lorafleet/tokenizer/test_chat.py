import copy
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lorafleet.local.tiny_model import make_model
from lorafleet.tokenizer.chat import ChatTokenizer, read_files
from lorafleet.tokenizer.messages import Untokenizable
from tests.bodies import CHAT_BODIES, COMPLETION_PROMPTS

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("chat") / "tiny-qwen")


@pytest.fixture(scope="module")
def chat(model) -> ChatTokenizer:
    return ChatTokenizer.from_dir(model)


def with_template(model: Path, template: str, **config) -> ChatTokenizer:
    files = read_files(model) | {"chat_template.jinja": template}
    files["tokenizer_config.json"] = json.dumps(json.loads(files["tokenizer_config.json"]) | config)
    return ChatTokenizer.from_files(files)


def test_a_plain_chat_renders_as_chatml_with_the_default_system_prompt(chat):
    assert chat.render({"messages": HI}) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tools_are_rendered_as_vllm_dumps_them(chat):
    tool = {"function": {"parameters": {"b": 1, "a": "<x>"}, "name": "f", "unknown": 1}, "type": "function", "q": 2}
    prompt = chat.render({"messages": HI, "tools": [tool]})
    expected = (
        '{"type": "function", "function": {"name": "f", "description": null, "parameters": {"b": 1, "a": "<x>"}}}'
    )
    assert f"<tools>\n{expected}\n</tools>" in prompt


def test_tool_arguments_reach_the_template_as_an_object(chat):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Zürich"}'}}
    prompt = chat.render({"messages": [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]})
    assert '<tool_call>\n{"name": "f", "arguments": {"city": "Zürich"}}\n</tool_call>' in prompt


def test_text_parts_are_joined_by_newlines(chat):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "<|im_start|>user\none\ntwo<|im_end|>" in chat.render({"messages": [{"role": "user", "content": parts}]})


TEXTS = [{"type": "text", "text": text} for text in ("", "one", "", "two", "")]
AS_TEXT = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
AS_PARTS = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }};{% else %}"
    "{% for part in m.content %}[{{ part.text }}]{% endfor %};{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "role", "expected"),
    [
        (AS_TEXT, "user", "user:one\ntwo;"),
        (AS_TEXT, "tool", "tool:one\ntwo;"),
        (AS_PARTS, "user", "user:[][one][][two][];"),
        (AS_PARTS, "tool", "tool:\none\n\ntwo\n;"),
    ],
)
def test_an_empty_text_part_is_dropped_from_text_and_kept_in_parts(model, template, role, expected):
    message = {"role": role, "tool_call_id": "1", "content": TEXTS}
    assert with_template(model, template).render({"messages": [message]}) == expected


CALL = {"id": "1", "type": "function", "function": {"arguments": "{}", "name": "f"}}


@pytest.mark.parametrize("key", ["name", "task"])
@pytest.mark.parametrize(
    "message",
    [{"role": "assistant", "tool_calls": [CALL]}, {"role": "assistant", "content": "x", "reasoning": "r"}, HI[0]],
    ids=["calls without content", "reasoning", "plain"],
)
def test_a_name_reaches_the_template_whatever_else_a_message_has(model, key, message):
    chat = with_template(model, "{% for m in messages %}{{ m.content }}{{ m." + key + " }}{% endfor %}")
    assert chat.render({"messages": [message | {key: "Ann"}]}).endswith("Ann")


DEVELOPER = (
    "{% for m in messages %}{% if m.role == 'developer' %}{{ m.content }}{{ m.tools | tojson }}{% endif %}{% endfor %}"
)


def test_a_developers_tools_are_shown_in_the_order_of_their_type(model):
    function = {"z": 1, "strict": True, "parameters": {"b": 1, "a": 2}, "description": "d", "name": "f"}
    message = {"role": "developer", "content": "", "tools": [{"q": 2, "type": "function", "function": function}]}
    assert with_template(model, DEVELOPER).render({"messages": [message]}) == (
        '[{"function": {"name": "f", "description": "d", "parameters": {"b": 1, "a": 2}, "strict": true, "z": 1}, '
        '"type": "function", "q": 2}]'
    )


@pytest.mark.parametrize(
    "tools",
    [
        "no",
        [1],
        [{"type": "function"}],
        [{"function": {"name": "f"}}],
        [{"type": "other", "function": {"name": "f"}}],
        [{"type": "function", "function": {"description": "no name"}}],
        [{"type": "function", "function": {"name": "f", "strict": "no"}}],
        [{"type": "function", "function": {"name": "f", "parameters": None}}],
    ],
    ids=str,
)
def test_a_developers_tools_of_other_types_are_left_to_the_engine(model, tools):
    with pytest.raises(Untokenizable, match="developer"):
        with_template(model, DEVELOPER).render({"messages": [{"role": "developer", "content": "x", "tools": tools}]})


def test_a_developer_message_becomes_part_of_the_one_system_message(chat):
    body = {"messages": [{"role": "system", "content": "A"}, *HI, {"role": "developer", "content": "B"}]}
    assert chat.render(body).startswith("<|im_start|>system\nA\n\nB<|im_end|>\n<|im_start|>user\nHi")


def test_a_final_message_to_continue_stays_open(chat):
    body = {
        "messages": [*HI, {"role": "assistant", "content": "One, "}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    assert chat.render(body).endswith("<|im_start|>assistant\nOne, ")


@pytest.mark.parametrize(("name", "body"), CHAT_BODIES, ids=[name for name, _ in CHAT_BODIES])
def test_rendering_does_not_change_the_body(chat, name, body):
    before = copy.deepcopy(body)
    chat.chat_ids(body)
    assert body == before


@pytest.mark.parametrize("prompt", COMPLETION_PROMPTS)
def test_decoding_the_ids_of_a_prompt_gives_its_visible_text(chat, prompt):
    import unicodedata

    shown = unicodedata.normalize("NFC", prompt).replace("<|im_start|>", "").replace("<|im_end|>", "")
    assert chat.decode(chat.completion_ids(prompt)) == shown


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"messages": []}, "at least one message"),
        ({}, "at least one message"),
        ({"messages": "Hi"}, "messages must be a list"),
        ({"messages": [{"content": "Hi"}]}, "role"),
        ({"messages": ["Hi"]}, "role"),
        ({"messages": [{"role": "user", "content": 7}]}, "content must be"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image_url"),
        ({"messages": [{"role": "user", "content": [{"type": ["text"], "text": "a"}]}]}, "only text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_reference"}]}]}, "tool_reference"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking"}]}]}, "no text"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "Unicode"),
        ({"messages": [{"role": "assistant", "content": "a", "tool_calls": "b"}]}, "tool_calls"),
        ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"function": "f"}]}]}, "tool call"),
        ({"messages": HI, "tools": []}, "at least one tool"),
        ({"messages": HI, "tools": [{"type": "function"}]}, "function"),
        ({"messages": HI, "chat_template": "{{ messages }}"}, "chat_template"),
        ({"messages": HI, "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"messages": HI, "chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        *(
            ({"messages": HI, "chat_template_kwargs": {name: "x"}}, "chat_template_kwargs")
            for name in ("messages", "model_config", "self", "tokenizer")
        ),
        ({"messages": HI, "chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"messages": HI, "continue_final_message": True}, "add_generation_prompt"),
    ],
)
def test_an_untokenizable_body_says_why(chat, body, why):
    with pytest.raises(Untokenizable, match=why):
        chat.chat_ids(body)


FUNCTION = {"name": "f"}


@pytest.mark.parametrize("odd", [0, 1, "no"])
@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("add_special_tokens", lambda odd: {"messages": HI, "add_special_tokens": odd}),
        ("add_special_tokens", lambda odd: {"prompt": "Hi", "add_special_tokens": odd}),
        ("add_generation_prompt", lambda odd: {"messages": HI, "add_generation_prompt": odd}),
        ("continue_final_message", lambda odd: {"messages": HI, "continue_final_message": odd}),
        ("strict", lambda odd: {"messages": HI, "tools": [{"function": FUNCTION | {"strict": odd}}]}),
        ("defer_loading", lambda odd: {"messages": HI, "tools": [{"function": FUNCTION | {"defer_loading": odd}}]}),
        ("defer_loading", lambda odd: {"messages": HI, "tools": [{"function": FUNCTION, "defer_loading": odd}]}),
    ],
)
def test_a_flag_that_is_no_boolean_is_left_to_the_engine(chat, name, body, odd):
    with pytest.raises(Untokenizable, match=f"{name} is .*, not true or false"):
        chat.prompt_text(body(odd))


def test_a_templates_error_gives_its_own_reason(model):
    strict = with_template(model, "{{ raise_exception('only one turn, please') }}")
    with pytest.raises(Untokenizable, match="only one turn, please"):
        strict.render({"messages": HI})


def test_a_template_cannot_reach_python(model):
    escape = with_template(model, "{{ messages.__class__.__base__.__subclasses__() }}")
    with pytest.raises(Untokenizable, match=r"unsafe|access"):
        escape.render({"messages": HI})


def test_a_template_cannot_change_the_messages(model):
    with pytest.raises(Untokenizable):
        with_template(model, "{{ messages.append(1) }}").render({"messages": HI})


def test_a_model_without_template_or_tokenizer_says_so(model):
    files = read_files(model)
    with pytest.raises(Untokenizable, match=r"no tokenizer\.json"):
        ChatTokenizer.from_files({})
    with pytest.raises(Untokenizable, match=r"tokenizer\.json"):
        ChatTokenizer.from_files({"tokenizer.json": "{}"})
    with pytest.raises(Untokenizable, match="does not compile"):
        with_template(model, "{% for %}")
    bare = ChatTokenizer.from_files({"tokenizer.json": files["tokenizer.json"]})
    assert bare.completion_ids("Hi")
    with pytest.raises(Untokenizable, match="no chat template"):
        bare.chat_ids({"messages": HI})


def test_the_tool_template_is_used_only_with_tools(model):
    files = read_files(model)
    del files["chat_template.jinja"]
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    files["tokenizer_config.json"] = json.dumps({"chat_template": named})
    both = ChatTokenizer.from_files(files)
    tool = {"type": "function", "function": {"name": "f"}}
    assert both.render({"messages": HI}) == "plain"
    assert both.render({"messages": HI, "tools": [tool]}) == "tools"


def test_a_template_sees_named_tokens_documents_and_its_own_variables_only(model):
    template = "{{ eos_token }}|{{ documents[0].title }}|{{ style }}|{{ unknown is defined }}|{{ reasoning_effort }}"
    body = {
        "messages": HI,
        "documents": [{"title": "T", "text": "t"}],
        "chat_template_kwargs": {"style": "short", "absent": 1},
        "reasoning_effort": "low",
    }
    assert with_template(model, template).render(body) == "<|im_end|>|T|short|False|low"


TAKES_PARTS = [
    "{% for m in messages %}{% for part in m['content'] %}{{ part.text }}{% endfor %}{% endfor %}",
    "{% set all = messages %}{% for m in all[1:] %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% set content = m.content %}{% for p in content %}{{ p }}{% endfor %}{% endfor %}",
    "{% macro show(c) %}{% for p in c %}{{ p }}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
]
TAKES_TEXT = [
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{% for call in m.tool_calls %}{{ call }}{% endfor %}{{ m.content }}{% endfor %}",
    "{% macro show(content) %}{% for p in content %}{{ p }}{% endfor %}{% endmacro %}{{ show(tools) }}",
]


_NAMED = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ messages[0].content }}"
_DECODER = {"4091": {"content": "<|endoftext|>", "special": True, "normalized": False}}


def with_special_tokens_map(model: Path, config: dict[str, object], named: dict[str, object]) -> dict[str, str]:
    files = read_files(model) | {"chat_template.jinja": _NAMED, "special_tokens_map.json": json.dumps(named)}
    files["tokenizer_config.json"] = json.dumps(json.loads(files["tokenizer_config.json"]) | config)
    return files


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, "|<|endoftext|>|<|im_start|>|Hi"),
        ({"added_tokens_decoder": _DECODER}, "|<|im_end|>|<|endoftext|>|Hi"),
    ],
)
def test_the_older_map_of_named_tokens_holds_where_the_configuration_lists_no_added_tokens(model, config, expected):
    named = {"eos_token": {"content": "<|endoftext|>"}, "pad_token": "<|im_start|>"}
    files = with_special_tokens_map(model, config, named)
    assert ChatTokenizer.from_files(files).render({"messages": HI}) == expected


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("config", [{}, {"added_tokens_decoder": _DECODER}])
def test_named_tokens_are_those_of_the_transformers_tokenizer(model, config, tmp_path):
    transformers = pytest.importorskip("transformers")
    named = {"eos_token": "<|endoftext|>", "pad_token": "<|im_start|>"}
    files = with_special_tokens_map(model, config, named)
    for name, content in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    ours = ChatTokenizer.from_files(files).render({"messages": HI})
    assert ours == theirs.apply_chat_template(HI, tokenize=False)


@pytest.mark.parametrize(
    ("template", "takes_parts"), [(t, True) for t in TAKES_PARTS] + [(t, False) for t in TAKES_TEXT]
)
def test_a_template_that_loops_over_content_is_given_parts_and_any_other_text(model, template, takes_parts):
    chat = with_template(model, template)
    assert chat.takes_parts is takes_parts


def test_extra_keys_of_a_part_reach_templates_that_take_parts(model):
    chat = with_template(
        model, "{% for m in messages %}{% for p in m['content'] %}{{ p | tojson }}{% endfor %}{% endfor %}"
    )
    part = {"cache_control": {"type": "ephemeral"}, "type": "text", "text": "<a>"}
    expected = '{"type": "text", "text": "<a>", "cache_control": {"type": "ephemeral"}}'
    assert chat.render({"messages": [{"role": "user", "content": [part]}]}) == expected


def test_the_generation_tag_and_loop_controls_are_understood(model):
    template = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% if loop.index == 1 %}{% break %}{% endif %}{% endfor %}"
    )
    assert with_template(model, template).render({"messages": [*HI, *HI]}) == "Hi"


def test_threads_that_share_a_tokenizer_get_the_same_ids(chat):
    body = dict(CHAT_BODIES)["long"]
    expected, found = chat.chat_ids(body), []
    threads = [threading.Thread(target=lambda: found.append(chat.chat_ids(body))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 8


def test_importing_it_pulls_in_neither_torch_nor_transformers_nor_numpy():
    heavy = {"torch", "transformers", "numpy", "vllm"}
    code = f"import sys, lorafleet.tokenizer.chat; print(sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_ids_equal_those_of_the_transformers_tokenizer_that_vllm_builds(chat, model):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(model))
    for prompt in COMPLETION_PROMPTS:
        assert chat.completion_ids(prompt) == theirs.encode(prompt)
    texts = [chat.render(body) for _, body in CHAT_BODIES]
    for text in texts:
        assert chat.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
