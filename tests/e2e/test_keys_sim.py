"""The command line against a fleet with keys: without one it says where to give it."""

from pathlib import Path

import pytest

from lorafleet.local.tiny_model import make_model
from tests.e2e.small_fleets import small_fleet

pytestmark = pytest.mark.fleet


async def test_the_command_line_without_a_key_names_the_variable_and_works_with_one(tmp_path: Path) -> None:
    (tmp_path / "shelf").mkdir()
    async with small_fleet(tmp_path / "fleet", make_model(tmp_path / "model"), shelf=tmp_path / "shelf") as fleet:
        assert (await fleet.cli("workers", "list"))[0] == 0
        fleet.keys["admin"] = ""
        status, output = await fleet.cli("adapters", "list")
        assert (status, "LORAFLEET_TOKEN" in output) == (1, True), output
