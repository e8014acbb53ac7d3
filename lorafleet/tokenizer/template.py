"""A model's chat template, compiled and rendered as vLLM and Transformers do it.

Source: vLLM 0.32 renderers/hf.py; Transformers 5.19 utils/chat_template_utils.py.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes as ast
import jinja2.parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lorafleet.tokenizer.messages import USUAL_ARGUMENTS, Message, Untokenizable
from lorafleet.tokenizer.split_points import SplitPoints
from lorafleet.tokenizer.template_cache import Part, RenderedTemplateCache, Roles, StandInTemplate

_CONTINUE_TAG: Final = "CONTINUE_FINAL_MESSAGE_TAG "
_DICT_ATTRIBUTES: Final = frozenset(dir(dict))
_LOOP_FIGURES: Final = frozenset(["first", "last", "index", "index0", "revindex", "revindex0", "length"])
_STRFTIME_NOW: Final = "strftime_now"
# The function `strftime_now` of templates: the text of a form. Raises Untokenizable where the engine's is not known.
StrftimeNow = Callable[[str], str]


class ChatTemplate:
    """A chat template, compiled once, with the traits that vLLM reads off its source."""

    def __init__(self, source: str, named_tokens: Mapping[str, str]) -> None:
        """Compile the template and learn which features it uses. Raises Untokenizable if it does not compile."""
        environment = _new_environment()
        try:
            parsed = environment.parse(source)
            self._code = environment.compile(source)
        except jinja2.TemplateError as exc:
            raise Untokenizable(f"the chat template does not compile: {exc}") from exc
        self._compiled = environment.template_class.from_code(environment, self._code, {})
        # Variables of every rendering. One dict to copy; jinja2's own way copies three and chains two.
        self._usual = {**environment.globals, **named_tokens, "documents": None}
        self._source = source
        self.knows_developer = '"developer"' in source or "'developer'" in source
        self.takes_parts = _loops_over_parts(parsed)
        self.date_forms = frozenset(_date_forms(parsed))
        self._knows_content = "content" in source
        # vLLM passes on only the variables that the template names, so that a client cannot reach any other.
        self._variables = jinja2.meta.find_undeclared_variables(parsed) | {"documents"}

    def render(
        self,
        messages: list[Message],
        tools: list[Message] | None,
        arguments: Mapping[str, Any],
        strftime: StrftimeNow | None = None,
    ) -> str:
        """The prompt text. Raises Untokenizable for every error of the template, and what `strftime` raises.

        arguments  as `_template_arguments` of chat.py returns them
        strftime   the template's `strftime_now`; None: this process's local time
        """
        prompting = arguments.get("add_generation_prompt", True)
        continuing = arguments.get("continue_final_message", False)
        variables = self._usual.copy()
        if strftime is not None:
            variables[_STRFTIME_NOW] = strftime
        if arguments is not USUAL_ARGUMENTS:
            variables.update((key, value) for key, value in arguments.items() if key in self._variables)
            variables.pop("continue_final_message", None)
        variables["add_generation_prompt"] = prompting
        if continuing and prompting:
            raise Untokenizable("continue_final_message needs add_generation_prompt to be false")
        variables["messages"] = self._with_continue_tag(messages) if continuing else messages
        variables["tools"] = tools
        try:
            text = "".join(self._compiled.root_render_func(self._compiled.new_context(variables, shared=True)))
        except Untokenizable:
            raise
        except Exception as exc:  # a template may fail on a client's input in any way Python can
            raise Untokenizable(f"the chat template refused the request: {exc}") from exc
        return _cut_at_continue_tag(text, messages[-1]["content"]) if continuing else text

    def rendered_cache(self, split_points: SplitPoints) -> RenderedTemplateCache:
        """A new cache of this template's results for conversations without tools and template arguments."""
        stand_in_template = StandInTemplate(_new_environment(), self._code)

        def render(roles: Roles, texts: Sequence[Any]) -> str:
            """The prompt text of a plain conversation."""
            return self.render(self._plain_messages(roles, texts), None, USUAL_ARGUMENTS)

        def render_parts(roles: Roles, texts: Sequence[Any]) -> Sequence[Part]:
            """The prompt of a conversation of stand-ins, in parts."""
            messages = self._plain_messages(roles, texts)
            variables = {"add_generation_prompt": True, "messages": messages, "tools": None}
            return stand_in_template.render_parts(self._usual | variables)

        return RenderedTemplateCache(split_points, render, render_parts)

    def _plain_messages(self, roles: Roles, texts: Sequence[Any]) -> list[Message]:
        """Messages of plain texts, as `render` takes them."""
        contents = [[{"type": "text", "text": text}] for text in texts] if self.takes_parts else texts
        return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]

    def refuses_late_system(self) -> bool:
        """Whether a system message after a user's is an error, rendered without our additions, as vLLM tests it."""
        bare = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
        turns = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
        try:
            bare.from_string(self._source).render(messages=turns, add_generation_prompt=False)
        except jinja2.TemplateError:
            return True
        return False

    def _with_continue_tag(self, messages: list[Message]) -> list[Message]:
        """The messages with a tag after the last one's text, to cut the prompt there; raises Untokenizable."""
        last = messages[-1]
        content = last["content"]
        if not self._knows_content:
            raise Untokenizable("continue_final_message: the chat template does not use content")
        if isinstance(content, str):
            return [*messages[:-1], last | {"content": content + _CONTINUE_TAG}]
        for index in range(len(content) - 1, -1, -1):
            if "text" in content[index]:
                marked = content[index] | {"text": content[index]["text"] + _CONTINUE_TAG}
                return [*messages[:-1], last | {"content": [*content[:index], marked, *content[index + 1 :]]}]
        raise Untokenizable("continue_final_message: the final message has no text to continue")


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} marks the assistant's text for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[ast.Node]:
        """The nodes of the tag's body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_template_error(message: str) -> None:
    """The function `raise_exception` of templates."""
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`: plain JSON. jinja2's own escapes <, > and & for HTML, and sorts keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    """The function `strftime_now` of templates: the local time in this form."""
    return datetime.now().strftime(form)  # noqa: DTZ005  (Transformers gives templates local time)


class _TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with two shortcuts for speed.

    `message.role` of a plain dict looks up the key at once; the sandbox tries an attribute first. `loop.first` skips
    the sandbox's checks whether a call could change something.
    """

    def getattr(self, obj: Any, attribute: str) -> Any:
        """The key or attribute of an object; undefined if it has neither."""
        if type(obj) is dict:
            if attribute not in _DICT_ATTRIBUTES:
                try:
                    return obj[attribute]
                except KeyError:
                    return self.undefined(obj=obj, name=attribute)
        elif type(obj) is LoopContext and attribute in _LOOP_FIGURES:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


def _new_environment() -> _TemplateEnvironment:
    """A jinja2 environment with the filters and functions of Transformers."""
    environment = _TemplateEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_template_error
    environment.globals[_STRFTIME_NOW] = _strftime_now
    return environment


def _cut_at_continue_tag(text: str, content: str | list[Message]) -> str:
    """The prompt up to the tag after the last message; raises Untokenizable."""
    final = content if isinstance(content, str) else next(p["text"] for p in reversed(content) if "text" in p)
    if final.strip() not in text or _CONTINUE_TAG.strip() not in text:
        raise Untokenizable("continue_final_message: the chat template does not show the final message")
    end = text.rindex(_CONTINUE_TAG.strip())
    # A template that trims the message trims the tag's space; then the text before the tag is trimmed as well.
    return text[:end] if text.startswith(_CONTINUE_TAG, end) else text[:end].rstrip()


def _date_forms(template: ast.Template) -> Iterator[str]:
    """The forms that the template writes into its calls of `strftime_now`."""
    for call in template.find_all(ast.Call):
        if isinstance(call.node, ast.Name) and call.node.name == _STRFTIME_NOW:
            yield from [arg.value for arg in call.args if isinstance(arg, ast.Const) and isinstance(arg.value, str)]


def _loops_over_parts(template: ast.Template) -> bool:
    """Whether some loop of the template runs over a message's content: then vLLM passes parts, else text.

    source  vLLM 0.32 renderers/hf.py _iter_nodes_assign_*
    """
    messages = {
        loop.target.name
        for loop in template.find_all(ast.For)
        if isinstance(loop.target, ast.Name)
        and any(_refers_to(loop.iter, name) for name in _aliases(template, "messages"))
    }
    in_macros: dict[int, set[str]] = {}  # loop inside a macro -> the macro's arguments that are some message's content
    for macro in template.find_all(ast.Macro):
        arguments = set(_content_arguments_of(template, macro, messages))
        in_macros |= {id(loop): arguments for loop in macro.find_all(ast.For)}
    for loop in template.find_all(ast.For):
        if any(_refers_to(loop.iter, name, "content") for name in messages):
            return True
        if isinstance(loop.iter, ast.Name) and loop.iter.name in in_macros.get(id(loop), {"content"}):
            return True
    return False


def _aliases(template: ast.Template, name: str) -> set[str]:
    """`name` and every variable that is set to it or to a slice of it, directly or not."""
    known, todo = {name}, [name]
    while todo:
        source = todo.pop()
        for assign in template.find_all(ast.Assign):
            target = assign.target
            if isinstance(target, ast.Name) and target.name not in known and _refers_to(assign.node, source):
                known.add(target.name)
                todo.append(target.name)
    return known


def _content_arguments_of(template: ast.Template, macro: ast.Macro, messages: set[str]) -> Iterator[str]:
    """Parameters of a macro that some call passes a message's content to."""

    def is_content(node: ast.Node) -> bool:
        """Whether the expression is a message's content."""
        return any(_refers_to(node, name, "content") for name in messages)

    names = [argument.name for argument in macro.args]
    for call in template.find_all(ast.Call):
        if isinstance(call.node, ast.Name) and call.node.name == macro.name:
            yield from (name for name, node in zip(names, call.args, strict=False) if is_content(node))
            yield from (pair.key for pair in call.kwargs if pair.key in names and is_content(pair.value))


def _refers_to(node: ast.Node | None, name: str, key: str | None = None) -> bool:
    """Whether the expression is `name` (or `name.key`), perhaps filtered, tested or sliced."""
    if isinstance(node, ast.Filter | ast.Test):
        return _refers_to(node.node, name, key)
    if isinstance(node, ast.Getitem) and isinstance(node.arg, ast.Slice):
        return _refers_to(node.node, name, key)
    if key is None:
        return isinstance(node, ast.Name) and node.ctx == "load" and node.name == name
    if isinstance(node, ast.Getitem):
        return isinstance(node.arg, ast.Const) and node.arg.value == key and _refers_to(node.node, name)
    return isinstance(node, ast.Getattr) and node.attr == key and _refers_to(node.node, name)
