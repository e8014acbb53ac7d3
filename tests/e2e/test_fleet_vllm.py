"""Two real vLLM workers on the CPU do what every fleet must do."""

import functools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from lorafleet.local import tiny_model
from tests.e2e.fleets import RunningFleet, chat, running
from tests.e2e.scenarios import SQL, FleetSuite
from tests.e2e.shifting import FIVE, ShiftSuite
from tests.e2e.trainers import TrainerSuite, example_trainer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

# Without these arguments vLLM answers 400 to every request with tools.
TOOLS = ("--", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
by_model = pytest.mark.parametrize("model", [SQL, pytest.param("tiny-qwen", marks=pytest.mark.thorough)])
CITIES = ("Paris", "Rome")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": list(CITIES)}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    folder: Path = tmp_path_factory.mktemp("vllm")
    tiny_model.make_adapters(folder / "adapters")
    for lora_id in FIVE[3:]:
        tiny_model.make_adapter(folder / "adapters", lora_id)
    flags = ["--engine", "vllm", "--workers", "2", "--max-loras", "2", "--adapters", str(folder / "adapters")]
    with running(folder / "state", *flags, *TOOLS, within_s=600) as fleet:
        yield fleet


class TestTwoVllmWorkers(FleetSuite):
    come_back_within_s = 240.0

    @pytest.mark.thorough  # another start of a real engine
    def test_a_killed_engine_comes_back_with_its_adapters(self, fleet: RunningFleet) -> None:
        super().test_a_killed_engine_comes_back_with_its_adapters(fleet)

    def test_trainer_publishes_by_vllms_own_call_and_what_runs_ends_with_its_version(self, fleet: RunningFleet) -> None:
        shelf = fleet.state_dir.parent / "adapters"
        body = {"lora_name": "trained", "lora_path": str(shelf / "run"), "load_inplace": True}

        def publish(step: int) -> None:
            """Overwrite the folder of the run, as trainers do, load it, and delete it."""
            tiny_model.make_adapter(shelf, "run", seed=step)
            answer = fleet.http("POST", f"{fleet.router}/v1/load_lora_adapter", json=body)
            assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'trained' added successfully.")
            shutil.rmtree(shelf / "run")

        def answer_of(model: str) -> tuple[str, str]:
            """The version that answers, and its text."""
            answer = fleet.ask(model=model, max_tokens=24, prompt="select")
            assert answer.status_code == 200, answer.text
            version = answer.headers["x-lorafleet-adapter"].partition("@")[0]
            return version, answer.json()["choices"][0]["message"]["content"]

        publish(1)
        assert len(fleet.held_by("trained/v1")) == 2
        version, first = answer_of("trained")
        assert version == "trained/v1"
        ask = chat(model="trained", prompt="select", max_tokens=600, ignore_eos=True, stream=True)
        with httpx.stream(
            "POST", f"{fleet.router}/v1/chat/completions", json=ask, headers=fleet.headers, timeout=300
        ) as under_way:
            lines = under_way.iter_lines()
            next(lines)
            publish(2)
            assert len(fleet.held_by("trained/v2")) == 2
            version, second = answer_of("trained")
            assert version == "trained/v2"
            rest = [line for line in lines if line.startswith("data: {")]
        assert under_way.headers["x-lorafleet-adapter"].startswith("trained/v1@")
        assert any('"finish_reason":"length"' in line.replace(" ", "") for line in rest[-2:])
        assert first != second
        assert answer_of("trained/v1") == ("trained/v1", first)
        answer = fleet.http("POST", f"{fleet.router}/v1/unload_lora_adapter", json={"lora_name": "trained"})
        assert answer.status_code == 200
        assert fleet.ask(model="trained").status_code == 404

    @by_model
    def test_openais_client_has_its_tools_called_and_may_leave_the_choice(
        self, fleet: RunningFleet, model: str
    ) -> None:
        from openai import OpenAI

        # strict: the weights are random, and without it the arguments are any JSON.
        function = {"name": "get_weather", "parameters": SCHEMA, "strict": True}
        ask = functools.partial(
            OpenAI(base_url=f"{fleet.router}/v1", api_key="any", max_retries=0).chat.completions.create,
            model=model,
            messages=[{"role": "user", "content": "How is the weather in Rome?"}],
            tools=[{"type": "function", "function": function}],
            temperature=0,
        )
        for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
            (call,) = ask(tool_choice=choice, max_tokens=500).choices[0].message.tool_calls
            assert call.function.name == "get_weather"
            assert json.loads(call.function.arguments)["city"] in CITIES
        assert ask(tool_choice="auto", max_tokens=8).usage.completion_tokens == 8

    @by_model
    def test_anthropics_client_has_its_tools_called_and_may_leave_the_choice(
        self, fleet: RunningFleet, model: str
    ) -> None:
        from anthropic import Anthropic

        ask = functools.partial(
            Anthropic(base_url=fleet.router, api_key="any", max_retries=0).messages.create,
            model=model,
            messages=[{"role": "user", "content": "How is the weather in Rome?"}],
            tools=[{"name": "get_weather", "input_schema": SCHEMA, "strict": True}],
            extra_body={"temperature": 0},
        )
        for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
            (call,) = (block for block in ask(tool_choice=choice, max_tokens=500).content if block.type == "tool_use")
            assert (call.name, call.input["city"] in CITIES) == ("get_weather", True)
        assert ask(tool_choice={"type": "auto"}, max_tokens=8).usage.output_tokens == 8


class TestTrainersOnVllm(TrainerSuite):
    @pytest.fixture
    def runs(self, fleet: RunningFleet) -> Path:
        return fleet.state_dir.parent / "adapters" / "runs"

    @pytest.fixture
    def model(self, fleet: RunningFleet) -> Path:
        return fleet.state_dir / "tiny-qwen"

    @pytest.mark.thorough  # brings torch into two more processes
    def test_trls_client_and_rollout_worker_sync_adapters_and_sample_by_them(
        self, fleet: RunningFleet, runs: Path, model: Path
    ) -> None:
        super().test_trls_client_and_rollout_worker_sync_adapters_and_sample_by_them(fleet, runs, model)

    @pytest.mark.parametrize("steps", [4, pytest.param(200, marks=[pytest.mark.thorough, pytest.mark.timeout(3600)])])
    def test_each_steps_answers_have_the_logprobs_of_that_very_step(
        self, fleet: RunningFleet, runs: Path, model: Path, steps: int
    ) -> None:
        with example_trainer(fleet, model, runs, steps=steps, name=f"policy-{steps}") as trainer:
            assert list(trainer.steps()) == list(range(1, steps + 1)), trainer.output()
            assert trainer.status() == 0, trainer.output()
        assert f"{steps} steps: 0 answers of another version, 0 cache hits across versions" in trainer.output()


@pytest.mark.thorough
class TestTrafficThatShifts(ShiftSuite):
    pass
