"""Record a session with real vLLM on the CPU, for the tests that replay it without one. About two minutes.

    python -m tests.recordings.record [FILE]      # needs what the tests marked `vllm` need

One request at a time, so that each lies at its true place among the events: prompts that share prefixes under the base
model, two adapters and a cache salt, repeated prompts, conversations that go on from decoded tokens, and a pool of so
few blocks that most of what is stored is evicted again. Only the twins go in together: both decode the same tokens, and
store the same blocks twice.

Three parts. `incremental`: vLLM's ordinary events, with an adapter unloaded and loaded again in the middle. `full`:
every request asks for reports of reused blocks. `after`: ordinary ones again, and one reset of the prefix cache.
"""

import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx
import zmq

from lorafleet.local.tiny_model import make_adapters, make_model
from tests.engines import start_engine
from tests.recordings.recording import VLLM, RecordedEngineRequest, RecordedEvent, Recording

BLOCK_SIZE = 32
TOTAL_BLOCKS = 40
SEED = 7
FLAGS = ("--num-gpu-blocks-override", str(TOTAL_BLOCKS), "--max-model-len", "768", "--max-num-batched-tokens", "768")
REQUESTS = {"incremental": 130, "full": 60, "after": 60}
# The engine publishes in a thread at the end of a step; this is a hundred times what it takes.
_QUIET_MS = 250
_LONGEST_PROMPT = 500


@dataclass(slots=True)
class RecordingSession:
    """The engine, the recorded entries, and the prompts that may be repeated."""

    client: httpx.Client
    sub: "zmq.Socket[bytes]"
    model: str
    entries: list[RecordedEvent | RecordedEngineRequest] = field(default_factory=list)
    prompts: list[tuple[str, str, list[int]]] = field(default_factory=list)
    report_full: bool = False

    def listen(self) -> None:
        """Record events until none comes for a while."""
        while self.sub.poll(_QUIET_MS):
            _, seq, payload = self.sub.recv_multipart()
            self.entries.append(RecordedEvent(int.from_bytes(seq, "big"), payload))

    def post(self, path: str, engine_name: str, salt: str, **fields: Any) -> dict[str, Any]:
        body = {"model": engine_name or self.model, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        body |= fields | ({"cache_salt": salt} if salt else {})
        if self.report_full:
            body["vllm_xargs"] = {"kv_cache_report_mode": "full"}
        answer = self.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()  # type: ignore[no-any-return]

    def ask(self, engine_name: str, salt: str, prompt: list[int], max_tokens: int) -> None:
        """Send and record one completion; its prompt with the answer may be continued later."""
        answer = self.post("/v1/completions", engine_name, salt, prompt=prompt, max_tokens=max_tokens)
        self.add_request(engine_name, salt, prompt, answer)
        self.prompts += [(engine_name, salt, prompt), (engine_name, salt, prompt + answer["choices"][0]["token_ids"])]

    def chat(self, engine_name: str, salt: str, messages: list[dict[str, str]], max_tokens: int) -> None:
        """Send and record one chat."""
        answer = self.post("/v1/chat/completions", engine_name, salt, messages=messages, max_tokens=max_tokens)
        self.add_request(engine_name, salt, answer["prompt_token_ids"], answer)

    def add_request(self, engine_name: str, salt: str, ids: list[int], answer: dict[str, Any]) -> None:
        usage = answer["usage"]
        assert usage["prompt_tokens"] == len(ids)
        cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        self.entries.append(RecordedEngineRequest(engine_name, salt, ids, cached_tokens, self.report_full))
        self.listen()

    def send_twice_at_once(self, prompt: list[int]) -> None:
        """Send a prompt twice at once; only the events are recorded, as the order of the requests is unknown."""
        with ThreadPoolExecutor(2) as pool:
            requested = [
                pool.submit(self.post, "/v1/completions", "", "", prompt=prompt, max_tokens=70) for _ in range(2)
            ]
        assert all(twin.result() for twin in requested)
        self.listen()


def send_random_requests(session: RecordingSession, rng: Random, requests: int, roots: list[tuple[str, str]]) -> None:
    """Send requests of all kinds, drawn at random."""
    prefixes = [[rng.randrange(300, 4000) for _ in range(size)] for size in (40, 96, 150)]
    for number in range(requests):
        engine_name, salt = rng.choice(roots)
        known = [prompt for prompt in session.prompts[-16:] if prompt[:2] in roots]
        kind = rng.choices(["fresh", "again", "goes on", "chat"], [5, 2, 3, 1])[0]
        max_tokens = rng.choice([1, 1, 8, 40, 70])
        new = [rng.randrange(300, 4000) for _ in range(rng.choice([5, 32, 60, 120]))]
        if number % 20 == 19:
            session.send_twice_at_once([*prefixes[0], *new])
        elif kind == "chat":
            system = {"role": "system", "content": "You answer in one short line. " * rng.choice([4, 8])}
            user = {"role": "user", "content": f"How many customers ordered {number} times in May?"}
            session.chat(engine_name, salt, [system, user], max_tokens)
        elif kind == "fresh" or not known:
            prompt = [*rng.choice(prefixes), *new]
            # For prompts that end with a block the last token is computed although its block is cached.
            session.ask(engine_name, salt, prompt[: len(prompt) // 32 * 32] if number % 3 == 0 else prompt, max_tokens)
        else:
            engine_name, salt, prompt = rng.choice(known)
            session.ask(engine_name, salt, (prompt if kind == "again" else prompt + new)[:_LONGEST_PROMPT], max_tokens)


def load_adapter(client: httpx.Client, name: str, path: Path) -> None:
    """Load an adapter; fails if it is refused."""
    answer = client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})
    assert answer.status_code == 200, answer.text


def record(client: httpx.Client, sub: "zmq.Socket[bytes]", model: str, adapters: list[Path]) -> Recording:
    """Record all three parts."""
    session, rng = RecordingSession(client, sub, model), Random(SEED)
    names = {f"adapter-{number}/v1@{number:012x}": path for number, path in enumerate(adapters[:2], 1)}
    for name, path in names.items():
        load_adapter(client, name, path)
    first, second = names
    roots = [("", ""), ("", "acme"), (first, ""), (first, "acme"), (second, "")]
    session.listen()
    parts = {"incremental": 0}
    send_random_requests(session, rng, REQUESTS["incremental"] // 2, roots)
    kept = [rng.randrange(300, 4000) for _ in range(100)]
    session.ask(first, "", kept, 1)
    client.post("/v1/unload_lora_adapter", json={"lora_name": first}).raise_for_status()
    session.ask(second, "", kept, 1)
    load_adapter(client, first, names[first])
    session.ask(first, "", kept, 1)
    send_random_requests(session, rng, REQUESTS["incremental"] // 2, roots)
    parts["full"] = len(session.entries)
    session.report_full = True
    send_random_requests(session, rng, REQUESTS["full"], roots)
    parts["after"] = len(session.entries)
    session.report_full = False
    send_random_requests(session, rng, REQUESTS["after"] // 2, roots)
    client.post("/reset_prefix_cache").raise_for_status()
    # The engine publishes the reset with its next step; this request has no cached prefix.
    session.ask("", "", [rng.randrange(300, 4000) for _ in range(20)], 1)
    send_random_requests(session, rng, REQUESTS["after"] // 2, roots)
    return Recording("vLLM 0.32.0, CPU", BLOCK_SIZE, TOTAL_BLOCKS, parts, session.entries)


def main(into: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context:
        model_dir, adapters = make_model(Path(folder) / "model"), make_adapters(Path(folder) / "adapters")
        engine = start_engine("vllm", model_dir, flags=FLAGS, environment={"VLLM_SERVER_DEV_MODE": "1"})
        try:
            with context.socket(zmq.SUB) as sub, httpx.Client(base_url=engine.url, timeout=120) as client:
                sub.set_hwm(0)
                sub.setsockopt(zmq.LINGER, 0)
                sub.connect(engine.kv_endpoint)
                sub.subscribe(b"")
                recording = record(client, sub, engine.model, adapters)
        finally:
            engine.stop()
    recording.save(into)
    requested = sum(isinstance(entry, RecordedEngineRequest) for entry in recording.entries)
    print(f"{into}: {requested} requests, {len(recording.entries) - requested} messages, {into.stat().st_size} bytes")  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else VLLM)
