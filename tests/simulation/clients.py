"""Clients of the fleet: requests, publishes, registrations and deletions, each written into the history."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import structlog

from tests.simulation.answers import ExpectedAnswers
from tests.simulation.determinism import running_node
from tests.simulation.history import History, Operation, Outcome
from tests.simulation.network import Address
from tests.simulation.nodes import Node
from tests.simulation.scenario import FIXED

MOST_WAIT_S = 900.0
"""The longest that a client waits for anything: a router's own limits end a request long before."""
OWN_TOKENS = 20
"""Tokens at the end of each prompt that no other prompt has."""
_AGAIN_S, _SOON_S = 0.5, 0.1
_NO_CONNECTION = -1
_NOT_YET = frozenset({_NO_CONNECTION, 0, 503})
# What a GET shows is in force at the orchestrator; routers follow within `confirm_wait_s`, two seconds.
_FOLLOW_S = 2.5
_PREFIX_TOKENS = (0, 64, 400)
_FIRST_TOKEN, _TOKENS = 300, 1000

log = structlog.get_logger()


class Clients:
    """Processes that call the fleet as its users do.

    keys      API keys by scope and by tenant; without another word an operator's, of scope `admin`
    owners    adapter or published name -> the tenant that alone may use it
    contents  the folders of the adapters' bytes, by number
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        *,
        routers: Sequence[Address],
        orchestrator: Address,
        keys: Mapping[str, str],
        owners: Mapping[str, str],
        contents: Sequence[Path],
        answers: ExpectedAnswers,
        history: History,
    ) -> None:
        self.history = history
        self._nodes, self._routers, self._orchestrator = nodes, routers, orchestrator
        self._keys, self._owners = keys, owners
        self._contents, self._answers = contents, answers
        self._loop = asyncio.get_running_loop()
        self._asked = 0
        self._rolling = defaultdict[str, asyncio.Lock](asyncio.Lock)

    # Calls.

    async def call(
        self, method: str, to: Address, path: str, *, timeout_s: float = 30.0, body: Any = None, tenant: str = ""
    ) -> tuple[int, Any]:
        """(status, answer) of a call by the running node.

        Without an answer: status 0 and the error, or `_NO_CONNECTION`, where nothing has been sent.
        """
        try:
            async with httpx.AsyncClient(verify=False, trust_env=False, timeout=timeout_s) as http:
                url = f"http://{to[0]}:{to[1]}{path}"
                answer = await http.request(method, url, headers=self._headers(tenant), json=body)
        except (httpx.ConnectError, httpx.ConnectTimeout) as exc:
            return _NO_CONNECTION, repr(exc)
        except httpx.HTTPError as exc:
            return 0, repr(exc)
        try:
            return answer.status_code, answer.json()
        except ValueError:
            return answer.status_code, answer.text

    def _headers(self, tenant: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self._keys[tenant or 'admin']}"}

    async def orchestrator(self, method: str, path: str, **more: Any) -> tuple[int, Any]:
        return await self.call(method, self._orchestrator, path, **more)

    async def router(self, number: int, method: str, path: str, **more: Any) -> tuple[int, Any]:
        return await self.call(method, self._routers[number], path, **more)

    def as_client(self, number: int, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """A task of this client's process."""
        token = running_node.set(self._nodes[number])
        try:
            return self._loop.create_task(work)
        finally:
            running_node.reset(token)

    # Operations.

    async def ask(
        self,
        *,
        client: int,
        router: int,
        name: str,
        prefix: int = 1,
        tokens: int = 4,
        is_streamed: bool = False,
        is_final: bool = False,
        content: int | None = None,
        tenant: str = "",
        salt: str = "",
    ) -> Operation:
        """Ask for a completion. The operation's value is the number of the bytes that answered.

        content  unused: a request has none
        tenant   whose key asks; empty: an operator's
        salt     the request's own `cache_salt`
        """
        del content
        prompt = self._prompt(prefix)
        body = {
            "model": name, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": is_streamed
        } | ({"stream_options": {"include_usage": True}} if is_streamed else {})  # fmt: skip
        body |= {"cache_salt": salt} if salt else {}
        operation = self._begin("ask", name, client, is_final=is_final, router=router, tenant=tenant, salt=salt)
        operation.detail |= {"cached": 0, "prompt": tuple(prompt)}
        status, text, headers = 0, "", {}
        try:
            async with httpx.AsyncClient(verify=False, trust_env=False, timeout=MOST_WAIT_S) as http:
                host, port = self._routers[router]
                url = f"http://{host}:{port}/v1/completions"
                answer = await http.post(url, json=body, headers=self._headers(tenant))
                status, text, headers = answer.status_code, answer.text, dict(answer.headers)
        except httpx.HTTPError as exc:
            text = repr(exc)
        operation.detail["worker"] = headers.get("x-lorafleet-worker", "")
        if status == 200:
            answered, usage, error = _read_answer(text, is_streamed=is_streamed)
            if error:
                status, text = 0, error
                operation.detail["is_broken_stream"] = "stream_broken" in error
            else:
                operation.value = self._answers.content_of(answered, prompt, tokens)
                operation.detail["cached"] = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        elif status == 404 and is_final:
            status = 200  # an answer, too: the name stands for nothing
        self._end(operation, status, text)
        return operation

    async def publish(
        self,
        *,
        client: int,
        router: int,
        name: str,
        content: int,
        asks_after: int = 0,
        at_orchestrator: bool = False,
        again_for_s: float = 0.0,
    ) -> None:
        """Publish bytes under a name, by the engines' own call at a router; then ask for it at once, so many times.

        at_orchestrator  by the orchestrator's own call instead
        again_for_s      how long to publish again, as a trainer does, while nobody answers or nobody leads
        """
        ends_at = self._loop.time() + again_for_s
        while await self._publish_once(client, router, name, content, at_orchestrator=at_orchestrator) in _NOT_YET:
            if self._loop.time() >= ends_at:
                break
            await asyncio.sleep(_SOON_S)
        await self._ask_at_once(client, name, asks_after)

    async def _publish_once(self, client: int, router: int, name: str, content: int, *, at_orchestrator: bool) -> int:
        """Publish once. The answer's status, 0 without one."""
        operation = self._begin("write", name, client, content, router=router)
        path = str(self._contents[content])
        if at_orchestrator:
            where = f"/v1/published/{name}"
            status, answer = await self.orchestrator(
                "POST", where, body={"source": path}, timeout_s=MOST_WAIT_S, tenant=self._owners.get(name, "")
            )
        else:
            body = {"lora_name": name, "lora_path": path, "load_inplace": True}
            status, answer = await self.router(
                router,
                "POST",
                "/v1/load_lora_adapter",
                body=body,
                timeout_s=MOST_WAIT_S,
                tenant=self._owners.get(name, ""),
            )
        self._end(operation, status, answer)
        return status

    async def register(self, *, client: int, router: int, name: str, content: int) -> None:
        """Register an adapter at the orchestrator."""
        del router
        operation = self._begin("write", name, client, content)
        body: dict[str, Any] = {"lora_id": name, "source": str(self._contents[content])}
        if owner := self._owners.get(name):
            body["tenants"] = [owner]
        status, answer = await self.orchestrator("POST", "/v1/adapters", body=body, timeout_s=MOST_WAIT_S)
        self._end(operation, status, answer)

    async def point(self, *, client: int, router: int, name: str, to: str, content: int, asks_after: int = 0) -> None:
        """Point an alias at an adapter that has these bytes, wait until that is in force, and ask at once."""
        del router
        operation = self._begin("write", name, client, content, to=to)
        body = {"targets": [{"lora_id": to, "weight": 1.0}]}
        status, answer = await self.orchestrator("PUT", f"/v1/aliases/{name}", body=body, timeout_s=MOST_WAIT_S)
        is_placed_later = status == 202
        while status == 202 and answer["status"].get("pending"):
            await asyncio.sleep(_AGAIN_S)
            found, answer_now = await self.orchestrator("GET", f"/v1/aliases/{name}")
            if found == 200:
                answer = answer_now
        if is_placed_later:
            await asyncio.sleep(_FOLLOW_S)
        self._end(operation, status, answer)
        await self._ask_at_once(client, name, asks_after)

    async def rollout(
        self,
        *,
        client: int,
        router: int,
        name: str,
        content: int,
        step_s: float,
        abort_after_s: float | None = None,
    ) -> None:
        """Move an alias to the adapter of `FIXED` with these bytes, in steps, and wait until that is over.

        abort_after_s  ask for its end after so long, which leads back to the start
        """
        del router
        async with self._rolling[name]:
            before = await self._pointed_at(name)
            operation = self._begin("rollout", name, client, content, before=before)
            steps = [{"weight": 0.5, "for_s": step_s}, {"weight": 1.0, "for_s": step_s}]
            body = {"to": FIXED[content], "steps": steps, "min_requests": 0, "max_first_token_ratio": None}
            path = f"/v1/aliases/{name}/rollout"
            status, answer = await self.orchestrator("POST", path, body=body, timeout_s=MOST_WAIT_S)
            if abort_after_s is not None:
                await asyncio.sleep(abort_after_s)
                found, ended = await self.orchestrator("DELETE", path, timeout_s=MOST_WAIT_S)
                operation.detail["is_aborted"] = found == 200 and ended["status"]["state"] == "aborted"
            operation.detail["after"] = await self._pointed_at(name)
            await asyncio.sleep(_FOLLOW_S)
            self._end(operation, status, answer)

    async def _pointed_at(self, name: str) -> int:
        """Number of the bytes at which an alias points, once no rollout runs; it is made where it is missing."""
        while True:
            status, rollout = await self.orchestrator("GET", f"/v1/aliases/{name}/rollout")
            is_over = status == 404 or (status == 200 and rollout["status"]["state"] not in {"placing", "watching"})
            status, alias = await self.orchestrator("GET", f"/v1/aliases/{name}")
            if is_over and status == 200 and len(alias["status"]["targets"]) == 1:
                return FIXED.index(alias["status"]["targets"][0]["lora_id"])
            if status == 404:
                body = {"targets": [{"lora_id": FIXED[0], "weight": 1.0}]}
                await self.orchestrator("PUT", f"/v1/aliases/{name}", body=body, timeout_s=MOST_WAIT_S)
            await asyncio.sleep(_AGAIN_S)

    async def end_drain(self, path: str) -> None:
        """Give a worker back, as an operator does who looks whether it worked."""
        for _ in range(60):
            status, _ = await self.orchestrator("POST", f"{path}/uncordon", body={})
            if 200 <= status < 300:
                return
            await asyncio.sleep(5.0)

    async def hold(self, *, client: int, for_s: float, lease_s: float) -> None:
        """Hold all new requests for a while; where `for_s` is longer than the lease, until that ends."""
        operation = self._begin("hold", "", client)
        body = {"mode": "keep", "lease_s": lease_s}
        status, answer = await self.orchestrator("POST", "/v1/pauses", body=body, timeout_s=MOST_WAIT_S)
        self._end(operation, status, answer)
        held_at = operation.returned_at
        operation.detail["until"] = operation.invoked_at + lease_s
        await asyncio.sleep(min(for_s, lease_s))
        if for_s < lease_s and operation.outcome is Outcome.OK:
            operation.detail["until"] = min(operation.detail["until"], self._loop.time())
            await self.orchestrator("DELETE", "/v1/pauses?tenant=")
        operation.detail["since"] = held_at

    async def delete(
        self, *, client: int, router: int, name: str, content: int | None = None, asks_after: int = 0
    ) -> None:
        """Delete an adapter, and ask again until that is done; then ask for the adapter at once, so many times."""
        del router, content
        operation, is_begun = self._begin("delete", name, client), False
        while True:
            status, answer = await self.orchestrator("DELETE", f"/v1/adapters/{name}", timeout_s=MOST_WAIT_S)
            if status != 202:
                break
            is_begun = True
            await asyncio.sleep(_AGAIN_S)
        if is_begun and status == _NO_CONNECTION:
            status = 0  # it was accepted before, so it may be done
        self._end(operation, 204 if status == 404 else status, answer)
        await self._ask_at_once(client, name, asks_after)

    async def _ask_at_once(self, client: int, name: str, times: int) -> None:
        """Ask at each router in turn, all at the same moment."""
        routers = (number % len(self._routers) for number in range(times))
        tenant = self._owners.get(name, "")
        asks = (self.ask(client=client, router=router, name=name, tenant=tenant) for router in routers)
        await asyncio.gather(*asks)

    def _prompt(self, prefix: int) -> list[int]:
        """Token ids: one of three beginnings, and an end that no other request has."""
        self._asked += 1
        beginning = [_FIRST_TOKEN + (7 * place + prefix) % _TOKENS for place in range(_PREFIX_TOKENS[prefix])]
        own = (_FIRST_TOKEN + (self._asked * 31 + place * place) % _TOKENS for place in range(OWN_TOKENS))
        return [*beginning, *own]

    def _begin(self, kind: str, name: str, client: int, value: int | None = None, **more: Any) -> Operation:
        is_final = more.pop("is_final", False)
        now = self._loop.time()
        operation = Operation(kind, name, now, f"client{client}", value, is_final=is_final, detail=more)
        self.history.operations.append(operation)
        return operation

    def _end(self, operation: Operation, status: int, answer: Any) -> None:
        operation.returned_at = self._loop.time()
        if 200 <= status < 300:
            operation.outcome = Outcome.OK
        elif 400 <= status < 500 or status == _NO_CONNECTION:
            operation.outcome = Outcome.REFUSED
        operation.detail["status"] = status
        if operation.outcome is not Outcome.OK:
            operation.detail["answer"] = answer if isinstance(answer, str) else json.dumps(answer)
        log.info("operation", what=str(operation))


def _read_answer(text: str, *, is_streamed: bool) -> tuple[str, dict[str, Any], str]:
    """(text, usage, error) of a completion that was answered with 200. A stream may tell an error in its midst."""
    if not is_streamed:
        answer = json.loads(text)
        return answer["choices"][0]["text"], answer["usage"], ""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    if not lines or lines[-1] != "[DONE]":
        return "", {}, f"the stream ended without [DONE]: {text[-300:]}"
    chunks = [json.loads(line) for line in lines[:-1]]
    if errors := [chunk["error"] for chunk in chunks if "error" in chunk]:
        return "", {}, f"error within the stream: {errors[0]}"
    answered = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    return answered, next((chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage")), {}), ""
