"""Chats and completions: a request's jobs in the engine, and its answer whole or as a stream."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from lorafleet.sim import answers, bodies
from lorafleet.sim.adapters import SimAdapter
from lorafleet.sim.bodies import ErrorAnswer
from lorafleet.sim.engine import EngineDeadError, EngineDraining, SimEngine, StreamedJob
from lorafleet.sim.prompts import PromptReader, read_json
from lorafleet.sim.settings import SimSettings
from lorafleet.sim.text import TextGenerator
from lorafleet.sim.timing import FinishReason


@dataclass(slots=True)
class GenerationRequest:
    """A checked request for text.

    prompts  token ids of each prompt; `limits` has the output limit of each
    echoes   text that precedes each choice's answer
    """

    head: answers.AnswerHead
    body: bodies.GenerationBody
    adapter: SimAdapter | None
    prompts: list[list[int]]
    limits: list[int]
    echoes: list[str]


@dataclass(slots=True)
class GenerationHandlers:
    """The handlers of /v1/chat/completions, /v1/completions and /inference/v1/generate."""

    settings: SimSettings
    engine: SimEngine
    prompts: PromptReader
    text_generator: TextGenerator
    fingerprint: str

    async def chat(self, request: Request) -> Response:
        """Answer POST /v1/chat/completions, whole or as a stream. Raises `ErrorAnswer`."""
        body = bodies.parse_body(bodies.ChatBody, await read_json(request))
        bodies.check_generate(body)
        adapter = await self.prompts.adapter_named(body.model)
        bodies.check_logprobs(body)
        if not body.messages:
            raise ErrorAnswer("Cannot apply chat template to an empty conversation. Provide at least one message.")
        prompt = body.given_prompt_ids
        if prompt is None:
            text, special = self.prompts.render_chat(body)
            prompt = await self.prompts.token_ids(text, special=special)
        self.prompts.check_vocabulary(body.given_prompt_ids or ())
        max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        bodies.check_length(len(prompt), self.settings.max_model_len, from_text=True)
        return await self._generate(request, body, adapter, [prompt], max_tokens, [""])

    async def completions(self, request: Request) -> Response:
        """Answer POST /v1/completions, whole or as a stream. Raises `ErrorAnswer`."""
        return await self._complete(request, bodies.parse_body(bodies.CompletionBody, await read_json(request)))

    async def tokens(self, request: Request) -> Response:
        """Answer POST /inference/v1/generate, whole or as a stream. Raises `ErrorAnswer`, 403 without its flag."""
        if not self.settings.scales_out:
            message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
            raise ErrorAnswer(message, "PermissionDeniedError", 403)
        body = bodies.parse_body(bodies.GenerateTokensBody, await read_json(request))
        return await self._complete(request, body.as_completion(), is_tokens=True)

    async def _complete(self, request: Request, body: bodies.CompletionBody, *, is_tokens: bool = False) -> Response:
        """Check and answer a completion; `is_tokens`: in the form of /inference/v1/generate. Raises `ErrorAnswer`."""
        bodies.check_generate(body)
        given_prompts = bodies.prompts_of(body)
        adapter = await self.prompts.adapter_named(body.model)
        if not is_tokens:
            bodies.check_logprobs(body)
        prompts: list[list[int]] = []
        for prompt in given_prompts:
            if isinstance(prompt, str):
                ids = await self.prompts.token_ids(prompt, special=body.add_special_tokens)
            else:
                ids = prompt
            bodies.check_length(len(ids), self.settings.max_model_len, from_text=isinstance(prompt, str))
            self.prompts.check_vocabulary(ids)
            prompts.append(ids)
        echoes = [
            (p if isinstance(p, str) else self.prompts.tokenizer.decode(p)) if body.echo else "" for p in given_prompts
        ]
        return await self._generate(request, body, adapter, prompts, body.max_tokens, echoes, is_tokens=is_tokens)

    async def _generate(
        self,
        request: Request,
        body: bodies.GenerationBody,
        adapter: SimAdapter | None,
        prompts: list[list[int]],
        max_tokens: int | None,
        echoes: list[str],
        *,
        is_tokens: bool = False,
    ) -> Response:
        """Check limits, run the prompts in the engine and answer, whole or as a stream. Raises `ErrorAnswer`."""
        limit = self.settings.max_model_len
        bodies.check_sampling(body, max_tokens, limit)
        limits = [bodies.output_limit(max_tokens, len(prompt), limit) for prompt in prompts]
        is_chat = isinstance(body, bodies.ChatBody)
        name = request.headers.get("x-request-id") or body.request_id or answers.random_id()
        head = answers.AnswerHead(
            is_chat=is_chat,
            id=f"{'chatcmpl' if is_chat else 'generate-tokens' if is_tokens else 'cmpl'}-{name}",
            created=int(time.time()),
            model=adapter.name if adapter else self.settings.served_model_name[0],
            fingerprint=self.fingerprint,
            show_cached=self.settings.enable_prompt_tokens_details,
            token_ids=bool(body.return_token_ids),
            choices_per_prompt=body.n,
            block_size=self.settings.block_size,
            is_tokens=is_tokens,
            logprobs=body.logprobs_count,
            has_prompt_logprobs=isinstance(body, bodies.CompletionBody) and body.prompt_logprobs is not None,
            names_tokens_by_id=bool(body.return_tokens_as_token_ids),
        )
        self.engine.check_alive()
        if adapter is not None and any(adapter.fails(prompt) for prompt in prompts):
            raise ErrorAnswer(
                f"adapter {adapter.name} fails this prompt, as its config says", "InternalServerError", 500
            )
        if adapter is not None and adapter.delay_s:
            await asyncio.sleep(adapter.delay_s)
        generation = GenerationRequest(
            head, body, adapter, prompts, limits, [echo for echo in echoes for _ in range(body.n)]
        )
        if body.stream:
            return StreamingResponse(self._stream_events(generation), media_type="text/event-stream")
        return await self._whole_answer(request, generation)

    @asynccontextmanager
    async def _submitted_jobs(
        self, generation: GenerationRequest
    ) -> "AsyncIterator[tuple[list[StreamedJob], asyncio.Queue[StreamedJob]]]":
        """Submit a job for each choice; yields the jobs and the queue of their updates.

        At the end aborts unfinished jobs.
        """
        updates: asyncio.Queue[StreamedJob] = asyncio.Queue()
        jobs: list[StreamedJob] = []
        body = generation.body
        digest = generation.adapter.digest if generation.adapter else b""
        try:
            for prompt, limit in zip(generation.prompts, generation.limits, strict=True):
                for choice in range(body.n):
                    reply = self.text_generator.reply(
                        digest, prompt, choice=choice, max_tokens=limit, ignore_eos=body.ignore_eos, stops=body.stops
                    )
                    jobs.append(
                        self.engine.submit(
                            prompt,
                            reply,
                            adapter=generation.adapter,
                            cache_salt=body.cache_salt,
                            report_reused=body.wants_reused_reported,
                            on_update=updates.put_nowait,
                        )
                    )
            yield jobs, updates
        finally:
            for job in jobs:
                self.engine.abort(job)

    async def _whole_answer(self, request: Request, generation: GenerationRequest) -> Response:
        """Run the request and return the whole answer; aborts the jobs if the client disconnects."""
        async with self._submitted_jobs(generation) as (jobs, updates):
            finished = asyncio.ensure_future(wait_until_finished(jobs, updates))
            disconnected = asyncio.ensure_future(wait_for_disconnect(request))
            await asyncio.wait({finished, disconnected}, return_when=asyncio.FIRST_COMPLETED)
            disconnected.cancel()
            if not finished.done():
                finished.cancel()
                return Response(status_code=499)  # the client has disconnected
            finished.result()
            if generation.head.is_tokens:
                return JSONResponse(answers.full_token_answer(generation.head, jobs))
            return JSONResponse(answers.full_answer(generation.head, jobs, generation.echoes))

    async def _stream_events(self, generation: GenerationRequest) -> AsyncIterator[str]:
        """Run the request and yield the answer as server-sent events; an engine's error is an event, too."""
        head, options = generation.head, generation.body.stream_options
        with_usage = bool(options and options.include_usage)
        continuous = bool(options and options.continuous_usage_stats and with_usage)
        try:
            async with self._submitted_jobs(generation) as (jobs, updates):
                places = {job: index for index, job in enumerate(jobs)}
                seen = dict.fromkeys(jobs, 0)
                while any(seen[job] < len(job.reply) for job in jobs):
                    job = _checked_job(await updates.get())
                    if head.is_chat and not any(seen.values()):
                        for index, each_job in enumerate(jobs):
                            yield _sse_event(answers.role_chunk(head, index, each_job, continuous=continuous))
                    first, seen[job] = seen[job], job.produced  # a slow reader gets several tokens at once, as in vLLM
                    if first == job.produced:
                        continue
                    index = places[job]
                    if head.is_tokens:
                        yield _sse_event(answers.token_chunk(head, index, job, first, job.produced))
                        continue
                    text = "" if first else generation.echoes[index]
                    text += "".join(job.reply_text.pieces[first : job.produced])
                    yield _sse_event(
                        answers.text_chunk(
                            head,
                            index,
                            job,
                            first,
                            job.produced,
                            text,
                            continuous=continuous,
                            with_fingerprint=not with_usage,
                        )
                    )
                if with_usage:
                    make = answers.token_usage_chunk if head.is_tokens else answers.usage_chunk
                    yield _sse_event(make(head, jobs))
        except (
            EngineDeadError,
            EngineDraining,
        ) as exc:  # status 200 is sent: an event has the error
            error = ErrorAnswer(str(exc), "InternalServerError", 500).body()
            yield f"data: {json.dumps(error)}\n\n"  # with spaces, unlike every other event
        yield "data: [DONE]\n\n"


async def wait_until_finished(jobs: Sequence[StreamedJob], updates: "asyncio.Queue[StreamedJob]") -> None:
    """Wait until all jobs have ended. Raises `EngineDeadError`."""
    while any(job.finish_reason is None for job in jobs):
        await updates.get()
    for job in jobs:
        _checked_job(job)


def _checked_job(job: StreamedJob) -> StreamedJob:
    """The job; raises `EngineDeadError` if its engine died."""
    if job.finish_reason is FinishReason.ERROR:
        raise EngineDeadError
    return job


async def wait_for_disconnect(request: Request) -> None:
    """Wait until the client has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _sse_event(part: dict[str, Any]) -> str:
    """A JSON object as one server-sent event."""
    return f"data: {json.dumps(part, ensure_ascii=False, separators=(',', ':'))}\n\n"
