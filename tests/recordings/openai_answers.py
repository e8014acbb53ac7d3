"""Recorded answers of real vLLM to requests of `openai`'s client, so that tests need no vLLM.

`python -m tests.recordings.openai_answers` records it again; it starts vLLM twice, about a minute.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import httpx

from lorafleet.local.tiny_model import make_adapters, make_model

FILE = Path(__file__).parent / "openai-answers-vllm-0.32.0.json"
USER = [{"role": "user", "content": "Which customers ordered twice?"}]
CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Bern", "Basel"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TOOLS = {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}, "max_tokens": 400}
SHORT = {"messages": USER, "max_tokens": 6, "temperature": 0}
SAMPLED = {"messages": USER, "max_tokens": 6, "seed": 1, "n": 2, "logprobs": True, "top_logprobs": 2}
# By name: path and body, without the model.
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, SHORT),
    "chat, streamed": (CHAT, SHORT | {"stream": True}),
    "usage, streamed": (CHAT, SHORT | {"stream": True, "stream_options": {"include_usage": True}}),
    # Sampled: the likeliest token of random weights is always white space.
    "tools": (CHAT, SHORT | TOOLS | {"temperature": 1, "seed": 1}),
    "tools, streamed": (CHAT, SHORT | TOOLS | {"temperature": 1, "seed": 1, "stream": True}),
    "two": (CHAT, SAMPLED),
    "two, streamed": (CHAT, SAMPLED | {"stream": True}),
    "refused": (CHAT, SHORT | {"temperature": -1}),
    "refused, streamed": (CHAT, SHORT | {"temperature": -1, "stream": True}),
    "completion": (COMPLETIONS, {"prompt": "SELECT", "max_tokens": 6, "temperature": 0, "logprobs": 2}),
    "completion, streamed": (COMPLETIONS, {"prompt": "SELECT", "max_tokens": 6, "temperature": 0, "stream": True}),
    "response": (RESPONSES, {"input": "Which customers ordered twice?", "max_output_tokens": 6, "temperature": 0}),
    "response, streamed": (
        RESPONSES,
        {"input": "Which customers ordered twice?", "max_output_tokens": 6, "temperature": 0, "stream": True},
    ),
    "embedding": (EMBEDDINGS, {"input": ["SELECT 1", "SELECT 2"], "encoding_format": "float"}),
}


def recorded_answers() -> dict[str, dict[str, Any]]:
    """By request name: status, content type and body; the adapter is that of `tests.contract.surface`."""
    found: dict[str, dict[str, Any]] = json.loads(FILE.read_text())
    return found


def _record() -> None:
    from tests.contract.surface import ENGINE_NAME, GENERATE_FLAGS, POOLING_FLAGS, STORE, engine_with_adapter
    from tests.engines import start_engine

    answers = {}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        (adapter, *_) = make_adapters(Path(folder) / "adapters")
        for flags, pooling in ((GENERATE_FLAGS, False), (POOLING_FLAGS, True)):
            engine = start_engine("vllm", model, flags=flags, environment=STORE)
            try:
                with engine_with_adapter(engine, adapter) as direct:
                    for name, (path, body) in ASKED.items():
                        if (path == EMBEDDINGS) is pooling:
                            answer = direct.client.post(path, json=body | {"model": ENGINE_NAME})
                            answers[name] = _recorded_answer(answer)
            finally:
                engine.stop()
    FILE.write_text(json.dumps(answers, indent=1) + "\n")


def _recorded_answer(answer: httpx.Response) -> dict[str, Any]:
    return {"status": answer.status_code, "type": answer.headers["content-type"], "body": answer.text}


if __name__ == "__main__":
    _record()
