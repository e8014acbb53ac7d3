"""Trainers' names on the command line."""

from pathlib import Path

import pytest

from lorafleet.local.tiny_model import make_adapter, make_model
from tests.e2e.small_fleets import small_fleet

pytestmark = pytest.mark.fleet


async def test_the_command_line_shows_an_adapter_by_a_trainers_name(tmp_path: Path) -> None:
    source = make_adapter(tmp_path / "shelf", "step-0", rank=8)
    model = make_model(tmp_path / "model")
    async with small_fleet(tmp_path / "fleet", model, shelf=tmp_path / "shelf") as fleet:
        for name in ("m@3", "m:active", "m:eval@3"):
            spec = {"lora_id": name, "source": f"file://{source}"}
            (await fleet.http.post("/v1/adapters", json=spec)).raise_for_status()
            status, output = await fleet.cli("adapters", "show", name)
            assert (status, name in output) == (0, True), output
