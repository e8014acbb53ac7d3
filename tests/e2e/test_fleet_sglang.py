"""A fleet on SGLang does what every fleet must do, and what SGLang makes hard.

The engine is its stub, or the real one in an environment that has it.
"""

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from lorafleet.local import tiny_model
from tests.e2e.fleets import RunningFleet, running, until
from tests.e2e.scenarios import COLD, PYTHON, SQL, FleetSuite, cached, fresh_prompt, predicted, text
from tests.patience import patience

pytestmark = pytest.mark.fleet

ROOT = Path(__file__).parents[2]
IS_REAL = importlib.util.find_spec("sglang") is not None
STUB = {
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "stubs")]),
    "SGLANG_STUB_HEALTH_S": "0.01",
    "SGLANG_STUB_TOKEN_S": "0.001",
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    folder: Path = tmp_path_factory.mktemp("sglang")
    tiny_model.make_adapters(folder / "adapters")
    tiny_model.make_adapter(folder / "adapters", COLD)
    flags = ("--engine", "sglang", "--workers", "2", "--adapters", str(folder / "adapters"))
    engine = {} if IS_REAL else STUB
    with running(folder / "state", *flags, environment=engine, within_s=600 if IS_REAL else 60) as fleet:
        yield fleet


class TestTwoSglangWorkers(FleetSuite):
    unload_path = "/unload_lora_adapter"
    come_back_within_s = 180 if IS_REAL else FleetSuite.come_back_within_s

    def test_an_adapter_that_was_unloaded_and_loaded_again_is_expected_to_have_no_blocks(
        self, fleet: RunningFleet
    ) -> None:
        prompt = fresh_prompt()
        first = fleet.ask(prompt=prompt, lora_id=SQL)
        worker = first.headers["x-lorafleet-worker"]
        again = fleet.ask(prompt=prompt, lora_id=SQL)
        assert again.headers["x-lorafleet-worker"] == worker
        assert predicted(again) == cached(again) > 0
        told = fleet.workers()[worker]
        as_leader = {"x-lorafleet-epoch": str(told["epoch"])}
        url = f"{told['agent_url']}/v1/admin/unload_lora"
        httpx.post(url, json={"lora_id": SQL}, headers=as_leader, timeout=patience(10)).raise_for_status()
        until(lambda: worker not in fleet.held_by(SQL), within_s=10, what="it is unloaded")
        reloaded = fleet.ask(prompt=prompt, lora_id=SQL)
        assert text(reloaded) == text(first)
        until(
            lambda: reloaded.headers["x-lorafleet-worker"] in fleet.held_by(SQL),
            within_s=10,
            what="its worker is known",
        )
        assert predicted(reloaded) == cached(reloaded) == 0

    def test_a_replica_that_does_not_report_an_adapter_is_never_asked_for_it(self, fleet: RunningFleet) -> None:
        """Else it would bring back what was unloaded, or answer from the base model."""
        holders = set(fleet.held_by(PYTHON))
        served = {fleet.ask(prompt=fresh_prompt(), lora_id=PYTHON).headers["x-lorafleet-worker"] for _ in range(10)}
        assert served <= holders | set(fleet.held_by(PYTHON))

        def loaded_and_reported() -> list[tuple[set[str], set[str]]]:
            """The names that each engine lists, and those that its agent reports as ready."""
            found = []
            for metadata in fleet.workers().values():
                listed = fleet.get(f"{metadata['transport']['engine_url']}/v1/models")["data"]
                reported = [lora for lora in metadata["lora"]["loaded_loras"] if lora["state"] == "ready"]
                found.append(
                    ({item["id"] for item in listed if item["parent"]}, {lora["engine_name"] for lora in reported})
                )
            return found

        # A load or an unload under way is in one list before the other.
        until(
            lambda: all(loaded == reported for loaded, reported in loaded_and_reported()),
            within_s=20,
            what="every engine has loaded exactly what its agent reports",
        )

    def test_what_sglang_answers_from_the_base_model_alone_is_refused_for_an_adapter(self, fleet: RunningFleet) -> None:
        body = {"input": fresh_prompt(), "max_output_tokens": 8}
        url = f"{fleet.router}/v1/responses"
        assert fleet.http("POST", url, json=body | {"model": "tiny-qwen"}).status_code == 200
        refused = fleet.http("POST", url, json=body | {"model": SQL})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_request_body")

    @pytest.mark.parametrize("adapter", [SQL, None])
    def test_generate_is_sglangs_own_call_with_its_logprobs_and_the_fleets_name_of_the_weights(
        self, fleet: RunningFleet, adapter: str | None
    ) -> None:
        ids = list(range(300, 400))
        body = {"input_ids": ids, "lora_path": adapter, "rid": "mine", "return_logprob": True, "top_logprobs_num": 2}
        body |= {"sampling_params": {"max_new_tokens": 3, "temperature": 0}}
        url = f"{fleet.router}/generate"
        first = fleet.http("POST", url, json=body)
        assert first.status_code == 200, first.text
        found = fleet.http("POST", url, json=body).json()
        meta = found["meta_info"]
        assert len(found["output_ids"]) == len(meta["output_token_logprobs"]) == len(meta["output_top_logprobs"]) == 3
        assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("mine", len(ids), 3)
        assert meta["weight_version"].startswith(f"{SQL}@" if adapter else "tiny-qwen")
        streamed = fleet.http("POST", url, json=body | {"stream": True}).text
        events = [part.removeprefix("data: ") for part in streamed.split("\n\n") if part]
        last = json.loads(events[-2])
        assert events[-1] == "[DONE]"
        assert last["output_ids"] == found["output_ids"]
        assert last["meta_info"]["weight_version"] == meta["weight_version"]
        assert last["meta_info"]["id"] == "mine"
        completion = {"prompt": ids, "lora_id": adapter, "max_tokens": 3}
        plain = fleet.http("POST", f"{fleet.router}/v1/completions", json=completion)
        assert plain.json()["choices"][0]["text"] == found["text"]
        batch = fleet.http("POST", url, json=body | {"input_ids": [ids, ids], "lora_path": [SQL, None]}).json()
        assert [output["meta_info"]["id"] for output in batch] == ["mine_0", "mine_1"]
        assert batch[0]["text"] != batch[1]["text"]
