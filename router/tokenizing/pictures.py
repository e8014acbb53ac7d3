"""Pictures in prompts: the tokens that an engine has in their place, and the ids that it hashes into their blocks.

A template shows a picture as one token, the placeholder, and the engine replaces it by the picture's own tokens: how
many, and which, depends on the model and on the picture's size. So an engine is asked once for each picture, by a chat
of that picture alone. From then on its prompts have exact token ids here, without asking.
"""

import asyncio
import binascii
import contextlib
from array import array
from base64 import b64decode
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import httpx
import structlog
from jinja2 import TemplateError
from xxhash import xxh3_128_digest

from lorafleet.kv.pictures import PlacedPicture, picture_id
from lorafleet.tokenizer.chat import ChatTokenizer
from lorafleet.tokenizer.messages import Picture, PictureStandIn, Untokenizable, without_pictures
from lorafleet.tokenizer.template import StrftimeNow
from router.tokenizing.tokens import NO_TOKENS, SlowTokens, Tokens

log = structlog.get_logger()

# Tokens of the pictures that are kept, four bytes each.
_MOST_TOKENS = 2_000_000
# Pictures that are asked for at a time; prompts with more new ones have approximate keys.
_MOST_QUESTIONS = 16
# Longest wait for an engine; a request waits for less (`tokenize_timeout_s`), and a later one finds the picture known.
_QUESTION_S = 10.0
# A picture that the engine did not take is asked for again after this time.
_RETRY_S = 60.0
_MOST_UNKNOWN = 4096

# Errors for a chat that our tokenizer cannot handle, or an answer unlike vLLM's.
_ANSWER_ERRORS = (Untokenizable, TemplateError, TypeError, ValueError, AttributeError, RecursionError)

PostTokenize = Callable[[Mapping[str, Any], str], Awaitable["array[int] | None"]]
EncodeChat = Callable[[Mapping[str, Any]], Tokens | SlowTokens]
_PictureKey = tuple[str, str, bytes]


class KnownPicture(NamedTuple):
    """A picture's id at engines, and the tokens that they have in place of the placeholder."""

    id: str
    placeholder: int
    tokens: "array[int]"


class PictureModel(NamedTuple):
    """A base model, and the engine that is asked for its pictures.

    path       where vLLM read it from; empty: not known, so its pictures have no ids
    timeout_s  a request's longest wait for new pictures
    strftime   of the engines' chat templates
    """

    tokenizer: ChatTokenizer
    name: str
    path: str
    engine_url: str
    timeout_s: float
    strftime: StrftimeNow | None = None


class PicturesOfEngines:
    """The pictures known so far, the longest unused dropped first. For the event loop alone."""

    def __init__(self, post: PostTokenize, clock: Callable[[], float]) -> None:
        """`post` sends a body to /tokenize of an engine's URL: the ids, or None if the engine refuses it."""
        self._post = post
        self._clock = clock
        self._known: OrderedDict[_PictureKey, KnownPicture] = OrderedDict()
        self._tokens = 0
        self._again_at: dict[_PictureKey, float] = {}
        self._questions: dict[_PictureKey, asyncio.Task[None]] = {}

    def close(self) -> None:
        """Cancel the questions that wait for an engine."""
        for task in self._questions.values():
            task.cancel()

    def find(self, model: PictureModel, pictures: Sequence[Picture]) -> list[KnownPicture] | None:
        """What is known of these pictures, in their order, marked as used last; None if one is unknown."""
        found = []
        for picture in pictures:
            known = self._known.get(key := _picture_key(model, picture))
            if known is None:
                return None
            self._known.move_to_end(key)
            found.append(known if picture.given_id is None else known._replace(id=picture.given_id))
        return found

    def tokenize(self, body: Mapping[str, Any], model: PictureModel, encode: EncodeChat) -> Tokens | SlowTokens:
        """The ids of a chat with pictures, or a call that asks an engine for new pictures first.

        NO_TOKENS if the chat has other media, or a picture that the engine does not explain in time.
        """
        try:
            messages, pictures = without_pictures(body["messages"])
        except Untokenizable:
            return NO_TOKENS
        if not pictures or not model.path:
            return NO_TOKENS
        shown = {**body, "messages": messages}
        known = self.find(model, pictures)
        if known is not None:
            return _tokens_with_pictures(shown, known, encode)

        async def learn_first() -> Tokens:
            """Ask for the unknown pictures, and tokenize if all are known in time."""
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(model.timeout_s):
                    await self.learn(model, pictures)
            known = self.find(model, pictures)
            if known is None:
                return NO_TOKENS
            found = _tokens_with_pictures(shown, known, encode)
            return found if isinstance(found, Tokens) else await found()

        return learn_first

    async def learn(self, model: PictureModel, pictures: Sequence[Picture]) -> None:
        """Ask an engine for those of these pictures that are unknown, and wait until it has answered.

        No effect for pictures that it did not take within the last minute, and while many others are asked for.
        """
        now = self._clock()
        questions = []
        for picture in pictures:
            key = _picture_key(model, picture)
            if key in self._known or self._again_at.get(key, 0.0) > now:
                continue
            task = self._questions.get(key)
            if task is None:
                if len(self._questions) >= _MOST_QUESTIONS:
                    return
                task = self._questions[key] = asyncio.create_task(self._ask(model, key, picture))
            questions.append(task)
        if questions:
            # The question goes on without its request: the picture's next prompt finds it known.
            await asyncio.wait(questions)

    async def _ask(self, model: PictureModel, key: _PictureKey, picture: Picture) -> None:
        """Ask an engine for one picture, and keep its answer, or when to ask again."""
        known = None
        try:
            async with asyncio.timeout(_QUESTION_S):
                identified = await asyncio.to_thread(_picture_id, picture.url, model.path)
                if identified is not None:
                    ours = array(
                        "I", model.tokenizer.chat_ids({"messages": [_chat_with_part(PictureStandIn())]}, model.strftime)
                    )
                    theirs = await self._post({"messages": [_chat_with_part(_picture_part(picture))]}, model.engine_url)
                    place = None if theirs is None else tokens_in_place(ours, theirs)
                    known = None if place is None else KnownPicture(identified, *place)
        except (TimeoutError, httpx.HTTPError, *_ANSWER_ERRORS) as exc:
            log.debug("a picture's tokens are not known", base_model=model.name, error=str(exc))
        finally:
            self._questions.pop(key, None)
        if known is None:
            self._again_at[key] = self._clock() + _RETRY_S
            if len(self._again_at) > _MOST_UNKNOWN:
                del self._again_at[next(iter(self._again_at))]
            return
        self._known[key] = known
        self._tokens += len(known.tokens)
        while self._tokens > _MOST_TOKENS:
            self._tokens -= len(self._known.popitem(last=False)[1].tokens)


def tokens_in_place(ours: Sequence[int], theirs: Sequence[int]) -> "tuple[int, array[int]] | None":
    """The placeholder in our ids, and the engine's tokens in its place; None if no one place explains the difference.

    Around a run of one token several places would do; the placeholder is then the token that the engine repeats.
    """
    surplus = Counter(theirs)
    surplus.subtract(ours)
    added = len(theirs) - len(ours)
    places = [
        at
        for at in range(len(ours))
        if added > 0 and theirs[:at] == ours[:at] and theirs[at + added + 1 :] == ours[at + 1 :]
    ]
    if not places:
        return None
    at = max(places, key=lambda place: surplus[ours[place]])
    if sum(surplus[ours[place]] == surplus[ours[at]] for place in places) > 1:
        return None
    return ours[at], array("I", theirs[at : at + added + 1])


def _tokens_with_pictures(
    shown: Mapping[str, Any], known: Sequence[KnownPicture], encode: EncodeChat
) -> Tokens | SlowTokens:
    """The ids of a chat whose pictures are stand-ins, with the tokens of these pictures in their places."""

    def placed(found: Tokens) -> Tokens:
        """The tokens with those of the pictures."""
        whole = None if found.ids is None else with_pictures(found.ids, known)
        return NO_TOKENS if whole is None else Tokens(whole[0], "local", pictures=whole[1])

    try:
        found = encode(shown)
    except _ANSWER_ERRORS:
        return NO_TOKENS
    if isinstance(found, Tokens):
        return placed(found)
    slow = found

    async def placed_later() -> Tokens:
        """The same, after the wait for a thread."""
        return placed(await slow())

    return placed_later


def with_pictures(
    ids: Sequence[int], pictures: Sequence[KnownPicture]
) -> "tuple[array[int], tuple[PlacedPicture, ...]] | None":
    """The ids with each picture's tokens in place of its placeholder, and the pictures' places.

    None unless there are as many placeholders as pictures: a text may have one, too.
    """
    placeholder = pictures[0].placeholder
    whole, placed, rest = array("I"), [], iter(pictures)
    for token in ids:
        if token != placeholder:
            whole.append(token)
            continue
        picture = next(rest, None)
        if picture is None or picture.placeholder != placeholder:
            return None
        placed.append(PlacedPicture(picture.id, len(whole), len(picture.tokens)))
        whole += picture.tokens
    return (whole, tuple(placed)) if len(placed) == len(pictures) else None


def _picture_key(model: PictureModel, picture: Picture) -> _PictureKey:
    """The key of a picture: the model, and a hash of its data URL."""
    return model.name, model.path, xxh3_128_digest(picture.url.encode("utf-8", "surrogatepass"))


def _chat_with_part(part: Mapping[str, Any]) -> dict[str, Any]:
    """A message with this part alone."""
    return {"role": "user", "content": [part]}


def _picture_part(picture: Picture) -> dict[str, Any]:
    """A picture as a content part."""
    return {"type": "image_url", "image_url": {"url": picture.url}}


def _picture_id(url: str, model_path: str) -> str | None:
    """vLLM's id of the picture in a data URL; None if it is not known. Takes a millisecond a megabyte: in a thread.

    source  vLLM 0.32 multimodal/media/connector.py: a data URL must be base64, and is decoded strictly
    """
    head, _, data = url.partition(",")
    if not head.endswith(";base64"):
        return None
    try:
        return picture_id(b64decode(data, validate=True), model_path)
    except (binascii.Error, ValueError):
        return None
