"""The routes of a model that pools (`--runner pooling`): vectors, classes, scores and ranks.

Nothing is computed. A text's vector is a hash of the adapter's bytes and the text's tokens, so that each adapter gives
its own; a class's share, a score and a rank come from the vector. Prompts are prefilled and cached as those of chats.
"""

import asyncio
import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lorafleet.sim import answers, bodies
from lorafleet.sim.adapters import SimAdapter
from lorafleet.sim.bodies import ErrorAnswer
from lorafleet.sim.engine import SimEngine, StreamedJob
from lorafleet.sim.generation import wait_until_finished
from lorafleet.sim.prompts import PromptReader, read_json
from lorafleet.sim.settings import SimSettings
from lorafleet.sim.text import SimReply
from lorafleet.sim.timing import FinishReason

VECTOR_SIZE = 8
# A job ends with a token; no answer shows it.
_NO_TEXT = SimReply([0], [""], FinishReason.LENGTH, None)


@dataclass(slots=True)
class PoolingHandlers:
    """The handlers of a model that pools.

    labels  names of its classes
    """

    settings: SimSettings
    engine: SimEngine
    prompts: PromptReader
    labels: Sequence[str]

    async def embeddings(self, request: Request) -> Response:
        """Answer POST /v1/embeddings. Raises `ErrorAnswer`."""
        return await self._answer_inputs(request, "embd", "embedding", "embedding")

    async def pooling(self, request: Request) -> Response:
        """Answer POST /pooling. Raises `ErrorAnswer`."""
        return await self._answer_inputs(request, "pooling", "pooling", "data")

    async def classify(self, request: Request) -> Response:
        """Answer POST /classify: the shares of all classes, and the label of the largest. Raises `ErrorAnswer`."""
        body = bodies.parse_body(bodies.InputBody, await read_json(request))
        vectors, tokens, model = await self._vectors(body, await self._input_prompts(body))
        data = []
        for index, vector in enumerate(vectors):
            shares = class_shares(vector, len(self.labels))
            label = self.labels[shares.index(max(shares))]
            data.append({"index": index, "label": label, "probs": shares, "num_classes": len(shares)})
        return _list_answer("classify", model, data, tokens)

    async def score(self, request: Request) -> Response:
        """Answer POST /score: the similarity of each pair. Raises `ErrorAnswer`."""
        body = bodies.parse_body(bodies.ScoreBody, await read_json(request))
        one, others = body.pair
        vectors, tokens, model = await self._vectors(body, await self._pair_prompts(one, others))
        scores = [
            {"index": index, "object": "score", "score": _share(vector[0])} for index, vector in enumerate(vectors)
        ]
        return _list_answer("score", model, scores, tokens)

    async def rerank(self, request: Request) -> Response:
        """Answer POST /rerank: the documents, the most relevant first. Raises `ErrorAnswer`."""
        body = bodies.parse_body(bodies.RerankBody, await read_json(request))
        vectors, tokens, model = await self._vectors(body, await self._pair_prompts([body.query], body.documents))
        results = [
            {"index": index, "document": {"text": text, "multi_modal": None}, "relevance_score": _share(vector[0])}
            for index, (text, vector) in enumerate(zip(body.documents, vectors, strict=True))
        ]
        results.sort(key=lambda result: -float(str(result["relevance_score"])))
        answer = {"id": f"score-{answers.random_id()}", "model": model, "results": results[: body.top_n or None]}
        return JSONResponse(answer | {"usage": {"prompt_tokens": tokens, "total_tokens": tokens}})

    async def _answer_inputs(self, request: Request, prefix: str, kind: str, field: str) -> Response:
        """The vector of each text. Raises `ErrorAnswer`."""
        body = bodies.parse_body(bodies.InputBody, await read_json(request))
        vectors, tokens, model = await self._vectors(body, await self._input_prompts(body))
        data = [{"index": index, "object": kind, field: vector} for index, vector in enumerate(vectors)]
        return _list_answer(prefix, model, data, tokens)

    async def _input_prompts(self, body: bodies.InputBody) -> list[list[int]]:
        """Token ids of each text, or of the chat. Raises `ErrorAnswer`."""
        if body.messages is not None:
            chat = bodies.MessagesBody.model_validate({"add_generation_prompt": False} | body.model_dump())
            text, special = self.prompts.render_chat(chat)
            return [await self.prompts.token_ids(text, special=special)]
        return [
            await self.prompts.token_ids(text, special=body.add_special_tokens) if isinstance(text, str) else text
            for text in body.texts
        ]

    async def _pair_prompts(self, one: Sequence[str], others: Sequence[str]) -> list[list[int]]:
        """Token ids of each pair; a single first text is paired with every other one. Raises `ErrorAnswer`."""
        if len(one) not in {1, len(others)}:
            raise ErrorAnswer("Input lengths must be either 1:1, 1:N or N:N")
        firsts = list(one) * len(others) if len(one) == 1 else list(one)
        texts = [f"{first}\n{other}" for first, other in zip(firsts, others, strict=True)]
        return [await self.prompts.token_ids(text, special=True) for text in texts]

    async def _vectors(
        self, body: bodies.PoolingBody, prompts: Sequence[list[int]]
    ) -> tuple[list[list[float]], int, str]:
        """The vector of each prompt, all prompts' tokens, and the model's name. Raises `ErrorAnswer`."""
        adapter = await self.prompts.adapter_named(body.model)
        for prompt in prompts:
            bodies.check_length(len(prompt), self.settings.max_model_len, from_text=True)
            self.prompts.check_vocabulary(prompt)
        updates: asyncio.Queue[StreamedJob] = asyncio.Queue()
        jobs: list[StreamedJob] = []
        try:
            jobs.extend(
                self.engine.submit(
                    prompt,
                    _NO_TEXT,
                    adapter=adapter,
                    cache_salt=body.cache_salt,
                    report_reused=False,
                    on_update=updates.put_nowait,
                )
                for prompt in prompts
            )
            await wait_until_finished(jobs, updates)
        finally:
            for job in jobs:
                self.engine.abort(job)
        name = adapter.name if adapter else self.settings.served_model_name[0]
        return [text_vector(adapter, prompt) for prompt in prompts], sum(map(len, prompts)), name


def text_vector(adapter: SimAdapter | None, prompt: Sequence[int]) -> list[float]:
    """The vector of a text: numbers from -1 to 1, by a hash of the adapter's bytes and the token ids."""
    digest = hashlib.sha256((adapter.digest if adapter else b"") + repr(list(prompt)).encode()).digest()
    return [round(byte / 127.5 - 1, 6) for byte in digest[:VECTOR_SIZE]]


def class_shares(vector: Sequence[float], classes: int) -> list[float]:
    """The share of each class, by softmax; with more classes than numbers, numbers count again."""
    powers = [math.exp(4 * vector[index % len(vector)] - index // len(vector)) for index in range(classes)]
    return [power / sum(powers) for power in powers]


def _share(value: float) -> float:
    """A number from -1 to 1 as one from 0 to 1."""
    return (value + 1) / 2


def _list_answer(prefix: str, model: str, data: list[dict[str, Any]], tokens: int) -> JSONResponse:
    """A list answer in vLLM's form."""
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0, "prompt_tokens_details": None}
    head = {"id": f"{prefix}-{answers.random_id()}", "object": "list", "created": int(time.time()), "model": model}
    return JSONResponse(head | {"data": data, "usage": usage})
