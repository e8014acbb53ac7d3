"""What every fleet must do with any engine: one suite, run on sim, vLLM and SGLang.

A subclass in a test file has a `fleet` fixture. Prompts are fresh, so that no test finds another's cached blocks.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import httpx

from router.request.engine_body import dialect_of
from tests.e2e.fleets import RunningFleet, chat, until
from tests.patience import patience

SQL, PYTHON, COLD = "sql-expert/v1", "python-expert/v1", "cold/v1"
BLOCK = 32
_fresh = count(1)

_WORDS = (
    "the customer wrote to the shop about an order that had not come and asked when it would be sent and what it would"
    " cost to change the address, because the house was sold and the new one is in another city near the river"
)


def fresh_prompt() -> str:
    """A new prompt that differs from all others at its first words; about 100 to 200 tokens."""
    number = next(_fresh)
    return f"{number} {os.getpid()} question number {number}: {_WORDS}. Then number {number} came back: {_WORDS}."


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def cached(answer: httpx.Response) -> int:
    """Cached prompt tokens, by the engine's own count."""
    details = answer.json()["usage"]["prompt_tokens_details"] or {}
    return details.get("cached_tokens") or 0


def predicted(answer: httpx.Response) -> int:
    return int(answer.headers["x-lorafleet-cached-tokens"])


class FleetSuite:
    """Each test is one promise of the fleet."""

    come_back_within_s = 30.0
    unload_path = "/v1/unload_lora_adapter"

    def test_base_and_adapters_answer_and_say_where(self, fleet: RunningFleet) -> None:
        workers = fleet.workers()
        for lora_id in (None, SQL, PYTHON):
            answer = fleet.ask(prompt=fresh_prompt(), **({"lora_id": lora_id} if lora_id else {}))
            assert text(answer)
            worker = answer.headers["x-lorafleet-worker"]
            served = answer.headers["x-lorafleet-adapter"]
            if lora_id is None:
                assert served == "base"
            else:
                assert served == engine_name(fleet.workers()[worker], lora_id)
            assert worker in workers
            assert answer.headers["x-request-id"]
            assert answer.json()["model"] == "tiny-qwen"

    def test_an_adapters_text_is_its_own_and_what_the_engine_itself_says(self, fleet: RunningFleet) -> None:
        prompt = fresh_prompt()
        texts = {}
        for lora_id in (SQL, PYTHON):
            fleet.ask(prompt=prompt, lora_id=lora_id)
            # The second answer and the engine's own both begin from the same cached blocks: the same arithmetic.
            answer = fleet.ask(prompt=prompt, lora_id=lora_id)
            texts[lora_id] = text(answer)
            worker = fleet.workers()[answer.headers["x-lorafleet-worker"]]
            url = f"{worker['transport']['engine_url']}/v1/chat/completions"
            direct = fleet.http("POST", url, json=chat(model=model_name(worker, lora_id), prompt=prompt))
            assert text(direct) == texts[lora_id]
        base = text(fleet.ask(prompt=prompt))
        assert len({base, *texts.values()}) == 3

    def test_a_repeated_prompt_goes_where_its_blocks_are_and_the_engine_counts_the_hit(
        self, fleet: RunningFleet
    ) -> None:
        # Long ones: on a busy machine engines may seem unequal, and an uneven pace outweighs a saving of milliseconds.
        prompts = [" ".join(fresh_prompt() for _ in range(5)) for _ in range(4)]
        firsts = [fleet.ask(prompt=prompt) for prompt in prompts]
        for prompt, first in zip(prompts, firsts, strict=True):
            assert cached(first) == predicted(first) == 0
            again = fleet.ask(prompt=prompt)
            workers = [answer.headers["x-lorafleet-worker"] for answer in (first, again)]
            assert workers[0] == workers[1], fleet.lines_of(again)
            # The last token is always computed, so a prompt of whole blocks is cached but for the last.
            whole_blocks = (first.json()["usage"]["prompt_tokens"] - 1) // BLOCK
            assert cached(again) == predicted(again) == whole_blocks * BLOCK > 0

    def test_a_prompt_under_another_adapter_matches_no_block(self, fleet: RunningFleet) -> None:
        prompt = fresh_prompt()
        for lora_id in (None, SQL, PYTHON):
            first = fleet.ask(prompt=prompt, **({"lora_id": lora_id} if lora_id else {}))
            assert (predicted(first), cached(first)) == (0, 0), lora_id
        again = fleet.ask(prompt=prompt, lora_id=SQL)
        assert predicted(again) == cached(again) > 0

    def test_an_adapter_loaded_nowhere_is_loaded_when_asked_for(self, fleet: RunningFleet) -> None:
        assert fleet.held_by(COLD) == []
        answer = fleet.ask(prompt=fresh_prompt(), lora_id=COLD)
        assert text(answer)
        assert answer.headers["x-lorafleet-worker"] in fleet.held_by(COLD)

    def test_requests_for_an_adapter_that_its_engines_have_lost_are_served(self, fleet: RunningFleet) -> None:
        text(fleet.ask(prompt=fresh_prompt(), lora_id=PYTHON))
        for worker in fleet.held_by(PYTHON):
            metadata = fleet.workers()[worker]
            url = metadata["transport"]["engine_url"] + self.unload_path
            fleet.http("POST", url, json={"lora_name": engine_name(metadata, PYTHON)}).raise_for_status()
        with ThreadPoolExecutor(5) as threads:
            answers = list(threads.map(lambda _: fleet.ask(prompt=fresh_prompt(), lora_id=PYTHON), range(5)))
        assert [answer.status_code for answer in answers] == [200] * 5, [answer.text for answer in answers]

    def test_a_streamed_answer_comes_in_pieces(self, fleet: RunningFleet) -> None:
        def came_in_pieces() -> bool:
            body = chat(prompt=fresh_prompt(), lora_id=SQL, stream=True, max_tokens=48, ignore_eos=True)
            with httpx.stream("POST", f"{fleet.router}/v1/chat/completions", json=body, timeout=patience(40)) as answer:
                assert answer.status_code == 200
                arrived = list(answer.iter_raw())
            everything = b"".join(arrived)
            assert everything.endswith(b"data: [DONE]\n\n")
            return arrived[0].count(b"data: ") < everything.count(b"data: ") / 2

        # How many tokens an engine puts into an event, and how many events come together, is the machine's business. On
        # a busy one all may, once. That the first need not wait for the last is ours.
        assert any(came_in_pieces() for _ in range(5))

    def test_unknown_names_and_broken_bodies_have_their_own_errors(self, fleet: RunningFleet) -> None:
        unknown = fleet.ask(model="no-such-model")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        unknown = fleet.ask(lora_id="no-such/adapter")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        broken = fleet.http("POST", f"{fleet.router}/v1/chat/completions", content=b"{")
        assert broken.status_code == 400
        assert broken.json()["error"]["message"]

    def test_the_openai_client_works_unchanged(self, fleet: RunningFleet) -> None:
        from openai import OpenAI  # 0.7 s, which no other test need wait for

        with OpenAI(base_url=f"{fleet.router}/v1", api_key="any", http_client=httpx.Client(trust_env=False)) as client:
            prompt = [{"role": "user", "content": fresh_prompt()}]

            def say(model: str, **more: Any) -> str:
                answer = client.chat.completions.create(
                    model=model, messages=prompt, temperature=0, max_tokens=16, **more
                )
                assert answer.model == model
                return str(answer.choices[0].message.content)

            def stream(model: str, **more: Any) -> str:
                pieces = client.chat.completions.create(
                    model=model, messages=prompt, temperature=0, max_tokens=16, stream=True, **more
                )
                return "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)

            say("tiny-qwen")
            base = say("tiny-qwen")
            by_field = {"extra_body": {"lora_id": SQL}}
            say(SQL)
            assert say(SQL) == say(f"tiny-qwen:{SQL}") == say("tiny-qwen", **by_field) != base
            assert stream("tiny-qwen") == base
            assert stream(SQL) == stream(f"tiny-qwen:{SQL}") == stream("tiny-qwen", **by_field) == say(SQL)
            listed = {model.id for model in client.models.list()}
            assert {"tiny-qwen", SQL, PYTHON, COLD} <= listed
            assert client.models.retrieve(SQL).id == SQL

    def test_explain_shows_every_replicas_scores_and_sends_nothing(self, fleet: RunningFleet) -> None:
        prompt = fresh_prompt()
        asked = fleet.ask(prompt=prompt)
        until(lambda: "0 of" not in explain(fleet, prompt).splitlines()[0], within_s=10, what="the blocks are known")
        said = explain(fleet, prompt)
        assert f"base on {asked.headers['x-lorafleet-worker']} by kv_lora:" in said.splitlines()[0]
        assert "->" in said
        assert all(worker in said for worker in fleet.workers())

    def test_a_killed_engine_comes_back_with_its_adapters(self, fleet: RunningFleet) -> None:
        worker = fleet.ask(prompt=fresh_prompt(), lora_id=SQL).headers["x-lorafleet-worker"]
        before = fleet.workers()[worker]
        held = {lora["lora_id"] for lora in before["lora"]["loaded_loras"] if lora["state"] == "ready"}
        assert SQL in held
        port = str(urlsplit(before["transport"]["engine_url"]).port)
        fleet.kill("--host", "127.0.0.1", "--port", port)

        def is_back() -> bool:
            now = fleet.workers()[worker]
            ready = {lora["lora_id"] for lora in now["lora"]["loaded_loras"] if lora["state"] == "ready"}
            return (
                now["engine_boot_id"] not in ("", before["engine_boot_id"])
                and now["state"] == "ready"
                and held <= ready
            )

        until(is_back, within_s=self.come_back_within_s, what=f"{worker}'s engine is back with {held}")
        engine = fleet.workers()[worker]
        url = f"{engine['transport']['engine_url']}/v1/chat/completions"
        assert text(fleet.http("POST", url, json=chat(model=model_name(engine, SQL), prompt=fresh_prompt())))
        assert text(fleet.ask(prompt=fresh_prompt(), lora_id=SQL))


def engine_name(metadata: dict[str, Any], lora_id: str) -> str:
    """What this worker's engine calls the adapter."""
    names = [lora["engine_name"] for lora in metadata["lora"]["loaded_loras"] if lora["lora_id"] == lora_id]
    assert len(names) == 1, (lora_id, metadata["lora"])
    return names[0]


def model_name(metadata: dict[str, Any], lora_id: str) -> str:
    """How a request to this worker's engine names the adapter."""
    dialect = dialect_of(metadata["transport"]["dialect"], engine_name="")
    return dialect.model(metadata["model"]["base_model"], engine_name(metadata, lora_id))


def explain(fleet: RunningFleet, prompt: str) -> str:
    answer = cli(fleet, "explain", prompt)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def cli(fleet: RunningFleet, *args: str, token: str = "") -> "subprocess.CompletedProcess[str]":
    """`lorafleet ARGS` to this fleet."""
    where = ["--router-url", fleet.router, "--orchestrator-url", fleet.orchestrator, "--token", token]
    command = [sys.executable, "-P", "-m", "lorafleet", *where, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=patience(60), check=False)
