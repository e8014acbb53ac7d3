"""Real vLLM engines for the tests of all routes, and the comparison of two answers."""

import json
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from router.api.openapi import EXAMPLES
from router.app import build
from router.config import RouterSettings
from router.protocols.routes import ROUTES, Route
from router.protocols.usage import usage_of
from router.request.engine_body import Body, EngineOptions, vllm_body
from tests.engines import RunningEngine
from tests.patience import patience, until
from tests.router.doubles import BASE, DIGEST, AgentDouble
from tests.serving import serving
from workers.wire import Load

LORA_ID = "sql/v1"
ENGINE_NAME = f"{LORA_ID}@{DIGEST[:12]}"
NAMES = {BASE: BASE, LORA_ID: ENGINE_NAME}

POOLING = ("/v1/embeddings", "/v2/embed", "/pooling", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank")
# Routes that need another kind of model (a classifier, structured decisions) or vLLM 0.33.
NOT_SERVED = ("/classify", "/v1/systemone", "/v1/decisions")
TELL_FLAGS = ("--enable-scale-out", "--enable-tokenizer-info-endpoint")
GENERATE_FLAGS = (*TELL_FLAGS, "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
POOLING_FLAGS = ("--runner", "pooling")
STORE = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}


@dataclass(slots=True)
class DirectEngine:
    """An engine with the adapter loaded, called without a router."""

    engine: RunningEngine
    client: httpx.Client

    def post(self, path: str, body: dict[str, Any], *, model: str = BASE, **options: Any) -> httpx.Response:
        """POST `body` with the fields that the router adds; `model` is the engine's name."""
        fields = msgspec.json.decode(msgspec.json.encode(body), type=Body)
        content = vllm_body(fields, model, options=EngineOptions(**options))
        return self.client.post(path, content=content, headers={"content-type": "application/json"})

    def ids(self, path: str, body: dict[str, Any]) -> list[int]:
        """The prompt's token ids as the engine renders them; fails if it refuses the body."""
        answer = self.post(f"{path}/render", body)
        assert answer.status_code == 200, answer.text
        rendered = answer.json()
        return (rendered[0] if isinstance(rendered, list) else rendered)["token_ids"]  # type: ignore[no-any-return]


@contextmanager
def engine_with_adapter(engine: RunningEngine, adapter: Path) -> Iterator[DirectEngine]:
    """The engine with the adapter loaded under the router's name for it during the block."""
    with httpx.Client(base_url=engine.url, timeout=120) as client:
        body = {"lora_name": ENGINE_NAME, "lora_path": str(adapter)}
        loaded = client.post("/v1/load_lora_adapter", json=body)
        assert loaded.status_code == 200, loaded.text
        yield DirectEngine(engine, client)
        client.post("/v1/unload_lora_adapter", json={"lora_name": ENGINE_NAME}).raise_for_status()


def example(path: str) -> dict[str, Any]:
    """The example of the OpenAPI document, with a deterministic answer."""
    sent, _answered = EXAMPLES[path]
    assert sent is not None
    return {name: value for name, value in sent.items() if name != "model"} | {"temperature": 0}


def assert_answers_its_example(direct: DirectEngine, route: Route) -> None:
    """The route answers its example for the base model and for an adapter, as its row says."""
    _sent, answered = EXAMPLES[route.path]
    texts = []
    for model in (BASE, ENGINE_NAME):
        answer = direct.post(route.path, example(route.path), model=model)
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert answered.keys() <= body.keys()
        assert body.get("model") == (model if route.echoes_model else None)
        assert (usage_of(route.usage, answer.content) is None) == (route.usage == "none")
        texts.append(json.dumps(comparable_answer(answer.text)).replace(json.dumps(model), ""))
    assert (texts[0] == texts[1]) == (route.adapter == "names"), "an adapter that runs gives another answer"


def assert_names_an_unknown_model(direct: DirectEngine, route: Route) -> None:
    """The route names an unknown model, by which the router distinguishes a missing adapter from a missing route."""
    answer = direct.post(route.path, example(route.path), model="sql/v1@000000000000")
    assert answer.status_code == 404
    assert "sql/v1@000000000000" in answer.json()["error"]["message"]
    assert ("type" in answer.json()) == (route.errors == "anthropic")


def assert_accepts_a_salt(direct: DirectEngine, route: Route) -> None:
    """The row is right about the salt: vLLM refuses a salt with a slash if the body has a salt, else ignores it."""
    answer = direct.post(route.path, example(route.path) | {"cache_salt": "a/b"}, model=ENGINE_NAME)
    if route.takes_salt and route.computes:
        assert (answer.status_code, "cache_salt" in answer.text) == (400, True), answer.text


def assert_salt_separates(direct: DirectEngine, path: str, body: dict[str, Any], name: str) -> None:
    """A request finds its own prompt under the same salt, and not under another. `name`: of this call's salts."""

    def hits() -> float:
        lines = direct.client.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:prefix_cache_hits_total"))

    found = []
    for salt in (f"a{name}", f"a{name}", f"b{name}"):
        before = hits()
        answer = direct.post(path, body | {"cache_salt": salt}, model=ENGINE_NAME)
        assert answer.status_code == 200, answer.text
        found.append(hits() - before)
    first, second, other = found
    assert (path, first, second > 0, other) == (path, 0, True, 0)


def assert_table_has_every_route(direct: DirectEngine) -> None:
    """Every route of the engine is in the table or in the list of excluded ones."""
    known = {path for _method, path in ROUTES} | {"/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel"}
    left_out = re.compile(
        r"/(adapters.*|invocations|ping|health|load|version|metrics|kv_event_sources|v1/models|inference/v1/abort_requests"
        r"|tokenizer_info|v1/(un)?load_lora_adapter|.*/(de)?render|(is_)?scal(e|ing)_elastic_ep)"
    )
    served = direct.client.get("/openapi.json").json()["paths"]
    assert {path for path in served if path not in known and not left_out.fullmatch(path)} == set()


def comparable_answer(text: str) -> Any:
    """An answer without ids, times and the stream's division into events, which differ each time."""
    if text.startswith(("data:", "event:")):
        return _comparable_stream([_parsed_event(part) for part in text.split("\n\n") if part])
    return _without_volatile(json.loads(text)) if text else ""


_VOLATILE = re.compile(r"^(id|call_id|item_id|request_id|created|created_at|completed_at|signature)$")
_SIGNED = re.compile(r',"system_fingerprint":"[^"]*"')
_TEXTS = frozenset({"content", "text", "delta"})
# On a busy machine one event may have all tokens of a short answer, and no event between the first and the last exists.
STREAM_ATTEMPTS = 5


def _without_volatile(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: None if _VOLATILE.match(name) else _without_volatile(inner) for name, inner in value.items()}
    return [_without_volatile(inner) for inner in value] if isinstance(value, list) else value


def _parsed_event(part: str) -> dict[str, Any]:
    lines = dict(line.split(": ", 1) for line in part.split("\n"))
    data = lines.pop("data")
    return lines | {"data": data if data == "[DONE]" else _without_volatile(json.loads(data))}


def _comparable_stream(events: list[dict[str, Any]]) -> dict[str, Any]:
    """By choice: the shapes of its events in order, and the joined text and log-probabilities of each field.

    A slow reader gets several tokens in one event, and choices arrive in any order. The event that ends
    a text may have more or less of it, so the text is that of the whole choice.
    """
    shapes: dict[str, list[str]] = {}
    texts: dict[str, dict[str, list[Any]]] = {}
    for event in events:
        choices = event["data"].get("choices") if isinstance(event["data"], dict) else None
        place = str(choices[0]["index"]) if choices else "all"
        shape = json.dumps(_without_texts(event, texts.setdefault(place, {}), in_choice=bool(choices)))
        if shape not in shapes.setdefault(place, []):
            shapes[place].append(shape)
    return {place: [shapes[place], {name: _joined(parts) for name, parts in texts[place].items()}] for place in shapes}


def _joined(parts: list[Any]) -> Any:
    """The parts of a text as one; numbers and objects stay apart, so that they can be compared with a tolerance."""
    return "".join(parts) if all(isinstance(part, str) for part in parts) else parts


def _without_texts(value: Any, texts: dict[str, list[Any]], *, in_choice: bool) -> Any:
    if isinstance(value, list):
        return [_without_texts(inner, texts, in_choice=in_choice) for inner in value]
    if not isinstance(value, dict):
        return value
    blanked: dict[str, Any] = {}
    for name, inner in value.items():
        if name in _TEXTS and isinstance(inner, str):
            texts.setdefault(name, []).append(inner)
        elif name == "logprobs" and in_choice and inner is not None:
            for part, found in inner.items():
                texts.setdefault(part, []).extend(found or ())
        elif name == "token_ids" and inner is not None:
            texts.setdefault(name, []).extend(f"{token} " for token in inner)
        elif name == "usage" and in_choice:
            blanked[name] = sorted(inner or ())
        elif name != "sequence_number":
            blanked[name] = _without_texts(inner, texts, in_choice=in_choice)
    return blanked


def control_of(direct: DirectEngine, *, figures: Load | None = None, also: Sequence[str] = ()) -> AgentDouble:
    """The orchestrator and agent of this one engine.

    figures  the engine's load in the agent's metadata
    also     further adapters that the engine has, with the bytes of the first
    """
    control = AgentDouble(workers={"w0": direct.engine.url}, block_sizes={"w0": 32}, figures=figures or Load())
    for lora_id in (LORA_ID, *also):
        control.add_adapter(lora_id, on=["w0"])
    return control


@asynccontextmanager
async def routed(
    direct: DirectEngine,
    model_dir: Path,
    *,
    control: AgentDouble | None = None,
    also: Sequence[str] = (),
    **settings: Any,
) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    """(client of a real router in front of this one engine, the router's parts); it tokenizes itself.

    control, also  as `control_of` makes it, and its further adapters
    """
    control = control or control_of(direct, also=also)
    async with AsyncExitStack() as stack:
        control.url = await stack.enter_async_context(serving(control.app))
        own = {"orchestrator_url": control.url, "tokenizer_paths": {BASE: str(model_dir)}}
        app, parts = build(RouterSettings(**{**own, **settings}))
        url = await stack.enter_async_context(serving(app, http=app.state.http))
        assert await parts.discovery.changes.until(lambda: bool(parts.discovery.fleet.replicas), timeout_s=patience(10))
        await until(lambda: parts.tokenizers.knows(BASE), within_s=20)
        yield await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=120)), parts


def has_only_closed_circuits(parts: Any) -> bool:
    """Whether the router's circuit breaker is closed for every replica."""
    replicas, now = parts.discovery.fleet.replicas.values(), parts.clock()
    return all(parts.scheduler.breaker.state(replica, now) == "closed" for replica in replicas)


async def assert_same_through_a_router(
    direct: DirectEngine, client: httpx.AsyncClient, path: str, body: Any, what: str, *, within: float = 0.0
) -> None:
    """Engine and router give equal answers to a request, except for ids, times and the model's name.

    within  tolerance for numbers: vLLM scores texts slightly differently when it computes them in one step
    """
    for requested, engine_name in NAMES.items():
        direct.post(path, body, model=engine_name)  # from now on both find the same cache
        for _ in range(STREAM_ATTEMPTS if body.get("stream") else 1):
            found, expected = await _answers(direct, client, path, body, requested=requested, engine_name=engine_name)
            if _are_alike(found, expected, within):
                break
        else:
            raise AssertionError(f"{path} {what}, model {requested}:\n{found}\nand from the engine alone:\n{expected}")


async def _answers(
    direct: DirectEngine, client: httpx.AsyncClient, path: str, body: Any, *, requested: str, engine_name: str
) -> tuple[Any, Any]:
    """The comparable answers through the router and of the engine alone, whose statuses must be the same."""
    alone = direct.client.post(path, json=body | {"model": engine_name})
    behind = await client.post(path, json=body | {"model": requested})
    heads = [(answer.status_code, answer.headers["content-type"]) for answer in (behind, alone)]
    assert heads[0] == heads[1], f"{path}: {behind.text[:500]}"
    echoes = ROUTES["POST", path].echoes_model
    texts = behind.text, alone.text.replace(json.dumps(engine_name), json.dumps(requested)) if echoes else alone.text
    if body.get("stream"):
        # Whether a stream without usage has a fingerprint is another test's subject.
        texts = _SIGNED.sub("", texts[0]), _SIGNED.sub("", texts[1])
    return comparable_answer(texts[0]), comparable_answer(texts[1])


def _are_alike(one: Any, other: Any, within: float) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_are_alike(one[key], other[key], within) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(_are_alike(*both, within) for both in zip(one, other, strict=True))
    return bool(abs(one - other) <= within) if isinstance(one, float) else bool(one == other)
