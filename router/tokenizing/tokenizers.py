"""Request body -> token ids: here when our tokenizer provably agrees with the engine's, else at the engine."""

import asyncio
import contextlib
import os
import threading
import time
from array import array
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import httpx
import msgspec
import structlog
from jinja2 import TemplateError

from lorafleet.service.fast_metrics import MetricValue
from lorafleet.tokenizer.ascii_bpe import MAX_CHARS
from lorafleet.tokenizer.chat import ChatTokenizer, read_files
from lorafleet.tokenizer.messages import Untokenizable
from router.core.fleet import Incarnation
from router.core.kv.index import WorkerId
from router.protocols.prompts import prompt_body
from router.protocols.routes import PromptKind
from router.telemetry.metrics import RouterMetrics
from router.tokenizing.agreement import TokenizerAgreement
from router.tokenizing.approximate import ApproximatePrompt
from router.tokenizing.prompt_cache import PieceTokenCache
from workers.wire import ModelFiles

log = structlog.get_logger()

Source = Literal["local", "remote", "given", "approximate", "none"]

# What /tokenize takes. Source: vLLM 0.32 entrypoints/serve/tokenize/protocol.py.
_TOKENIZE_FIELDS = (
    "messages",
    "prompt",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template_kwargs",
)
# What changes a prompt's ids but /tokenize would not know of (or, a client's own template, is not ours to run).
_ENGINE_ONLY_FIELDS = (
    "chat_template",
    "documents",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "reasoning_effort",
    "truncate_prompt_tokens",
)
# Everything of a body that its ids depend on.
FIELDS = frozenset({*_TOKENIZE_FIELDS, *_ENGINE_ONLY_FIELDS})

# Up to so many new characters are encoded on the event loop (about 1 ms of it), more in a thread; and more than the
# second number in other threads, so that a short prompt never waits behind a book.
_INLINE_CHARS = 4_096
_LONG_CHARS = 65_536
# And up to so many by their words, which takes about as long.
_QUICK_CHARS = MAX_CHARS
# No prose or code comes near so many characters a token: a longer prompt is too long for its engine. White space may
# have more (128 in Qwen 2.5's vocabulary), and then has an approximate key.
_MOST_CHARS_A_TOKEN = 16
# Of the threads: a third of the event loop's share of a core that both want.
_THREAD_NICENESS = 5
# Prompts that may wait for a thread; beyond, a prompt has an approximate key. A guess, nothing measured.
_MAX_WAITING = 64
# A worker whose files made no agreeing tokenizer, and an engine that was too slow, are left alone for so long.
_RETRY_WORKER_S = 60.0
_RETRY_ENGINE_S = 5.0
# Of added tokens in one probe: a thousand or two tokens, where an engine has all of them and ours none.
_PROBED_AT_ONCE = 256
# Engines that are held against our tokenizer at a time: when a router starts, all of them are new to it.
_MOST_ASKED = 4

# What our tokenizer must agree on with the engine before it is trusted: one body a trap (see docs/why.md).
PROBES: tuple[dict[str, Any], ...] = (
    {"messages": [{"role": "user", "content": "Hello, world! 12345 x_y  z\n\n"}]},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "naïve café 東京 🙂"}]},
    {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "SELECT *\tFROM t;"},
        ]
    },
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]},
    {"messages": [{"role": "user", "content": ""}], "add_generation_prompt": False},
    {
        "messages": [{"role": "user", "content": "weather?"}],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "weather",
                    "description": "by <city>",
                    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
                },
            }
        ],
    },
    {
        "messages": [
            {"role": "user", "content": "weather?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        ]
    },
    {"prompt": "def f(x):\n    return x"},
    {"prompt": "  leading, <|im_start|> special and trailing  "},
    {"prompt": ""},
)


class Tokens(msgspec.Struct, frozen=True):
    """Token ids of a prompt, unsigned 32-bit, and who made them; `ids` is None when nobody could.

    seen     so many of the first were in an earlier prompt, too
    kept     so many of the first will be in the next one of this conversation
    made_by  the number of the tokenizer of ours that made them; 0 for none
    approximation  of the prompt, where there are no ids; None, too: then no KV term
    """

    ids: "array[int] | None"
    source: Source
    seen: int = 0
    kept: int = 0
    made_by: int = 0
    approximation: ApproximatePrompt | None = None


NO_TOKENS = Tokens(None, "none")


_NO_IDS: "array[int]" = array("I")


# Ids that must be waited for: what makes them.
Slowly = Callable[[], Coroutine[Any, Any, Tokens]]
# What says that a prompt is not one for our tokenizer.
_NOT_HERE = (Untokenizable, TemplateError, TypeError, ValueError, RecursionError)


class _LoadedTokenizer(NamedTuple):
    """A tokenizer of ours. `pieces` is the name under which its ids are kept, which no other one has."""

    number: int
    tokenizer: ChatTokenizer
    pieces: str


class _ThreadsBusy(Exception):
    """Too many prompts wait for a thread."""


class Tokenizers:
    """One tokenizer a base model, from a folder or from the files that an agent of it serves."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        *,
        mode: str = "auto",
        paths: Mapping[str, Path] | None = None,
        remote_timeout_s: float = 0.5,
        cache_bytes: int = 16 * 2**20,
        threads: int = 2,
        metrics: RouterMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        paths             base model -> folder with its tokenizer's files, where an agent's shall not be asked
        remote_timeout_s  how long a request may wait for an engine's /tokenize before it goes without ids
        cache_bytes       for pieces of prompts already tokenized; 0 for no cache. The default holds some 250
                          conversations of 32 KB; one that is not held is tokenized again, which by words takes 0.4 ms
        threads           for long prompts, and as many again for very long ones
        """
        self._client = client
        self._mode = mode
        self._paths = dict(paths or {})
        self.remote_timeout_s = remote_timeout_s
        self._counts: tuple[MetricValue, MetricValue] | None = None
        if metrics is not None:
            self._counts = metrics.tokenized.labels("cache"), metrics.tokenized.labels("tokenizer")
        self._clock = clock
        self._cache = PieceTokenCache(cache_bytes)
        self._long, self._very_long = (
            _TokenizerThreads(threads, "tokenize"),
            _TokenizerThreads(threads, "tokenize-long"),
        )
        self._local: dict[str, _LoadedTokenizer] = {}
        self._made = 0
        self._agreement = TokenizerAgreement()
        # Base models most of whose engines are of another mind than our tokenizer by now.
        self._outvoted: set[str] = set()
        self._learning: set[str] = set()
        self._asking: set[tuple[str, str, str]] = set()
        self._worker_again_at: dict[tuple[str, str, str], float] = {}
        self._engine_again_at: dict[str, float] = {}

    def close(self) -> None:
        """End the threads; what waits for one is cancelled."""
        self._long.close()
        self._very_long.close()

    @property
    def cache_bytes(self) -> int:
        """What the pieces kept take."""
        return self._cache.size_bytes

    def knows(self, base_model: str) -> bool:
        """Whether prompts of this base model are tokenized here, or never will be."""
        return self._mode != "auto" or self._in_use(base_model) is not None

    def has_asked(self, base_model: str, incarnation: Incarnation | None) -> bool:
        """Whether there is nothing to `learn` from this engine."""
        if incarnation is None or self._mode != "auto":
            return self.knows(base_model)
        local = self._local.get(base_model)
        return local is not None and self._agreement.is_settled(incarnation, local.number)

    def agrees(self, incarnation: Incarnation, tokens: Tokens) -> bool:
        """Whether this boot of an engine has shown that it makes the same ids as the tokenizer that made these."""
        return tokens.made_by > 0 and self._agreement.agrees(incarnation, tokens.made_by)

    def adopt(self, base_model: str, tokenizer: ChatTokenizer) -> int:
        """Use this tokenizer from now on, with which no engine has agreed yet; returns its number."""
        self._made += 1
        self._local[base_model] = _LoadedTokenizer(self._made, tokenizer, f"{base_model}#{self._made}")
        self._outvoted.discard(base_model)
        return self._made

    async def learn(
        self, base_model: str, *, agent_url: str, engine_url: str, incarnation: Incarnation | None = None
    ) -> None:
        """Get a base model's tokenizer and hold it against the engine's; safe to repeat and to interrupt.

        Where there is one, this engine is held against it. When most engines turn out to disagree, the next one that
        does is asked for its files, and what they make takes the place of what there was.
        A worker with which it came to nothing is left alone for a minute; any other worker may be tried meanwhile.

        incarnation  None for an engine whose restarts cannot be noticed: it is never taken to agree
        raises       httpx.HTTPError when agent or engine cannot be asked now
        """
        if incarnation is not None:
            self._agreement.heard(base_model, incarnation)
        if base_model not in self._local and not self._has_files(base_model, agent_url):
            return  # an engine without an agent hands out no files: it is asked for each prompt
        worker = (base_model, agent_url or engine_url, incarnation[1] if incarnation else "")
        now = self._clock()
        self._worker_again_at = {key: at for key, at in self._worker_again_at.items() if at > now}
        is_asked = worker in self._worker_again_at or worker in self._asking or len(self._asking) >= _MOST_ASKED
        if is_asked or self.has_asked(base_model, incarnation):
            return
        self._asking.add(worker)
        try:
            if not await self._learned(base_model, agent_url, engine_url, incarnation):
                self._worker_again_at[worker] = now + _RETRY_WORKER_S
        except httpx.HTTPError:
            # Shorter: it may be starting. The next worker heard of is asked meanwhile.
            self._worker_again_at[worker] = now + _RETRY_ENGINE_S
            raise
        finally:
            self._asking.discard(worker)

    def forget(self, worker: WorkerId) -> None:
        """A worker is gone, and its engine's word with it."""
        base_model = self._agreement.forget(worker)
        if base_model is not None:
            self._count(base_model)

    async def _learned(self, base_model: str, agent_url: str, engine_url: str, incarnation: Incarnation | None) -> bool:
        """Whether this engine was held against our tokenizer, and whether there is one now. Raises httpx.HTTPError."""
        local = self._local.get(base_model)
        if local is not None:
            agrees = await self._agrees(local.tokenizer, base_model, engine_url)
            if incarnation is not None:
                self._agreement.answered(incarnation, local.number, agrees)
            self._count(base_model)
            if agrees is not False or base_model not in self._outvoted:
                return agrees is not None
            if not self._has_files(base_model, agent_url):
                return False
        if base_model in self._learning:
            return True
        self._learning.add(base_model)
        try:
            made = await self._agreeing(base_model, agent_url, engine_url)
        finally:
            self._learning.discard(base_model)
        if made is None:
            return False
        number = self.adopt(base_model, made)
        if incarnation is not None:
            self._agreement.answered(incarnation, number, True)
        return True

    def _count(self, base_model: str) -> None:
        """Ask the engines' answers whether our tokenizer is still the one to use."""
        local = self._local.get(base_model)
        if local is None or not self._agreement.is_outvoted(base_model, local.number):
            self._outvoted.discard(base_model)
            return
        if base_model not in self._outvoted:
            log.warning("tokenizing at the engine: most engines have another tokenizer by now", base_model=base_model)
            self._outvoted.add(base_model)
        self._agreement.unsettle(base_model)

    def _in_use(self, base_model: str) -> _LoadedTokenizer | None:
        return None if base_model in self._outvoted else self._local.get(base_model)

    def _has_files(self, base_model: str, agent_url: str) -> bool:
        return bool(agent_url) or base_model in self._paths

    async def ids(
        self, body: Mapping[str, Any], *, base_model: str, engine_url: str, kind: PromptKind | None = None
    ) -> Tokens:
        """The ids that the engine will compute for this body's prompt.

        body  decoded JSON
        kind  of body, as its route has it; None: `messages` make it a chat, `prompt` (text or one list of ids) a
              completion
        """
        found = self.at_once(body, base_model=base_model, engine_url=engine_url, kind=kind)
        return found if isinstance(found, Tokens) else await found()

    def at_once(
        self,
        body: Mapping[str, Any],
        *,
        base_model: str,
        engine_url: str,
        kind: PromptKind | None = None,
        max_model_len: int = 0,
    ) -> "Tokens | Slowly":
        """As `ids`; or what makes them, where a thread or the engine must be waited for.

        max_model_len  the longest prompt that any engine takes, in tokens; 0: not known
        """
        given = body.get("prompt") if kind in {None, "completion"} else None
        if isinstance(given, list):
            if len(given) == 1 and isinstance(given[0], str | list):
                (given,) = given  # a batch of one, as some clients write every prompt
            if isinstance(given, list):
                return _given(given) if body.get("truncate_prompt_tokens") is None else NO_TOKENS
            body = {**body, "prompt": given}
        if self._mode == "off":
            return NO_TOKENS
        local = self._in_use(base_model) if self._mode == "auto" else None
        if kind is not None and kind != "chat":
            prompt = prompt_body(kind, body, local.tokenizer if local else None)
            if prompt is None:
                return NO_TOKENS
            body = prompt
        remote = partial(self._remote, body, base_model, engine_url)
        if local is None:
            return remote
        try:
            return self._encode(local, body, remote, max_model_len)
        except _NOT_HERE as exc:
            log.debug("not tokenized here", base_model=base_model, error=str(exc))
            return remote

    def _encode(
        self, local: _LoadedTokenizer, body: Mapping[str, Any], remote: "Slowly", max_model_len: int
    ) -> "Tokens | Slowly":
        """Piece by piece, and only those that were not seen before. Raises _NOT_HERE."""
        tokenizer = local.tokenizer
        pieces, special = tokenizer.prompt_pieces(body)
        made: list[array[int]] = []
        missing, chars, last = [], 0, len(pieces) - 1
        for at, piece in enumerate(pieces):
            # The last piece grows with the next turn, so it would never be found again.
            ids = self._cache.get(local.pieces, piece) if at < last else None
            if ids is None:
                missing.append(at)
                chars += len(piece)
                ids = _NO_IDS
            made.append(ids)
        slow = missing
        if chars <= _QUICK_CHARS:
            slow = []
            for at in missing:
                ids = tokenizer.quick_ids(pieces[at], add_special_tokens=special)
                if ids is None:
                    slow.append(at)
                else:
                    made[at] = ids
        if slow:
            rest = [pieces[at] for at in slow]
            encode = partial(tokenizer.encode_pieces, rest, add_special_tokens=special)
            chars = sum(map(len, rest))
            if chars > _INLINE_CHARS:
                if 0 < max_model_len * _MOST_CHARS_A_TOKEN < chars:
                    return NO_TOKENS
                threads = self._long if chars <= _LONG_CHARS else self._very_long
                made_of = partial(self._joined, local, pieces, made, missing, slow)
                return partial(self._in_thread, threads, encode, made_of, remote)
            return self._joined(local, pieces, made, missing, slow, encode())
        return self._joined(local, pieces, made, missing)

    async def _in_thread(
        self,
        threads: "_TokenizerThreads",
        encode: "Callable[[], list[array[int]]]",
        joined: "Callable[[list[array[int]]], Tokens]",
        remote: "Slowly",
    ) -> Tokens:
        try:
            return joined(await threads.run(encode))
        except _ThreadsBusy:
            return NO_TOKENS  # the engine would be asked for the longest prompts, just when there are too many
        except _NOT_HERE as exc:
            log.debug("not tokenized here", error=str(exc))
            return await remote()

    def _joined(
        self,
        local: _LoadedTokenizer,
        pieces: Sequence[str],
        made: "list[array[int]]",
        missing: Sequence[int],
        slow: Sequence[int] = (),
        encoded: "Sequence[array[int]]" = (),
    ) -> Tokens:
        """The ids of all pieces.

        made     of each piece; those of the pieces at `slow` are `encoded`
        missing  which pieces the cache does not have
        """
        for at, ids in zip(slow, encoded, strict=True):
            made[at] = ids
        last = len(pieces) - 1
        new = 0
        for at in missing:
            new += len(made[at])
            if at < last:
                self._cache.put(local.pieces, pieces[at], made[at])
        whole = made[0] if not last else array("I", b"".join(made))
        if self._counts is not None:
            by_cache, by_tokenizer = self._counts
            by_tokenizer.inc(new)
            by_cache.inc(len(whole) - new)
        kept = len(whole) - len(made[last])
        seen = kept if missing[0] == last else sum([len(ids) for ids in made[: missing[0]]])
        return Tokens(whole, "local", seen, kept, local.number)

    async def _files(self, base_model: str, agent_url: str) -> Mapping[str, str]:
        if base_model in self._paths:
            return await asyncio.to_thread(read_files, self._paths[base_model])
        answer = await self._client.get(f"{agent_url}/v1/model/files")
        answer.raise_for_status()
        return ModelFiles.model_validate_json(answer.content).files

    async def _agreeing(self, base_model: str, agent_url: str, engine_url: str) -> ChatTokenizer | None:
        """The tokenizer if it equals this engine's on every probe; None when it does not, or cannot be made."""
        try:
            files = await self._files(base_model, agent_url)
            local = await asyncio.to_thread(ChatTokenizer.from_files, files)
        except (Untokenizable, ValueError, KeyError, OSError) as exc:
            log.warning("tokenizing at the engine: its files make no tokenizer", base_model=base_model, error=str(exc))
            return None
        agrees = await self._agrees(local, base_model, engine_url)
        if agrees is None:
            log.warning("tokenizing at the engine: it answered no probe, so ours is unproven", base_model=base_model)
        if not agrees:
            return None
        log.info("tokenizing here: equal to the engine on every probe that it took", base_model=base_model)
        return local

    async def _agrees(self, local: ChatTokenizer, base_model: str, engine_url: str) -> bool | None:
        """Whether the engine has the same ids for every probe that it takes; None when it takes none.

        raises  httpx.HTTPError when it cannot be asked now
        """
        agrees = None
        for number, probe in enumerate((*PROBES, *_added_token_probes(local.added_tokens))):
            theirs = await self._ask(probe, engine_url)
            if theirs is None:
                continue
            if theirs != _encoded_or_none(local, probe):
                log.warning("an engine's ids are not ours", base_model=base_model, engine=engine_url, probe=number)
                return False
            agrees = True
        return agrees

    async def _remote(self, body: Mapping[str, Any], base_model: str, engine_url: str) -> Tokens:
        if any(body.get(name) is not None for name in _ENGINE_ONLY_FIELDS):
            return NO_TOKENS
        now = self._clock()
        if self._engine_again_at.get(engine_url, 0.0) > now:
            return NO_TOKENS
        try:
            async with asyncio.timeout(self.remote_timeout_s):
                ids = await self._ask(body, engine_url)
        except (TimeoutError, httpx.TimeoutException):
            # One request has waited; those behind it need not.
            self._engine_again_at = {url: at for url, at in self._engine_again_at.items() if at > now}
            self._engine_again_at[engine_url] = now + _RETRY_ENGINE_S
            log.warning(
                "the engine tokenizes too slowly: approximate keys meanwhile", engine=engine_url, for_s=_RETRY_ENGINE_S
            )
            ids = None
        except (httpx.HTTPError, TypeError, ValueError, RecursionError) as exc:
            log.debug("not tokenized at the engine", base_model=base_model, error=str(exc))
            ids = None
        return NO_TOKENS if ids is None else Tokens(ids, "remote")

    async def _ask(self, body: Mapping[str, Any], engine_url: str) -> "array[int] | None":
        """The engine's own ids; None when it refuses this body (it will refuse the request as well).

        No model is named: it is the base model's, whatever its engine calls it.
        """
        wanted = {name: body[name] for name in _TOKENIZE_FIELDS if name in body}
        # Our own key is for agents; an engine may be somebody else's.
        answer = await self._client.post(f"{engine_url}/tokenize", json=wanted, auth=httpx.Auth())
        if answer.status_code in (502, 503, 504):
            answer.raise_for_status()  # not now: that says nothing about this body
        if answer.status_code != 200:
            return None
        tokens = answer.json().get("tokens")
        return _packed(tokens) if isinstance(tokens, list) else None


class _TokenizerThreads:
    """A few threads, and a bound on who may wait for one."""

    def __init__(self, threads: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name, initializer=_step_back)
        self._most = threads + _MAX_WAITING
        self._taken = 0

    async def run(self, work: "Callable[[], list[array[int]]]") -> "list[array[int]]":
        """What `work` returns. Raises _Busy."""
        if self._taken >= self._most:
            raise _ThreadsBusy
        self._taken += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        finally:
            self._taken -= 1

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


def _step_back() -> None:
    """This thread yields to the event loop where both want one core: it may take long, the loop may not."""
    with contextlib.suppress(OSError, AttributeError):  # only Linux has a niceness for each thread
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _THREAD_NICENESS)


def _given(prompt: list[Any]) -> Tokens:
    """Ids in the request itself. A batch of prompts, or numbers that are no ids, have none."""
    if not prompt or set(map(type, prompt)) != {int}:
        return NO_TOKENS
    ids = _packed(prompt)
    return NO_TOKENS if ids is None else Tokens(ids, "given")


def _packed(ids: list[Any]) -> "array[int] | None":
    try:
        return array("I", ids)
    except (TypeError, OverflowError):
        return None


def _added_token_probes(contents: Sequence[str]) -> list[dict[str, Any]]:
    """Each added token in a prompt, where it must be one token, or none, to both."""
    starts = range(0, len(contents), _PROBED_AT_ONCE)
    return [{"prompt": " x ".join(contents[start : start + _PROBED_AT_ONCE])} for start in starts]


def _encoded_or_none(local: ChatTokenizer, body: Mapping[str, Any]) -> "array[int] | None":
    """Both ways; None, too, where they differ."""
    try:
        text, special = local.prompt_text(body)
        ids = array("I", local.encode(text, add_special_tokens=special))
        quick = local.quick_ids(text, add_special_tokens=special)
    except (Untokenizable, TemplateError, TypeError, ValueError):
        return None
    return ids if quick in (None, ids) else None
