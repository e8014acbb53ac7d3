"""Token ids of a request's prompt: made here if our tokenizer agrees with the engine's, else by the engine."""

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import datetime
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import structlog

from lorafleet.service.process import release_free_memory
from lorafleet.telemetry.repeats import RepeatLimiter
from lorafleet.tokenizer.chat import ChatTokenizer, read_files
from lorafleet.tokenizer.messages import HasMedia, Untokenizable, has_media
from router.core.fleet import Incarnation
from router.core.kv.index import WorkerId
from router.protocols.prompts import may_be_truncated, prompt_body
from router.protocols.routes import PromptKind
from router.telemetry.metrics import RouterMetrics
from router.tokenizing.agreement import TokenizerAgreement
from router.tokenizing.dates import (
    DatesDiffer,
    ShownDate,
    clock_of,
    common_texts,
    date_probes,
    date_unknown,
    dates_differ,
    possible_dates,
    seconds_left,
)
from router.tokenizing.doubts import TokenDoubts
from router.tokenizing.given import given_prompt, packed_ids
from router.tokenizing.pictures import PictureModel, PicturesOfEngines
from router.tokenizing.probes import PROBES, added_token_probes, checked_ids
from router.tokenizing.prompt_encoder import TOKENIZE_ERRORS, LoadedTokenizer, PromptEncoder
from router.tokenizing.tokens import NO_TOKENS, SlowTokens, Tokens
from workers.wire import ModelFiles

log = structlog.get_logger()

# Fields that /tokenize accepts. Source: vLLM 0.32 entrypoints/serve/tokenize/protocol.py.
_TOKENIZE_FIELDS = (
    "messages",
    "prompt",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template_kwargs",
)
# Fields that change a prompt's ids and that /tokenize does not accept; or, a client's own template, must not run here.
_ENGINE_ONLY_FIELDS = frozenset(
    {
        "chat_template",
        "documents",
        "media_io_kwargs",
        "mm_processor_kwargs",
        "reasoning_effort",
        "truncate_prompt_tokens",
    }
)
# All body fields on which a prompt's ids depend.
FIELDS = frozenset({*_TOKENIZE_FIELDS, *_ENGINE_ONLY_FIELDS})

# Pauses before a worker whose files made no agreeing tokenizer, or an engine that was too slow, is tried again.
_RETRY_WORKER_S = 60.0
_RETRY_ENGINE_S = 5.0
# Engines probed at a time: when a router starts, all of them are new to it.
_MAX_PROBED_ENGINES = 4
# Seconds that a body whose answers contradicted our ids is a probe, too.
_CONTESTED_S = 600.0


class _Reading(NamedTuple):
    """The date that an engine shows, and when it must be read again."""

    date: ShownDate
    due_at: float


async def _no_headers(_url: str) -> dict[str, str]:
    """No header: for agents without key files."""
    return {}


class Tokenizers:
    """One tokenizer for each base model, from a folder or from the files that an agent serves."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        *,
        agent_headers: Callable[[str], Awaitable[dict[str, str]]] = _no_headers,
        mode: str = "auto",
        paths: Mapping[str, Path] | None = None,
        remote_timeout_s: float = 0.5,
        cache_bytes: int = 16 * 2**20,
        threads: int = 2,
        metrics: RouterMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        agent_headers     the header with the key for an agent at a URL; may raise httpx.HTTPError
        paths             base model -> folder with its tokenizer's files, used in place of an agent's files
        remote_timeout_s  longest wait for an engine's /tokenize; then the request is routed without ids
        cache_bytes       size of the cache of tokenized pieces; 0 for none. The default holds about 250 conversations
                          of 32 KB
        threads           for long prompts, and as many again for very long ones
        """
        self._client = client
        self._agent_headers = agent_headers
        self._mode = mode
        self._paths = dict(paths or {})
        self.remote_timeout_s = remote_timeout_s
        self._clock = clock
        self._metrics = metrics
        counts = None
        if metrics is not None:
            counts = metrics.tokenized.labels("cache"), metrics.tokenized.labels("tokenizer")
        self._encoder = PromptEncoder(cache_bytes, threads, counts)
        self._lines = RepeatLimiter(clock)
        self._pictures = PicturesOfEngines(self._post_tokenize, clock)
        self._local: dict[str, LoadedTokenizer] = {}
        self._numbers_used = 0
        self._agreement = TokenizerAgreement()
        # Base models where most engines disagree with our tokenizer.
        self._outvoted: set[str] = set()
        self._doubts = TokenDoubts()
        # Bodies whose answers contradicted our ids, by base model, and until when they are probes.
        self._contested: dict[str, tuple[Mapping[str, Any], float]] = {}
        self._loading: set[str] = set()
        self._probing: set[tuple[str, str, str]] = set()
        self._worker_again_at: dict[tuple[str, str, str], float] = {}
        self._engine_again_at: dict[str, float] = {}

    def close(self) -> None:
        """Cancel waiting prompts and questions, and let the threads end."""
        self._pictures.close()
        self._encoder.close()

    @property
    def cache_bytes(self) -> int:
        """Bytes in the piece cache and in the word caches of all tokenizers."""
        word_caches = [local.tokenizer.word_cache for local in self._local.values()]
        return self._encoder.cache.size_bytes + sum([words.size_bytes for words in word_caches if words is not None])

    def knows(self, base_model: str) -> bool:
        """Whether prompts of this base model are tokenized here, or never will be."""
        return self._mode != "auto" or self._local_in_use(base_model) is not None

    def has_probed(self, base_model: str, incarnation: Incarnation) -> bool:
        """Whether this engine need not be probed by `load_or_probe` now."""
        if self._mode != "auto":
            return True
        local = self._local.get(base_model)
        return (
            local is not None
            and self._agreement.is_settled(incarnation, local.number)
            and not self._agreement.is_date_due(incarnation, self._clock())
        )

    def agrees(self, incarnation: Incarnation, tokens: Tokens) -> bool:
        """Whether this engine boot returns the same ids as the tokenizer that made these tokens."""
        return tokens.made_by > 0 and self._agreement.agrees(incarnation, tokens.made_by, self._clock())

    def note(self, base_model: str) -> str | None:
        """Why prompts of this base model are not tokenized here, or not all of them; None if they are."""
        local = self._local.get(base_model)
        if self._mode != "auto" or local is None:
            return None
        if base_model in self._outvoted:
            return "most engines tokenize otherwise than this router: prompts are tokenized at the engines"
        if local.strftime is dates_differ:
            return "the chat template shows the date, and the engines' dates differ: approximate keys meanwhile"
        return None

    def adopt(self, base_model: str, tokenizer: ChatTokenizer) -> int:
        """Make this the base model's tokenizer and return its number; no engine has agreed with it yet."""
        self._numbers_used += 1
        name = f"{base_model}#{self._numbers_used}"
        self._local[base_model] = LoadedTokenizer(self._numbers_used, tokenizer, name, date_unknown)
        self._set_outvoted(base_model, is_outvoted=False)
        return self._numbers_used

    async def load_or_probe(
        self, base_model: str, *, agent_url: str, engine_url: str, incarnation: Incarnation | None = None
    ) -> None:
        """Load a base model's tokenizer, or compare it with one more engine; safe to repeat and to interrupt.

        If most engines disagree with the tokenizer, the files of the next disagreeing engine replace it. A worker
        without success is tried again after a minute; other workers are tried meanwhile.

        engine_url   empty: an engine without /tokenize, which goes by the files that its agent serves
        incarnation  its boot id is empty for an engine whose restarts would not be noticed; None: without a name, too
        raises       httpx.HTTPError if agent or engine cannot be reached now
        """
        incarnation = incarnation or (WorkerId(engine_url), "")
        self._agreement.add_engine(base_model, incarnation)
        if base_model not in self._local and not self._has_files(base_model, agent_url):
            return  # an engine without an agent serves no files: it tokenizes each prompt itself
        worker = (base_model, agent_url or engine_url, incarnation[1])
        now = self._clock()
        self._worker_again_at = {key: at for key, at in self._worker_again_at.items() if at > now}
        is_busy = (
            worker in self._worker_again_at or worker in self._probing or len(self._probing) >= _MAX_PROBED_ENGINES
        )
        if is_busy or self.has_probed(base_model, incarnation):
            return
        self._probing.add(worker)
        try:
            if not await self._probe_or_load(base_model, agent_url, engine_url, incarnation):
                self._worker_again_at[worker] = now + _RETRY_WORKER_S
        except httpx.HTTPError:
            # A shorter pause: the engine may be starting. Other workers are tried meanwhile.
            self._worker_again_at[worker] = now + _RETRY_ENGINE_S
            raise
        finally:
            self._probing.discard(worker)

    def record_answer(
        self,
        base_model: str,
        incarnation: Incarnation,
        tokens: Tokens,
        body: Mapping[str, Any] | None,
        *,
        kind: PromptKind | None,
        contradicts: bool,
    ) -> frozenset[WorkerId]:
        """Count an answer for or against the ids of its prompt: the workers whose engines are to be probed again now.

        body  of the request, decoded; None: too large to be a probe
        kind  the route's kind of prompt
        """
        local = self._local.get(base_model)
        if local is None or tokens.made_by != local.number or base_model in self._outvoted:
            return frozenset()
        doubt = self._doubts.record(base_model, incarnation, body, self._clock(), contradicts=contradicts)
        if doubt is None:
            return frozenset()
        log.warning(
            "answers contradict our token ids: the engines are probed again",
            base_model=base_model,
            workers=sorted(worker for worker, _ in doubt.engines),
        )
        probe = None if doubt.body is None or kind is None else prompt_body(kind, doubt.body, local.tokenizer)
        if probe is not None and all(probe.get(name) is None for name in _ENGINE_ONLY_FIELDS):
            self._contested[base_model] = probe, self._clock() + _CONTESTED_S
        self._doubt(base_model, doubt.engines)
        return frozenset([worker for worker, _ in doubt.engines])

    def _doubt(self, base_model: str, engines: Iterable[Incarnation]) -> None:
        """Have these engines probed again at their next report, without a pause."""
        for incarnation in engines:
            self._agreement.doubt(incarnation)
        self._worker_again_at = {key: at for key, at in self._worker_again_at.items() if key[0] != base_model}

    def forget(self, worker: WorkerId) -> None:
        """Drop a worker that is gone, with its engine's answer, and count again whether most engines disagree."""
        base_model = self._agreement.forget(worker)
        if base_model is not None:
            self._update_outvoted(base_model)
            self._update_date(base_model)

    async def _probe_or_load(self, base_model: str, agent_url: str, engine_url: str, incarnation: Incarnation) -> bool:
        """Compare this engine with our tokenizer, or load and adopt one of its files; whether either was done.

        True while another call loads one. Raises httpx.HTTPError.
        """
        local = self._local.get(base_model)
        if local is not None:
            if self._agreement.is_settled(incarnation, local.number) and await self._renew_date(
                local, base_model, engine_url, incarnation
            ):
                return True
            was_doubted = self._agreement.is_doubted(incarnation)
            agrees, reading = await self._engine_agrees(local.tokenizer, base_model, engine_url)
            self._record_probes(base_model, local.number, incarnation, agrees, reading)
            if was_doubted:
                self._record_verdict(base_model, incarnation, agrees)
            if agrees is not False or base_model not in self._outvoted:
                return agrees is not None
            if not self._has_files(base_model, agent_url):
                return False
        if base_model in self._loading:
            return True
        self._loading.add(base_model)
        try:
            loaded = await self._load_agreeing(base_model, agent_url, engine_url)
        finally:
            self._loading.discard(base_model)
        if loaded is None:
            return False
        tokenizer, reading = loaded
        self._record_probes(base_model, self.adopt(base_model, tokenizer), incarnation, True, reading)
        return True

    async def _renew_date(
        self, local: LoadedTokenizer, base_model: str, engine_url: str, incarnation: Incarnation
    ) -> bool:
        """Read again the date that an agreeing engine shows; whether it could be read. Raises httpx.HTTPError."""
        reading = await self._read_date(local.tokenizer, engine_url)
        if reading is None:
            return False
        self._agreement.record_date(incarnation, *reading)
        self._update_date(base_model)
        return True

    def _record_probes(
        self, base_model: str, number: int, incarnation: Incarnation, agrees: bool | None, reading: _Reading | None
    ) -> None:
        """Record what an engine answered to all probes, and what follows from it for the base model."""
        self._agreement.record_answer(incarnation, number, agrees)
        if reading is not None:
            self._agreement.record_date(incarnation, *reading)
        self._update_outvoted(base_model)
        self._update_date(base_model)

    def _record_verdict(self, base_model: str, incarnation: Incarnation, agrees: bool | None) -> None:
        """Log and count what a doubted engine's new probe said. Where it differs, all engines are doubted.

        An engine that has changed without a restart is not the only one, as a rule.
        """
        outcome = "unanswered" if agrees is None else "agrees" if agrees else "differs"
        if self._metrics is not None:
            self._metrics.token_doubts.labels(outcome).inc()
        log.warning("a doubted engine was probed", base_model=base_model, worker=incarnation[0], outcome=outcome)
        self._doubts.record_verdict(base_model, self._clock(), agrees=agrees is not False)
        if agrees is False:
            self._doubt(base_model, self._agreement.agreeing(base_model))

    def _update_outvoted(self, base_model: str) -> None:
        """Update whether most engines of a base model disagree with our tokenizer; if so, let them be probed again.

        Logged when it begins and ends. Without a tokenizer of our own it is not outvoted.
        """
        local = self._local.get(base_model)
        is_outvoted = local is not None and self._agreement.is_outvoted(base_model, local.number)
        if is_outvoted and base_model not in self._outvoted:
            log.warning("tokenizing at the engine: most engines have another tokenizer by now", base_model=base_model)
        elif not is_outvoted and base_model in self._outvoted:
            log.info("tokenizing here again: most engines agree", base_model=base_model)
        self._set_outvoted(base_model, is_outvoted=is_outvoted)
        if is_outvoted:
            self._agreement.reopen(base_model)

    def _set_outvoted(self, base_model: str, *, is_outvoted: bool) -> None:
        """Set whether the base model's prompts are tokenized at the engines, as most disagree with our tokenizer."""
        (self._outvoted.add if is_outvoted else self._outvoted.discard)(base_model)
        if self._metrics is not None:
            self._metrics.tokenizer_distrusted.labels(base_model).set(is_outvoted)

    def _update_date(self, base_model: str) -> None:
        """Have prompts show the date that the agreeing engines show; logged where these differ."""
        local = self._local.get(base_model)
        if local is None or not local.tokenizer.date_forms:
            return
        dates = self._agreement.dates(base_model, local.number)
        strftime = date_unknown if not dates else dates_differ
        if len(dates) == 1:
            [date] = dates
            strftime = date.strftime
        elif dates and local.strftime is not dates_differ:
            log.warning(
                "approximate keys: the chat template shows the date, and the engines' dates differ",
                base_model=base_model,
                dates=sorted(text for date in dates for _, text in date.texts),
            )
        self._local[base_model] = local._replace(strftime=strftime)

    def _local_in_use(self, base_model: str) -> LoadedTokenizer | None:
        """The base model's tokenizer here; None if there is none or most engines disagree with it."""
        return None if base_model in self._outvoted else self._local.get(base_model)

    def _has_files(self, base_model: str, agent_url: str) -> bool:
        """Whether the base model's tokenizer files can be read, from an agent or a folder."""
        return bool(agent_url) or base_model in self._paths

    async def ids(
        self, body: Mapping[str, Any], *, base_model: str, engine_url: str, kind: PromptKind | None = None
    ) -> Tokens:
        """The token ids of this body's prompt, made here or by the engine; NO_TOKENS if there are none.

        body  decoded JSON
        kind  the route's kind of prompt; None infers it: `messages` is a chat, `prompt` (text or one list of ids) a
              completion
        """
        found = self.tokenize(body, base_model=base_model, engine_url=engine_url, kind=kind)
        return found if isinstance(found, Tokens) else await found()

    def tokenize(
        self,
        body: Mapping[str, Any],
        *,
        base_model: str,
        engine_url: str,
        kind: PromptKind | None = None,
        max_model_len: int = 0,
        model_path: str = "",
        owner: str = "",
    ) -> Tokens | SlowTokens:
        """As `ids`, or a call that returns them, if a thread or the engine must be waited for. Caches new pieces.

        NO_TOKENS if tokenizing is off or only the engine can know them. Errors here leave it to the engine, except for
        prompts with pictures and the like: its ids do not tell them apart.

        model_path     where vLLM read the base model from, for ids of pictures; empty: pictures have none
        max_model_len  the longest prompt that any engine accepts, in tokens; 0 if unknown
        owner          whose requests alone find the pieces of this one, by the time that it takes; empty: everyone's
        """
        found = self._tokenize(body, base_model, engine_url, kind, max_model_len, model_path, owner)
        return _if_shorter(found, max_model_len) if may_be_truncated(kind, body) else found

    def _tokenize(  # noqa: PLR0917  (for each request, and names take time)
        self,
        body: Mapping[str, Any],
        base_model: str,
        engine_url: str,
        kind: PromptKind | None,
        max_model_len: int,
        model_path: str,
        owner: str,
    ) -> Tokens | SlowTokens:
        """As `tokenize`, of the whole prompt, also where its engine would cut it."""
        if kind == "input":
            prompt = prompt_body(kind, body)
            if prompt is None:
                return NO_TOKENS
            body, kind = prompt, "chat" if "messages" in prompt else "completion"
        given = None if kind == "chat" else given_prompt(body, kind)
        if isinstance(given, Tokens):
            return given
        if given is not None:
            body = {**body, "prompt": given}
        if self._mode == "off":
            return NO_TOKENS
        local = self._local_in_use(base_model) if self._mode == "auto" else None
        if kind is not None and kind != "chat":
            prompt = prompt_body(kind, body, local.tokenizer if local else None)
            if prompt is None:
                return NO_TOKENS
            body = prompt
        remote = partial(self._tokenize_at_engine, body, base_model, engine_url)
        try:
            if local is not None:
                return self._encoder.encode(local, body, remote, max_model_len, owner)
        except DatesDiffer:
            return NO_TOKENS  # ids of one engine are wrong for the others
        except HasMedia:
            assert local is not None
            encode = partial(self._encoder.encode, local, remote=_no_tokens, max_model_len=max_model_len, owner=owner)
            model = PictureModel(
                local.tokenizer, base_model, model_path, engine_url, self.remote_timeout_s, local.strftime
            )
            return self._pictures.tokenize(body, model, encode)
        except TOKENIZE_ERRORS as exc:
            log.debug("not tokenized here", base_model=base_model, error=str(exc))
        return NO_TOKENS if has_media(body.get("messages")) else remote

    async def _model_files(self, base_model: str, agent_url: str) -> Mapping[str, str]:
        """Read a base model's tokenizer files from its folder, or GET them from an agent; raises httpx.HTTPError."""
        if base_model in self._paths:
            return await asyncio.to_thread(read_files, self._paths[base_model])
        headers = await self._agent_headers(agent_url)
        answer = await self._client.get(f"{agent_url}/v1/model/files", headers=headers, auth=httpx.Auth())
        answer.raise_for_status()
        return ModelFiles.model_validate_json(answer.content).files

    async def _load_agreeing(
        self, base_model: str, agent_url: str, engine_url: str
    ) -> tuple[ChatTokenizer, _Reading | None] | None:
        """Load a tokenizer of the worker's files that agrees with its engine on every probe, and the engine's date.

        None, logged, if there is none.
        """
        try:
            files = await self._model_files(base_model, agent_url)
            local = await asyncio.to_thread(_load_chat_tokenizer, files)
        except (Untokenizable, ValueError, KeyError, OSError) as exc:
            if failures := self._lines.count(("files", base_model)):
                log.warning(
                    "tokenizing at the engine: its files make no tokenizer",
                    base_model=base_model,
                    error=str(exc),
                    failures=failures,
                )
            return None
        agrees, reading = await self._engine_agrees(local, base_model, engine_url)
        if agrees is None and (failures := self._lines.count(("unproven", base_model))):
            log.warning(
                "tokenizing at the engine: it answered no probe, so ours is unproven",
                base_model=base_model,
                failures=failures,
            )
        if not agrees:
            return None
        if engine_url:
            log.info("tokenizing here: equal to the engine on every probe that it took", base_model=base_model)
        else:
            log.info("tokenizing here by its files: the engine has no /tokenize", base_model=base_model)
        return local, reading

    async def _engine_agrees(
        self, local: ChatTokenizer, base_model: str, engine_url: str
    ) -> tuple[bool | None, _Reading | None]:
        """POST every probe to the engine; whether it has our ids for each that it accepts, and the date that it shows.

        None if it accepts none; no date if that cannot be read. An engine without a URL is taken at its files' word.

        raises  httpx.HTTPError if the engine cannot be reached now
        """
        agrees, reading = None, await self._read_date(local, engine_url)
        if not engine_url:
            return True, reading
        number = 0
        probes: list[Mapping[str, Any]] = [*PROBES, *added_token_probes(local.added_tokens)]
        contested, until = self._contested.get(base_model, (None, 0.0))
        if contested is not None and self._clock() < until:
            probes.append(contested)
        while number < len(probes):
            engine_ids = await self._post_tokenize(probes[number], engine_url)
            strftime = reading.date.strftime if reading is not None else date_unknown
            if engine_ids is not None and engine_ids != checked_ids(local, probes[number], strftime):
                before, reading = reading, await self._read_date(local, engine_url)
                if before is not None and reading is not None and before.date != reading.date:
                    continue  # the engine's midnight was between two probes
                if failures := self._lines.count(("differs", base_model)):
                    log.warning(
                        "an engine's ids are not ours",
                        base_model=base_model,
                        engine=engine_url,
                        probe=number,
                        failures=failures,
                    )
                return False, reading
            agrees = True if engine_ids is not None else agrees
            number += 1
        return agrees, reading

    async def _read_date(self, local: ChatTokenizer, engine_url: str) -> _Reading | None:
        """The date that the engine's chat template shows, of the dates that may be right; None if none is.

        Asks nothing for a template without dates. Raises httpx.HTTPError.
        """
        if not local.date_forms:
            return _Reading(ShownDate(), inf)
        if not engine_url:
            return None
        answers = [(probe, *await self._post_date_probe(probe, engine_url)) for probe in date_probes(local)]
        if any(engine_ids is None for _, engine_ids, _ in answers):
            return None
        utc = answers[-1][2] if answers else clock_of({})
        date = common_texts(
            date
            for date in possible_dates(local.date_forms, utc)
            if all(engine_ids == checked_ids(local, probe, date.strftime) for probe, engine_ids, _ in answers)
        )
        return None if date is None else _Reading(date, self._clock() + seconds_left(utc) if answers else inf)

    async def _tokenize_at_engine(self, body: Mapping[str, Any], base_model: str, engine_url: str) -> Tokens:
        """POST a body to /tokenize for its ids; NO_TOKENS if that fails.

        A slow engine is not asked for 5 s; it is logged, once in a while.
        """
        asked = _ENGINE_ONLY_FIELDS.intersection(body)
        if asked and any(body[name] is not None for name in asked):
            return NO_TOKENS
        now = self._clock()
        if self._engine_again_at.get(engine_url, 0.0) > now:
            return NO_TOKENS
        try:
            async with asyncio.timeout(self.remote_timeout_s):
                ids = await self._post_tokenize(body, engine_url)
        except (TimeoutError, httpx.TimeoutException):
            # Later requests do not wait as this one did.
            self._engine_again_at = {url: at for url, at in self._engine_again_at.items() if at > now}
            self._engine_again_at[engine_url] = now + _RETRY_ENGINE_S
            # Every request that was waiting there comes here.
            if failures := self._lines.count(("slow", engine_url)):
                log.warning(
                    "the engine tokenizes too slowly: approximate keys meanwhile",
                    engine=engine_url,
                    for_s=_RETRY_ENGINE_S,
                    failures=failures,
                )
            ids = None
        except (httpx.HTTPError, TypeError, ValueError, RecursionError) as exc:
            log.debug("not tokenized at the engine", base_model=base_model, error=str(exc))
            ids = None
        return NO_TOKENS if ids is None else Tokens(ids, "remote")

    async def _post_tokenize(self, body: Mapping[str, Any], engine_url: str) -> "array[int] | None":
        """POST a body to /tokenize; the engine's ids, None if it refuses or answers in another form.

        Raises httpx.HTTPError, see `_post`.
        """
        return _ids_in(await self._post(body, engine_url))

    async def _post_date_probe(self, body: Mapping[str, Any], engine_url: str) -> "tuple[array[int] | None, datetime]":
        """As `_post_tokenize`, with the engine's UTC time."""
        answer = await self._post(body, engine_url)
        return _ids_in(answer), clock_of(answer.headers)

    async def _post(self, body: Mapping[str, Any], engine_url: str) -> httpx.Response:
        """POST a body to /tokenize. Raises httpx.HTTPError, also for a 502 to 504.

        No model is named, so that the engine uses its base model.
        """
        request = {name: body[name] for name in _TOKENIZE_FIELDS if name in body}
        # Without our own key: the engine may be another party's.
        answer = await self._client.post(f"{engine_url}/tokenize", json=request, auth=httpx.Auth())
        if answer.status_code in (502, 503, 504):
            answer.raise_for_status()  # temporary: no answer about this body
        return answer


def _ids_in(answer: httpx.Response) -> "array[int] | None":
    """The ids in an engine's answer of /tokenize; None for a refusal, and for another form."""
    if answer.status_code != 200:
        return None
    found = answer.json()
    tokens = found.get("tokens") if isinstance(found, dict) else None
    return packed_ids(tokens) if isinstance(tokens, list) else None


def _if_shorter(found: Tokens | SlowTokens, max_tokens: int) -> Tokens | SlowTokens:
    """These tokens if they are fewer than `max_tokens`, else NO_TOKENS: the engine cuts the prompt."""
    if isinstance(found, Tokens):
        return found if found.ids is None or len(found.ids) < max_tokens else NO_TOKENS
    slow = found

    async def later() -> Tokens:
        """The same, after the wait for a thread or the engine."""
        tokens = _if_shorter(await slow(), max_tokens)
        assert isinstance(tokens, Tokens)
        return tokens

    return later


async def _no_tokens() -> Tokens:
    """NO_TOKENS, in place of an engine's ids, which do not tell pictures apart."""
    return NO_TOKENS


def _load_chat_tokenizer(files: Mapping[str, str]) -> ChatTokenizer:
    """The tokenizer of a model's files. Raises Untokenizable.

    Parsing takes several times as much memory as the tokenizer; that is given back to the system.
    """
    try:
        return ChatTokenizer.from_files(files)
    finally:
        release_free_memory()
