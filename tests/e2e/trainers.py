"""What trainers send to a fleet, call by call, and what each checks of the answers: one suite for sim and for vLLM.

The sequences are those of TRL 1.16, prime-rl, SkyRL 0.4, AReaL 1.0.4, ART 0.5.23 and axolotl, as their sources have
them. A subclass in a test file has the fixtures `fleet`, and `runs`: a folder that the fleet's workers may read.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from lorafleet.local.tiny_model import make_adapter
from tests.e2e.fleets import RunningFleet
from tests.patience import patience

_seeds = count(1000)


def prompt_ids() -> list[int]:
    """Token ids that no other test has sent."""
    start = next(_seeds)
    return [300 + (start * 7 + place * 11) % 997 for place in range(70)]


def write_step(folder: Path) -> Path:
    """Overwrite the folder with an adapter of other bytes, as a trainer's step does."""
    shutil.rmtree(folder, ignore_errors=True)
    return make_adapter(folder.parent, folder.name, seed=next(_seeds))


def served_by(answer: httpx.Response) -> str:
    """The version that answered."""
    assert answer.status_code == 200, f"{answer.status_code} {answer.text}"
    return answer.headers["x-lorafleet-adapter"].rpartition("@")[0]


@dataclass(slots=True)
class ExampleTrainer:
    """A running trainer of examples/rollout_trainer."""

    process: "subprocess.Popen[str]"
    lines: list[str] = field(default_factory=list)

    def steps(self) -> Iterator[int]:
        """The number of each step, when it is done, until the trainer ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.match(r"step (\d+): ", line):
                yield int(found[1])

    def status(self) -> int:
        return self.process.wait(patience(20))

    def output(self) -> str:
        return "".join(self.lines)


@contextmanager
def example_trainer(
    fleet: RunningFleet, model: Path, runs: Path, *flags: str, steps: int, name: str = "policy"
) -> Iterator[ExampleTrainer]:
    """Run the trainer, as a user does."""
    command = [sys.executable, "-P", "examples/rollout_trainer/trainer.py", "--url", fleet.router, *flags]
    command += ["--model", str(model), "--runs", str(runs), "--steps", str(steps), "--name", name]
    root = Path(__file__).parents[2]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=root, stdin=subprocess.DEVNULL, **pipes)
    try:
        yield ExampleTrainer(process)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


class TrainerSuite:
    """Each test is one trainer's loop of a few steps."""

    @pytest.fixture
    def http(self, fleet: RunningFleet) -> Iterator[httpx.Client]:
        with httpx.Client(base_url=fleet.router, timeout=patience(60), trust_env=False, verify=False) as client:
            yield client

    @pytest.mark.slow
    def test_trls_client_and_rollout_worker_sync_adapters_and_sample_by_them(
        self, fleet: RunningFleet, runs: Path, model: Path
    ) -> None:
        command = [sys.executable, "-m", "tests.e2e.trl_cycle", fleet.router, str(model), str(runs)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=patience(200), check=False)
        assert ran.returncode == 0, ran.stderr[-4000:]
        seen = json.loads(ran.stdout.splitlines()[-1])
        assert seen["syncs_adapters"], "TRL would merge the adapter and send full weights"
        assert seen["max_model_len"] > 0
        assert all(sample["tokens"] > 0 and sample["highest_logprob"] <= 0 for sample in seen["samples"])
        # The newest name is served, and with max_staleness 1 the one before; TRL has unloaded older ones.
        names = [f"trl-policy-v{number}/v1" for number in (1, 2, 3)]
        assert seen["served"] == [names[:1], names[:2], ["404", *names[1:]]]

    def test_prime_rl_loads_in_place_under_one_name_and_samples_by_token_ids_with_a_salt(
        self, http: httpx.Client, runs: Path
    ) -> None:
        assert http.get("/health").status_code == 200
        assert "tiny-qwen" in {card["id"] for card in http.get("/v1/models").json()["data"]}
        ids = prompt_ids()
        for step in (1, 2):
            folder = write_step(runs / f"step_{step}")
            body = {"lora_name": "r8-1e-4", "lora_path": folder.as_posix()}
            http.post("/load_lora_adapter", json=body).raise_for_status()
            sampling = {"temperature": 1.0, "max_tokens": 8, "logprobs": 1, "stop_token_ids": []}
            body = {"model": "r8-1e-4", "token_ids": ids, "cache_salt": str(step), "priority": 0}
            body["sampling_params"] = sampling | {"skip_special_tokens": False}
            answer = http.post("/inference/v1/generate", json=body, headers={"X-Session-ID": "rollout-1"})
            assert served_by(answer) == f"r8-1e-4/v{step}"
            (choice,) = answer.json()["choices"]
            assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) > 0
            # Its orchestrator keeps no step of one version under the name of another.
            assert int(answer.headers["x-lorafleet-cached-tokens"]) == 0
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "r8-1e-4"}).is_success

    def test_skyrl_overwrites_one_folder_and_its_tinker_api_samples_by_it(self, http: httpx.Client, runs: Path) -> None:
        paused = http.post("/pause", params={"mode": "keep", "clear_cache": "false"})
        assert (paused.status_code, paused.json()["status"]) == (200, "paused")
        assert http.post("/resume").json()["status"] == "resumed"
        for step in (1, 2):
            body = {"lora_name": "skyrl-lora", "lora_path": str(write_step(runs / "skyrl"))}
            loaded = http.post("/skyrl/v1/load_lora_adapter", json=body)
            assert loaded.status_code == 200, loaded.text
            sampling = {"n": 2, "logprobs": 0, "output_kind": 2, "prompt_logprobs": None}
            sampling |= {"temperature": 1.0, "max_tokens": 6, "seed": step, "top_k": -1, "top_p": 1.0}
            body = {"model": "skyrl-lora", "token_ids": prompt_ids(), "sampling_params": sampling}
            answer = http.post("/inference/v1/generate", json=body, headers={"X-Session-ID": "41"})
            assert served_by(answer) == f"skyrl-lora/v{step}"
            for choice in answer.json()["choices"]:
                assert choice["finish_reason"] in ("stop", "length")
                assert [row["logprob"] <= 0 for row in choice["logprobs"]["content"]] == [True] * len(
                    choice["token_ids"]
                )
            assert len(answer.json()["choices"]) == 2
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "skyrl-lora"}).is_success

    def test_areal_with_sglangs_calls_loads_between_pause_and_continue_and_unloads_the_oldest(
        self, http: httpx.Client, runs: Path
    ) -> None:
        for step in (1, 2, 3):
            assert http.post("/pause_generation", json={}).is_success
            body = {"lora_name": f"lora-v{step}", "lora_path": str(write_step(runs / "areal"))}
            assert http.post("/load_lora_adapter", json=body).json()["success"]
            if step == 3:
                assert http.post("/unload_lora_adapter", json={"lora_name": "lora-v1"}).json()["success"]
            assert http.post("/continue_generation", json={}).is_success
            sampling: dict[str, Any] = {"top_p": 1.0, "top_k": 100000000, "max_new_tokens": 6, "temperature": 1.0}
            sampling |= {"stop_token_ids": [], "ignore_eos": False, "skip_special_tokens": True}
            sampling |= {"frequency_penalty": 0.0}
            body = {"input_ids": prompt_ids(), "image_data": None, "sampling_params": sampling}
            body |= {"return_logprob": True, "stream": False, "lora_path": f"lora-v{step}"}
            answer = http.post("/generate", json=body)
            assert answer.status_code == 200, answer.text
            meta = answer.json()["meta_info"]
            assert meta["weight_version"].rpartition("@")[0] == f"lora-v{step}/v1"
            assert meta["finish_reason"]["type"] in ("stop", "length")
            assert all(value <= 0 and token >= 0 for value, token, *_ in meta["output_token_logprobs"])
            assert len(meta["output_token_logprobs"]) == meta["completion_tokens"] > 0
        assert http.post("/generate", json=body | {"lora_path": "lora-v1"}).status_code == 404

    def test_areal_with_vllms_calls_reads_token_ids_in_logprobs(self, http: httpx.Client, runs: Path) -> None:
        for step in (1, 2):
            assert http.post("/areal_pause_generation", json={}).json()["success"]
            body = {"lora_path": str(write_step(runs / "areal-vllm")), "lora_name": f"actor-v{step}"}
            assert http.post("/v1/load_lora_adapter", json=body).is_success
            assert http.post("/areal_continue_generation", json={}).json()["success"]
            body = {"model": f"actor-v{step}", "prompt": prompt_ids(), "max_tokens": 6, "temperature": 1.0}
            body |= {"top_p": 1.0, "top_k": 100000000, "stop_token_ids": [], "ignore_eos": False}
            body |= {"skip_special_tokens": True, "return_tokens_as_token_ids": True, "logprobs": 0}
            answer = http.post("/v1/completions", json=body | {"use_beam_search": False, "stream": False})
            assert served_by(answer) == f"actor-v{step}/v1"
            (choice,) = answer.json()["choices"]
            ids = [int(token.split(":")[1]) for token in choice["logprobs"]["tokens"]]
            assert len(ids) == len(choice["logprobs"]["token_logprobs"]) > 0

    def test_art_finds_no_runtime_of_its_own_and_loads_each_step_as_a_model(
        self, http: httpx.Client, runs: Path
    ) -> None:
        assert http.get("/art/capabilities").status_code == 404
        for step in (1, 2):
            body = {"lora_name": f"agent@{step}", "lora_path": str(write_step(runs / f"{step:04}"))}
            assert http.post("/v1/load_lora_adapter", json=body).is_success
            message = {"role": "user", "content": f"Play move {step}."}
            body = {"model": f"agent@{step}", "messages": [message], "max_completion_tokens": 6, "logprobs": True}
            body |= {"return_token_ids": True, "nvext": {"extra_fields": ["engine_data"]}}
            answer = http.post("/v1/chat/completions", json=body)
            assert (served_by(answer), answer.json()["model"]) == (f"agent@{step}/v1", f"agent@{step}")
            (choice,) = answer.json()["choices"]
            assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) > 0
            assert answer.json()["prompt_token_ids"]
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "agent@1"}).is_success
        assert http.post("/v1/chat/completions", json=body | {"model": "agent@1"}).status_code == 404

    def test_two_axolotl_runs_load_the_base_models_name_in_place_and_each_samples_its_own(
        self, http: httpx.Client, runs: Path
    ) -> None:
        base = "tiny-qwen"
        assert "/v1/load_lora_adapter" in http.get("/openapi.json").json()["paths"]
        refused = http.post(
            "/v1/load_lora_adapter", json={"lora_name": base, "lora_path": str(runs), "load_inplace": True}
        )
        assert (refused.status_code, "/runs/NAME" in refused.json()["error"]["message"]) == (400, True)
        for step in (1, 2):
            for run in ("ax-1", "ax-2"):
                # Its probe of the route has a path that nobody has; it takes anything but a bare 404 for a yes.
                probe = http.post(
                    f"/runs/{run}/v1/load_lora_adapter", json={"lora_name": "__probe__", "lora_path": "/no"}
                )
                assert probe.status_code in (400, 500)
                folder = write_step(runs / f"{run}-v{step}")
                body = {"lora_name": base, "lora_path": str(folder), "load_inplace": True}
                assert http.post(f"/runs/{run}/v1/load_lora_adapter", json=body).status_code == 200
                assert http.post(f"/runs/{run}/reset_prefix_cache/").status_code == 200
            for run in ("ax-1", "ax-2"):
                body = {"model": base, "messages": [{"role": "user", "content": f"Play {step}."}], "max_tokens": 4}
                answer = http.post(f"/runs/{run}/v1/chat/completions", json=body)
                assert served_by(answer) == f"{run}/{base}/v{step}"
                assert answer.json()["model"] == base
                body = {"model": base, "input": f"Play {step}.", "max_output_tokens": 4}
                # Sim engines have no such route, and say so themselves: the request is routed all the same.
                routed = http.post(f"/runs/{run}/v1/responses", json=body).headers["x-lorafleet-adapter"]
                assert routed.rpartition("@")[0] == f"{run}/{base}/v{step}"
            assert (
                http.post("/v1/completions", json={"model": base, "prompt": "x", "max_tokens": 1}).headers[
                    "x-lorafleet-adapter"
                ]
                == "base"
            )
        fallback = http.post("/runs/ax-1/set_lora_adapter/", json={"lora_name": "active_lora", "lora_int_id": 1})
        assert (fallback.status_code, fallback.json()["error"]["code"]) == (404, "not_offered")
        assert http.get("/runs/ax-1/v1/models").json()["data"][0]["id"] == base
        for run in ("ax-1", "ax-2"):
            assert http.post(f"/runs/{run}/v1/unload_lora_adapter", json={"lora_name": base}).is_success

    def test_two_runs_of_one_name_share_it_in_silence_at_no_url(self, http: httpx.Client, runs: Path) -> None:
        first, second = (write_step(runs / f"shared-{number}") for number in (1, 2))
        body = {"lora_name": "trl-policy-v1-shared", "lora_path": str(first)}
        assert http.post("/v1/load_lora_adapter", json=body).is_success
        assert http.post("/v1/load_lora_adapter", json=body).is_success  # the call of one that was cut off
        taken = http.post("/v1/load_lora_adapter", json=body | {"lora_path": str(second)})
        assert (taken.status_code, "already been loaded" in taken.text) == (400, True)
        sampled = {"model": body["lora_name"], "prompt": prompt_ids(), "max_tokens": 2}
        assert served_by(http.post("/v1/completions", json=sampled)) == "trl-policy-v1-shared/v1"
        own = http.post("/runs/second/v1/load_lora_adapter", json=body | {"lora_path": str(second)})
        assert own.status_code == 200, own.text
        assert served_by(http.post("/runs/second/v1/completions", json=sampled)) == "second/trl-policy-v1-shared/v1"
        assert served_by(http.post("/v1/completions", json=sampled)) == "trl-policy-v1-shared/v1"
        held = http.post("/runs/second/pause", params={"mode": "keep"})
        assert (held.status_code, http.get("/runs/second/is_paused").json()["is_paused"]) == (200, True)
        assert not http.get("/is_paused").json()["is_paused"]
        assert served_by(http.post("/v1/completions", json=sampled)) == "trl-policy-v1-shared/v1"
        assert http.post("/runs/second/resume").is_success
        for url in ("", "/runs/second"):
            assert http.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": body["lora_name"]}).is_success
