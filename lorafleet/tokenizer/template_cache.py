"""A cache of rendered chat templates: the text around a conversation's messages, learned from one rendering.

Most templates show each message's text unchanged, between marks that depend on the order of roles alone. Then the next
conversation with the same roles needs no rendering: its texts go between the same marks. If an added token follows a
text, the prompt can also be split there without a search.

The cache does not analyse a template's source. The template renders stand-ins instead of texts. A stand-in can be
shown, joined to text and stripped. It also answers a few questions, and the cached result asks them of every later
conversation. Any other use of a stand-in raises, and such conversations are rendered one by one.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from sys import intern
from types import CodeType
from typing import Any, Final, NamedTuple, NoReturn, cast

from jinja2.sandbox import SandboxedEnvironment

from lorafleet.tokenizer.split_points import SplitPoints

# Cached results, messages of the longest conversation cached, and failed tries for one order of roles: an unusual
# text may answer a question so that no result can be cached. Guesses, nothing measured.
_MOST_TEMPLATES = 256
_LONGEST_CONVERSATION = 256
_TRIES = 4
# Jinja2 tests that a stand-in answers as any text does. Other tests and filters raise.
_TYPE_TESTS: Final = frozenset(["defined", "iterable", "mapping", "none", "number", "sequence", "string", "undefined"])
_HARMLESS_FILTERS: Final = frozenset(["d", "default"])
# Filters and functions that do not return the same result each time.
_RANDOM_FILTERS: Final = frozenset(["random"])
_CHANGING_NAMES: Final = frozenset(["lipsum", "strftime_now"])

# One question and its answer: the text's number, the method, its arguments, the result.
Question = tuple[int, Callable[..., bool], tuple[str, ...], bool]
# Part of a rendered prompt: plain text, the number of a message, or ~number for its stripped text.
Part = str | int
Roles = tuple[str, ...]


class _TextInspected(Exception):
    """A template used a stand-in in an unsupported way. No error class that jinja2's filters catch."""


class _StandIn:
    """A stand-in for message text, alone or joined with other text."""

    # Underscored: a template may ask whether text has an attribute of some name, and text has none of these.
    __slots__ = ("_parts", "_questions", "_text")

    def __init__(self, parts: tuple[Part, ...], questions: list[Question], text: str | None = None) -> None:
        """text  the message's text, if this stands for one unchanged message"""
        self._parts = parts
        self._questions = questions
        self._text = text

    def __add__(self, other: object) -> "_StandIn":
        return _StandIn(self._parts + _parts_of(other), self._questions)

    def __radd__(self, other: object) -> "_StandIn":
        return _StandIn(_parts_of(other) + self._parts, self._questions)

    def __bool__(self) -> bool:
        return self._answer_question(bool)

    def __contains__(self, other: object) -> bool:
        return self._answer_question(str.__contains__, other)

    def startswith(self, other: object) -> bool:
        """Whether the text starts so; question and answer are recorded. Raises _TextInspected for joined text."""
        return self._answer_question(str.startswith, other)

    def endswith(self, other: object) -> bool:
        """Whether the text ends so; question and answer are recorded. Raises _TextInspected for joined text."""
        return self._answer_question(str.endswith, other)

    def strip(self) -> "_StandIn":
        """A stand-in for the stripped text; raises _TextInspected for joined text."""
        number, _ = self._single_text()
        return _StandIn((~number,), self._questions)

    def _single_text(self) -> tuple[int, str]:
        """Number and text of an unchanged message; raises _TextInspected for joined text."""
        [number, *more] = self._parts
        if self._text is None or more or not isinstance(number, int):
            raise _TextInspected
        return number, self._text

    def _answer_question(self, question: Callable[..., bool], *others: object) -> bool:
        """Answer a question by the message's text, and record question and answer.

        Raises for another that is no text.
        """
        number, text = self._single_text()
        arguments = tuple([other if isinstance(other, str) else _raise_inspected() for other in others])
        answer = question(text, *arguments)
        self._questions.append((number, question, arguments, answer))
        return answer

    def _raise_on_use(self, *_: object) -> NoReturn:
        """Raises _TextInspected: the operator is not supported."""
        raise _TextInspected

    __getattr__ = __getitem__ = __iter__ = __len__ = __call__ = __hash__ = _raise_on_use
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _raise_on_use
    __str__ = __repr__ = __format__ = __int__ = __float__ = __index__ = _raise_on_use
    __mul__ = __rmul__ = __mod__ = __rmod__ = _raise_on_use


def _parts_of(value: object) -> tuple[Part, ...]:
    """The parts of a stand-in, or a text as one part; raises _TextInspected for other values."""
    if isinstance(value, _StandIn):
        return value._parts
    return (value,) if isinstance(value, str) else _raise_inspected()


def _join(values: Iterable[Any]) -> Any:
    """As `"".join`, but with a stand-in among the values the result is a stand-in.

    A value that is neither raises _TextInspected beside a stand-in, and TypeError without one.
    """
    items = list(values)
    questions = next((value._questions for value in items if isinstance(value, _StandIn)), None)
    if questions is None:
        return "".join(items)
    return _StandIn(tuple([part for value in items for part in _parts_of(value)]), questions)


class StandInTemplate:
    """A compiled template in an environment that can render stand-ins."""

    def __init__(self, environment: SandboxedEnvironment, code: CodeType) -> None:
        """environment  used by this object alone: its tests and filters are replaced"""
        tests = cast("dict[str, Any]", environment.tests)
        environment.concat = _join  # type: ignore[method-assign]
        environment.tests = {name: _wrap_test(name, test) for name, test in tests.items()}
        environment.filters = {name: _wrap_filter(name, filter_) for name, filter_ in environment.filters.items()}
        self._template = environment.template_class.from_code(environment, code, {})
        # Compiled code calls `str` on everything that it outputs.
        template_globals = self._template.root_render_func.__globals__
        template_globals["str"] = lambda value: value if isinstance(value, _StandIn) else str(value)

    def render_parts(self, variables: Mapping[str, Any]) -> tuple[Part, ...]:
        """The rendered prompt in parts. Raises every error of the template."""
        known = {name: _raise_inspected if name in _CHANGING_NAMES else value for name, value in variables.items()}
        template = self._template
        return _parts_of(_join(template.root_render_func(template.new_context(known, shared=True))))


def _raise_inspected(*_: object, **__: object) -> NoReturn:
    """Raises _TextInspected, whatever the arguments."""
    raise _TextInspected


def _wrap_test(name: str, test: Callable[..., Any]) -> Callable[..., Any]:
    """A jinja2 test that raises for stand-ins, unless any text gives the same result."""

    @functools.wraps(test)
    def wrapped(*arguments: Any) -> Any:
        """The test's result; raises _TextInspected for stand-ins in tests of other kinds."""
        if any(isinstance(argument, _StandIn) for argument in arguments):
            return test("") if name in _TYPE_TESTS else _raise_inspected()
        return test(*arguments)

    return wrapped


def _wrap_filter(name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    """A jinja2 filter that raises for stand-ins, unless it strips or keeps them."""
    if name in _RANDOM_FILTERS:
        return _raise_inspected

    @functools.wraps(filter_)
    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        """The filter's result, a stripped stand-in for `trim`; raises _TextInspected for other filters."""
        if any(isinstance(argument, _StandIn) for argument in (*arguments, *keywords.values())):
            if name == "trim" and len(arguments) == 1 and not keywords:
                return arguments[0].strip()
            if name not in _HARMLESS_FILTERS:
                raise _TextInspected
        return filter_(*arguments, **keywords)

    return wrapped


class RenderedTemplate(NamedTuple):
    """The rendered text around a conversation's messages, split after each message.

    questions  questions, and the answers that every conversation's texts must give
    lead       pieces before the first text
    around     the text before and after each message in its piece
    stripped   whether each text is stripped; empty if none is
    rest       the text after the last piece
    """

    questions: tuple[Question, ...]
    lead: tuple[str, ...]
    around: tuple[tuple[str, str], ...]
    stripped: tuple[bool, ...]
    rest: str

    @classmethod
    def from_parts(
        cls, parts: Sequence[Part], questions: Sequence[Question], count: int, split_points: SplitPoints
    ) -> "RenderedTemplate | None":
        """A template from the parts of one rendering, or None.

        None unless each of `count` texts is shown once, in order, and followed by a certain split point.
        """
        plain, numbers = [""], []
        for part in parts:
            if isinstance(part, str):
                plain[-1] += part
            else:
                numbers.append(part)
                plain.append("")
        if [max(number, ~number) for number in numbers] != list(range(count)):
            return None
        *lead, before = split_points.pieces(plain[0], sure=True)
        around = []
        for behind in plain[1:]:
            end = split_points.first_certain_end(behind)
            if not end:
                return None
            # A few strings that every cached template repeats.
            around.append((intern(before), intern(behind[:end])))
            before = behind[end:]
        stripped = tuple([number < 0 for number in numbers])
        return cls(
            tuple(dict.fromkeys(questions)), tuple(lead), tuple(around), stripped if any(stripped) else (), before
        )

    def pieces(self, texts: list[str], min_chars: int) -> list[str] | None:
        """The prompt in pieces of `min_chars` or more that end after a message.

        None if the template asks about a text (`questions`) and gets another answer than it was learned with.
        """
        for number, question, arguments, answer in self.questions:
            if question(texts[number], *arguments) is not answer:
                return None
        if self.stripped:
            texts = [text.strip() if strips else text for text, strips in zip(texts, self.stripped, strict=True)]
        pieces, pending = [*self.lead], ""
        for text, (before, behind) in zip(texts, self.around, strict=True):
            piece = f"{pending}{before}{text}{behind}"
            if len(piece) >= min_chars:
                pieces.append(piece)
                pending = ""
            else:
                pending = piece
        pieces.append(pending + self.rest)
        return pieces


class RenderedTemplateCache:
    """Rendered results of one chat template, by the order of roles.

    templates  the results; `tries` counts the attempts to learn one
    """

    def __init__(
        self,
        split_points: SplitPoints,
        render: Callable[[Roles, Sequence[Any]], str],
        render_parts: Callable[[Roles, Sequence[Any]], Sequence[Part]],
    ) -> None:
        """
        render        renders the prompt of a conversation
        render_parts  renders the prompt of a conversation of stand-ins, in parts
        """
        self._split_points = split_points
        self._render = render
        self._render_parts = render_parts
        self.templates: dict[Roles, RenderedTemplate] = {}
        self.tries: dict[Roles, int] = {}

    def pieces(self, roles: Roles, texts: list[str]) -> list[str] | None:
        """The prompt of a conversation in pieces; None if the template must render it. Learns a new order of roles.

        Equal to `SplitPoints.pieces` of the rendered prompt, except that added tokens inside a text split nothing.
        """
        template = self.templates.get(roles)
        pieces = None if template is None else template.pieces(texts, self._split_points.min_chars)
        if pieces is None and self.tries.get(roles, 0) < _TRIES:
            template = self._learn_template(roles, texts)
            pieces = None if template is None else template.pieces(texts, self._split_points.min_chars)
        return pieces

    def _learn_template(self, roles: Roles, texts: list[str]) -> RenderedTemplate | None:
        """Render stand-ins for this order of roles and cache the result; None if it cannot be cached.

        Counts the try, unless the conversation is too long to cache. When full, cache and tries are cleared first.
        """
        if len(roles) > _LONGEST_CONVERSATION:
            return None
        if len(self.tries) >= _MOST_TEMPLATES:
            self.tries.clear()
            self.templates.clear()
        self.tries[roles] = self.tries.get(roles, 0) + 1
        questions: list[Question] = []
        stand_ins = [_StandIn((number,), questions, text) for number, text in enumerate(texts)]
        try:
            template = RenderedTemplate.from_parts(
                self._render_parts(roles, stand_ins), questions, len(texts), self._split_points
            )
            if template is None or "".join(template.pieces(texts, 1) or ()) != self._render(roles, texts):
                return None
        except Exception:  # noqa: BLE001  (a template may raise anything; rendering then reports it)
            return None
        self.templates[roles] = template
        return template
