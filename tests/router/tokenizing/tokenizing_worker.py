"""An agent and its engine that tokenize, and prompts for them."""

import asyncio

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from lorafleet.tokenizer.chat import ChatTokenizer

BASE = "tiny-qwen"


RULES = "You answer in SQL. Tables: customers(id, name), orders(id, customer, total).\n" * 40


HI = {"messages": [{"role": "user", "content": "Hi"}]}


class TokenizingWorker:
    """An agent and its engine in one app: serves a model's files and tokenizes with them."""

    def __init__(self, chat: ChatTokenizer, files: dict[str, str]) -> None:
        self.chat = chat
        self.files = files
        self.files_asked = 0
        self.tokenize_asked = 0
        self.agent_status = 200
        self.tokenize_status = 200
        self.offset = 0  # added to each id: another tokenizer than its files make
        self.answers = asyncio.Event()
        self.answers.set()

    @property
    def app(self) -> Starlette:
        async def model_files(request: Request):
            self.files_asked += 1
            return JSONResponse({"base_model": BASE, "files": self.files}, self.agent_status)

        async def tokenize(request: Request):
            self.tokenize_asked += 1
            await self.answers.wait()
            body = await request.json()
            text, special = self.chat.prompt_text(body)
            ids = self.chat.encode(text, add_special_tokens=special)
            return JSONResponse({"tokens": [i + self.offset for i in ids]}, self.tokenize_status)

        return Starlette(
            routes=[
                Route("/v1/model/files", model_files),
                Route("/tokenize", tokenize, methods=["POST"]),
                Route("/{as_another:int}/tokenize", tokenize, methods=["POST"]),
            ]
        )


LONG = {"prompt": RULES}
