"""Prompts with pictures on real vLLM: what the router predicts is what the engine had cached."""

import base64
import io
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorafleet.kv.pictures import picture_id
from router.app import build
from router.config import RouterSettings
from tests.contract.surface import DirectEngine
from tests.engines import start_engine
from tests.patience import patience, until
from tests.properties import examples
from tests.router.doubles import BASE
from tests.serving import serving

pytestmark = pytest.mark.vllm

MODES = [("PNG", "RGB"), ("PNG", "RGBA"), ("PNG", "L"), ("PNG", "LA"), ("PNG", "P"), ("PNG", "1"), ("PNG", "I;16")]
MODES += [("JPEG", "RGB"), ("JPEG", "L"), ("JPEG", "CMYK")]


def picture(color: int, size: tuple[int, int] = (40, 30), *, mode: str = "RGB", form: str = "PNG") -> bytes:
    """A picture of one color; its lowest bytes give the color's parts."""
    from PIL import Image

    parts = len(Image.new(mode, (1, 1)).getbands())
    value = tuple((color >> 8 * part) % 256 for part in range(parts)) if parts > 1 else color % 256
    file = io.BytesIO()
    Image.new(mode, size, value).save(file, form, progressive=bool(color % 2))
    return file.getvalue()


@given(st.integers(0, 1 << 32), st.sampled_from(MODES), st.tuples(st.integers(1, 9), st.integers(1, 9)))
@settings(max_examples=examples(60), deadline=None)
@pytest.mark.slow
def test_ids_of_pictures_are_vllms_own(color: int, kind: tuple[str, str], size: tuple[int, int]) -> None:
    from vllm.multimodal.hasher import MultiModalHasher
    from vllm.multimodal.media.image import ImageMediaIO

    form, mode = kind
    data = picture(color, size, mode=mode, form=form)
    opened = ImageMediaIO().load_bytes(data)
    expected = MultiModalHasher.hash_kwargs("blake3", model_id="org/tiny-vlm", image=opened)
    assert picture_id(data, "org/tiny-vlm") == expected, kind


def chat(*pictures: bytes, text: str = "What is this?") -> dict[str, Any]:
    """A chat with pictures after a long system prompt, and long words after them."""
    urls = ["data:image/png;base64," + base64.b64encode(data).decode() for data in pictures]
    shown = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    system = {"role": "system", "content": "Describe each picture in ten words, without its frame. " * 4}
    user = {"role": "user", "content": [*shown, {"type": "text", "text": text + " Take all the words you need. " * 8}]}
    return {"model": BASE, "messages": [system, user], "max_tokens": 1, "temperature": 0}


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DirectEngine, Path]]:
    """A running vLLM with a tiny model that takes pictures, and the model's folder."""
    folder = tmp_path_factory.mktemp("tiny-vlm")
    subprocess.run(
        [sys.executable, "-P", "-m", "tests.contract.tiny_vlm", str(folder)], check=True, timeout=patience(300)
    )
    engine = start_engine("vllm", folder, served_model_name=BASE)
    try:
        with httpx.Client(base_url=engine.url, timeout=120) as client:
            yield DirectEngine(engine, client), folder
    finally:
        engine.stop()


@asynccontextmanager
async def behind_a_router(direct: DirectEngine, folder: Path) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    """(client of a router that follows this engine and its KV events without an agent, the router's parts)."""
    app, parts = build(
        RouterSettings(engines=(direct.engine.url,), tokenizer_paths={BASE: folder}, tokenize_timeout_s=patience(10))
    )
    async with serving(app, http=app.state.http) as url, httpx.AsyncClient(base_url=url, timeout=120) as client:
        await until(lambda: parts.tokenizers.knows(BASE) and bool(parts.feeds.followed_workers), within_s=60)
        yield client, parts


@pytest.mark.thorough
async def test_the_router_predicts_what_the_engine_has_cached_of_prompts_with_pictures(
    vlm: tuple[DirectEngine, Path],
) -> None:
    direct, folder = vlm
    red, blue, clear, wide = picture(200), picture(200 << 16), picture(77, mode="RGBA"), picture(3, (112, 30))
    async with behind_a_router(direct, folder) as (client, parts):
        (replica,) = parts.discovery.fleet.replicas.values()
        index = parts.feeds.index(BASE, replica.block_size)
        predicted = {}
        for name, pictures in {
            "red": [red],
            "red again": [red],
            "blue": [blue],
            "clear": [clear],
            "clear again": [clear],
            "wide": [wide],
            "wide, red": [wide, red],
            "wide, red again": [wide, red],
            "wide, blue": [wide, blue],
            "red, wide": [red, wide],
            "no picture": [],
        }.items():
            known = index.blocks(replica.id, "device")
            answer = await client.post("/v1/chat/completions", json=chat(*pictures))
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert int(answer.headers["x-lorafleet-cached-tokens"]) == cached, name
            predicted[name] = cached
            new = usage["prompt_tokens"] // replica.block_size - cached // replica.block_size

            def has_new(known: int = known, new: int = new) -> bool:
                """Whether the engine's events have come."""
                return index.blocks(replica.id, "device") >= known + new - 1

            await until(has_new)
        assert predicted["red again"] > predicted["blue"] >= replica.block_size
        assert predicted["clear again"] > predicted["clear"]
        assert predicted["wide, red again"] > predicted["wide, blue"] >= predicted["red, wide"]
        data = base64.b64encode(red).decode()
        part = {"type": "input_image", "image_url": f"data:image/png;base64,{data}", "detail": "auto"}
        block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
        words = "Look closely at this picture, please, and tell all that there is to be seen in it. " * 2
        response = {"input": [{"role": "user", "content": [part, {"type": "input_text", "text": words}]}]}
        message = {"messages": [{"role": "user", "content": [{"type": "text", "text": words * 2}, block]}]}
        call = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "a", "content": [block, {"type": "text", "text": words}]}
        turns = [("user", words), ("assistant", [call]), ("user", [result])]
        looked = {"messages": [{"role": role, "content": content} for role, content in turns]}
        for path, body in (
            ("/v1/messages", looked | {"max_tokens": 1}),
            ("/v1/responses", response | {"max_output_tokens": 1}),
            ("/v1/messages", message | {"max_tokens": 1}),
        ):
            before = index.blocks(replica.id, "device")
            (await client.post(path, json=body | {"model": BASE, "temperature": 0})).raise_for_status()
            await until(lambda before=before: index.blocks(replica.id, "device") > before)
            answer = await client.post(path, json=body | {"model": BASE, "temperature": 0})
            usage = answer.json()["usage"]
            details = usage.get("input_tokens_details") or {"cached_tokens": usage.get("cache_read_input_tokens")}
            assert int(answer.headers["x-lorafleet-cached-tokens"]) == details["cached_tokens"] > 0, path
        assert {decision.tokens_from for decision in parts.decisions} == {"local"}
