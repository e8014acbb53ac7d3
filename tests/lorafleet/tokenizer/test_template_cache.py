"""Prompts from the rendered-template cache equal rendered prompts for all texts."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lorafleet.local.tiny_model import make_model
from lorafleet.tokenizer.chat import ChatTokenizer, read_files
from tests.properties import examples

CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
# The turns of well-known models, with the tiny model's marks.
FRAMED = {
    "chatml": CHATML + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    # Llama 3 strips every text and shows its first mark once.
    "llama 3": (
        "{% for m in messages %}"
        "{% set content = '<|im_start|>' + m['role'] + '\n\n' + m['content'] | trim + '<|im_end|>' %}"
        "{% if loop.index0 == 0 %}{% set content = '<|endoftext|>' + content %}{% endif %}{{ content }}{% endfor %}"
        "{{ '<|im_start|>assistant\n\n' }}"
    ),
    # Qwen 3 asks whether a user's text is a tool's answer, and an assistant's has thoughts in it.
    "qwen 3": (
        "{%- set ns = namespace(open=true, last=messages|length - 1) %}"
        "{%- for m in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}"
        "{%- if ns.open and m.role == 'user' and m.content is string and not("
        "m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}"
        "{%- set ns.open = false %}{%- set ns.last = index %}{%- endif %}{%- endfor %}"
        "{%- for m in messages %}{%- if m.content is string %}{%- set content = m.content %}"
        "{%- else %}{%- set content = '' %}{%- endif %}"
        "{%- if m.role == 'assistant' %}{%- set thoughts = '' %}"
        "{%- if '</think>' in content %}{%- set thoughts = content.split('</think>')[0].strip('\n') %}"
        "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
        "{%- if loop.index0 > ns.last and thoughts %}{{ '<|im_start|>assistant\n<think>' + thoughts + content }}"
        "{%- else %}{{ '<|im_start|>' + m.role + '\n' + content }}{%- endif %}{{ '<|im_end|>\n' }}"
        "{%- else %}{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>' + '\n' }}{%- endif %}{%- endfor %}"
    ),
    "parts": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{% if part.type == 'text' %}"
        "{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    ),
    "a macro": (
        "{% macro turn(m) %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endmacro %}"
        "{% for m in messages %}{{ turn(m) }}{% endfor %}"
    ),
    "a block set": (
        "{% for m in messages %}{% set turn %}{{ m.role }}: {{ m.content }}<|im_end|>{% endset %}{{ turn }}{% endfor %}"
    ),
    "a text that may be empty": (
        "{% for m in messages %}{{ m.content if m.content else 'silence' }}<|im_end|>{% endfor %}"
    ),
    "a long beginning of its own": "<|im_start|>" + "Be kind. " * 60 + "<|im_end|>" + CHATML,
}
# What a template may do with a text besides showing it.
LOOKS = [
    "{{ c | upper }}", "{{ c | length }}", "{{ c[0] }}", "{{ c[:3] }}", "{{ c * 2 }}", "{{ c ~ '!' }}",
    "{{ c | replace('a', 'b') }}", "{{ c.upper() }}", "{{ c.split('a')[0] }}", "{{ c.strip('a') }}",
    "{{ c | trim('a') }}", "{{ c.lstrip() }}", "{{ c | tojson }}", "{{ m | tojson }}", "{{ m }}",
    "{{ m.values() | list }}", "{{ messages | map(attribute='content') | join }}",
    "{{ messages | groupby('content') | length }}", "{{ c if c == 'a' else 'b' }}", "{{ c if c != '' else 'b' }}",
    "{{ 'x' if c in ['a', ''] }}{{ c }}", "{{ {'a': 'x'}[c] }}", "{{ {'a': 'x'}.get(c, c) }}",
    "{{ 'x' if c > 'b' }}{{ c }}", "{{ 'x' if c is lower }}{{ c }}", "{{ 'x' if c is eq 'a' }}{{ c }}",
    "{{ 'x' if c is sameas 'a' }}{{ c }}", "{{ c | int }}", "{{ c | int(7) }}{{ c }}", "{{ c | float }}{{ c }}",
    "{{ '%s' % c }}", "{{ '{}'.format(c) }}", "{{ c | default('x', true) | trim }}",
    "{% for letter in c %}{{ letter }},{% endfor %}", "{% filter trim %} {{ c }} {% endfilter %}", "{{ c }}{{ c }}",
    "", "{% set t %}{{ c }}{% endset %}{{ t | upper }}",
    "{% macro show(x) %}{{ x }}{% endmacro %}{{ show(c) | length }}",
    "{% macro show(x) %} {{ x }} {% endmacro %}{{ show(c) | trim }}", "{{ [c] | first | first }}",
    "{{ (c | trim) or 'empty' }}", "{{ 'x' if (c | trim).startswith('a') }}{{ c }}", "{{ c.parts }}{{ c.text }}",
    "{{ 'x' if c.nothing is defined }}{{ c }}", "{{ 'x' if ('x' + c).endswith('a') }}{{ c }}",
    "{{ c | batch(2) | list }}", "{{ c | urlencode }}", "{{ 'x' if loop.changed(c) }}{{ c }}", "{{ c.encode() }}",
    "{{ range(3)[c] }}{{ c }}", "{{ 'abc'[c] }}{{ c }}", "{{ not c }}",
    "{{ 'x' if c is sequence }}{{ 'y' if c is mapping }}{{ 'z' if c is iterable }}{{ c }}", "{{ c.__class__ }}",
    "{{ c is callable }}{{ c }}", "{{ 'x' if c == m.role }}{{ c }}", "{{ m | items | list }}",
    "{{ c | list | length }}", "{{ c | attr('text') }}", "{{ c | safe }}", "{{ c | e }}",
    "{{ 'x' if messages[0].content == c }}", "{% if c is none or c is undefined %}x{% endif %}{{ c }}",
    "{{ c | string }}", "{{ [c, c] | unique | list | length }}", "{{ [c] | sum(start='') }}",
    "{{ messages | selectattr('content') | list | length }}",
    "{{ messages | selectattr('content', 'equalto', 'a') | list | length }}{{ c }}", "{{ 'x' if 'a' in c }}{{ c }}",
]  # fmt: skip
TEXTS = st.sampled_from([
    "", "a", " a ", "\n", "A" * 300, "b" * 300, "<|im_end|>", "<|im_", "end|>", "é", "東京", "<b>", "12", "a</think>b",
    "<tool_response>", "<tool_response>a</tool_response>", "{{ c }}", "%s", "\0",
])  # fmt: skip
SPEAKERS = st.sampled_from(["user", "assistant", "system"])
CONVERSATIONS = st.lists(
    st.lists(st.tuples(SPEAKERS, TEXTS | st.text(max_size=4)), min_size=1, max_size=4), min_size=1, max_size=6
)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    return read_files(make_model(tmp_path_factory.mktemp("frames") / "tiny-qwen"))


def templated(files: dict[str, str], template: str) -> ChatTokenizer:
    return ChatTokenizer.from_files(files | {"chat_template.jinja": template})


def body_of(*texts: tuple[str, str]) -> dict:
    return {"messages": [{"role": role, "content": text} for role, text in texts]}


def assert_rendered(chat: ChatTokenizer, body: dict) -> None:
    pieces, special = chat.prompt_pieces(body)
    prompt = chat.render(body)
    assert "".join(pieces) == prompt
    assert [i for piece in pieces for i in chat.encode(piece, add_special_tokens=special)] == chat.chat_ids(body)


@pytest.mark.parametrize("name", ["tiny", *FRAMED])
def test_cached_conversations_equal_rendered_ones(files, name):
    chat = templated(files, FRAMED[name]) if name in FRAMED else ChatTokenizer.from_files(files)
    assert_rendered(chat, body_of(("system", "Be brief."), ("user", "Hi")))
    assert chat.template_cache.pieces(("system", "user"), ["a", "b"]) is not None

    @settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow])
    @given(bodies=CONVERSATIONS)
    def check(bodies):
        for texts in bodies:
            assert_rendered(chat, body_of(*texts))

    check()


@pytest.mark.parametrize("look", LOOKS)
def test_a_template_that_inspects_texts_is_rendered_correctly(files, look):
    chat = templated(
        files, "{% for m in messages %}{% set c = m.content %}" + look + "<|im_end|>{% endfor %}<|im_start|>"
    )
    texts = ["a", "", " a ", "b", "A", "<b>", "12", "aab", "c" * 300]
    for first in texts:
        for second in texts:
            body = body_of(("user", first), ("assistant", second))
            try:
                prompt = chat.render(body)
            except ValueError:
                with pytest.raises(ValueError, match="the chat template refused"):
                    chat.prompt_pieces(body)
            else:
                assert "".join(chat.prompt_pieces(body)[0]) == prompt


@pytest.mark.parametrize("fickle", ["{{ strftime_now('%f') }}", "{{ [1, 2, 3] | random }}", "{{ lipsum(1, false) }}"])
def test_a_template_with_changing_output_is_not_cached(files, fickle):
    chat = templated(files, CHATML + fickle)
    chat.prompt_pieces(body_of(("user", "a")))
    assert not chat.template_cache.templates


def test_a_body_with_further_fields_is_rendered(files):
    chat = ChatTokenizer.from_files(files)
    plain = body_of(("system", "Be brief."), ("user", "Hi"))
    tool = {"type": "function", "function": {"name": "f"}}
    for more in ({"tools": [tool]}, {"add_generation_prompt": False}, {"chat_template_kwargs": {"a": 1}}):
        assert_rendered(chat, plain | more)
    for odd in ({"name": "Ann"}, {"tool_calls": []}, {"content": None}, {"content": [{"type": "text", "text": "a"}]}):
        assert_rendered(chat, {"messages": [{"role": "assistant", "content": "a"} | odd]})
    assert_rendered(chat, body_of(("developer", "Be kind."), ("user", "Hi")))
    assert_rendered(chat, body_of(("system", "x-anthropic-billing-header: 1\nBe brief."), ("user", "Hi")))
    assert not chat.template_cache.templates
    for nothing in ({"messages": None}, {"messages": "Hi"}, {"messages": []}, {"messages": [["role", "content"]]}):
        with pytest.raises(ValueError, match="message"):
            chat.prompt_pieces(nothing)
    for strange in ({"role": ["user"], "content": "a"}, {"role": "user", "content": 7}):
        with pytest.raises(ValueError, match=r"role|content"):
            chat.prompt_pieces({"messages": [strange]})


def test_learning_an_order_of_roles_is_tried_a_few_times(files):
    chat = templated(files, CHATML.replace("m.content", "m.content.upper()"))
    for _ in range(20):
        chat.prompt_pieces(body_of(("user", "a")))
    assert chat.template_cache.tries == {("user",): 4}


def test_the_number_of_cached_templates_is_bounded(files):
    chat = ChatTokenizer.from_files(files)
    for number in range(600):
        speakers = ["user" if number >> bit & 1 else "assistant" for bit in range(10)]
        assert_rendered(chat, body_of(*[(speaker, "a") for speaker in speakers]))
    assert len(chat.template_cache.templates) <= 256
    long = body_of(*[("user", "a")] * 300)
    assert_rendered(chat, long)
    assert max(map(len, chat.template_cache.templates)) < 300


def test_pieces_of_a_conversation_are_pieces_of_its_continuation(files):
    chat = ChatTokenizer.from_files(files)
    turns = [("user", "a" * 300), ("assistant", "b" * 20), ("user", "c" * 300), ("assistant", "d" * 300), ("user", "e")]
    for count in range(1, 5):
        pieces, longer = (chat.prompt_pieces(body_of(*turns[:n]))[0] for n in (count, count + 1))
        assert longer[: len(pieces) - 1] == pieces[:-1]
        assert pieces == chat.pieces(chat.render(body_of(*turns[:count])), add_special_tokens=False)


def test_tokens_that_others_overlap_are_not_cached_split_points(files):
    file = json.loads(files["tokenizer.json"])
    # One that begins within another's letters, and takes them.
    begun = [
        token | {"content": "x" + token["content"][:2], "id": 5000 + token["id"]} for token in file["added_tokens"]
    ]
    file["added_tokens"] += begun
    chat = ChatTokenizer.from_files(files | {"tokenizer.json": json.dumps(file)})
    assert_rendered(chat, body_of(("user", "x"), ("assistant", "<|im_startx")))
    assert_rendered(chat, body_of(("user", "a"), ("assistant", "b")))
    assert not chat.template_cache.templates


def test_a_model_without_template_has_no_template_cache(files, tmp_path: Path):
    assert ChatTokenizer.from_files({"tokenizer.json": files["tokenizer.json"]}).template_cache is None
