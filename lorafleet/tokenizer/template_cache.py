"""What a chat template puts around the texts of a conversation, learned by watching it render one.

Most templates show every message's text as it is, between marks that depend on who speaks and in what order. Then the
next conversation of the same speakers needs no rendering: its texts go into the same frame. And where the frame has an
added token behind a text, the prompt may be cut without being searched for one.

Whether a template is of that kind is not read off its source. It renders stand-ins: they can be shown, joined to other
text and stripped, and they answer a few questions, which the frame then asks of every conversation. Whatever else a
template does to a stand-in raises, however deep inside a filter, and such conversations are rendered one by one.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from sys import intern
from types import CodeType
from typing import Any, Final, NamedTuple, NoReturn, cast

from jinja2.sandbox import SandboxedEnvironment

from lorafleet.tokenizer.split_points import SplitPoints

# Frames kept, the longest conversation that gets one, and how often a template is watched in vain for one order of
# speakers: a text may answer a question in a way that no frame can have. Guesses, nothing measured.
_MOST_FRAMES = 256
_LONGEST = 256
_TRIES = 4
# Answered for a stand-in as for any text; whatever else is asked of one by a test or filter raises.
_KINDS: Final = frozenset(["defined", "iterable", "mapping", "none", "number", "sequence", "string", "undefined"])
_HARMLESS_FILTERS: Final = frozenset(["d", "default"])
# What does not answer the same each time.
_FICKLE_FILTERS: Final = frozenset(["random"])
_FICKLE_NAMES: Final = frozenset(["lipsum", "strftime_now"])

# One question and its answer: which text, what is asked, with what, and what it said.
Question = tuple[int, Callable[..., bool], tuple[str, ...], bool]
# What is shown: plain text, or the number of a message; ~number: its text, stripped.
Part = str | int
Speakers = tuple[str, ...]


class _TextInspected(Exception):
    """The template did with a text what no stand-in can. None of the errors that jinja2's filters catch."""


class _StandIn:
    """Something with texts in it whose letters the template has not seen."""

    # Underscored: a template may ask whether text has an attribute of some name, and text has none of these.
    __slots__ = ("_asked", "_parts", "_text")

    def __init__(self, parts: tuple[Part, ...], asked: list[Question], text: str | None = None) -> None:
        """text  what it stands for, where it is one message's, as it came"""
        self._parts = parts
        self._asked = asked
        self._text = text

    def __add__(self, other: object) -> "_StandIn":
        return _StandIn(self._parts + _parts(other), self._asked)

    def __radd__(self, other: object) -> "_StandIn":
        return _StandIn(_parts(other) + self._parts, self._asked)

    def __bool__(self) -> bool:
        return self._answer(bool)

    def __contains__(self, other: object) -> bool:
        return self._answer(str.__contains__, other)

    def startswith(self, other: object) -> bool:
        return self._answer(str.startswith, other)

    def endswith(self, other: object) -> bool:
        return self._answer(str.endswith, other)

    def strip(self) -> "_StandIn":
        number, _ = self._one()
        return _StandIn((~number,), self._asked)

    def _one(self) -> tuple[int, str]:
        [number, *more] = self._parts
        if self._text is None or more or not isinstance(number, int):
            raise _TextInspected
        return number, self._text

    def _answer(self, question: Callable[..., bool], *others: object) -> bool:
        number, text = self._one()
        arguments = tuple([other if isinstance(other, str) else _raises() for other in others])
        answer = question(text, *arguments)
        self._asked.append((number, question, arguments, answer))
        return answer

    def _looked(self, *_: object) -> NoReturn:
        raise _TextInspected

    __getattr__ = __getitem__ = __iter__ = __len__ = __call__ = __hash__ = _looked
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _looked
    __str__ = __repr__ = __format__ = __int__ = __float__ = __index__ = _looked
    __mul__ = __rmul__ = __mod__ = __rmod__ = _looked


def _parts(value: object) -> tuple[Part, ...]:
    if isinstance(value, _StandIn):
        return value._parts
    return (value,) if isinstance(value, str) else _raises()


def _joined(values: Iterable[Any]) -> Any:
    """As `"".join`, of text and of what is shown."""
    found = list(values)
    asked = next((value._asked for value in found if isinstance(value, _StandIn)), None)
    if asked is None:
        return "".join(found)
    return _StandIn(tuple([part for value in found for part in _parts(value)]), asked)


class StandInTemplate:
    """A template that renders stand-ins: its compiled code, in an environment that knows them."""

    def __init__(self, environment: SandboxedEnvironment, code: CodeType) -> None:
        """environment  of its own, for this alone"""
        tests = cast("dict[str, Any]", environment.tests)
        environment.concat = _joined  # type: ignore[method-assign]
        environment.tests = {name: _test(name, test) for name, test in tests.items()}
        environment.filters = {name: _filter(name, filter_) for name, filter_ in environment.filters.items()}
        self._template = environment.template_class.from_code(environment, code, {})
        # Compiled code makes text of whatever it shows by this name.
        named = self._template.root_render_func.__globals__
        named["str"] = lambda value: value if isinstance(value, _StandIn) else str(value)

    def shown(self, variables: Mapping[str, Any]) -> tuple[Part, ...]:
        """What it renders. Raises whatever it raises."""
        known = {name: _raises if name in _FICKLE_NAMES else value for name, value in variables.items()}
        template = self._template
        return _parts(_joined(template.root_render_func(template.new_context(known, shared=True))))


def _raises(*_: object, **__: object) -> NoReturn:
    raise _TextInspected


def _test(name: str, test: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(test)
    def asked(*arguments: Any) -> Any:
        if any(isinstance(argument, _StandIn) for argument in arguments):
            return test("") if name in _KINDS else _raises()
        return test(*arguments)

    return asked


def _filter(name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    if name in _FICKLE_FILTERS:
        return _raises

    @functools.wraps(filter_)
    def filtered(*arguments: Any, **named: Any) -> Any:
        if any(isinstance(argument, _StandIn) for argument in (*arguments, *named.values())):
            if name == "trim" and len(arguments) == 1 and not named:
                return arguments[0].strip()
            if name not in _HARMLESS_FILTERS:
                raise _TextInspected
        return filter_(*arguments, **named)

    return filtered


class RenderedTemplate(NamedTuple):
    """What stands around the texts of a conversation, cut behind each.

    questions  what its texts must answer
    lead       pieces before the first text
    around     what stands before and behind each text in its piece
    stripped   whether each text is stripped; empty: none is
    rest       what follows the last piece
    """

    questions: tuple[Question, ...]
    lead: tuple[str, ...]
    around: tuple[tuple[str, str], ...]
    stripped: tuple[bool, ...]
    rest: str

    @classmethod
    def of(
        cls, shown: Sequence[Part], asked: Sequence[Question], count: int, cuts: SplitPoints
    ) -> "RenderedTemplate | None":
        """None where one of `count` texts is not shown once and in order, or has no sure cut behind it."""
        plain, numbers = [""], []
        for part in shown:
            if isinstance(part, str):
                plain[-1] += part
            else:
                numbers.append(part)
                plain.append("")
        if [max(number, ~number) for number in numbers] != list(range(count)):
            return None
        *lead, before = cuts.pieces(plain[0], sure=True)
        around = []
        for behind in plain[1:]:
            end = cuts.first_sure(behind)
            if not end:
                return None
            # A few texts, each in every frame many times.
            around.append((intern(before), intern(behind[:end])))
            before = behind[end:]
        stripped = tuple([number < 0 for number in numbers])
        return cls(tuple(dict.fromkeys(asked)), tuple(lead), tuple(around), stripped if any(stripped) else (), before)

    def pieces(self, texts: list[str], min_chars: int) -> list[str] | None:
        """The prompt in pieces as `SplitPoints.pieces` has them; None where these texts have another frame."""
        for number, question, arguments, answer in self.questions:
            if question(texts[number], *arguments) is not answer:
                return None
        if self.stripped:
            texts = [text.strip() if strips else text for text, strips in zip(texts, self.stripped, strict=True)]
        pieces, held = [*self.lead], ""
        for text, (before, behind) in zip(texts, self.around, strict=True):
            piece = f"{held}{before}{text}{behind}"
            if len(piece) >= min_chars:
                pieces.append(piece)
                held = ""
            else:
                held = piece
        pieces.append(held + self.rest)
        return pieces


class RenderedTemplateCache:
    """The frames of one template, by who speaks."""

    def __init__(
        self,
        cuts: SplitPoints,
        rendered: Callable[[Speakers, Sequence[Any]], str],
        shown: Callable[[Speakers, Sequence[Any]], Sequence[Part]],
    ) -> None:
        """
        rendered  the prompt of a conversation of these texts
        shown     the same by a template that is watched, with stand-ins for its texts
        """
        self._cuts = cuts
        self._rendered = rendered
        self._shown = shown
        self._frames: dict[Speakers, RenderedTemplate] = {}
        self._tries: dict[Speakers, int] = {}

    def pieces(self, speakers: Speakers, texts: list[str]) -> list[str] | None:
        """The prompt of a conversation, cut as `SplitPoints.pieces` cuts it, but for texts with added tokens; None
        where it must be rendered.
        """
        frame = self._frames.get(speakers)
        pieces = None if frame is None else frame.pieces(texts, self._cuts.min_chars)
        if pieces is None and self._tries.get(speakers, 0) < _TRIES:
            frame = self._learned(speakers, texts)
            pieces = None if frame is None else frame.pieces(texts, self._cuts.min_chars)
        return pieces

    def _learned(self, speakers: Speakers, texts: list[str]) -> RenderedTemplate | None:
        if len(speakers) > _LONGEST:
            return None
        if len(self._tries) >= _MOST_FRAMES:
            self._tries.clear()
            self._frames.clear()
        self._tries[speakers] = self._tries.get(speakers, 0) + 1
        asked: list[Question] = []
        stand_ins = [_StandIn((number,), asked, text) for number, text in enumerate(texts)]
        try:
            frame = RenderedTemplate.of(self._shown(speakers, stand_ins), asked, len(texts), self._cuts)
            if frame is None or "".join(frame.pieces(texts, 1) or ()) != self._rendered(speakers, texts):
                return None
        except Exception:  # noqa: BLE001  (a template may fail in any way Python can; then rendering says how)
            return None
        self._frames[speakers] = frame
        return frame
