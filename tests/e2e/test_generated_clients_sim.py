"""Clients that `openapi-python-client` makes from the services' OpenAPI documents, against a sim fleet.

`pipx install openapi-python-client` brings the generator. Typer's version differs from ours, so it is no dependency.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lorafleet.local import tiny_model
from tests.e2e.fleets import SIM_FLAGS, running
from tests.patience import patience

pytestmark = [pytest.mark.fleet, pytest.mark.thorough]

GENERATOR = shutil.which("openapi-python-client")
ROUTER = """
import sys
from lorafleet_router_client import Client
from lorafleet_router_client.api.default import model_v1_models_model_get, models_v1_models_get
from lorafleet_router_client.api.inference import post_v1_chat_completions
from lorafleet_router_client.models.post_v1_chat_completions_body import PostV1ChatCompletionsBody

client = Client(base_url=sys.argv[1], raise_on_unexpected_status=True)
assert models_v1_models_get.sync_detailed(client=client).status_code == 200
assert model_v1_models_model_get.sync_detailed("good/v1", client=client).status_code == 200
body = PostV1ChatCompletionsBody.from_dict({
    "model": "good/v1", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4,
})
print(post_v1_chat_completions.sync_detailed(client=client, body=body).content.decode())
"""
ORCHESTRATOR = """
import json, sys
from lorafleet_orchestrator_client import Client
from lorafleet_orchestrator_client.api.adapters import adapters_v1_adapters_get
from lorafleet_orchestrator_client.api.fleet import workers_v1_workers_get

client = Client(base_url=sys.argv[1], raise_on_unexpected_status=True)
adapters, workers = adapters_v1_adapters_get.sync(client=client), workers_v1_workers_get.sync(client=client)
print(json.dumps([[item.lora_id for item in adapters.data], [item.id for item in workers.data]]))
"""


@pytest.mark.skipif(GENERATOR is None, reason="openapi-python-client is not installed: pipx install it")
def test_generated_clients_call_a_fleet(tmp_path: Path) -> None:
    tiny_model.make_adapter(tmp_path / "adapters", "good/v1")
    with running(tmp_path / "state", *SIM_FLAGS, "1", "--adapters", str(tmp_path / "adapters")) as fleet:

        def printed(service: str, url: str, script: str) -> str:
            """What a script prints that has the service's client."""
            assert GENERATOR is not None
            place = tmp_path / service
            document = tmp_path / f"{service}.json"
            document.write_text(fleet.http("GET", f"{url}/openapi.json").text)
            call = (GENERATOR, "generate", "--path", document, "--output-path", place, "--fail-on-warning")
            made = subprocess.run(call, capture_output=True, text=True, timeout=patience(120), check=False)
            assert made.returncode == 0, made.stdout + made.stderr
            done = subprocess.run(
                [sys.executable, "-c", script, url], cwd=place, env={**os.environ, "PYTHONPATH": str(place)},
                capture_output=True, text=True, timeout=patience(60), check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            return done.stdout

        answer = json.loads(printed("router", fleet.router, ROUTER))
        assert (answer["object"], answer["model"]) == ("chat.completion", "good/v1")
        assert json.loads(printed("orchestrator", fleet.orchestrator, ORCHESTRATOR)) == [["good/v1"], ["w0"]]
