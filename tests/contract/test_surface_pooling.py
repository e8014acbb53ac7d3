"""The routes for vectors and scores on real vLLM, with and without a router."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from router.protocols.routes import ROUTES, Route
from tests.contract.surface import (
    ENGINE_NAME,
    POOLING,
    POOLING_FLAGS,
    DirectEngine,
    assert_accepts_a_salt,
    assert_answers_its_example,
    assert_names_an_unknown_model,
    assert_salt_separates,
    assert_same_through_a_router,
    assert_table_has_every_route,
    engine_with_adapter,
    example,
    routed,
)
from tests.engines import start_engine
from tests.patience import until
from tests.router.doubles import BASE

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]

by_row = pytest.mark.parametrize("route", [ROUTES["POST", path] for path in POOLING], ids=lambda route: route.path)


@pytest.fixture(scope="module")
def direct(model_dir: Path, adapters: dict[str, Path]) -> Iterator[DirectEngine]:
    engine = start_engine("vllm", model_dir, flags=POOLING_FLAGS)
    try:
        with engine_with_adapter(engine, adapters["sql"]) as direct:
            yield direct
    finally:
        engine.stop()


@by_row
def test_every_route_answers_its_example_for_base_model_and_adapter(direct: DirectEngine, route: Route) -> None:
    assert_answers_its_example(direct, route)


@by_row
def test_every_route_names_an_unknown_model(direct: DirectEngine, route: Route) -> None:
    assert_names_an_unknown_model(direct, route)


@by_row
def test_body_of_every_route_has_a_salt_if_its_row_requires_one(direct: DirectEngine, route: Route) -> None:
    assert_accepts_a_salt(direct, route)


def test_salt_separates_texts_on_every_route_that_takes_one(direct: DirectEngine) -> None:
    text = "INSERT INTO salts VALUES ('sea', 'rock', 'none'); " * 8
    for number, path in enumerate(path for path in POOLING if ROUTES["POST", path].takes_salt):
        if "score" in path:
            body: dict[str, Any] = {"text_1": text, "text_2": "salt"}
        elif "rerank" in path:
            body = {"query": text, "documents": ["salt"]}
        else:
            body = {"input": text}
        assert_salt_separates(direct, path, body, f"{number}")


def test_every_inference_route_of_the_engine_is_in_the_table(direct: DirectEngine) -> None:
    assert_table_has_every_route(direct)


async def test_router_answers_every_route_like_the_engine(direct: DirectEngine, model_dir: Path) -> None:
    async with routed(direct, model_dir) as (client, _parts):
        for path in POOLING:
            await assert_same_through_a_router(direct, client, path, example(path), "example", within=1e-3)
        for encoding in ("base64", "bytes"):
            name = {"sql/v1": ENGINE_NAME, BASE: BASE}
            for requested, engine_name in name.items():
                body = {"input": ["one", "two"], "encoding_format": encoding}
                alone = direct.post("/v1/embeddings", body, model=engine_name)
                behind = await client.post("/v1/embeddings", json=body | {"model": requested})
                assert behind.headers["content-type"] == alone.headers["content-type"]
                if encoding == "bytes":
                    assert behind.content == alone.content


async def test_pooling_engine_is_probed_with_a_pooling_request(direct: DirectEngine, model_dir: Path) -> None:
    async with routed(direct, model_dir) as (_client, parts):
        look = parts.scheduler.breaker.probe
        assert look is not None
        look(next(iter(parts.discovery.fleet.replicas.values())))
        await until(lambda: parts.metrics.circuit_looks.labels("well").value)
